"""A run's output directory and the directory of an export: may Ratel write there?

A directory that has files in it must have Ratel's marker (`model.marker`). A run may write to its own output directory,
except over files of the user's; an export may replace only an export of the same step of the same run. `--overwrite`
insists.

Invariants: nothing is written before all of this is known; nothing heavy is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ratel_cli.config.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput, EnvironmentFailure
from ratel_cli.model.marker import Marker, check_output, holds_nothing, read_marker, write_marker
from ratel_cli.run.run_directory import (
    METRICS_NAME,
    is_output_of_run,
    recorded_config,
    run_directory,
    with_own_store,
)
from ratel_cli.run.run_files import is_of_older_version, own_run_files, reject_run_files_of_others
from ratel_cli.run.settings import place_of, store_hint
from ratel_cli.store.headers import stored_id
from ratel_cli.store.lock import DATA_FILE_NAME
from ratel_cli.store.run_record import RunRecord, read_record

_ELSEWHERE = "choose another output_dir, or replace it with --overwrite"


def own_output(config: RunConfig) -> str:
    """The output directory of the config's run, as markers name it."""
    return os.path.realpath(config.output_dir)


def is_own_place(config: RunConfig) -> bool:
    """Whether the directories in `storage.paths` are those that the config's run itself makes its store in."""
    return with_own_store(config).storage.paths == config.storage.paths


def is_of_other_run(config: RunConfig, directory: Path, record: RunRecord) -> bool:
    """Whether the store in `directory`, with this record, belongs to another run than the config's.

    It does if that run exists, unless it has this very store in another place: then this one was copied with the
    config's run.
    """
    run = Path(record.run)
    if os.path.realpath(run) == own_output(config) or not is_output_of_run(run):
        return False
    theirs, store_id = recorded_config(run), stored_id(directory)
    if theirs is None or store_id is None:
        return True
    snapshot = theirs.storage.snapshot
    places = {os.path.realpath(path) for path in (*theirs.storage.paths, *((snapshot.path,) if snapshot else ()))}
    return os.path.realpath(directory) in places or store_id not in map(stored_id, map(Path, places))


def other_owner(config: RunConfig) -> RunRecord | None:
    """The record of the store in `storage.paths` if it is another run's; None if it is this one's, or there is none.

    A store without a record, of an earlier version, counts as this run's.
    """
    path = config.storage.paths[0]
    record = read_record(path)
    return record if record is not None and is_of_other_run(config, path, record) else None


def has_own_store(config: RunConfig) -> bool:
    """Whether the run's store is in `storage.paths`."""
    is_there = all(os.path.isfile(path / DATA_FILE_NAME) for path in config.storage.paths)
    return is_there and other_owner(config) is None


def no_store(config: RunConfig) -> BadInput:
    """The error for a run without a store in `storage.paths`."""
    owner = other_owner(config)
    if owner is None:
        return BadInput(f"there is no store in {place_of(config)}", store_hint(config))
    return BadInput(
        f"the store in {place_of(config)} belongs to the run in {owner.run}",
        f"name that run by its output directory, {owner.run}",
    )


def check_run_output(config: RunConfig, run_files: Iterable[str], *, overwrite: bool) -> None:
    """Raise BadInput unless the config's run may write to its output directory, and `run_files` to `run/` in it."""
    directory = config.output_dir
    _reject_local_overlap(config, directory, option="output_dir")
    _check_directory(directory, overwrite=overwrite)
    reject_run_files_of_others(config, run_files, overwrite=overwrite)


def _check_directory(directory: Path, *, overwrite: bool) -> None:
    marker = read_marker(directory)
    if marker is None and is_of_older_version(directory):
        return
    check_output(directory, overwrite=overwrite, option="output_dir")
    if marker is None or marker.is_run or overwrite:
        return
    if marker.step is not None:
        raise BadInput(f"output_dir: {_holds(directory, marker)}", _ELSEWHERE)
    if run_directory(directory).exists():
        raise BadInput(f"output_dir: Ratel did not make {run_directory(directory)}", _ELSEWHERE)


def may_claim_at_once(config: RunConfig) -> bool:
    """Whether nobody would miss the claim if the command is refused after it.

    The directory is new or Ratel made it, so that a command which is killed there can be run again. A folder of the
    user's is claimed only when nothing can refuse the command any more.
    """
    directory = config.output_dir
    marker = read_marker(directory)
    if marker is None:
        return holds_nothing(directory) or is_of_older_version(directory)
    return marker.is_run or (marker.step is None and not run_directory(directory).exists())


def claim_output(config: RunConfig, run_files: Iterable[str] = ()) -> None:
    """Make the output directory, with the marker that says whose it is, and that Ratel writes `run_files` in `run/`.

    Raises EnvironmentFailure.
    """
    directory, run = config.output_dir, own_output(config)
    marker, own, names = read_marker(directory), own_run_files(directory), frozenset(run_files)
    if is_claimed(config) and names <= own:
        return
    step, files = (None, ()) if marker is None else (marker.step, marker.files)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        listed = tuple(sorted(own | names))
        write_marker(directory, Marker(run=run, is_run=True, step=step, files=files, run_files=listed))
    except OSError as error:
        raise EnvironmentFailure(
            f"output_dir: {directory} cannot be written: {error.strerror}", "set output_dir to another directory"
        ) from error


def finish_export(directory: Path, log: RunLog, *, option: str) -> None:
    """Publish the rest of an export whose process was killed, if there is one. Raises EnvironmentFailure.

    `option` named the directory.
    """
    marker = read_marker(directory)
    if marker is None or not marker.is_publishing:
        return
    from ratel_cli.model.publishing import finish_publishing, renamed_notice

    try:
        renamed = finish_publishing(directory)
    except OSError as error:
        raise EnvironmentFailure(
            f"{option}: the export that was begun in {directory} cannot be finished: {error.strerror}",
            "make its files writable and run this again; until then the directory holds no whole model",
        ) from error
    log.notice(f"{directory}: finished the export of step {marker.step}, which was interrupted")
    for path, spare in renamed:
        log.notice(renamed_notice(path, spare))


def is_claimed(config: RunConfig) -> bool:
    """Whether the marker says that the output directory is the config's run's."""
    marker = read_marker(config.output_dir)
    return marker is not None and marker.is_run and marker.run == own_output(config)


def check_export_output(config: RunConfig, output: Path, *, step: int | None, overwrite: bool) -> None:
    """Raise BadInput unless `step` of the config's run may be exported to `output`; None: the step is not known yet."""
    _reject_local_overlap(config, output, option="-o")
    check_output(output, overwrite=overwrite, option="-o")
    marker = read_marker(output)
    if marker is None or overwrite:
        return
    is_other_run = marker.run != own_output(config)
    if (is_other_run and (marker.is_run or marker.step is not None)) or (
        step is not None and marker.step not in (None, step)
    ):
        raise BadInput(f"-o: {_holds(output, marker)}", "choose another directory, or replace it with --overwrite")


def _reject_local_overlap(config: RunConfig, output_dir: Path, *, option: str) -> None:
    """`reject_overlap` at once, if the base model is a directory; the directory of a hub model is not known yet."""
    if config.base_model is not None and os.path.isdir(config.base_model):
        reject_overlap(output_dir, Path(config.base_model), option=option)


def reject_overlap(output_dir: Path, base_dir: Path, *, option: str = "output_dir") -> None:
    """Raise BadInput if one of the directories is in the other, also through links; `option` named the output."""
    output, base = Path(os.path.realpath(output_dir)), Path(os.path.realpath(base_dir))
    hint = f"choose another {option}"
    if output == base:
        raise BadInput(
            f"{option} and base_model are the same directory, {base_dir}: the export would overwrite the base model",
            hint,
        )
    if output.is_relative_to(base):
        raise BadInput(f"{option}: {output_dir} is inside the base model, {base_dir}", hint)
    linked = (Path(os.path.realpath(entry.path)) for entry in os.scandir(base) if entry.is_symlink())
    if any(path.is_relative_to(output) for path in (base, *linked)):
        raise BadInput(f"{option}: the base model, {base_dir}, or a file of it is inside {output_dir}", hint)


def reject_lost_store(config: RunConfig, place: str) -> None:
    """Raise BadInput if the run has left a model or steps in its output directory. There is no store in `place`."""
    directory = config.output_dir
    marker, metrics = read_marker(directory), run_directory(directory) / METRICS_NAME
    if marker is not None and marker.step is not None:
        found = _holds(directory, marker)
    elif metrics.is_file() and metrics.stat().st_size:
        found = f"{directory} holds the records of a run"
    else:
        return
    restore = "`ratel restore CONFIG` brings a store back from its snapshot; "
    raise BadInput(
        f"{found}, but its store is gone: there is none in {place}",
        "choose another output_dir to train from the beginning; "
        + (restore if config.storage.snapshot is not None else "")
        + "--resume no starts over here, and replaces what the run has left",
    )


def _holds(directory: Path, marker: Marker) -> str:
    if marker.step is None:
        return f"{directory} is the output directory of the run {Path(marker.run).name}"
    return f"{directory} holds step {marker.step} of the run {Path(marker.run).name}"
