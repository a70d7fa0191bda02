"""Tokens of beginnings of a text: what the tokenizer itself gives for each of them."""

from __future__ import annotations

import random
from typing import cast

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ratel_cli.data.text import prompt_tokens
from ratel_cli.data.text.prompt_tokens import PromptTokens
from tests.data.conftest import CORPUS

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
PREPEND = normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace(" ", "_")])
SCHEMES = [
    (normalizers.NFKC(), BYTES),
    (PREPEND, None),
    (normalizers.Lowercase(), pre_tokenizers.Metaspace(prepend_scheme="first")),
    (normalizers.Strip(), pre_tokenizers.Metaspace(prepend_scheme="always")),
    (normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()),
]
ADDED = [
    AddedToken("<unk>", special=True),
    AddedToken("<s>", special=True),
    AddedToken("<s>more", special=True),
    AddedToken("<l>", special=True, lstrip=True),
    AddedToken("<r>", special=True, rstrip=True),
    AddedToken("<w>", special=True, single_word=True),
    AddedToken("fox", normalized=True),
]
PIECES = [each.content for each in ADDED] + [
    "the quick",
    " ",
    "  \n",
    "brown",
    "x",
    "FOX",
    "\u00e9\U0001f600",
    "<s",
    ">",
]


def _tokenizer(scheme: int) -> PreTrainedTokenizerFast:
    normalizer, pre_tokenizer = SCHEMES[scheme]
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"], show_progress=False)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")  # type: ignore[no-untyped-call]
    backend = tokenizer.backend_tokenizer
    backend.add_tokens(ADDED)
    return tokenizer


@pytest.mark.parametrize("scheme", range(len(SCHEMES)))
def test_beginnings_have_the_tokens_that_they_have_alone(scheme: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every beginning of random texts, for tokenizers that treat the first word, white space and case in their ways."""
    monkeypatch.setattr(prompt_tokens, "_MOST_CACHED", 40)
    tokenizer, chosen = _tokenizer(scheme), random.Random(scheme)
    num_chars = [0]

    def tokenise(texts: list[str]) -> list[list[int]]:
        num_chars[0] += sum(map(len, texts))
        return cast(list[list[int]], tokenizer(texts, add_special_tokens=False)["input_ids"]) if texts else []

    texts = ["".join(chosen.choices(PIECES, k=12)) for _ in range(60)]
    prompts = PromptTokens(tokenizer, tokenise)
    for group in (texts[:30], texts[30:], texts[:5]):
        batch = tokenizer(group, add_special_tokens=False, return_offsets_mapping=True)
        arrays = [np.array(ids, np.int32) for ids in batch["input_ids"]]
        spans = [np.array(each, np.int64).reshape(-1, 2) for each in batch["offset_mapping"]]
        ends = [range(len(text) + 1) for text in group]
        wanted = [(each, some) for each, some in zip(zip(group, arrays, spans, strict=True), ends, strict=True)]
        for text, some, found in zip(group, ends, prompts.of_beginnings(wanted), strict=True):
            alone = cast(
                list[list[int]], tokenizer([text[:end] for end in some], add_special_tokens=False)["input_ids"]
            )
            assert found == alone, text
    assert num_chars[0] < sum(len(text) ** 2 / 2 for text in texts) / 2
    assert prompts.of_beginnings([]) == []
