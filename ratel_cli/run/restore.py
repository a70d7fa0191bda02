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
from pathlib import Path

from ratel_cli.config.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput, EnvironmentFailure, IntegrityFailure
from ratel_cli.hardware.budget import BRIEF
from ratel_cli.hardware.drives import measure_drives
from ratel_cli.hardware.host import return_freed_memory
from ratel_cli.io.files import nearest_existing
from ratel_cli.run.base_model import check_model, read_base, silence_transformers
from ratel_cli.run.context import RunContext, open_context
from ratel_cli.run.settings import num_slots
from ratel_cli.run.store import prepare_store
from ratel_cli.store.copy import copy_generation
from ratel_cli.store.store import Store


def restore(config: RunConfig, directory: Path, *, overwrite: bool, log: RunLog) -> int:
    """Copy the snapshot in `directory` to the config's storage. Returns its step. Raises RatelError."""
    return_freed_memory()
    silence_transformers()
    _refuse_same_directory(config, directory)
    if not Store.exists([directory]):
        raise BadInput(f"there is no snapshot in {directory}", "name its directory: --from DIR")
    base = read_base(config, log)
    with open_context(config, log) as context:
        context.listen()
        snapshot = context.resources.enter_context(_open(context, directory))
        check_model(snapshot, config, base.model.spec, directory)
        if Store.exists(config.storage.paths):
            if not overwrite:
                _refuse_to_lose(context, snapshot)
            with context.bar("verifying the snapshot", snapshot.slot_bytes) as advance:
                snapshot.current().check_all(context.pool, progress=advance)
        with _make(context, snapshot) as store:
            with context.bar("copying the snapshot", snapshot.slot_bytes) as advance:
                copy_generation(snapshot.current(), store.shadow(), context.pool, progress=advance)
            store.commit_import(snapshot.progress)
        return snapshot.progress.step


def _refuse_same_directory(config: RunConfig, directory: Path) -> None:
    if os.path.realpath(directory) in map(os.path.realpath, config.storage.paths):
        raise BadInput(f"the snapshot in {directory} and the store to be restored are the same directory")


def _open(context: RunContext, directory: Path) -> Store:
    try:
        return Store.open([directory], queue=context.queue, identity=None, notice=context.log.notice)
    except EnvironmentFailure as failure:
        raise EnvironmentFailure(
            f"the snapshot cannot be used: {failure.message}",
            "nobody else may use it meanwhile, and its file must be writable, as it is locked; it is only read",
        ) from failure


def _refuse_to_lose(context: RunContext, snapshot: Store) -> None:
    """Raise BadInput unless the store that is there belongs to the same run, and has not come as far."""
    paths = context.config.storage.paths
    where, hint = ", ".join(map(str, paths)), "--overwrite puts the snapshot in its place"
    try:
        with Store.open(paths, queue=context.queue, identity=None, notice=context.log.notice) as present:
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


def _make(context: RunContext, snapshot: Store) -> Store:
    """A new store such as the run would make, for the snapshot's blocks."""
    paths, weights = context.config.storage.paths, None
    if len(paths) > 1:
        there = [nearest_existing(path) for path in paths]
        weights = measure_drives(there, context.queue, context.pool, budget=BRIEF, progress=lambda what: None).weights
    return prepare_store(
        paths,
        identity=snapshot.identity,
        layout=snapshot.layout,
        block_elements=snapshot.block_elements,
        num_slots=num_slots(context.config),
        queue=context.queue,
        overwrite=True,
        drive_weights=weights,
        bar=context.bar,
        notice=context.log.notice,
    )
