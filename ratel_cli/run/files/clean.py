"""`ratel clean`: which files a run has left, and their deletion, by name.

They are the store's files on all drives, the snapshot's, those in `run/` of the output directory, and, if asked for,
the export. Or the store alone, with the run's copy of its tokens: then the run stays, and its marker says that the
store was deleted. A file counts only if it is this run's: a store by its place or its record, the rest by the marker. A
token cache is known by its name, a hash, and a file of TensorBoard by the end of its name.

Invariants: nothing is deleted that was not found first; a folder goes only if nothing is left in it; a store that a
process uses is not touched; what was interrupted can be finished by the same command. Nothing heavy is imported.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final, Literal

from ratel_cli.commands import command
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.keys.values import TRACKERS
from ratel_cli.data.files.file_names import CACHE_FILE_NAMES, REJECTS_NAME, TEST_REJECTS_NAME
from ratel_cli.errors import BadInput, EnvironmentFailure, RatelError
from ratel_cli.model.files.marker import MARKER_NAME, NEW_MARKER_NAME, STAGING_NAME, is_unchanged, read_marker
from ratel_cli.run.files.output import deleted_store, is_of_other_run, is_own_place, record_deleted_store
from ratel_cli.run.files.resharding_record import NEW_RESHARDING_NAME, RESHARDING_NAME, new_directories
from ratel_cli.run.files.run_directory import (
    CONFIG_NAME,
    EVENTS_NAME,
    EVENTS_SUFFIX,
    HARDWARE_NAME,
    METRICS_NAME,
    MODEL_NAME,
    NEW_REFERENCE_NAME,
    ORIGIN_NAME,
    PLAN_NAME,
    REFERENCE_NAME,
    REPORT_NAME,
    TOKENS_NAME,
    TRACE_NAME,
    log_name,
    paths_in,
    rank_directory,
    record_name,
    recorded_config,
    run_directory,
    same_places,
    store_at,
    store_hint,
)
from ratel_cli.run.files.run_files import forget_missing, is_run_output, own_run_files
from ratel_cli.store.headers import read_header
from ratel_cli.store.lock import DATA_FILE_NAME, OWNER_FILE_NAME, StoreLock
from ratel_cli.store.open import stored_identity, stored_step
from ratel_cli.store.run_record import RECORD_FILE_NAME, read_record
from ratel_cli.training.facts import FACTS_NAME

_RUN_FILES: Final = (
    FACTS_NAME, HARDWARE_NAME, MODEL_NAME, METRICS_NAME, TRACE_NAME, REJECTS_NAME, TEST_REJECTS_NAME,
    REPORT_NAME, ORIGIN_NAME, REFERENCE_NAME, NEW_REFERENCE_NAME, CONFIG_NAME,
)  # fmt: skip
_SHOWS_A_STORE: Final = (PLAN_NAME,)
"""A run writes it when its store is made. It goes first, so that a run without it may have no store any more."""
_CACHE: Final = re.compile(r"[0-9a-f]{32}(\.partial-\d+)?")
"""The name of a token cache, or of one that a killed process has left."""
_WAIT_SECONDS: Final = 0.5

Extent = Literal["store", "run", "export"]
"""What goes: the store and the run's copy of its tokens; also the snapshot and the files in `run/`; also the export."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftFiles:
    """What a run has left."""

    config: RunConfig
    extent: Extent
    files: tuple[Path, ...]
    """Files to delete, in this order."""
    stores: tuple[Path, ...]
    """Directories with a data file among them."""
    folders: tuple[Path, ...]
    """Folders to remove afterwards where nothing is left in them, in this order."""
    kept: tuple[str, ...]
    """What stays although it might be expected to go, each with the reason."""
    step: int | None
    """Last step of the store that goes; None if there is none, or it cannot be read."""
    is_exported: bool
    """Whether the run's output directory has the model of that step."""

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(path.lstat().st_size for path in self.files)


def find_left_files(config: RunConfig, extent: Extent) -> LeftFiles:
    """The files of the config's run. Raises BadInput if its store is not where the run has recorded it."""
    if is_run_output(config.output_dir):
        _reject_lost_store(config)
    found = _Found()
    # Where a store was, and its record is left of it, deleting it was interrupted.
    places = [
        place
        for place in _own_stores(config, found.kept, extent)
        if _is_store(place) or (not os.path.lexists(place / DATA_FILE_NAME) and _is_recorded(config, [place]))
    ]
    found.files += _own(config, (RESHARDING_NAME, NEW_RESHARDING_NAME))
    if extent != "store":
        found.files += _own(config, _SHOWS_A_STORE)
    found.files += [path for place in places for path in _regular(place, (DATA_FILE_NAME, OWNER_FILE_NAME))]
    # Records say whose a store is: they go last.
    found.files += [path for place in places for path in _regular(place, (RECORD_FILE_NAME,))]
    found.folders += [place for place in places if place.name.endswith(".store")]
    if is_run_output(config.output_dir):
        tokens = run_directory(config.output_dir) / TOKENS_NAME
        caches = sorted(path for path in _in_folder(tokens, "*") if _CACHE.fullmatch(path.name))
        found.files += [path for cache in caches if _is_folder(cache) for path in _regular(cache, CACHE_FILE_NAMES)]
        found.folders += [*caches, tokens]
        if extent != "store":
            _add_run_files(found, config)
    if extent == "export":
        _add_export(found, config.output_dir)
    step = stored_step(config.storage.paths) if config.storage.paths[0] in places else None
    return LeftFiles(
        config=config,
        extent=extent,
        files=tuple(found.files),
        stores=tuple(filter(_is_store, places)),
        folders=tuple(dict.fromkeys(found.folders)),
        kept=tuple(found.kept),
        step=step,
        is_exported=step is not None and _is_exported(config.output_dir, step),
    )


@dataclass(slots=True)
class _Found:
    """What was found so far, in the order of `LeftFiles`."""

    files: list[Path] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


def _add_run_files(found: _Found, config: RunConfig) -> None:
    found.files += [path for tracker in TRACKERS for path in _own(config, (record_name(tracker), log_name(tracker)))]
    run = run_directory(config.output_dir)
    events = run / EVENTS_NAME
    written = sorted(path.name for path in _in_folder(events, f"events.out.tfevents.*{EVENTS_SUFFIX}"))
    found.files += [*_regular(events, written), *_own(config, _RUN_FILES)]
    found.folders += [events, run]


def _add_export(found: _Found, directory: Path) -> None:
    marker = read_marker(directory)
    if marker is None or not marker.is_run:
        return
    begun = directory / STAGING_NAME
    parts = sorted(begun.rglob("*"), reverse=True) if _is_folder(begun) else []
    found.files += filter(_is_regular, parts)
    found.folders += [*filter(_is_folder, parts), begun]
    left = [*marker.files, *(file for file in marker.replaced if file.xxh3_128)]
    names = dict.fromkeys(file.name for file in left if is_unchanged(directory, file))
    found.files += [directory / name for name in names]
    changed = {file.name for file in marker.files} - names.keys()
    present = sorted(name for name in changed if os.path.lexists(directory / name))
    found.kept += [f"{directory / name} was changed since Ratel wrote it" for name in present]
    found.files += _regular(directory, (NEW_MARKER_NAME, MARKER_NAME))
    found.folders += [*((directory / name).parent for name in names), directory]


def _is_exported(directory: Path, step: int) -> bool:
    marker = read_marker(directory)
    if marker is None or not marker.is_run or marker.step != step:
        return False
    return all(os.path.isfile(directory / file.name) for file in marker.files)


def _own(config: RunConfig, names: Sequence[str]) -> list[Path]:
    """The files in `run/` with these names that are Ratel's."""
    run, own = run_directory(config.output_dir), own_run_files(config.output_dir)
    return _regular(run, [name for name in names if name in own]) if _is_folder(run) else []


def _in_folder(folder: Path, pattern: str) -> list[Path]:
    """What matches the pattern in a folder of a run; nothing if the folder, or `run/` itself, is a link."""
    return list(folder.glob(pattern)) if _is_folder(folder.parent) and _is_folder(folder) else []


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _reject_lost_store(config: RunConfig) -> None:
    """Raise BadInput if the run has made a store that is not there: without its records nobody would find it again."""
    run, paths = run_directory(config.output_dir), config.storage.paths
    recorded = recorded_config(config.output_dir)
    if recorded is None or not _own(config, _SHOWS_A_STORE) or deleted_store(config) is not None:
        return
    if not same_places(recorded.storage.paths, paths):
        raise BadInput(
            f"nothing was deleted: the store of the run in {config.output_dir} is in {store_at(recorded)}, "
            f"not in {store_at(config)}",
            f"name the run by its output directory: {command('clean', config.output_dir)}",
        )
    missing = [path for path in paths if not os.path.lexists(path / DATA_FILE_NAME)]
    if missing:
        raise BadInput(
            f"nothing was deleted: there is no store in {', '.join(map(str, missing))}, "
            f"where {run / CONFIG_NAME} says that it is",
            f"{store_hint(config)}; if the store is deleted already, delete {run / PLAN_NAME} too, and run this again",
        )


def delete(left: LeftFiles) -> None:
    """Delete the files, and the folders that are empty then. Raises EnvironmentFailure.

    Where the run stays, it records first that its store is deleted.
    """
    output_dir = left.config.output_dir
    with ExitStack() as locks:
        if left.stores:
            locks.enter_context(StoreLock(left.stores, create=False, wait_seconds=_WAIT_SECONDS, read_only=True))
        if left.extent == "store" and left.stores and is_run_output(output_dir):
            already = deleted_store(left.config)
            record_deleted_store(left.config, left.step if already is None else already.step)
        for path in left.files:
            try:
                if path.name == RECORD_FILE_NAME:  # what the lock has written there goes before the record
                    path.with_name(OWNER_FILE_NAME).unlink(missing_ok=True)
                path.unlink(missing_ok=True)
            except OSError as error:
                raise EnvironmentFailure(f"{path}: cannot be deleted: {error.strerror}") from error
    forget_missing(output_dir, own_run_files(output_dir))
    for folder in left.folders:
        with suppress(OSError):
            folder.rmdir()


def _own_stores(config: RunConfig, kept: list[str], extent: Extent) -> Iterator[Path]:
    """The directories of the run's store and of its snapshot. What stays goes into `kept`."""
    paths = config.storage.paths
    if _is_recorded(config, paths) or (not any(map(read_record, paths)) and is_own_place(config)):
        yield from _of_other_ranks(config)
        yield from new_directories(config)
        yield from paths
    elif any(map(_is_store, paths)):
        kept.append(f"the store in {', '.join(map(str, paths))} belongs to another run")
    snapshot = config.storage.snapshot
    if snapshot is not None and extent != "store":
        yield from _snapshots_of_other_ranks(config, snapshot.path)
    if snapshot is None or not _is_store(snapshot.path):
        return
    identity = stored_identity([snapshot.path])
    is_same = identity is not None and identity == stored_identity(paths)
    if _is_recorded(config, [snapshot.path]) or (read_record(snapshot.path) is None and is_same):
        if extent == "store":
            kept.append(f"the snapshot in {snapshot.path}; `ratel restore CONFIG` makes the store again from it")
        else:
            yield snapshot.path
    else:
        kept.append(f"the snapshot in {snapshot.path} belongs to another run")


def _of_other_ranks(config: RunConfig) -> Iterator[Path]:
    """The directories of the stores of the run's other ranks."""
    for rank in count(1):
        recorded = recorded_config(rank_directory(config.output_dir, rank))
        if recorded is None:
            return
        if _is_recorded(recorded, recorded.storage.paths):
            yield from recorded.storage.paths


def _snapshots_of_other_ranks(config: RunConfig, path: Path) -> Iterator[Path]:
    """The directories of the snapshots of the run's other ranks, within that of rank 0."""
    for rank in count(1):
        recorded, [place] = recorded_config(rank_directory(config.output_dir, rank)), paths_in([path], rank)
        if recorded is None:
            return
        if _is_recorded(recorded, [place]):
            yield place


def _is_recorded(config: RunConfig, paths: Sequence[Path]) -> bool:
    """Whether the record says that the store is this run's. All its directories have it, unless some are deleted."""
    for path in paths:
        record = read_record(path)
        if record is not None:
            return not is_of_other_run(config, path, record)
    return False


def _is_store(directory: Path) -> bool:
    path = directory / DATA_FILE_NAME
    try:
        return _is_regular(path) and not read_header(path).is_foreign
    except RatelError:
        return False


def _regular(directory: Path, names: Sequence[str]) -> list[Path]:
    return [directory / name for name in names if _is_regular(directory / name)]


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False
