"""Tokens that a run adds: the model, the tokenizer and the weights are those that transformers makes of them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer

from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import ROWS, Config, assert_rejected, save_base, works
from tests.reference import Trained, train_in_memory

_OTHERS = [("mean", False), ("random", True), ("random", False)]
TOKENS = ["Which number", "even"]
"""Both are in the rows."""


def grown(base: Path, directory: Path, *, rows: int, seed: int = 42, mean: bool = True) -> Path:
    """The base model with the tokens of the tests, as a user of transformers makes it."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens([AddedToken(each, lstrip=False, rstrip=False, normalized=False) for each in TOKENS])
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(seed)
    model.resize_token_embeddings(rows, mean_resizing=mean)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def plain(config: Config, directory: Path, **changes: object) -> Trained:
    """The run of `config`, on the model in `directory`, with plain PyTorch."""
    data = config.load_data(tokenizer_dir=directory)
    steps = [data.step(step) for step in range(len(config.metrics))]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return train_in_memory(
        model.config, load_file(directory / "model.safetensors"), steps, replace(config.recipe, **changes)
    )


@pytest.mark.parametrize(
    ("init", "tied"), [("mean", True), *(pytest.param(*each, marks=pytest.mark.full) for each in _OTHERS)]
)
def test_a_run_trains_the_grown_model(make_config: MakeConfig, tmp_path: Path, init: str, tied: bool) -> None:
    base = save_base(tmp_path / "base", tied=tied)
    config = make_config(base=base, tokens=TOKENS, new_tokens_init=init)
    stderr = config.succeed()
    rows = len(AutoTokenizer.from_pretrained(base)) + len(TOKENS)
    assert f"the vocabulary grows to {rows} rows; new ones are drawn (new_tokens_init: {init})" in stderr
    trained = plain(config, grown(base, tmp_path / "grown", rows=rows, mean=init == "mean"))
    assert [line["loss"] for line in config.metrics] == list(trained.losses)
    weights = config.exported
    assert {name for name in trained.weights if not torch.equal(weights[name], trained.weights[name])} == set()
    loaded = AutoModelForCausalLM.from_pretrained(config.output)
    assert loaded.config.vocab_size == rows == len(AutoTokenizer.from_pretrained(config.output))


@pytest.mark.parametrize(("saved", "tied", "dtype"), [
    ((), True, "bfloat16"),
    pytest.param((), False, "float32", marks=pytest.mark.full),
    pytest.param(("lm_head",), False, "bfloat16", marks=pytest.mark.full),
    pytest.param(("embed_tokens", "lm_head"), False, "bfloat16", marks=pytest.mark.full),
    pytest.param(("embed_tokens",), True, "float32", marks=pytest.mark.full),
    pytest.param((), True, "float32", marks=pytest.mark.nightly),
    pytest.param((), False, "bfloat16", marks=pytest.mark.nightly),
], ids=str)  # fmt: skip
def test_an_adapter(make_config: MakeConfig, tmp_path: Path, *, tied: bool, saved: tuple[str, ...], dtype: str) -> None:
    """It trains the rows of the new tokens, or what it is told to train whole. PEFT loads it onto the grown base."""
    base = save_base(tmp_path / "base", tied=tied)
    config = make_config(
        base=base,
        tokens=TOKENS,
        adapter="lora",
        lora_r=4,
        lora_modules_to_save=list(saved),
        dtype=dtype,
        peft_ensure_weight_tying=tied and bool(saved),
    )
    config.succeed()
    first = len(AutoTokenizer.from_pretrained(base))
    new = [first, first + 1]
    directory = grown(base, tmp_path / "grown", rows=first + 2)
    rows = {name: new for name in ("embed_tokens", "lm_head")[: 1 if tied else 2] if name not in saved}
    lora: dict[str, object] = {"r": 4, "lora_alpha": 4, "target_modules": "all-linear"}
    lora |= {"modules_to_save": [*saved] or None, "ensure_weight_tying": tied and bool(saved)}
    lora |= {"trainable_token_indices": rows or None}
    trained = plain(config, directory, lora=tuple(lora.items()))
    assert [line["loss"] for line in config.metrics] == list(trained.losses)
    works("verify", config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        wanted = PeftModel.from_pretrained(model, config.output).merge_and_unload().state_dict()
    works("merge", config, "-o", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.vocab_size == first + 2
    found = merged.state_dict()
    assert {name for name in wanted if not torch.equal(found[name], wanted[name])} == set()
    trained_rows = trained.weights.get("model.embed_tokens.token_adapter.trainable_tokens_delta.default")
    if trained_rows is not None:
        assert torch.equal(found["model.embed_tokens.weight"][first:], trained_rows)


@pytest.mark.full
def test_a_new_end_of_text(make_config: MakeConfig, tmp_path: Path) -> None:
    """A token that `special_tokens` names comes first; the run ends in a crash and is resumed; what is exported is what
    the tokenizer of transformers would be."""
    base = save_base(tmp_path / "base")
    settings = {
        "base": base,
        "tokens": ["<think>", "<|stop|>"],
        "new_special_tokens": ["<|tool|>"],
        "special_tokens": {"eos_token": "<|stop|>"},
        "pad_vocab_to_multiple_of": 64,
        "new_tokens_init": "random",
        "max_steps": 3,
    }
    config, killed = make_config(**settings), make_config("killed", **settings)
    config.succeed()
    killed.run_until_killed(kill_at="commit.written:2")
    ended = killed.finetune("new_tokens_init=mean")
    assert_rejected(ended, 2, "new_tokens_init was random, is now mean")
    killed.succeed()
    config.assert_same_result(killed)
    tokenizer, before = AutoTokenizer.from_pretrained(config.output), AutoTokenizer.from_pretrained(base)
    first = len(before)
    assert tokenizer("<think>a<|stop|><|tool|>").input_ids == [first + 1, *before("a").input_ids, first, first + 2]
    assert tokenizer.decode([first, first + 1, first + 2], skip_special_tokens=True) == "<think>"
    model = AutoModelForCausalLM.from_pretrained(config.output)
    rows = model.get_input_embeddings().weight.shape[0]
    assert (rows % 64, rows - first <= 66) == (0, True)
    assert model.config.eos_token_id == model.generation_config.eos_token_id[0] == tokenizer.eos_token_id == first
    for arguments in (("verify", config), ("generate", config, "Which", "--max-new-tokens", "2")):
        works(*arguments)


def test_what_cannot_have_new_tokens(make_config: MakeConfig, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", tied=True)
    changes = {"base": base, "tokens": TOKENS, "adapter": "lora", "lora_modules_to_save": ["embed_tokens"]}
    ended = make_config(**changes).finetune()
    assert_rejected(ended, 2, "are one matrix, of which PEFT trains copies that differ")
    assert "hint: set peft_ensure_weight_tying: true" in ended.stderr
    changes["lora_modules_to_save"] = ["model.norm"]
    ended = make_config("norm", **changes, peft_ensure_weight_tying=True).finetune()
    assert_rejected(ended, 2, "lora_modules_to_save names no matrix that embedding and head of LlamaForCausalLM share")
    for path in base.glob("*token*"):
        path.unlink()
    ended = make_config("bare", base=base, tokens=TOKENS).finetune()
    assert_rejected(ended, 2, "there are no tokenizer files")


@pytest.mark.full
@pytest.mark.parametrize("changes", [
    {"adapter": "lora", "load_in_4bit": True},
    {"adapter": "lora", "base_storage": "in_place"},
    {"adapter": "lora", "rl": "dpo"},
    {"datasets": "classes"},
], ids=["quantised", "in place", "dpo", "classes"])  # fmt: skip
def test_other_runs(make_config: MakeConfig, tmp_path: Path, changes: dict[str, object]) -> None:
    """What is loaded from the export is what the store has."""
    if "rl" in changes:
        pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "even"} for row in ROWS]
        changes = {**changes, "datasets": [{"path": str(_written(tmp_path, pairs))}]}
    elif "datasets" in changes:
        texts = [{"text": row["completion"], "label": number % 2} for number, row in enumerate(ROWS)]
        rows = {"path": str(_written(tmp_path, texts)), "type": "classification", "labels": ["even", "odd"]}
        changes = {"datasets": [rows]}
    base = save_base(tmp_path / "base", tied="rl" in changes)
    config = make_config(base=base, tokens=TOKENS, max_steps=2, **changes)
    config.succeed()
    works("verify", config)
    lines = config.metrics
    assert lines[0]["loss"] != lines[1]["loss"] and lines[1]["grad_norm"] > 0


@pytest.mark.full
def test_ranks_begin_with_the_same_rows(make_config: MakeConfig, tmp_path: Path) -> None:
    """Each imports its slice of the matrices, in which old rows and new ones meet."""
    base = save_base(tmp_path / "base")
    changes = {"base": base, "tokens": TOKENS, "max_steps": 1, "learning_rate": 0.0, "weight_decay": 0.0}
    alone, together = make_config(**changes), make_config("ranks", **changes)
    alone.succeed()
    together.succeed_ranks(2)
    wanted, found = alone.exported, together.exported
    assert {name for name in wanted if not torch.equal(found[name], wanted[name])} == set()


def _written(directory: Path, rows: Sequence[object]) -> Path:
    path = directory / "others.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.full
def test_reserved_tokens_get_other_names(make_config: MakeConfig, tmp_path: Path) -> None:
    """No row is added; the export's tokenizer reads the new names, and not the old ones."""
    base = save_base(tmp_path / "base")
    before = AutoTokenizer.from_pretrained(base)
    reserved = before.convert_tokens_to_ids("<|user|>")
    config = make_config(base=base, added_tokens_overrides={str(reserved): "<|person|>"}, max_steps=1)
    config.succeed()
    tokenizer = AutoTokenizer.from_pretrained(config.output)
    assert len(tokenizer) == len(before)
    assert tokenizer("<|person|>").input_ids == [reserved]
    assert len(tokenizer("<|user|>").input_ids) > 1
    works("verify", config)
    ended = make_config("unknown", base=base, added_tokens_overrides={"299": "<|person|>"}).finetune()
    assert_rejected(ended, 2, "added_tokens_overrides: 299 is no token beside the vocabulary")
