"""The types of the fixtures in conftest.py, for the tests that use them."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from transformers import PreTrainedTokenizerFast

from ratel_cli.data.dataset import DatasetSource, TrainingData


class MakeTokenizer(Protocol):
    """Builds a tokenizer with any chat template, and with a BOS token that it adds by itself."""

    def __call__(self, *, chat_template: str | None = ..., adds_bos: bool = ...) -> PreTrainedTokenizerFast: ...


class WriteRows(Protocol):
    """Writes objects as JSON Lines and returns the path."""

    def __call__(self, *rows: object, name: str = ...) -> Path: ...


class Load(Protocol):
    """`load_training_data` with small defaults; `changes` are its arguments."""

    def __call__(self, *sources: DatasetSource | Path, **changes: object) -> TrainingData: ...
