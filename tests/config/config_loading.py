"""Shared by the tests of configs: the smallest text that loads, and the types of the fixtures."""

from __future__ import annotations

from typing import Protocol

from ratel_cli.config.load import LoadedConfig

MINIMAL = "base_model: org/name\ndatasets: train.jsonl\n"


class Load(Protocol):
    """Loads a text as run.yaml, with overrides."""

    def __call__(self, text: str | bytes, *overrides: str) -> LoadedConfig: ...


class Complain(Protocol):
    """Loads a text that must not load. Gives every error, as `error | hint` if it has a hint."""

    def __call__(self, text: str | bytes, *overrides: str) -> list[str]: ...
