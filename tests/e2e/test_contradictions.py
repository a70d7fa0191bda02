"""Inputs that are valid alone, but not together, are rejected before anything is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import assert_rejected, export_hash, file_hash, finetune, output_of, ratel, store_of, succeed


def changed_base(base: Path, directory: Path, **values: object) -> Path:
    """A copy of the base model with other values in its config.json."""
    shutil.copytree(base, directory)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return directory


def test_output_over_the_base_model(make_config: MakeConfig, base: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(base, tmp_path / "copy"))
    before = file_hash(copy / "model.safetensors")
    config = make_config(base=copy, output_dir=str(copy))
    assert_rejected(finetune(config), 2, "output_dir and base_model are the same directory")
    assert file_hash(copy / "model.safetensors") == before


def test_a_tokenizer_with_more_tokens_than_the_model(make_config: MakeConfig, base: Path, tmp_path: Path) -> None:
    """As that of Gemma 3 1B: it trains as without them, and only what has one of them cannot be used."""
    copy = Path(shutil.copytree(base, tmp_path / "copy"))
    tokenizer = AutoTokenizer.from_pretrained(copy)
    tokenizer.add_tokens([f"<|extra{index}|>" for index in range(5)])
    tokenizer.save_pretrained(copy)
    rows = [{"text": f"Which number is {number % 9}?"} for number in range(110)]
    few, more = tmp_path / "few.jsonl", tmp_path / "more.jsonl"
    few.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more.write_text(few.read_text() + json.dumps({"text": "Which number is <|extra3|>?"}) + "\n")
    plain, config = make_config("plain", rows=few), make_config(base=copy, rows=more)
    succeed(plain)
    stderr = succeed(config)
    assert "but the model's embedding has only 300 rows: rows of data with a higher id are rejected" in stderr
    assert "rejected 1 of 111 rows" in stderr and export_hash(config) == export_hash(plain)
    reason = "the token '<|extra3|>' has the id 303, but the model's embedding has only 300 rows"
    assert f"more.jsonl:111: {reason}" in ratel("data", config, "--bad").stdout
    assert "rejected 1 of 111 rows" in ratel("eval", output_of(config), more).stderr
    assert_rejected(ratel("generate", config, "Which <|extra3|>", "--raw"), 2, f"prompt 1: {reason}")
    for token in ("eos_token", "pad_token"):
        ended = finetune(make_config(token, base=copy, special_tokens={token: "<|extra1|>"}))
        assert_rejected(ended, 2, f"the tokenizer's {token} '<|extra1|>' has the id 301, but the model's embedding")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 0),
        ("hidden_size", "abc"),
        ("hidden_size", -32),
        ("hidden_size", 2**40),
        ("max_position_embeddings", -5),
        ("intermediate_size", None),
        ("hidden_act", "nosuch"),
        ("rope_parameters", {"rope_type": "nosuch"}),
    ],
)
def test_a_model_config_that_describes_no_model(
    make_config: MakeConfig, base: Path, tmp_path: Path, key: str, value: object
) -> None:
    config = make_config(base=changed_base(base, tmp_path / "changed", **{key: value}))
    assert_rejected(finetune(config), 2, "config.json")


def test_a_damaged_tokenizer(make_config: MakeConfig, base: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(base, tmp_path / "copy"))
    (copy / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE"}}')
    assert_rejected(finetune(make_config(base=copy)), 2, "no usable tokenizer")


@pytest.mark.full
def test_a_store_made_for_another_durability(make_config: MakeConfig) -> None:
    config = make_config(max_steps=2)
    succeed(config)
    before = file_hash(store_of(config))
    assert_rejected(finetune(config, "storage.durability=none"), 2, "the store was made with storage.durability: step")
    assert file_hash(store_of(config)) == before


@pytest.mark.full
def test_more_saved_generations_than_the_store_has_space_for(make_config: MakeConfig) -> None:
    config = make_config(max_steps=2)
    succeed(config)
    assert_rejected(finetune(config, "save_steps=1"), 2, "the store has space for 0 saved generations")
    assert_rejected(finetune(config, "--resume", "1"), 2, "that step is not saved")
    assert_rejected(finetune(config, "--resume", "1", "--dry-run"), 2, "that step is not saved")
    assert (output_of(config) / "model.safetensors").exists()


@pytest.mark.full
def test_training_data_that_changed_is_named(make_config: MakeConfig, rows: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(rows.read_bytes())
    config = make_config(rows=path, max_steps=1)
    succeed(config)
    path.write_bytes(rows.read_bytes().splitlines(keepends=True)[0] + rows.read_bytes())
    ended = finetune(config)
    assert_rejected(ended, 2, f"the training data changed since this run began ({path})")
    begin = f"for a new run, set another output_dir (--from {output_of(config)} starts it from this run's state); "
    assert begin in ended.stderr
