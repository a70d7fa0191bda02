"""What `ratel plan` plans: a run, or a model of which nothing is here but its config.json.

A model is named by its directory, by its hub id if the hub's cache has its config.json, or as one of `configs/models`.
Its step is that of `ratel init` without data, unless the command line says otherwise.

Invariant: nothing is downloaded, and what names a run or its config file is read as by any other command.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput, excerpt
from ratel_cli.run.files.run_directory import is_output_of_run, read_config
from ratel_cli.run.start.starting_text import STEP_TOKENS, TEXT_LENGTH, starting_text
from ratel_cli.sizes import STEP_KEYS

_INSTALLED = Path(__file__).parents[2] / "configs"
SHIPPED = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[3] / "configs"
"""The directory `configs`: a wheel has it in the package, a clone beside it."""
_CONFIG_NAMES = (".yaml", ".yml", ".json", ".gz")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedConfig:
    """The config that is planned."""

    config: RunConfig
    path: Path | None
    """The run or the config file that was read; None for a model."""
    name: str


def config_to_plan(named: Path, overrides: Sequence[str], log: RunLog) -> PlannedConfig:
    """The config of what the command line names. Raises BadInput."""
    shapes = {path.stem: path for path in sorted((SHIPPED / "models").glob("*.yaml"))}
    path = named if os.path.lexists(named) else shapes.get(str(named), named)
    if os.path.isfile(path / "config.json") and not is_output_of_run(path):
        return _of_model(path, overrides)
    if path != named and not any(each.partition("=")[0] in (*STEP_KEYS, "sequence_len") for each in overrides):
        overrides = (*overrides, f"tokens_per_step={STEP_TOKENS}")
    if os.path.lexists(path) or path.suffix in _CONFIG_NAMES:
        return PlannedConfig(config=read_config(path, log, overrides), path=path, name=path.stem)
    cached = _in_hub_cache(str(named))
    if cached is None:
        close = get_close_matches(str(named), shapes, n=1)
        raise BadInput(
            f"{excerpt(str(named))}: no such file or directory, and the hub's cache has no model of this name",
            f"did you mean {close[0]}?"
            if close
            else "name a run, its config, a directory with a model's config.json,"
            " or a hub id after `hf download OWNER/NAME config.json`",
        )
    return _of_model(cached, overrides)


def _in_hub_cache(name: str) -> Path | None:
    """The directory of a hub model's files in the cache; None if its config.json is not there."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json")
    except (ValueError, OSError):  # no hub id
        return None
    return Path(found).parent if isinstance(found, str) else None


def _of_model(directory: Path, overrides: Sequence[str]) -> PlannedConfig:
    text = starting_text(str(directory), [], Path("plan.yaml"), overrides)
    text.choose("sequence_len", min(TEXT_LENGTH, _most_positions(directory)))
    if not text.given & {*STEP_KEYS}:
        length = text.config.sequence_len
        text.choose("tokens_per_step", max(1, STEP_TOKENS // length) * length)
    return PlannedConfig(config=text.config, path=None, name=directory.name)


def _most_positions(directory: Path) -> int:
    """The longest sequence that the model's config allows; what reads it for good says what is wrong with it."""
    try:
        values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return TEXT_LENGTH
    most = values.get("max_position_embeddings") if isinstance(values, dict) else None
    return most if isinstance(most, int) and most > 0 else TEXT_LENGTH
