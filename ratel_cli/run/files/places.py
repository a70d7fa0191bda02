"""The arguments of `ratel env` and `ratel doctor`: configs, output directories of runs, or directories of drives.

Invariant: nothing heavy is imported, so a wrong argument is answered at once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.overrides import is_override
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput
from ratel_cli.run.files.run_directory import is_output_of_run, read_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """What the arguments name."""

    paths: tuple[Path, ...]
    """Directories of stores, which may not exist yet; each once."""
    configs: tuple[RunConfig, ...]


def find_places(arguments: Sequence[Path], log: RunLog) -> Places:
    """The directories that the arguments name; the current one without arguments. Raises BadInput.

    Arguments `KEY=VALUE` change the configs that the others name.
    """
    paths: list[Path] = []
    configs: list[RunConfig] = []
    overrides = [str(each) for each in arguments if is_override(str(each)) and not os.path.lexists(each)]
    if overrides and len(overrides) == len(arguments):
        raise BadInput(f"argument '{overrides[0]}': there is no run that it could change", "name its config first")
    for argument in arguments:
        if str(argument) in overrides:
            continue
        if os.path.isdir(argument) and not is_output_of_run(argument):
            paths.append(argument)
            continue
        config = read_config(argument, log, overrides)
        configs.append(config)
        paths += config.storage.paths
    return Places(paths=tuple(dict.fromkeys(paths or [Path()])), configs=tuple(configs))
