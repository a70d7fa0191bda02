"""Snapshots of a training state: its last step, copied to other directories, from where training can go on.

A snapshot is a store like any other. Its identity says which store it was copied from, until training goes on from it:
then it is a training state of its own.

Invariants: only a snapshot of the same training state is replaced, and nothing else; once a snapshot is complete, there
is always one complete generation.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from ratel_cli.errors import BadInput, EnvironmentFailure, IntegrityFailure
from ratel_cli.io.queue import IoQueue, depth_for, open_queue
from ratel_cli.library.settings import OWN_LOOP
from ratel_cli.run.context import RunContext
from ratel_cli.run.train.space import SNAPSHOT_SLOTS
from ratel_cli.store.fill import Copied
from ratel_cli.store.layout import Geometry
from ratel_cli.store.open import stored_identity
from ratel_cli.store.store import Store, StoreIdentity

_SNAPSHOT_OF: Final = f"{OWN_LOOP}: a snapshot of store "
_HINT: Final = "give another directory, or delete what is there"


def is_snapshot(identity: StoreIdentity) -> bool:
    """Whether a store was copied from another one, and nobody has trained on from it."""
    return identity.data_hash.startswith(_SNAPSHOT_OF)


def write_snapshot(context: RunContext, store: Store, directories: Sequence[Path]) -> None:
    """Copy the store's current generation into `directories`, and return when it is durable.

    Raises BadInput if they hold anything but a snapshot of this store, and what `Store.create` and `fill` raise;
    the snapshot before stays valid then.
    """
    config, notice = context.config, context.log.notice
    for directory in directories:
        if os.path.realpath(directory) in map(os.path.realpath, config.storage.paths):
            raise BadInput(
                f"{directory} has the training state itself: losing it would lose the snapshot, too",
                "give a directory on another drive",
            )
        if directory.exists() and not directory.is_dir():
            raise BadInput(f"{directory} is no directory")
    data_hash = f"{_SNAPSHOT_OF}{store.store_id.hex()}"
    # A queue of its own: a drive that hangs breaks only this one, and not that of training.
    with open_queue(config.storage.engine, notice=notice, depth=depth_for(len(directories))) as queue:
        if Store.exists(directories):
            target = _found(context, directories, queue, data_hash)
        else:
            target = _made(context, store, directories, queue, replace(store.identity, data_hash=data_hash))
        with target:
            context.fill(target, Copied(store.current()), "copying the snapshot")


def _made(
    context: RunContext, store: Store, directories: Sequence[Path], queue: IoQueue, identity: StoreIdentity
) -> Store:
    geometry = Geometry(
        blocks=store.blocks,
        num_slots=SNAPSHOT_SLOTS,
        shares=(1,) * len(directories),
        chunk_elements=store.chunk_elements,
    )
    notice = context.log.notice
    with context.bar("preparing the snapshot", geometry.slot_address(geometry.num_slots)) as advance:
        try:
            return Store.create(directories, geometry, identity=identity, queue=queue, notice=notice, progress=advance)
        except EnvironmentFailure as failure:
            raise EnvironmentFailure(
                f"the snapshot cannot be made: {failure.message}",
                "give a directory with enough space and write permission",
            ) from failure


def _found(context: RunContext, directories: Sequence[Path], queue: IoQueue, data_hash: str) -> Store:
    """The snapshot that is there. Looks at what it is before it waits for a lock: others may use what is there."""
    where = ", ".join(map(str, directories))
    identity = stored_identity(directories)
    if identity is None or identity.data_hash != data_hash:
        raise BadInput(f"what is in {where} is no snapshot of this training state, so it is not replaced", _HINT)
    try:
        return Store.open(directories, queue=queue, identity=identity, notice=context.log.notice)
    except BadInput as error:
        raise BadInput(f"the snapshot in {where} cannot be replaced: {error.message}", _HINT) from error
    except IntegrityFailure as failure:
        raise IntegrityFailure(f"the snapshot in {where} cannot be replaced: {failure.message}", _HINT) from failure
