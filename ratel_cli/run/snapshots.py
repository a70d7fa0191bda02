"""A run's snapshots: where they go, and whether that can be; before anything is written, and then beside the store.

Called by `run.finetune`. Invariants: a snapshot of another run is never written over, nor one whose run has lost
its store, unless the run starts over; a device that is too small is known before anything is written.
"""

from __future__ import annotations

import os

from ratel_cli.config.schema import RunConfig
from ratel_cli.config.sections import SnapshotConfig
from ratel_cli.errors import BadInput, EnvironmentFailure, IntegrityFailure
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.io.queue import IoQueue, open_queue
from ratel_cli.model.spec import ModelSpec
from ratel_cli.run.context import RunContext
from ratel_cli.run.snapshot_space import NUM_SLOTS, SnapshotSpace
from ratel_cli.run.store import prepare_store
from ratel_cli.store.layout import record_layout
from ratel_cli.store.lock import DATA_FILE_NAME
from ratel_cli.store.store import Store, StoreIdentity
from ratel_cli.training.snapshots import Snapshots
from ratel_cli.units import format_bytes

_SHARE = 0.25
"""Of what the drives read, that a copy may take from training."""


def find_snapshot(context: RunContext, identity: StoreIdentity, *, has_store: bool, resume: str) -> Store | None:
    """The snapshot that the run has made so far; None if there is none, none is wanted, or it is to be replaced."""
    config = context.config
    wanted = config.storage.snapshot
    if wanted is None:
        return None
    if os.path.realpath(wanted.path) in map(os.path.realpath, config.storage.paths):
        raise BadInput(
            f"storage.snapshot.path and storage.paths both name {wanted.path}: what is lost there is lost twice",
            "set storage.snapshot.path to a directory on another device",
        )
    if resume == "no" or not Store.exists([wanted.path]):
        return None
    if not has_store:
        raise BadInput(
            f"there is a snapshot in {wanted.path}, but no store in {', '.join(map(str, config.storage.paths))}",
            "`ratel restore` brings it back; --resume no starts over, and replaces the snapshot too",
        )
    return _open(context, wanted, identity)


def check_space(space: SnapshotSpace | None) -> None:
    """Raise EnvironmentFailure if the device is too small."""
    if space is not None and space.need_bytes > space.have_bytes:
        raise EnvironmentFailure(
            f"no space for the snapshot: need {format_bytes(space.need_bytes)} in {space.path}, "
            f"have {format_bytes(space.have_bytes)}",
            "free some space there, or set storage.snapshot.path to another device",
        )


def snapshot_rows(config: RunConfig, space: SnapshotSpace | None, hardware: HardwareProfile) -> list[tuple[str, str]]:
    """What the opening statement says of it."""
    wanted = config.storage.snapshot
    if wanted is None or space is None:
        return []
    every = f"{wanted.every} steps" if wanted.every > 1 else "step"
    told = (
        f"need {format_bytes(space.need_bytes)} in {wanted.path}, have {format_bytes(space.have_bytes)}; "
        f"every {every}, at up to {_bytes_per_second(hardware) / 1e9:.2g} GB/s"
    )
    return [("snapshot", told)]


def make_snapshot(context: RunContext, spec: ModelSpec, identity: StoreIdentity, *, resume: str) -> Store | None:
    """A snapshot of nothing yet, for the model's blocks; None if none is wanted."""
    wanted = context.config.storage.snapshot
    if wanted is None:
        return None
    try:
        store = prepare_store(
            [wanted.path],
            identity=identity,
            layout=record_layout(context.config.dtype),
            block_elements=[block.num_elements for block in spec.blocks],
            num_slots=NUM_SLOTS,
            queue=_open_queue(context),
            overwrite=resume == "no",
            what="snapshot",
            bar=context.bar,
            notice=context.log.notice,
        )
    except EnvironmentFailure as failure:
        raise _unusable(failure) from failure
    return context.resources.enter_context(store)


def start_snapshots(
    context: RunContext, store: Store, target: Store | None, hardware: HardwareProfile, *, is_new: bool
) -> Snapshots | None:
    """What copies the store's generations to `target` while it trains; None if no snapshot is wanted."""
    wanted, log = context.config.storage.snapshot, context.log
    if wanted is None or target is None:
        return None
    return context.resources.enter_context(
        Snapshots(
            store,
            target,
            is_new=is_new,
            every=wanted.every,
            bytes_per_second=_bytes_per_second(hardware),
            notice=log.notice,
            warn=log.warn,
        )
    )


def _open(context: RunContext, wanted: SnapshotConfig, identity: StoreIdentity) -> Store:
    queue = _open_queue(context)
    try:
        return context.resources.enter_context(
            Store.open([wanted.path], queue=queue, identity=identity, notice=context.log.notice)
        )
    except BadInput as error:
        raise BadInput(
            f"storage.snapshot.path: {error.message}",
            "set storage.snapshot.path to another directory, or start over with --resume no",
        ) from error
    except IntegrityFailure as failure:
        raise IntegrityFailure(
            f"storage.snapshot.path: {failure.message}",
            f"remove {wanted.path / DATA_FILE_NAME} to have it made anew, or set storage.snapshot.path elsewhere",
        ) from failure
    except EnvironmentFailure as failure:
        raise _unusable(failure) from failure


def _unusable(failure: EnvironmentFailure) -> EnvironmentFailure:
    return EnvironmentFailure(
        f"storage.snapshot.path: {failure.message}",
        "set storage.snapshot.path to a directory of this run's own, with room, that you may write to",
    )


def _open_queue(context: RunContext) -> IoQueue:
    """Its own: a device that hangs breaks its queue, and training must go on."""
    return context.resources.enter_context(open_queue(context.config.storage.engine, notice=context.log.notice))


def _bytes_per_second(hardware: HardwareProfile) -> float:
    return _SHARE * hardware.nvme.read_bytes_per_second
