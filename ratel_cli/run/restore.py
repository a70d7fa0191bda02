"""Makes a run's store anew from a snapshot.

Called by `cli.restore`. In order:

    1. the snapshot: opened, and found to be of the config's model
    2. what is in `storage.paths`: nothing, or a store that is older than the snapshot, or one that may be replaced
    3. if a store is replaced: every byte of the snapshot is read and checked before
    4. a new store; the snapshot copied into it, every byte checked; committed as its first generation

Invariant: a store is given up only for a snapshot that is whole, and newer unless that was not asked for; until the
last byte is copied the new store counts as unfinished, and nobody goes on from it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from ratel_cli.config.schema import RunConfig
from ratel_cli.console import Bar, RunLog
from ratel_cli.errors import BadInput, EnvironmentFailure, IntegrityFailure
from ratel_cli.hardware.budget import BRIEF
from ratel_cli.hardware.drives import measure_drives
from ratel_cli.hardware.host import default_limit_bytes, return_freed_memory
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.files import nearest_existing
from ratel_cli.io.queue import IoQueue, open_queue
from ratel_cli.run.base_model import check_model, read_base, silence_transformers
from ratel_cli.run.settings import num_slots
from ratel_cli.store.copy import copy_generation
from ratel_cli.store.store import Store
from ratel_cli.training.stopping import StopRequest


def restore(config: RunConfig, directory: Path, *, overwrite: bool, log: RunLog) -> int:
    """Copy the snapshot in `directory` to the config's storage. Returns its step. Raises RatelError."""
    return_freed_memory()
    silence_transformers()
    _refuse_same_directory(config, directory)
    if not Store.exists([directory]):
        raise BadInput(f"there is no snapshot in {directory}", "name its directory: --from DIR")
    base = read_base(config, log)
    with ExitStack() as resources:
        stop = resources.enter_context(StopRequest())
        queue = resources.enter_context(open_queue(config.storage.engine, notice=log.notice))
        pool = resources.enter_context(BufferPool(config.limits.host_memory or default_limit_bytes()))
        snapshot = resources.enter_context(_open(directory, queue, log))
        check_model(snapshot, config, base.model.spec, directory)
        if Store.exists(config.storage.paths):
            if not overwrite:
                _refuse_to_lose(config, snapshot, queue, log)
            with log.bar("verifying the snapshot", snapshot.slot_bytes) as bar:
                snapshot.current().check_all(pool, progress=_advance(bar, stop))
        with _make(config, snapshot, queue, pool, stop, log) as store:
            with log.bar("copying the snapshot", snapshot.slot_bytes) as bar:
                copy_generation(snapshot.current(), store, pool, progress=_advance(bar, stop))
            store.commit_import(snapshot.progress)
        return snapshot.progress.step


def _refuse_same_directory(config: RunConfig, directory: Path) -> None:
    if os.path.realpath(directory) in map(os.path.realpath, config.storage.paths):
        raise BadInput(f"the snapshot in {directory} and the store to be restored are the same directory")


def _open(directory: Path, queue: IoQueue, log: RunLog) -> Store:
    try:
        return Store.open([directory], queue=queue, identity=None, notice=log.notice)
    except EnvironmentFailure as failure:
        raise EnvironmentFailure(
            f"the snapshot cannot be used: {failure.message}",
            "nobody else may use it meanwhile, and its file must be writable, as it is locked; it is only read",
        ) from failure


def _refuse_to_lose(config: RunConfig, snapshot: Store, queue: IoQueue, log: RunLog) -> None:
    """Raise BadInput unless the store that is there belongs to the same run, and has not come as far."""
    where, hint = ", ".join(map(str, config.storage.paths)), "--overwrite puts the snapshot in its place"
    try:
        with Store.open(config.storage.paths, queue=queue, identity=None, notice=log.notice) as present:
            identity, step = present.identity, present.progress.step
    except (BadInput, IntegrityFailure) as failure:
        raise BadInput(f"there is a store in {where} that cannot be opened: {failure.message}", hint) from failure
    ours = snapshot.identity
    if (identity.model_hash, identity.config_hash, identity.data_hash, identity.seed) != (
        ours.model_hash,
        ours.config_hash,
        ours.data_hash,
        ours.seed,
    ):
        raise BadInput(f"the store in {where} belongs to another run than the snapshot", hint)
    if step >= snapshot.progress.step:
        raise BadInput(
            f"the store in {where} is at step {step}, and the snapshot at step {snapshot.progress.step}", hint
        )


def _make(
    config: RunConfig, snapshot: Store, queue: IoQueue, pool: BufferPool, stop: StopRequest, log: RunLog
) -> Store:
    """A new store such as the run would make, for the snapshot's blocks."""
    paths, slots, weights = config.storage.paths, num_slots(config), None
    if len(paths) > 1:
        there = [nearest_existing(path) for path in paths]
        weights = measure_drives(there, queue, pool, budget=BRIEF, progress=lambda what: None).weights
    with log.bar("preparing the store", slots * snapshot.slot_bytes) as bar:
        return Store.create(
            paths,
            identity=snapshot.identity,
            layout=snapshot.layout,
            block_elements=snapshot.block_elements,
            num_slots=slots,
            queue=queue,
            in_place=slots == 1,
            overwrite=True,
            weights=weights,
            progress=_advance(bar, stop),
            notice=log.notice,
        )


def _advance(bar: Bar, stop: StopRequest) -> Callable[[int], None]:
    def advance(num_bytes: int) -> None:
        stop.check()
        bar.advance(num_bytes)

    return advance
