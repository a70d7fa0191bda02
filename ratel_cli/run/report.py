"""What a report shows of a run, gathered from its files. Each file that is missing or damaged becomes a note.

Invariant: nothing of the run is changed, and nothing heavy is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from ratel_cli.config.load import dump, to_yaml
from ratel_cli.config.schema import RunConfig
from ratel_cli.errors import RatelError
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.report.recorded_plan import read_plan
from ratel_cli.report.run_report import RunReport
from ratel_cli.run.hardware_file import load_hardware
from ratel_cli.run.run_directory import HARDWARE_NAME, METRICS_NAME, PLAN_NAME, run_directory
from ratel_cli.run.status import status_of
from ratel_cli.run.user_cache import ratel_version
from ratel_cli.training.facts import read_facts
from ratel_cli.training.history import History, read_history

Value = TypeVar("Value")


def report_of(config: RunConfig) -> RunReport:
    """The report of the config's run, whatever of it is there."""
    run_dir, status, notes = run_directory(config.output_dir), status_of(config), list[str]()
    history = _history(run_dir / METRICS_NAME, notes)
    if status.state != "running":
        history = history.up_to(status.step)
    plan = _noted(run_dir / PLAN_NAME, read_plan, notes)
    return RunReport(
        name=Path(os.path.realpath(config.output_dir)).name,
        status=status,
        history=history,
        plan=plan,
        hardware=_noted(run_dir / HARDWARE_NAME, _hardware, notes),
        facts=read_facts(run_dir),
        changed_keys=_changed_keys(config),
        config_text=to_yaml(config),
        gpu_limit_bytes=config.limits.gpu_memory,
        endurance_tb=config.storage.endurance_tb,
        max_tb_written=config.storage.max_tb_written,
        notes=tuple(notes),
        made=datetime.now().astimezone(),
        version=ratel_version(),
    )


def _history(path: Path, notes: list[str]) -> History:
    try:
        return read_history(path)
    except OSError as error:
        notes.append(f"run/{path.name} cannot be read: {error.strerror}.")
        return History()


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


def _changed_keys(config: RunConfig) -> str:
    """The keys that are not at their defaults, as YAML."""
    return dump(config.model_dump(mode="json", exclude_defaults=True))
