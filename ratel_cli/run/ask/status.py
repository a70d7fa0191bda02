"""How far runs have come, from their files alone: which process trains them, their last steps, the space they take.

Invariant: nothing of a run is changed, a run that is training is not disturbed, and a run that cannot be read does not
hide the others. Nothing heavy is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import Final

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.errors import RatelError
from ratel_cli.model.files.marker import Marker, read_marker
from ratel_cli.report.words.status import RunState, RunStatus
from ratel_cli.run.files.output import deleted_store, has_own_store
from ratel_cli.run.files.run_directory import METRICS_NAME, find_run, is_output_of_run, run_directory
from ratel_cli.run.inputs.settings import best_rule
from ratel_cli.store.lock import DATA_FILE_NAME, StoreUse, find_use
from ratel_cli.store.open import stored_step
from ratel_cli.training.facts import RunFacts, read_facts
from ratel_cli.training.history import History, read_history, read_recent, recent_rate, recent_seconds
from ratel_cli.training.metrics import STEP_FIGURES

MOST_LEVELS: Final = 4
"""How many levels of folders below a directory are searched for runs."""


def find_statuses(path: Path, log: RunLog) -> list[RunStatus]:
    """The run that `path` names, by config or output directory, or the runs below it. Raises BadInput."""
    if not os.path.isdir(path) or is_output_of_run(path):  # Path.is_dir raises for names that are too long
        return [status_of(find_run(path, log))]
    return [_status_below(found) for found in find_runs(path)]


def find_runs(directory: Path) -> Iterator[Path]:
    """The output directories of runs in a directory, `MOST_LEVELS` deep. Links and hidden folders are not followed."""
    top = len(directory.parts)
    for name, folders, _ in os.walk(directory):
        place = Path(name)
        if is_output_of_run(place):
            folders[:] = [folder for folder in folders if folder != "run"]
            yield place
        is_deep = len(place.parts) - top >= MOST_LEVELS
        folders[:] = [] if is_deep else sorted(folder for folder in folders if not folder.startswith("."))


def status_of(config: RunConfig) -> RunStatus:
    """How far the config's run has come."""
    directory = config.output_dir
    run_dir = run_directory(directory)
    facts, marker = read_facts(run_dir), read_marker(directory)
    paths = store_paths(config)
    use = StoreUse(is_locked=False, pid=None) if paths is None else find_use(paths[0])
    deleted = deleted_store(config)
    committed_step = stored_step(paths) if paths is not None else deleted.step if deleted is not None else None
    is_training = use.is_locked and facts is not None and facts.pid == use.pid
    problem: str | None = None
    try:
        history = read_recent(run_dir / METRICS_NAME)
    except OSError as error:
        history, problem = History(), f"{run_dir / METRICS_NAME}: cannot be read: {error.strerror}"
    if committed_step is not None and not is_training:
        history = history.up_to(committed_step)
    steps = history.steps
    step = steps[-1].step if steps else committed_step or 0
    num_steps = config.max_steps if facts is None else facts.num_steps
    has_store, has_begun = paths is not None, is_output_of_run(directory)
    state = _state(marker, facts, use, step=step, num_steps=num_steps, has_store=has_store, has_begun=has_begun)
    seconds = recent_seconds(steps)
    return RunStatus(
        output_dir=directory,
        state=state,
        step=step,
        num_steps=num_steps,
        steps_per_epoch=None if facts is None else facts.steps_per_epoch,
        figures={
            figure.key: value
            for figure in STEP_FIGURES
            for each in steps
            if figure.in_status and (value := figure.value(each)) is not None
        },
        tokens_per_second=recent_rate(steps),
        seconds_left=None if num_steps is None or seconds is None else max(0, num_steps - step) * seconds,
        ended_early=step > 0 and facts is not None and facts.ended_early_at == step,
        best_step=_best_step(config, run_dir / METRICS_NAME, step),
        last_step_at=_modified(run_dir / METRICS_NAME) if steps else None,
        store_bytes=_sizes(path / DATA_FILE_NAME for path in paths or ()),
        store_deleted=deleted is not None,
        output_bytes=_bytes_in(directory),
        pid=use.pid if use.is_locked else None,
        problem=problem,
    )


def _best_step(config: RunConfig, path: Path, last_step: int) -> int | None:
    """The step with the best evaluation up to `last_step`; None if none is the best, or that is not known."""
    rule = best_rule(config)
    if rule is None:
        return None
    with suppress(OSError):
        return rule.best_so_far(read_history(path).up_to(last_step).steps).step
    return None


def store_paths(config: RunConfig) -> Sequence[Path] | None:
    """The directories of the run's store; None if it is not there, or belongs to another run."""
    return config.storage.paths if has_own_store(config) else None


def _status_below(directory: Path) -> RunStatus:
    """The status of one run among several: what is wrong with it is a part of it."""
    try:
        return status_of(find_run(directory, RunLog(StringIO())))
    except RatelError as error:
        return RunStatus(output_dir=directory, state="damaged", problem=error.message)


def _state(
    marker: Marker | None,
    facts: RunFacts | None,
    use: StoreUse,
    *,
    step: int,
    num_steps: int | None,
    has_store: bool,
    has_begun: bool,
) -> RunState:
    if use.is_locked:
        return "running" if facts is not None and facts.pid == use.pid else "in use"
    best_step, ended_at = (None, None) if facts is None else (facts.exported_step, facts.ended_early_at)
    is_whole = step > 0 and (num_steps is None or step >= num_steps or step == ended_at)
    exported = marker.step if marker is not None and marker.is_run else None
    if is_whole and exported is not None and (exported >= step or exported == best_step):
        return "finished"
    if not has_store:
        return "no store" if has_begun else "not begun"
    return "stopped" if use.pid is None else "killed"


def _modified(path: Path) -> datetime | None:
    with suppress(OSError):
        return datetime.fromtimestamp(path.stat().st_mtime).astimezone()
    return None


def _sizes(paths: Iterator[Path]) -> int:
    total = 0
    for path in paths:
        with suppress(OSError):
            total += path.lstat().st_size
    return total


def _bytes_in(directory: Path) -> int:
    """The size of all files in a directory and below it, without stores, and without the outputs of other runs."""
    total = 0
    for name, folders, files in os.walk(directory):
        folders[:] = [folder for folder in folders if not is_output_of_run(Path(name) / folder)]
        total += _sizes(Path(name) / file for file in files if file != DATA_FILE_NAME)
    return total
