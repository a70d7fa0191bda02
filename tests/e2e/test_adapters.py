"""LoRA runs against PEFT in plain PyTorch: what is trained, what is exported, and what stays as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ratel_cli.model.files.skeleton import DTYPES
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import Config, as_json, assert_rejected, file_hash, in_dtype, ratel, tree, works, write_config
from tests.e2e.trained import assert_trained, in_plain_torch, saved_name
from tests.engine.architectures import tiny_config
from tests.reference import Trained
from tests.tiers import rotating, thinned

NUM_STEPS = 4
EXPRESSION = r"model.layers.[\d]+.(mlp|self_attn).(up|down|q)_proj"
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CHANGES: dict[str, object] = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "max_steps": NUM_STEPS}
WHOLE: dict[str, object] = {"peft_use_dora": True, "lora_modules_to_save": ["lm_head"]}
SAVES: dict[str, object] = {"save_steps": 2, "save_total_limit": 2}
IN_PEFT: dict[str, object] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def plain(config: Config, base: Path, **lora: object) -> Trained:
    """What PEFT trains in plain PyTorch."""
    return in_plain_torch(config, base, lora=tuple({**IN_PEFT, **lora}.items()))


def adapter_of(config: Config) -> dict[str, torch.Tensor]:
    return load_file(config.output / "adapter_model.safetensors")


LORA: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "all linear": ({}, {}),
    "dropout and rslora": (
        {"lora_target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.1, "peft_use_rslora": True},
        {"target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.1, "use_rslora": True},
    ),
    "one layer": (
        {"lora_layers_to_transform": [1], "peft_init_lora_weights": "gaussian"},
        {"layers_to_transform": [1], "init_lora_weights": "gaussian", "target_modules": LINEAR},
    ),
    "all linear by axolotl": (
        {"peft_init_lora_weights": False, "lora_target_linear": True, "lora_target_modules": ["q_proj"]},
        {},
    ),
    "a regular expression": ({"lora_target_modules": EXPRESSION}, {"target_modules": EXPRESSION}),
    "dora, and modules trained whole": (
        {"peft_use_dora": True, "lora_dropout": 0.1, "lora_modules_to_save": ["embed_tokens", "lm_head"]},
        {"use_dora": True, "lora_dropout": 0.1, "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
}
"""Keys of a config, and what they are in PEFT."""


@pytest.mark.parametrize(("what", "dtype"), thinned(rotating(list(LORA), ["bfloat16", "float32"]), every=3, offset=2))
def test_the_adapter_is_what_peft_trains(make_config: MakeConfig, base: Path, dtype: str, what: str) -> None:
    keys, lora = LORA[what]
    config = make_config(**{**CHANGES, **keys, "dtype": dtype})
    config.succeed()
    saved = tuple(f"{name}.weight" for name in keys.get("lora_modules_to_save", ()))  # type: ignore[attr-defined]
    assert_trained(config, plain(config, base, **lora), whole=saved)


def test_the_second_matrices_and_the_head_have_other_rates(make_config: MakeConfig, base: Path) -> None:
    """LoRA+, and axolotl's `embedding_lr_scale`: the head does not decay."""
    keys = {**CHANGES, "lora_modules_to_save": ["lm_head"], "weight_decay": 0.1, "learning_rate": 1e-3}
    own = {"loraplus_lr_ratio": 16, "embedding_lr_scale": 0.125, "lr_scheduler": "constant", "warmup_ratio": 0}
    config = make_config(**keys, **own)
    config.succeed()
    lora = tuple({**IN_PEFT, "modules_to_save": ["lm_head"]}.items())
    rates = (("lora_B", 1e-3 * 16), ("^lm_head", 1e-3 * 0.125))
    wanted = in_plain_torch(config, base, lora=lora, group_rates=rates, never_decayed="^lm_head")
    assert_trained(config, wanted, whole=("lm_head.weight",))
    assert_rejected(config.finetune("max_steps=5", "loraplus_lr_ratio=8"), 2, "loraplus_lr_ratio was 16")
    assert_rejected(config.finetune("embedding_lr=1e-5"), 2, "are both set")


@pytest.mark.parametrize("what", thinned(["lora", "dora"], every=2, offset=1))
def test_peft_loads_what_is_exported(make_config: MakeConfig, base: Path, what: str) -> None:
    """Killed in between, too. Of the base nothing is copied or changed."""
    keys = WHOLE if what == "dora" else {}
    config, before = make_config(**CHANGES, **keys), file_hash(base / "model.safetensors")
    config.run_until_killed(kill_at="commit.written:3")
    config.succeed()
    output = config.output
    assert file_hash(base / "model.safetensors") == before and not (output / "model.safetensors").exists()
    assert (output / "tokenizer.json").is_file() and not (output / "config.json").exists()
    settings = json.loads((output / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (4, 8, "LORA")
    assert settings["base_model_name_or_path"] == str(base) and settings["inference_mode"] is True
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(model, output)
    theirs = {saved_name(name): each for name, each in loaded.base_model.model.named_parameters()}
    for name, values in adapter_of(config).items():
        assert torch.equal(theirs[name.replace("lm_head", "lm_head.modules_to_save")], values.float()), name
    assert "bit for bit" in works("verify", config).stdout


KINDS: dict[str, dict[str, object]] = {
    "lora": {"lora_dropout": 0.1},
    "dora, head whole": WHOLE,
    "two rates": {"loraplus_lr_ratio": 16.0, "lora_modules_to_save": ["lm_head"], "embedding_lr": 1e-5},
}


@pytest.mark.parametrize(
    ("point", "kind", "dtype"),
    rotating(
        ["create.filled:1", "commit.written:2", "commit.synced:3", "manifest.ready:3", "commit.published:4"],
        list(KINDS),
        ["bfloat16", "float32", "float16"],
        every=5,
        offset=2,
        full_rotation=True,
    ),
)
def test_a_killed_run_ends_with_the_same_adapter(make_config: MakeConfig, point: str, kind: str, dtype: str) -> None:
    changes = {**CHANGES, **KINDS[kind], "dtype": dtype, **SAVES}
    killed, undisturbed = make_config("killed", **changes), make_config("undisturbed", **changes)
    killed.run_until_killed(kill_at=point)
    killed.succeed()
    undisturbed.succeed()
    found, wanted = adapter_of(killed), adapter_of(undisturbed)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert killed.curve == undisturbed.curve


@pytest.mark.full
@pytest.mark.parametrize("kind", list(KINDS))
def test_an_adapter_comes_back_from_a_snapshot(make_config: MakeConfig, kind: str, tmp_path: Path) -> None:
    """Of the frozen base, too, the snapshot has all that a run needs."""
    storage = {"engine": "threads", "snapshot": {"path": str(tmp_path / "snapshot"), "every": 1}}
    config = make_config(**{**CHANGES, **KINDS[kind], "storage": storage})
    config.succeed()
    wanted = adapter_of(config)
    config.store.unlink()
    works("restore", config)
    works("export", config, "-o", tmp_path / "restored")
    found = load_file(tmp_path / "restored" / "adapter_model.safetensors")
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    config.succeed(f"max_steps={NUM_STEPS + 1}")


def assert_same_without_its_store(config: Config, rows: Path) -> None:
    """The exported adapter on its base has the loss of the store, says the same, and can be loaded."""
    losses, texts = [], []
    for _ in range(2):
        losses.append(as_json("eval", config.output, rows)["loss"])
        texts.append(works("generate", config.output, "Which number is 0?", "--max-new-tokens", 5).stdout)
        works("clean", config.output, "--store", "--yes")
        assert "loads: " in works("verify", config.output).stdout
    assert losses[0] == losses[1] and texts[0] == texts[1]


QUANTISED = (
    {},
    {"load_in_4bit": True},
    {"load_in_4bit": True, "bnb_4bit_use_double_quant": False},
    {"load_in_8bit": True},
)


@pytest.mark.full
@pytest.mark.parametrize("keys", QUANTISED, ids=["16 bit", "nf4 double", "nf4", "int8"])
def test_a_run_is_asked_with_its_store_and_without(
    make_config: MakeConfig, rows: Path, keys: dict[str, object]
) -> None:
    config = make_config(**CHANGES, **keys)
    config.succeed()
    assert_same_without_its_store(config, rows)


@pytest.mark.full
def test_a_run_goes_on_with_the_same_adapter_alone(make_config: MakeConfig, rows: Path) -> None:
    config, whole = make_config(**{**CHANGES, "max_steps": 2}), make_config("whole", **CHANGES)
    config.succeed()
    whole.succeed()
    ended = config.finetune("lora_alpha=16", f"max_steps={NUM_STEPS}")
    assert_rejected(ended, 2, "which has other settings: lora_alpha was 8, is now 16")
    for key, value in (("lora_r", 8), ("lora_alpha", 16), ("lora_dropout", 0.5), ("peft_use_rslora", True)):
        other = make_config(f"other {key}", **{**CHANGES, key: value})
        assert_rejected(other.finetune("--from", str(config.output)), 2, f"{key} was ", f"is now {value}")
    assert_rejected(ratel("eval", config, rows, "lora_alpha=800"), 2, "was made for another model")
    config.succeed("max_steps=3", "lora_target_linear=true")
    config.succeed(f"max_steps={NUM_STEPS}", "lr_scheduler=constant", "--resume", "no", "--overwrite-store")
    started = make_config("started", **{**CHANGES, "max_steps": 6})
    started.succeed("--from", str(whole.output))
    assert started.metrics[0]["step"] == NUM_STEPS + 1


@pytest.mark.full
def test_the_plan_is_what_a_step_moves(make_config: MakeConfig) -> None:
    """Only the adapter's state is written. (Where the base does not stay in RAM it is read: tests/engine.)"""
    config = make_config(**CHANGES)
    config.succeed()
    plan = as_json("plan", config)
    assert plan["model"]["num_trained_parameters"] < plan["model"]["num_parameters"] / 4
    # What a step writes may be counted with the next one. To the byte it is compared in tests/engine.
    written = sum(line["nvme_written_bytes"] for line in config.metrics)
    num_writes = NUM_STEPS + sum(line["clipped"] for line in config.metrics)  # speculation may write a step twice
    assert 0 < written <= num_writes * plan["traffic"]["nvme_written_bytes"]


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "keys"), [(2, {}), (3, {}), (2, QUANTISED[1])], ids=["2", "3", "nf4 double"])
def test_ranks_train_one_adapter(make_config: MakeConfig, ranks: int, keys: dict[str, object]) -> None:
    config = make_config("ranks", **CHANGES, **keys)
    alone = make_config("alone", **CHANGES, **keys, gradient_accumulation_steps=2 * ranks)
    config.succeed_ranks(ranks)
    alone.succeed()
    found, wanted = adapter_of(config), adapter_of(alone)
    for name, values in wanted.items():
        torch.testing.assert_close(found[name], values, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lora_target_modules": ["nothing"]}, "lora_target_modules: LlamaForCausalLM has no module named nothing"),
        ({"lora_target_modules": ["q_prj", "x"]}, "has no module named q_prj or x"),
        ({"lora_target_modules": "q_proj"}, "has a name that it matches whole; one is model.layers.0.self_attn.q_proj"),
        ({"lora_target_modules": "(q_proj"}, "(q_proj is no regular expression"),
        ({"lora_layers_to_transform": [1, 2]}, "lora_layers_to_transform: there is no layer 2: LlamaForCausalLM has 2"),
        ({"lora_target_modules": ["embed_tokens"]}, "embedding and head can have no adapter"),
        ({"lora_target_modules": ["embed_tokens"], "lora_target_linear": True}, "embed_tokens: no linear layer"),
        ({"lora_modules_to_save": ["score"]}, "lora_modules_to_save: score: no module of the model with weights"),
    ],
)
def test_adapters_that_cannot_be(make_config: MakeConfig, keys: dict[str, object], message: str) -> None:
    config = make_config(**{**CHANGES, **keys})
    assert_rejected(config.finetune(), 2, message)


@pytest.mark.parametrize(
    ("of_files", "dtype", "kind"),
    rotating(
        ["bfloat16", "float32"],
        ["bfloat16", "float32"],
        ["lora", "dora, head whole"],
        every=2,
        offset=2,
        full_pairs=True,
    ),
)
def test_merging_has_the_bits_of_peft(
    make_config: MakeConfig, base: Path, of_files: str, dtype: str, kind: str, tmp_path: Path
) -> None:
    """In the dtype of the base model's files, whatever the run has computed in."""
    own, merged = in_dtype(base, of_files), tmp_path / "merged"
    config = make_config(**{**CHANGES, **KINDS[kind], "dtype": dtype, "base": own, **SAVES})
    config.succeed()
    assert f"merged step {NUM_STEPS} to" in works("merge", config, "-o", merged).stderr
    assert_merged_by_peft(merged, own, config.output, tmp_path)
    assert "adapter" not in (merged / "README.md").read_text().partition("## Settings")[0]
    works("verify", merged)
    works("merge", config, "--step", 2, "-o", tmp_path / "earlier")
    assert file_hash(next(merged.glob("*.safetensors"))) != file_hash(
        next((tmp_path / "earlier").glob("*.safetensors"))
    )


def assert_merged_by_peft(merged: Path, base: Path, adapter: Path, folder: Path) -> None:
    """Every tensor has the dtype and the bits that PEFT saves, and so has what transformers loads."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(folder / "theirs")
    found, wanted = tensors_of(merged), tensors_of(folder / "theirs")
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert found[name].dtype == values.dtype and torch.equal(found[name], values), name
    configs = [json.loads((path / "config.json").read_text())["dtype"] for path in (merged, folder / "theirs")]
    assert configs[0] == configs[1] and AutoModelForCausalLM.from_pretrained(merged).num_parameters()


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """What all safetensors files there have."""
    return {name: each for path in directory.glob("*.safetensors") for name, each in load_file(path).items()}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")  # PEFT looks for them among modules alone
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("mixtral", {}),
        ("gpt_oss", {"lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
        ("mixtral", {"lora_layers_to_transform": [1]}),
    ],
    ids=["mixtral", "gpt_oss", "mixtral, one layer"],
)
def test_adapters_of_experts_are_loaded_and_merged_as_by_peft(
    base: Path, rows: Path, tmp_path: Path, family: str, keys: dict[str, object], dtype: str
) -> None:
    own = tmp_path / "own"
    model = AutoModelForCausalLM.from_config(tiny_config(family, vocab_size=400))
    model.to(DTYPES[dtype]).save_pretrained(own)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(base / name, own)
    changes = {**CHANGES, **keys, "peft_init_lora_weights": False, "sequence_len": 16, "dtype": dtype}
    config = write_config(tmp_path, base=own, rows=rows, **changes)
    config.succeed()
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(own, dtype="auto"), config.output)
    theirs = {saved_name(name): each for name, each in loaded.base_model.model.named_parameters()}
    adapter = adapter_of(config)
    assert any("experts" in name for name in adapter)
    assert any("q_proj" in name for name in adapter) is ("lora_target_parameters" not in keys), "named stacks, or all"
    assert {name.split(".")[4] for name in adapter} == (
        {"1"} if "lora_layers_to_transform" in keys else {"0", "1", "2"}
    )
    for name, values in adapter.items():
        assert torch.equal(theirs[name], values), name
    works("merge", config, "-o", tmp_path / "merged")
    wanted = loaded.merge_and_unload()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").state_dict()
    is_merged = [name for name, values in wanted.state_dict().items() if "experts" in name and values.dim() == 3]
    assert is_merged
    for name, values in wanted.state_dict().items():
        assert torch.equal(found[name], values), name
    works("verify", config)


@pytest.mark.full
def test_what_cannot_be_merged(make_config: MakeConfig, plain_run: Config, tmp_path: Path) -> None:
    assert_rejected(ratel("merge", plain_run, "-o", tmp_path / "merged"), 2, "this run trains no adapter")
    config = make_config(**CHANGES)
    config.succeed()
    before = tree(config.output)
    assert_rejected(ratel("merge", config, "-o", config.output), 2, "contains the adapter")
    whole = make_config("whole").finetune("--from", str(config.output))
    assert_rejected(whole, 2, "that run trains another model: adapter was lora, is now not set")
    assert f"`ratel merge {config.output} -o DIR`" in whole.stderr
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.safetensors").write_text("mine")
    assert_rejected(ratel("merge", config, "-o", tmp_path / "mine"), 2, "-o")
    assert (tmp_path / "mine" / "model.safetensors").read_text() == "mine"
    assert tree(config.output) == before


@pytest.mark.full
def test_a_merge_beyond_float16_is_refused(make_config: MakeConfig, base: Path, tmp_path: Path) -> None:
    keys = {"lora_target_modules": ["q_proj"], "lora_alpha": 10**8, "peft_init_lora_weights": False, "max_steps": 1}
    config = make_config(**{**CHANGES, **keys, "dtype": "bfloat16", "base": in_dtype(base, "float16")})
    config.succeed()
    ended = ratel("merge", config, "-o", tmp_path / "merged")
    assert_rejected(ended, 5, "q_proj.weight cannot be exported")
    assert "merge with PEFT into the base model in bfloat16" in ended.stderr
    assert not (tmp_path / "merged" / "config.json").exists()


def test_the_card_says_how_to_load_it(make_config: MakeConfig) -> None:
    config = make_config(**CHANGES)
    assert "load it with PEFT's from_pretrained" in config.succeed()
    text = (config.output / "README.md").read_text()
    assert "library_name: peft" in text and "A LoRA adapter of " in text and "lora_r: 4" in text
    assert 'AutoPeftModelForCausalLM.from_pretrained("."' in text
