"""The model that a RUN|DIR argument names: of a run, in its store or its export, or of a directory with a model.

Invariant: this file imports nothing heavy, so a wrong path or a wrong key is answered at once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ratel_cli.commands import name_run
from ratel_cli.config.keys.schema import DatasetConfig, RunConfig
from ratel_cli.config.load import config_from
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput
from ratel_cli.run.files.output import has_own_store, no_store
from ratel_cli.run.files.run_directory import check_exists, find_run, is_output_of_run

_OF_THE_PLACE = ("split", "name", "max_samples", "weight")
"""Keys of a dataset that are about its rows, not about what a row is."""
_WEIGHTS = ("model*.safetensors", "diffusion_pytorch_model*.safetensors", "adapter_model.safetensors")
"""Files of an export: of transformers, of diffusers, and of PEFT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """Whose weights a command uses, and the settings that it uses them with."""

    config: RunConfig
    """The run's config; for a directory that no run has made, the defaults. With the overrides of the command line."""
    directory: Path | None
    """The directory with the weights; None: they are in the run's store."""
    given: frozenset[str] | None
    """For a directory that no run has made: the keys of the command line, which its own config does not replace."""
    run: Path | None = None
    """What the command line called the run; None for a directory that no run has made."""


def find_model(path: Path, log: RunLog, overrides: Sequence[str]) -> NamedModel:
    """The model that `path` names, with `KEY=VALUE` overrides. Raises BadInput if it names none."""
    check_exists(path)
    if os.path.isdir(path) and not is_output_of_run(path):  # Path.is_dir raises for names that are too long
        return _of_directory(path, log, overrides)
    config = find_run(path, log, overrides)
    if has_own_store(config) or not _holds_model(config.output_dir):
        return NamedModel(config=config, directory=None, given=None, run=path)
    why = no_store(config)
    log.notice(f"{why.message}; using the exported model in {config.output_dir}; for the store, {why.hint}")
    # An adapter's export has no model: that is still the config's.
    exported = (
        config
        if config.adapter is not None
        else config.model_copy(update={"base_model": str(config.output_dir), "random_init": False})
    )
    return NamedModel(config=exported, directory=config.output_dir, given=None, run=path)


def with_data(config: RunConfig, data: str, overrides: Sequence[str]) -> RunConfig:
    """The config with the rows of `data` in place of its own, read as those of its first dataset, in their order."""
    return with_rows(config, config.datasets[0].model_copy(update={"path": data, **_reset(overrides)}))


def with_rows(config: RunConfig, rows: DatasetConfig) -> RunConfig:
    """The config with these rows in place of its own, in their order. The loss is that of answers, whatever the run
    learns from."""
    unused = {"test_datasets": (), "val_set_size": 0, "streaming": False, "shuffle": False, "rl": None}
    return config.model_copy(update={"datasets": (rows,), **unused})


def overrides_for_data(config: RunConfig, data: str, overrides: Sequence[str]) -> list[str]:
    """`overrides`, and those with which the first dataset of the run's config is the one that `with_data` makes."""
    changed = {key: value for key, value in _reset(overrides).items() if getattr(config.datasets[0], key) != value}
    words = [f"datasets.0.{key}={'null' if value is None else value}" for key, value in changed.items()]
    return [*overrides, f"datasets.0.path={data}", *words]


def _reset(overrides: Sequence[str]) -> dict[str, object]:
    """What does not hold for rows from another place."""
    given = {override.partition("=")[0].strip() for override in overrides}
    defaults = DatasetConfig(path=os.devnull)
    return {key: getattr(defaults, key) for key in _OF_THE_PLACE if f"datasets.0.{key}" not in given}


def _of_directory(path: Path, log: RunLog, overrides: Sequence[str]) -> NamedModel:
    if (path / "model_index.json").is_file():
        raise BadInput(f"{path}: a diffusion pipeline, which has several models", f"give {path / 'transformer'}")
    if not (path / "config.json").is_file():
        raise BadInput(
            f"{path}: neither a run's output directory nor a model: it has no run/config.yaml and no config.json",
            "give the output directory of a run, its config file, or a directory with a model",
        )
    loaded = config_from({"base_model": str(path), "datasets": [{"path": os.devnull}]}, overrides, path=path)
    for notice in loaded.notices:
        log.notice(notice)
    name_run(path)
    given = frozenset(override.partition("=")[0].strip() for override in overrides)
    return NamedModel(config=loaded.config, directory=path, given=given)


def _holds_model(directory: Path) -> bool:
    weights = (path for pattern in _WEIGHTS for path in directory.glob(pattern))
    is_described = any((directory / name).is_file() for name in ("config.json", "adapter_config.json"))
    return is_described and next(weights, None) is not None
