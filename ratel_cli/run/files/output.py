"""A run's output directory and the directory of an export: may Ratel write there?

A directory that has files in it must have Ratel's marker (`model/files/marker.py`). A run may write to its own output
directory, except over files of the user's; an export may replace only an export of the same step of the same run.
`--overwrite` insists.

Invariants: nothing is written before all of this is known; nothing heavy is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput, EnvironmentFailure, printable
from ratel_cli.model.files.marker import DeletedStore, Marker, check_output, holds_nothing, read_marker, write_marker
from ratel_cli.run.files.run_directory import (
    METRICS_NAME,
    is_output_of_run,
    recorded_config,
    run_directory,
    store_at,
    store_hint,
    with_own_store,
)
from ratel_cli.run.files.run_files import own_run_files, reject_run_files_of_others
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

    A store without a record counts as this run's.
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
        return BadInput(missing_store(config), _hint_for_deleted(config) or store_hint(config))
    return BadInput(
        f"the store in {store_at(config)} belongs to the run in {owner.run}",
        f"name that run by its output directory, {owner.run}",
    )


def missing_store(config: RunConfig) -> str:
    """The clause about a store that is not there, or not all of it, for messages."""
    deleted = deleted_store(config)
    if deleted is None:
        return f"there is no store in {store_at(config)}"
    return f"the store in {store_at(config)} was deleted by `ratel clean --store` ({printable(deleted.when)})"


def deleted_store(config: RunConfig) -> DeletedStore | None:
    """What is recorded of the run's store if the user had it deleted; None if it was not, or it is there again."""
    marker = read_marker(config.output_dir)
    return None if marker is None or not marker.is_run or has_own_store(config) else marker.deleted_store


def record_deleted_store(config: RunConfig, step: int | None) -> None:
    """Record that the store, which is at `step`, is deleted now. Raises EnvironmentFailure."""
    directory = config.output_dir
    if read_marker(directory) is None:
        claim_output(config)
    when = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    marker = read_marker(directory)
    assert marker is not None
    try:
        write_marker(directory, replace(marker, deleted_store=DeletedStore(step=step, when=when)))
    except OSError as error:
        raise EnvironmentFailure(
            f"nothing was deleted: {directory} cannot be written, where it would be recorded: {error.strerror}",
            "make it writable and run this again",
        ) from error


def forget_deleted_store(config: RunConfig) -> None:
    """Record that the run has a store again. Never raises: while the store is there, the record does not count."""
    marker = read_marker(config.output_dir)
    if marker is not None and marker.deleted_store is not None:
        with suppress(OSError):
            write_marker(config.output_dir, replace(marker, deleted_store=None))


def _hint_for_deleted(config: RunConfig) -> str | None:
    """What can be done without the store that the user had deleted; None if it was not."""
    if deleted_store(config) is None:
        return None
    marker, words = read_marker(config.output_dir), []
    if any(os.path.lexists(path / DATA_FILE_NAME) for path in config.storage.paths):
        words.append("files of it are left: `ratel clean CONFIG --store` deletes them")
    if marker is not None and marker.step is not None:
        words.append(f"the exported model in {config.output_dir} can be used without it")
    if config.storage.snapshot is not None:
        words.append("`ratel restore CONFIG` makes it again from its snapshot")
    return "; ".join([*words, "`ratel finetune CONFIG --resume no` trains from the beginning"])


def check_run_output(config: RunConfig, run_files: Iterable[str], *, overwrite: bool) -> None:
    """Raise BadInput unless the config's run may write to its output directory, and `run_files` to `run/` in it."""
    directory = config.output_dir
    _reject_local_overlap(config, directory, option="output_dir")
    _check_directory(directory, overwrite=overwrite)
    reject_run_files_of_others(config, run_files, overwrite=overwrite)


def _check_directory(directory: Path, *, overwrite: bool) -> None:
    marker = read_marker(directory)
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
        return holds_nothing(directory)
    return marker.is_run or (marker.step is None and not run_directory(directory).exists())


def claim_output(config: RunConfig, run_files: Iterable[str] = ()) -> None:
    """Make the output directory, with the marker that says whose it is, and that Ratel writes `run_files` in `run/`.

    Raises EnvironmentFailure.
    """
    directory, run = config.output_dir, own_output(config)
    marker, own, names = read_marker(directory), own_run_files(directory), frozenset(run_files)
    if is_claimed(config) and names <= own:
        return
    step, files, deleted = (None, (), None) if marker is None else (marker.step, marker.files, marker.deleted_store)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        listed = tuple(sorted(own | names))
        claimed = Marker(run=run, is_run=True, step=step, files=files, run_files=listed, deleted_store=deleted)
        write_marker(directory, claimed)
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
    from ratel_cli.model.export.publishing import finish_publishing, renamed_notice

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


def reject_lost_store(config: RunConfig) -> None:
    """Raise BadInput if the run, whose store is not there, has left a model or steps in its output directory."""
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
        f"{found}, but its store is gone: {missing_store(config)}",
        "choose another output_dir to train from the beginning; "
        + (restore if config.storage.snapshot is not None else "")
        + "--resume no starts over here, and replaces what the run has left",
    )


def _holds(directory: Path, marker: Marker) -> str:
    if marker.step is None:
        return f"{directory} is the output directory of the run {Path(marker.run).name}"
    return f"{directory} holds step {marker.step} of the run {Path(marker.run).name}"
