"""Configs of other trainers become what they mean there, and run, with a tiny model and tiny data in their place.

A config that asks for something impossible ends with the line that says so. `ported_meanings` has what the others mean.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainingArguments

from ratel_cli.config.importing import import_config
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.load import dump, load_config, to_yaml
from ratel_cli.config.yaml.yaml_marks import Plain
from tests.e2e.ported_configs import IMPOSSIBLE, PORTED
from tests.e2e.ported_meanings import MEANINGS, Adapter, Meaning, Set
from tests.e2e.runs import Config, Ended, ratel, save_base, works
from tests.reference import train_in_memory
from tests.tiers import sample

LEAST = 40
LEAST_SHARE = 0.9
ROWS_OF: dict[str, dict[str, object]] = {
    "alpaca": {"instruction": "Add one.", "input": "41", "output": "42"},
    "completion": {"text": "one two three four", "chapter": "one two three"},
    "chat_template": {
        "messages": [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This one."}],
        "conversations": [{"from": "human", "value": "Which?"}, {"from": "gpt", "value": "This one."}],
    },
}


SPECIAL_TOKENS = ["<s>", "</s>", "<unk>", "<|im_end|>", "<|eot_id|>"]
"""What the configs name as special tokens, and the tokenizers of their models have."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model whose tokenizer has the special tokens."""
    directory = save_base(tmp_path_factory.mktemp("ported") / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens(SPECIAL_TOKENS, special_tokens=True)
    tokenizer.save_pretrained(directory)
    model = LlamaForCausalLM.from_pretrained(directory)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By dataset type: a file with rows that fit."""
    directory = tmp_path_factory.mktemp("ported")
    files = {}
    for kind, row in ROWS_OF.items():
        files[kind] = directory / f"{kind}.jsonl"
        files[kind].write_text(f"{json.dumps(row)}\n" * 24)
    return files


def tiny_values(config: Path, base: Path, data: dict[str, Path]) -> list[str]:
    """Overrides with a tiny model and data of the same types, whatever the config names; without trackers."""
    replaced = [
        f"base_model={base}",
        "revision_of_model=null",
        "output_dir=out",
        "sequence_len=512",
        "device=cpu",
        "storage.engine=threads",
    ]
    replaced.append("report_to=none")
    loaded = load_config(config, replaced).config
    for number, dataset in enumerate(loaded.datasets):
        kind = "chat_template" if dataset.type == "auto" else dataset.type
        replaced.append(f"datasets.{number}.path={data[kind]}")
    return replaced


def dry_run(config: Config, base: Path, data: dict[str, Path]) -> Ended:
    return config.finetune(*tiny_values(config, base, data), "--dry-run")


@pytest.mark.full
@pytest.mark.parametrize("name", sample(PORTED, every=14))
def test_a_config_of_another_trainer_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Path, data: dict[str, Path]
) -> None:
    monkeypatch.chdir(tmp_path)
    theirs, ours = Path("theirs.yaml"), Config("run.yaml")
    content: dict[str, Plain] = json.loads(json.dumps(PORTED[name]))
    theirs.write_text(dump(content))
    ended = ratel("import", theirs, "-o", str(ours))
    if name in IMPOSSIBLE:
        assert ended.code == 2
        assert any(IMPOSSIBLE[name] in error for error in ended.errors), ended.stderr
        assert not ours.exists()
        return
    assert ended.code == 0, ended.stderr
    assert import_config(theirs).tool == name.partition(":")[0]
    ended = dry_run(ours, tiny, data)
    assert ended.code == 0, ended.stderr


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, meaning in MEANINGS.items() if meaning.adapter is not None])
def test_its_adapter_is_what_peft_trains(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Path, data: dict[str, Path]
) -> None:
    """Three steps of it, with the tool's rank, scale, dropout and modules, in plain PyTorch."""
    monkeypatch.chdir(tmp_path)
    Path("theirs.yaml").write_text(dump(json.loads(json.dumps(PORTED[name]))))
    Path("imported.yaml").write_text(import_config(Path("theirs.yaml")).text)
    run = Config("run.yaml")
    run.write_text(to_yaml(load_config(Path("imported.yaml"), tiny_values(Path("imported.yaml"), tiny, data)).config))
    works("finetune", run, "dtype=float32", "max_steps=3")
    config = run.with_name("recorded.yaml")
    config.write_text((run.output / "run" / "config.yaml").read_text())
    adapter, batches = MEANINGS[name].adapter, config.load_data()
    assert adapter is not None
    lora = {
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": adapter.modules or "all-linear",
        "task_type": "CAUSAL_LM",
    }
    wanted = train_in_memory(
        LlamaConfig.from_pretrained(tiny),
        load_file(tiny / "model.safetensors"),
        [batches.step(step) for step in range(3)],
        replace(config.recipe, lora=tuple(lora.items()), learning_rates=tuple(rates_of(config))),
    )
    found = load_file(run.output / "adapter_model.safetensors")
    adapters = {f"base_model.model.{n.replace('.default', '')}": v for n, v in wanted.weights.items() if "lora_" in n}
    assert found.keys() == adapters.keys()
    assert [key for key, values in adapters.items() if not torch.equal(found[key], values)] == []


def rates_of(config: Config) -> list[float]:
    """Those of the run's log, which the schedule's own tests judge."""
    return [line["learning_rate"] for line in config.metrics]


def meaning_of(config: RunConfig, unknown: frozenset[str]) -> Meaning:
    """What a config of Ratel trains."""
    options = config.lr_scheduler_kwargs
    keys = [field.name for field in dataclasses.fields(Set)]
    return Meaning(
        sets=[Set(**{key: getattr(each, key) for key in keys}) for each in config.datasets],
        learning_rate=config.learning_rate,
        schedule=config.lr_scheduler,
        least_rate=None if options is None else options.min_lr_rate,
        warmup=(config.warmup_steps, config.warmup_ratio),
        epochs=config.num_epochs,
        max_steps=config.max_steps,
        step=config.split,
        length=config.sequence_len,
        packing=config.sample_packing,
        betas=(config.adam_beta1, config.adam_beta2),
        epsilon=config.adam_epsilon,
        decay=config.weight_decay,
        clip=config.max_grad_norm,
        trains_on_inputs=config.train_on_inputs,
        dtype=config.dtype,
        streaming=config.streaming,
        held_out=config.val_set_size,
        chat_template=config.chat_template,
        adapter=None
        if config.adapter is None
        else Adapter(
            rank=config.lora_r,
            alpha=config.lora_alpha or config.lora_r,
            dropout=config.lora_dropout,
            modules=() if config.lora_target_linear else config.lora_target_modules,
        ),
        unknown=unknown,
    )


@pytest.mark.parametrize("name", MEANINGS)
def test_it_means_what_it_means_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs.yaml").write_text(dump(json.loads(json.dumps(PORTED[name]))))
    imported = import_config(Path("theirs.yaml"))
    unknown = {row.written for row in imported.outcomes if row.fate == "undecided" and "has no such key" in row.reason}
    Path("run.yaml").write_text(imported.text)
    found, expected = meaning_of(load_config(Path("run.yaml")).config, frozenset(unknown)), MEANINGS[name]
    fields = {field.name: getattr(expected, field.name) for field in dataclasses.fields(Meaning)}
    fields["sets"] = list(expected.sets)
    assert {key: getattr(found, key) for key in fields} == fields


def leaves(content: Mapping[str, Plain], prefix: str = "") -> Iterator[str]:
    """The dotted keys of a config, without the numbers of lists."""
    for key, value in content.items():
        yield prefix + key
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict):
                yield from leaves(each, f"{prefix}{key}.")


@pytest.mark.parametrize("name", MEANINGS)
def test_no_key_vanishes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key of the file has a row, or the key around it has one, or those inside it."""
    monkeypatch.chdir(tmp_path)
    content: dict[str, Plain] = json.loads(json.dumps(PORTED[name]))
    Path("theirs.yaml").write_text(dump(content))
    rows = {row.written for row in import_config(Path("theirs.yaml")).outcomes}
    parts = {".".join(row.split(".")[:size]) for row in rows for size in range(1, row.count(".") + 2)}
    lost = {key for key in leaves(content) if key not in parts}
    assert not {key for key in lost if not any(key.startswith(f"{row}.") for row in rows)}


def test_there_are_enough_and_nearly_all_run() -> None:
    assert len(PORTED) >= LEAST
    assert IMPOSSIBLE.keys() | MEANINGS.keys() == PORTED.keys()
    assert not IMPOSSIBLE.keys() & MEANINGS.keys()
    assert len(PORTED) - len(IMPOSSIBLE) >= LEAST_SHARE * len(PORTED)


def test_the_arguments_that_the_trainer_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: Path, data: dict[str, Path]
) -> None:
    """Every field of TrainingArguments with its default: nothing of it is unknown."""
    monkeypatch.chdir(tmp_path)
    fields = dataclasses.fields(TrainingArguments)
    defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    Path("training_args.json").write_text(json.dumps(defaults, default=str))
    imported = import_config(Path("training_args.json"))
    assert imported.tool == "transformers"
    undecided = {outcome.written for outcome in imported.outcomes if outcome.fate == "undecided"}
    assert undecided == {"base_model", "datasets"}
    Path("run.yaml").write_text(imported.text)
    config = load_config(Path("run.yaml"), [f"base_model={base}", f"datasets={data['alpaca']}"]).config
    assert (config.lr_scheduler, config.num_epochs, config.micro_batch_size) == ("linear", 3.0, 8)
    assert (config.learning_rate, config.warmup_steps, config.dtype) == (5e-5, 0, "float32")
