"""Fixtures: small tokenizers, and short ways to write and load data. The types of the fixtures are here too."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Protocol, cast

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ratel_cli.data.batches.dataset import DataSettings, MicroBatch, TrainingData
from ratel_cli.data.batches.load_data import load_training_data
from ratel_cli.data.sources.encode import Encoding
from ratel_cli.data.sources.load_tokens import TokenFiles
from ratel_cli.data.text.rows import DatasetSource
from ratel_cli.data.text.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
GOOD_ROW = {"text": "the quick brown fox"}
CORPUS = ["the quick brown fox jumps over the lazy dog", "what is a list? a list is a mutable sequence"] * 4


class MakeTokenizer(Protocol):
    """Makes a tokenizer with this chat template. `adds_bos`: it puts a BOS token before each text."""

    def __call__(self, *, chat_template: str | None = ..., adds_bos: bool = ...) -> PreTrainedTokenizerFast: ...


class WriteRows(Protocol):
    """Writes objects as JSON Lines and returns the path."""

    def __call__(self, *rows: object, name: str = ...) -> Path: ...


class Load(Protocol):
    """`load_training_data` with small defaults. `changes` are arguments of it, or fields of its values."""

    def __call__(self, *sources: DatasetSource | Path, **changes: object) -> TrainingData: ...


def _backend() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


@pytest.fixture(scope="session")
def make_tokenizer() -> MakeTokenizer:
    """Makes byte-level BPE tokenizers."""
    saved = _backend().to_str()

    def make(*, chat_template: str | None = CHATML, adds_bos: bool = False) -> PreTrainedTokenizerFast:
        backend = Backend.from_str(saved)
        if adds_bos:
            backend.post_processor = processors.TemplateProcessing(
                single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", SPECIAL_TOKENS.index("<s>"))]
            )
        names = {
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            **({"bos_token": "<s>"} if adds_bos else {}),
        }
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)  # type: ignore[no-untyped-call]
        tokenizer.chat_template = chat_template
        return tokenizer

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer: MakeTokenizer) -> PreTrainedTokenizerFast:
    """A tokenizer with the ChatML template."""
    return make_tokenizer()


@pytest.fixture
def write_rows(tmp_path: Path) -> WriteRows:
    """Writes objects as JSON Lines and returns the path."""

    def write(*rows: object, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def notices() -> list[str]:
    """The notices of all loads."""
    return []


@pytest.fixture
def load(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, notices: list[str]) -> Load:
    """Calls `load_training_data` with small defaults."""

    def run(*sources: DatasetSource | Path, **changes: object) -> TrainingData:
        arguments: dict[str, object] = {
            "tokenizer": cast(Tokenizer, tokenizer),
            "sequence_len": 64,
            "micro_batch_size": 1,
            "gradient_accumulation_steps": 1,
            "packing": False,
            "shuffle": False,
            "seed": 0,
            "val_set_size": 0,
            "train_on_inputs": False,
            "cache_dir": tmp_path / "cache",
            "rejects_path": tmp_path / "run" / "rejects.jsonl",
            "notice": notices.append,
            **changes,
        }
        items = [DatasetSource(path=str(item)) if isinstance(item, Path) else item for item in sources]
        values = [
            value(**{each.name: arguments.pop(each.name) for each in fields(value) if each.name in arguments})  # type: ignore[arg-type]
            for value in (DataSettings, Encoding, TokenFiles)
        ]
        return load_training_data(items, *values, **arguments)  # type: ignore[arg-type]

    return run


def same_batches(one: list[MicroBatch], other: list[MicroBatch]) -> bool:
    return len(one) == len(other) and all(
        a.sample_ids == b.sample_ids
        and torch.equal(a.input_ids, b.input_ids)
        and torch.equal(a.targets, b.targets)
        and torch.equal(a.position_ids, b.position_ids)
        for a, b in zip(one, other, strict=True)
    )


def read_rejects(tmp_path: Path) -> list[tuple[str, int, str]]:
    lines = (tmp_path / "run" / "rejects.jsonl").read_text().splitlines()
    return [(row["file"], row["line"], row["reason"]) for row in map(json.loads, lines)]


def write_text_rows(path: Path, num_good: int, bad: list[str]) -> Path:
    """Write good rows, then the bad ones. The first bad line has the number num_good + 1."""
    path.write_text("".join(line + "\n" for line in [json.dumps(GOOD_ROW)] * num_good + bad))
    return path
