"""Which run a command is about: RUN is its output directory, which holds its config, or a config file.

Called by `cli.export`, `cli.verify` and `cli.restore`. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ratel_cli.config.load import load_config
from ratel_cli.config.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput


def is_output_of_run(path: Path) -> bool:
    """Whether a run has left its config in this directory."""
    return _config_in(path).is_file()


def find_run(path: Path, log: RunLog, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of the run that RUN means; its output directory is RUN, if that is a directory. Raises BadInput."""
    if path.is_dir() and not is_output_of_run(path):
        raise BadInput(
            f"{path}: is no run's output directory: there is no run/config.yaml in it",
            "give the output directory of a run, or its config file",
        )
    loaded = load_config(_config_in(path) if path.is_dir() else path, overrides)
    for notice in loaded.notices:
        log.notice(notice)
    if loaded.config.base_model is None:
        raise BadInput(f"{path}: `model_shape` is for `ratel plan` alone; nothing was trained with this config")
    return loaded.config.model_copy(update={"output_dir": path}) if path.is_dir() else loaded.config


def _config_in(directory: Path) -> Path:
    return directory / "run" / "config.yaml"
