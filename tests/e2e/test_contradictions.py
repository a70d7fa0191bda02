"""Inputs that are valid alone, but not together, are rejected before anything is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import assert_rejected, ratel


def changed_base(base: Path, directory: Path, **values: object) -> Path:
    """A copy of the base model with other values in its config.json."""
    shutil.copytree(base, directory)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return directory


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
    plain.succeed()
    stderr = config.succeed()
    assert "but the model's embedding has only 300 rows: rows of data with a higher id are rejected" in stderr
    assert "rejected 1 of 111 rows" in stderr and config.export_hash == plain.export_hash
    reason = "the token '<|extra3|>' has the id 303, but the model's embedding has only 300 rows"
    assert f"more.jsonl:111: {reason}" in ratel("data", config, "--bad").stdout
    assert "rejected 1 of 111 rows" in ratel("eval", config.output, more).stderr
    assert_rejected(ratel("generate", config, "Which <|extra3|>", "--raw"), 2, f"prompt 1: {reason}")
    for token in ("eos_token", "pad_token"):
        ended = make_config(token, base=copy, special_tokens={token: "<|extra1|>"}).finetune()
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
    assert_rejected(config.finetune(), 2, "config.json")
