"""Replaces a run's store by a copy of its snapshot.

    1. open the snapshot; it must be of the config's model
    2. look at `storage.paths`: it must be empty, or hold a store that is older than the snapshot, or `overwrite` is set
    3. if a store will be replaced, read and check every byte of the snapshot first
    4. create the new store, copy the snapshot into it, checking every byte, and commit it as the first generation

Of several ranks, each has its slices in a snapshot of its own, and all are restored at the newest step that all have; a
store that has it already stays.

Invariants: a store of another run is never replaced; one of this run only by a snapshot that is whole, and, unless
`overwrite` is set, newer. Until the last byte is copied the new store counts as unfinished, and no run resumes from it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput, EnvironmentFailure, IntegrityFailure
from ratel_cli.hardware.budget import BRIEF
from ratel_cli.hardware.drives import measure_drives
from ratel_cli.io.files import nearest_existing
from ratel_cli.run.context import RunContext, open_context
from ratel_cli.run.files.output import forget_deleted_store
from ratel_cli.run.files.run_directory import (
    paths_in,
    rank_directory,
    recorded_config,
    same_places,
    store_at,
    store_of_rank,
)
from ratel_cli.run.inputs.base import check_model
from ratel_cli.run.inputs.base_kinds import read_base
from ratel_cli.run.inputs.process import prepare_process
from ratel_cli.run.inputs.settings import new_geometry
from ratel_cli.run.train.open import snapshot_of_all
from ratel_cli.run.train.store import prepare_store, reject_restoring_over_other_run
from ratel_cli.store.checksums import DAMAGED_HINT
from ratel_cli.store.fill import Copied
from ratel_cli.store.open import stored_identity, stored_step
from ratel_cli.store.store import Store


def restore(config: RunConfig, directory: Path, *, overwrite: bool, log: RunLog) -> int:
    """Copy the snapshot in `directory` to the config's storage; that of each rank, to its own. Returns its step. Raises
    RatelError."""
    prepare_process()
    _reject_same_directory(config, directory)
    reject_restoring_over_other_run(config)
    if not Store.exists([directory]):
        raise BadInput(f"there is no snapshot in {directory}", "give its directory: --from DIR")
    base = read_base(config, log)
    with _about_snapshot(directory), open_context(config, log) as context:
        context.listen()
        snapshots = _open(context, directory)
        check_model(snapshots[0], config, base.model.spec, directory)
        generations = snapshot_of_all(snapshots)
        of_ranks = [replace(context, config=_of_rank(config, rank)) for rank in range(len(snapshots))]
        for rank, of_rank in enumerate(of_ranks[1:], start=1):
            _reject_same_directory(of_rank.config, *paths_in([directory], rank))
            reject_restoring_over_other_run(of_rank.config)
        step, missing = generations[0].progress.step, list(range(len(snapshots)))
        if len(snapshots) > 1 and not overwrite:
            missing = [rank for rank in missing if not _is_restored(of_ranks[rank], snapshots[rank], step)]
        replaced = [rank for rank in missing if Store.exists(of_ranks[rank].config.storage.paths)]
        for rank in replaced if not overwrite else ():
            _reject_loss(of_ranks[rank], snapshots[rank], step)
        for rank in missing if replaced else ():
            with context.bar("verifying the snapshot", snapshots[rank].generation_bytes) as advance:
                generations[rank].check_all(context.pool, progress=advance)
        for rank in missing:
            with _make(of_ranks[rank], snapshots[rank]) as store:
                context.fill(store, Copied(generations[rank]), "copying the snapshot")
        forget_deleted_store(config)
        return step


@contextmanager
def _about_snapshot(directory: Path) -> Iterator[None]:
    """A context in which damage is found in the snapshot, not in a store: restoring it again would not help."""
    try:
        yield
    except IntegrityFailure as failure:
        if failure.hint == DAMAGED_HINT:
            failure.message = f"the snapshot in {directory} is damaged: {failure.message}"
            failure.hint = "name another snapshot with --from DIR, or start over with --resume no"
        raise


def _of_rank(config: RunConfig, rank: int) -> RunConfig:
    """The run's config with the output directory of a rank, and its store: where it was, if that of rank 0 is where it
    was; else in that."""
    if not rank:
        return config
    recorded = recorded_config(config.output_dir)
    stays = recorded is not None and same_places(config.storage.paths, recorded.storage.paths)
    paths = store_of_rank(config, rank) if stays else paths_in(config.storage.paths, rank)
    storage = config.storage.model_copy(update={"paths": paths})
    return config.model_copy(update={"output_dir": rank_directory(config.output_dir, rank), "storage": storage})


def _reject_same_directory(config: RunConfig, directory: Path) -> None:
    if os.path.realpath(directory) in map(os.path.realpath, config.storage.paths):
        raise BadInput(f"the snapshot and the store to restore are in the same directory, {directory}")


def _open(context: RunContext, directory: Path) -> list[Store]:
    """The snapshots of all ranks."""
    try:
        first = context.open_store([directory], read_only=True)
        others = [paths_in([directory], rank) for rank in range(1, first.rank_slice.size)]
        return [first, *(context.open_store(paths, read_only=True) for paths in others)]
    except EnvironmentFailure as failure:
        raise EnvironmentFailure(
            f"the snapshot cannot be used: {failure.message}",
            "make sure that no other process uses it, and that you may read it",
        ) from failure


def _is_restored(context: RunContext, snapshot: Store, step: int) -> bool:
    """Whether the rank's store has the step already, whole. What others have may still have to be restored."""
    paths = context.config.storage.paths
    if stored_identity(paths) != snapshot.identity or stored_step(paths) != step:
        return False
    try:
        with context.open_store(paths, read_only=True) as store:
            with context.bar("verifying a store that has the step", store.generation_bytes) as advance:
                store.current().check_all(context.pool, progress=advance)
            return store.rank_slice == snapshot.rank_slice
    except (BadInput, IntegrityFailure):
        return False


def _reject_loss(context: RunContext, snapshot: Store, to_step: int) -> None:
    """Raise BadInput unless the existing store belongs to the snapshot's run and is at an earlier step."""
    paths = context.config.storage.paths
    where, hint = store_at(context.config), "use --overwrite to replace it with the snapshot"
    try:
        with context.open_store(paths) as existing:
            identity, step = existing.identity, existing.progress.step
    except (BadInput, IntegrityFailure) as failure:
        raise BadInput(f"there is a store in {where} that cannot be opened: {failure.message}", hint) from failure
    if replace(identity, software="") != replace(snapshot.identity, software=""):
        raise BadInput(f"the store in {where} and the snapshot belong to different runs", hint)
    if step >= to_step:
        raise BadInput(f"the store in {where} is at step {step}, and the snapshot at step {to_step}", hint)


def _make(context: RunContext, snapshot: Store) -> Store:
    """A new, empty store for the snapshot's blocks, as the config's run would create it."""
    paths = context.config.storage.paths
    shares: tuple[int, ...] = (1,)
    if len(paths) > 1:
        existing = [nearest_existing(path) for path in paths]
        shares = measure_drives(existing, context.queue, context.pool, budget=BRIEF, progress=lambda what: None).shares
    rank_slice, base_files = snapshot.rank_slice, snapshot.base_files
    geometry = new_geometry(
        context.config, snapshot.blocks, shares=shares, rank_slice=rank_slice, base_files=base_files
    )
    identity = snapshot.identity
    return prepare_store(context, paths, geometry, identity=identity, overwrite=True, base_files=base_files)
