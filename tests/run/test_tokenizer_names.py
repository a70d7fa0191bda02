"""Other names for tokens that a tokenizer has beside its vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from ratel_cli.errors import BadInput
from ratel_cli.run.inputs.tokenizer import _rename_tokens
from tests.e2e.runs import save_base

USER, ASSISTANT = 2, 3
"""Ids of the two marks of a turn."""


def test_two_tokens_change_places(tmp_path: Path) -> None:
    save_base(tmp_path)
    _rename_tokens(tmp_path, {USER: "<|assistant|>", ASSISTANT: "<|user|>"})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("<|user|><|assistant|>").input_ids == [ASSISTANT, USER]


def test_a_special_token_keeps_its_part(tmp_path: Path) -> None:
    save_base(tmp_path)
    _rename_tokens(tmp_path, {0: "<|stop|>"})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|stop|>", 0)
    _rename_tokens(tmp_path, {0: "<|stop|>"})  # as in an export that has the name already
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token_id == 0


@pytest.mark.parametrize("names", [{USER: "<|pad|>"}, {USER: "e"}, {USER: "<|x|>", ASSISTANT: "<|x|>"}], ids=str)
def test_a_name_is_that_of_one_token(names: dict[int, str], tmp_path: Path) -> None:
    save_base(tmp_path)
    with pytest.raises(BadInput, match="would be the name of two tokens"):
        _rename_tokens(tmp_path, names)


def test_a_tokenizer_without_the_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has no tokenizer\.json"):
        _rename_tokens(tmp_path, {USER: "<|x|>"})
