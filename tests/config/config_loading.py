"""Shared by the tests of configs: the smallest text that loads, and the types of the fixtures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import yaml

from ratel_cli.config.importing import Imported, import_config
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.load import LoadedConfig, load_config

MINIMAL = "base_model: org/name\ndatasets: train.jsonl\n"


class Load(Protocol):
    """Loads a text as run.yaml, with overrides."""

    def __call__(self, text: str | bytes, *overrides: str) -> LoadedConfig: ...


class Complain(Protocol):
    """Loads a text that must not load. Gives every error, as `error | hint` if it has a hint."""

    def __call__(self, text: str | bytes, *overrides: str) -> list[str]: ...


def imported(directory: Path, theirs: str | Mapping[str, object]) -> tuple[Imported, RunConfig]:
    """What `ratel import` makes of another trainer's config, and the config that it writes."""
    path, ours = directory / "theirs.yaml", directory / "run.yaml"
    path.write_text(theirs if isinstance(theirs, str) else yaml.safe_dump(dict(theirs), sort_keys=False))
    found = import_config(path)
    ours.write_text(found.text)
    return found, load_config(ours).config
