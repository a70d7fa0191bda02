"""What a report shows of a run, gathered from its files. Each file that is missing or damaged becomes a note.

Invariant: nothing of the run is changed, and nothing heavy is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.load import dump, to_yaml
from ratel_cli.errors import RatelError
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.json_fields import read_file_as
from ratel_cli.planning.search.recorded_plan import RecordedPlan
from ratel_cli.report.page.run_report import RunReport
from ratel_cli.run.ask.status import status_of
from ratel_cli.run.files.hardware_file import load_hardware
from ratel_cli.run.files.run_directory import (
    CONFIG_NAME,
    HARDWARE_NAME,
    METRICS_NAME,
    PLAN_NAME,
    as_recorded_by_run,
    recorded_config,
    run_directory,
)
from ratel_cli.run.files.user_cache import ratel_version
from ratel_cli.sizes import SPLIT_KEYS
from ratel_cli.training.facts import read_facts
from ratel_cli.training.history import History, read_history

Value = TypeVar("Value")


def report_of(config: RunConfig) -> RunReport:
    """The report of the run in the config's `output_dir`, whatever of it is there.

    Its settings are those that it was started with last. If `config` has others, a note names their keys.
    """
    notes = list[str]()
    config = _as_trained(config, notes)
    run_dir, status = run_directory(config.output_dir), status_of(config)
    try:
        history = read_history(run_dir / METRICS_NAME)
    except OSError as error:
        notes.append(f"run/{METRICS_NAME} cannot be read: {error.strerror}.")
        history = History()
    if status.state != "running":
        history = history.up_to(status.step)
    plan = _noted(run_dir / PLAN_NAME, partial(read_file_as, RecordedPlan), notes)
    return RunReport(
        name=Path(os.path.realpath(config.output_dir)).name,
        status=status,
        history=history,
        plan=plan,
        hardware=_noted(run_dir / HARDWARE_NAME, _hardware, notes),
        facts=read_facts(run_dir),
        changed_keys=dump(config.model_dump(mode="json", exclude_defaults=True)),
        config_text=to_yaml(config),
        gpu_limit_bytes=config.limits.gpu_memory,
        endurance_tb=config.storage.endurance_tb,
        max_tb_written=config.storage.max_tb_written,
        notes=tuple(notes),
        made=datetime.now().astimezone(),
        version=ratel_version(),
    )


def _as_trained(config: RunConfig, notes: list[str]) -> RunConfig:
    """The config that the run has recorded. The one that was given, with a note, if that cannot be read."""
    recorded = recorded_config(config.output_dir)
    if recorded is None:
        notes.append(f"run/{CONFIG_NAME} cannot be read; the settings shown are those of the config that was given.")
        return config
    trained = recorded.model_copy(update={"output_dir": config.output_dir})
    given, own = (as_recorded_by_run(each).model_dump(mode="json") for each in (config, trained))
    keys = _different_keys(given, own)
    if config.split is None:  # the plan's choice is recorded, and is no change
        keys = [key for key in keys if key not in SPLIT_KEYS]
    if config.is_chunk_planned:
        keys = [key for key in keys if key != "head_chunk"]
    if keys:
        notes.append(
            f"The config that was given has other values for {', '.join(keys)}. This report shows the values that the "
            f"run was trained with, from run/{CONFIG_NAME}."
        )
    return trained


def _different_keys(given: Mapping[str, object], own: Mapping[str, object], within: str = "") -> list[str]:
    """The dotted keys with other values, in the order of the config."""
    found = []
    for key, value in given.items():
        other = own.get(key)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            found += _different_keys(value, other, f"{within}{key}.")
        elif value != other:
            found.append(within + key)
    return found


def _noted(path: Path, read: Callable[[Path], Value | None], notes: list[str]) -> Value | None:
    """What `read` finds in the file. If that is nothing, a note says so."""
    found = read(path)
    if found is None:
        missing = "cannot be read" if path.exists() else "is not there"
        notes.append(f"run/{path.name} {missing}.")
    return found


def _hardware(path: Path) -> HardwareProfile | None:
    try:
        return load_hardware(path) if path.is_file() else None
    except RatelError:
        return None
