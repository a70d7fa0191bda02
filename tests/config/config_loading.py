"""What the config's tests share: the least text that loads, and the types of their fixtures."""

from __future__ import annotations

from typing import Protocol

from ratel_cli.config.load import LoadedConfig

MINIMAL = "base_model: org/name\ndatasets: train.jsonl\n"


class Load(Protocol):
    """Loads a text as run.yaml, with overrides."""

    def __call__(self, text: str | bytes, *overrides: str) -> LoadedConfig: ...


class Complain(Protocol):
    """Loads what must not load; gives every error, as `error | hint` where there is a hint."""

    def __call__(self, text: str | bytes, *overrides: str) -> list[str]: ...
