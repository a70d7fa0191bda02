"""Compares how two versions of Ratel read the same configs: the loader and `ratel import`, on thousands of them.

    python -m scripts.compare_configs draw CONFIGS [--seed N] [--count N]
    python scripts/compare_configs.py answer CONFIGS ANSWERS [--start N] [--stop N]
    python -m scripts.compare_configs compare OLD NEW [--show N]

`draw` writes one config a line: each key of the tables in `ratel_cli/config/fates` with each of a list of values and
its examples, in a config of its tool, and random combinations of keys. `answer` reads each of them with the `ratel_cli`
of the Python that runs it, so that each version answers in a process of its own, and `compare` prints what differs.
`ANSWERS` may be written in parts: what is there already is not computed again.

Invariant: the same seed and tables give the same configs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

Config = dict[str, Any]
VALUES: Sequence[Any] = (
    None, True, False, 0, 1, -1, 0.0, 0.5, 7, "", "x", "no", "steps", "auto", "none", "a,b", "main", "x.jsonl",
    "{{ x }}", [], {}, ["a", "b"], {"a": 1},
)  # fmt: skip
"""What each key is tried with, beside the examples of its rows."""
MORE: Mapping[str, Sequence[Any]] = {
    "adapter": ("lora", "qlora", None),
    "finetuning_type": ("lora", "full", "freeze"),
    "use_peft": (True, 1, False),
    "load_in_4bit": (True, False),
    "load_in_8bit": (True, False),
    "quantization_bit": (4, 8, 3),
    "quantization_method": ("bnb", "gptq"),
    "quant_config": ({"name": "bnb", "quantization_bit": 4}, {"name": "auto", "compute_dtype": "bf16"}),
    "peft_config": ({"name": "lora", "r": 4}, {"name": "freeze"}),
    "bnb_config_kwargs": ({"bnb_4bit_use_double_quant": False}, {}),
    "bnb_4bit_compute_dtype": ("bfloat16", "float32"),
    "double_quantization": (True, False),
    "use_bnb_nested_quant": (True, False),
    "model_quantization_config": ("Mxfp4Config", "FineGrainedFP8Config"),
    "model_quantization_config_kwargs": ({"dequantize": True}, {}),
    "lora_target": ("all", "q_proj,v_proj"),
    "lora_target_modules": ("all-linear", ["q_proj"], "q_proj"),
    "lora_alpha": (None, 16),
    "lora_rank": (4,),
    "lora_r": (4, None),
    "additional_target": ("lm_head,embed_tokens",),
    "stage": ("sft", "pt", "dpo", "kto", "rm"),
    "rl": ("dpo", "kto", "orpo", "simpo", False, None),
    "pref_loss": ("sigmoid", "orpo", "simpo", "hinge"),
    "pref_ftx": (0, 0.1, 0.0),
    "loss_type": ("sigmoid", "ipo", ["simpo"], ["sigmoid", "ipo"], "dft", "nll"),
    "dpo_loss_type": ("ipo", ["sigmoid"]),
    "beta": (0.1, None),
    "cpo_alpha": (0.0, 1.0),
    "simpo_gamma": (0.5,),
    "label_smoothing": (0, 0.1),
    "optim": ("adamw_torch", "lion_pytorch", "sgd", "adamw_torch_8bit"),
    "optimizer": ("lion_pytorch", "muon", "adamw", "sgd"),
    "optim_args": ("momentum=0.9", "bf16_stochastic_round=true", {"bf16_stochastic_round": True}, {}, "x"),
    "use_muon": (True, False, "false"),
    "adam_beta1": (0.8, None),
    "adam_beta2": (0.9, None),
    "lr_scheduler": ("cosine", "linear", "constant"),
    "lr_scheduler_type": ("cosine", "linear"),
    "cosine_min_lr_ratio": (0.1, "x", None),
    "save_strategy": ("no", "steps", "epoch", "best"),
    "eval_strategy": ("no", "steps", "epoch"),
    "evaluation_strategy": ("no", "steps", "epoch"),
    "save_steps": (10, None),
    "eval_steps": (10, None),
    "logging_steps": (5, None),
    "max_steps": (-1, 20),
    "eval_delay": (0, 5),
    "load_best_model_at_end": (True, False),
    "early_stopping_patience": (2, None),
    "batch_size": (8, None),
    "micro_batch_size": (2, "auto"),
    "gradient_accumulation_steps": (2, None),
    "dtype": ("auto", "float32", "bfloat16"),
    "torch_dtype": ("auto", "float32"),
    "bf16": (True, False, "auto", 0),
    "fp16": (True, False),
    "pure_bf16": (True, False),
    "use_cpu": (True, 1, False, 0),
    "no_cuda": (True, 1),
    "bf16_master": ("stochastic",),
    "train_sampling_strategy": ("sequential", "random", "group_by_length"),
    "disable_shuffling": (True, False),
    "plugins": (["axolotl.integrations.liger.LigerPlugin"], ["axolotl.x.kd.K"], ["a.fsdp.X"], "x"),
    "report_to": ("wandb", "none", ["wandb", "tensorboard"], ["comet_ml"], []),
    "use_wandb": (True, False),
    "wandb_mode": ("offline", "online"),
    "wandb_project": ("p",),
    "wandb_name": ("n",),
    "mlflow_experiment_name": ("p",),
    "run_name": ("n",),
    "push_to_hub": (True, False, 0),
    "hub_model_id": ("me/name", None),
    "attn_implementation": ("sdpa", "flash_attention_4", "flex_attention", "auto", "org/kernel"),
    "completion_only_loss": (True, False, None),
    "assistant_only_loss": (True, False, None),
    "chat_template": ("{{ x }}", "chatml", "jinja"),
    "chat_template_path": ("x.jinja", "org/m"),
    "special_tokens": ({"pad_token": "x"},),
    "tokens": (["a"], {"eos_token": "x"}),
    "eos_token": ("x", None),
    "dataset": ("alpaca_en_demo", "a,b", "d.yaml"),
    "dataset_dir": ("x",),
    "eval_dataset": ("e.jsonl", ""),
    "dataset_name": ("a", "x.yaml"),
    "dataset_config": ("c", None),
    "dataset_configs": (["c"], ["c", "d"]),
    "dataset_splits": (["train"], ["train", "test"]),
    "max_samples": (7, None),
    "dataset_mixer": ({"a": 1, "b": 0.5},),
    "dataset_mixture": ({"datasets": [{"id": "a"}], "test_split_size": 0.1, "seed": 1},),
    "pretraining_dataset": ([{"path": "x", "text_column": "t"}], "x", None),
    "streaming": (True,),
    "max_length": (None, 512),
    "max_grad_norm": (None, 0),
    "loraplus_lr_ratio": (16.0, None),
    "weight_decay": (0.1, 0),
    "warmup_steps": (1, 0),
    "model_revision": ("main", "x"),
    "datasets.data_files": ("x.jsonl", ["x.jsonl"], ["a", "b"]),
    "datasets.path": ("json", "org/x"),
    "datasets.type": ("chat_template", "alpaca", "sharegpt", "chatml.intel", {"field_instruction": "q"},
                      {"field_prompt": "p", "prompt_format": "{prompt}"}, "foo"),
    "datasets.message_field_role": ("from",),
    "datasets.message_field_content": ("value", None),
    "datasets.field_thinking": ("think",),
    "datasets.template_thinking_key": ("think", "r"),
    "datasets.split": ("train",),
    "datasets.ds_type": ("json",),
    "datasets.conversation": ("x",),
    "datasets.shards": (3,),
    "datasets.roles_to_train": (["assistant"], []),
    "datasets.train_on_eos": ("turn",),
    "datasets.field_messages": ("m",),
    "datasets.field_system": ("s",),
    "datasets.text_column": ("t",),
    "datasets.revision": ("main", "x"),
    "datasets.weight": (2,),
    "datasets.field": ("t",),
    "datasets.config": ("c",),
}  # fmt: skip
"""By key of the combinations: values that other keys change the meaning of."""


def drawn(seed: int, count: int) -> Iterator[Config]:
    """Each key with each value, in a config of each of its tools; then combinations, `count` configs in all."""
    from scripts.foreign_keys import table_of  # a version that answers need not have them
    from scripts.write_fates import CONFIGS

    given: dict[tuple[str, str], list[Any]] = {}
    for tool in CONFIGS:
        for row in table_of(tool):
            given.setdefault((tool, row["key"]), []).append((json.loads(row["given"] or "{}"), row["example"]))
    made = 0
    for (tool, key), rows in given.items():
        examples = [json.loads(example) for _, example in rows]
        for value in _distinct([*examples, *(VALUES if tool != "torchtune" else VALUES[:12]), *MORE.get(key, ())]):
            yield put(CONFIGS[tool], {**rows[0][0], key: value})
            made += 1
    rng = random.Random(seed)
    keys = sorted(MORE)
    tools = [tool for tool in CONFIGS if tool != "torchtune"]
    tuned = sorted(key for tool, key in given if tool == "torchtune")
    for _ in range(count - made):
        if rng.random() < 0.1:
            chosen = {key: rng.choice(VALUES) for key in rng.sample(tuned, rng.randint(2, 6))}
            yield put(CONFIGS["torchtune"], chosen)
            continue
        base = CONFIGS[rng.choice(tools)]
        kept = {key: value for key, value in base.items() if rng.random() < 0.8}
        chosen = {
            key: rng.choice(MORE[key]) if rng.random() < 0.85 else rng.choice(VALUES)
            for key in rng.sample(keys, rng.randint(2, 7))
        }
        items = list(put(kept, chosen).items())
        rng.shuffle(items)
        yield dict(items)


def _distinct(values: Sequence[Any]) -> list[Any]:
    """The values, each once; `1`, `1.0` and `true` are three."""
    return list({repr(value): value for value in values}.values())


def put(config: Mapping[str, Any], values: Mapping[str, Any]) -> Config:
    """The config with these values of dotted keys; in a list, of its first item."""
    out: Config = json.loads(json.dumps(config))
    for key, value in values.items():
        *path, last = key.split(".")
        place = out
        for part in path:
            inner = place.get(part)
            if isinstance(inner, list) and inner:
                inner = inner[0]
            if not isinstance(inner, dict):
                inner = {"path": "d.jsonl"} if part == "datasets" else {}
                place[part] = [inner] if part == "datasets" else inner
            place = inner
        place[last] = value
    return out


def answer(config: Config, folder: Path) -> dict[str, Any]:
    """What the loader and `import` make of a config."""
    from ratel_cli.config.importing import import_config
    from ratel_cli.config.load import examine_text
    from ratel_cli.errors import BadInput

    text, path = yaml.safe_dump(config, sort_keys=False), folder / "c.yaml"
    path.write_text(text)
    found: dict[str, Any] = {}
    try:
        reading = examine_text(text, Path("c.yaml"))
        found["config"] = None if reading.config is None else str(reading.config.model_dump(mode="json"))
        found["left out"] = sorted(reading.left_out)
        found["findings"] = sorted(f"{each.where}: {each.message} ({each.hint})" for each in reading.findings)
        found["notices"] = sorted(reading.notices)
    except BadInput as error:
        found["loader"] = str(error)
    except Exception as error:  # noqa: BLE001  a crash is an answer, too
        found["loader crash"] = f"{type(error).__name__}: {error}"
    try:
        imported = import_config(path)
        found["tool"], found["text"] = imported.tool, imported.text.splitlines()[1:]  # the first one has a path
        found["outcomes"] = sorted(
            f"{each.written}: {each.value} | {each.fate} | {each.ours} | {each.reason}" for each in imported.outcomes
        )
    except BadInput as error:
        messages = [str(each) for each in (error, *error.others)]
        found["refused"] = sorted(message.replace(str(path), "c.yaml") for message in messages)
    except Exception as error:  # noqa: BLE001
        found["import crash"] = f"{type(error).__name__}: {error}"
    return found


def _answer(arguments: argparse.Namespace) -> None:
    configs = arguments.configs.read_text().splitlines()[arguments.start : arguments.stop]
    done = len(arguments.answers.read_text().splitlines()) if arguments.answers.exists() else 0
    with tempfile.TemporaryDirectory() as folder, arguments.answers.open("a") as file:
        for line in configs[done:]:
            file.write(json.dumps(answer(json.loads(line), Path(folder))) + "\n")


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The parts of an answer that differ; of lists, what only one of them has."""
    found = {}
    for name in [name for name in {**old, **new} if old.get(name) != new.get(name)]:
        first, second = old.get(name), new.get(name)
        if isinstance(first, list) and isinstance(second, list):
            only = [each for each in first if each not in second]
            first, second = only, [each for each in second if each not in first]
        found[name] = (first, second)
    return found


def _compare(arguments: argparse.Namespace) -> int:
    counts: Counter[str] = Counter()
    total = 0
    configs = arguments.configs.read_text().splitlines() if arguments.configs else None
    with arguments.old.open() as old, arguments.new.open() as new:
        for number, (first, second) in enumerate(zip(old, new, strict=False)):
            total += 1
            found = {} if first == second else differences(json.loads(first), json.loads(second))
            counts.update([*found, *(["any"] if found else [])])
            if found and counts["any"] <= arguments.show:
                print(f"{number}: {configs[number] if configs else ''}")
                for name, (before, after) in found.items():
                    print(f"  {name}\n    old {before}\n    new {after}")
    print(f"{total} configs: {dict(counts)}")
    return int(bool(counts))


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    draw = commands.add_parser("draw")
    draw.add_argument("configs", type=Path)
    draw.add_argument("--seed", type=int, default=7)
    draw.add_argument("--count", type=int, default=50_000)
    one = commands.add_parser("answer")
    one.add_argument("configs", type=Path)
    one.add_argument("answers", type=Path)
    one.add_argument("--start", type=int, default=0)
    one.add_argument("--stop", type=int)
    two = commands.add_parser("compare")
    two.add_argument("old", type=Path)
    two.add_argument("new", type=Path)
    two.add_argument("--configs", type=Path, help="print each config that differs")
    two.add_argument("--show", type=int, default=20)
    arguments = parser.parse_args(words)
    if arguments.command == "draw":
        lines = (json.dumps(each) for each in drawn(arguments.seed, arguments.count))
        arguments.configs.write_text("".join(f"{line}\n" for line in lines))
        return 0
    if arguments.command == "answer":
        _answer(arguments)
        return 0
    return _compare(arguments)


if __name__ == "__main__":
    sys.exit(main())
