"""The snapshot of a run: found, checked for space, created, and handed to the thread that copies to it.

Invariants: a snapshot of another run is overwritten only if the user insists, also where both runs have the same
settings, and its store never; one whose run has lost its store, only if the run starts over. A device that is too
small is reported before anything is written.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.keys.sections import SnapshotConfig
from ratel_cli.engine.ranks.ranks import Ranks
from ratel_cli.errors import BadInput, EnvironmentFailure, IntegrityFailure, RatelError
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.model.files.import_weights import WeightSource
from ratel_cli.model.files.in_place import base_files_of
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.report.words.run import snapshot_line
from ratel_cli.run.context import RunContext
from ratel_cli.run.files.output import is_of_other_run, missing_store
from ratel_cli.run.files.run_directory import recorded_config
from ratel_cli.run.train.open import newest_snapshot
from ratel_cli.run.train.space import SNAPSHOT_SLOTS, Space
from ratel_cli.run.train.start import Start, StartOver
from ratel_cli.run.train.store import describe_store, prepare_store, reject_replacing
from ratel_cli.store.base_files import list_bytes_of
from ratel_cli.store.layout import Geometry
from ratel_cli.store.lock import DATA_FILE_NAME
from ratel_cli.store.open import stored_rank_slice
from ratel_cli.store.run_record import read_record
from ratel_cli.store.store import Store, StoreIdentity
from ratel_cli.training.snapshots import AllRanks, Snapshots
from ratel_cli.units import counted, format_rate

_NONE = -1
_SHARE = 0.25
"""The share of the drives' read rate that a copy may take from training."""


def find_snapshot(context: RunContext, identity: StoreIdentity, start: Start, *, has_store: bool) -> Store | None:
    """The snapshot that the run has made so far; None if there is none, or none is wanted, or the run starts over."""
    config = context.config
    wanted = config.storage.snapshot
    if wanted is None:
        return None
    if os.path.realpath(wanted.path) in map(os.path.realpath, config.storage.paths):
        raise BadInput(
            f"storage.snapshot.path and storage.paths both name {wanted.path}: "
            "losing it would lose both the store and the snapshot",
            "set storage.snapshot.path to a directory on another device",
        )
    _reject_other_run(config, wanted.path, start)
    if start == StartOver(replaces_others=False):
        reject_replacing(config, [wanted.path], identity)
    if isinstance(start, StartOver) or not Store.exists([wanted.path]):
        return None
    if not has_store:
        raise BadInput(
            f"there is a snapshot in {wanted.path}, but {missing_store(config)}",
            "restore the store with `ratel restore CONFIG`, or start over with --resume no, which replaces the "
            "snapshot, too",
        )
    stored = stored_rank_slice([wanted.path])
    if stored is not None and stored != context.ranks.slice:
        raise BadInput(
            f"storage.snapshot.path: the snapshot in {wanted.path} is one of {counted(stored.size, 'rank')}, and this "
            f"run has {context.ranks.size}",
            "set storage.snapshot.path to another directory",
        )
    return _open(context, wanted, identity)


def space_rows(config: RunConfig, spaces: Sequence[Space], hardware: HardwareProfile) -> list[tuple[str, str]]:
    """The rows of the opening statement about snapshot and export."""
    words = {space.name: space.words for space in spaces}
    wanted = config.storage.snapshot
    if wanted is not None:
        every = f"{wanted.every} steps" if wanted.every > 1 else "step"
        words["snapshot"] += f"; every {every}, at up to {format_rate(_bytes_per_second(hardware))}"
    return list(words.items())


def make_snapshot(
    context: RunContext, spec: ModelSpec, source: WeightSource, identity: StoreIdentity, start: Start
) -> Store | None:
    """A new, empty snapshot for the model's blocks; None if none is wanted. `source`: of the base model's weights."""
    wanted = context.config.storage.snapshot
    if wanted is None:
        return None
    rank_slice = context.ranks.slice
    own = spec.sliced(rank_slice)
    base_files = base_files_of(own, source)
    geometry = Geometry(
        blocks=own.stored_blocks,
        num_slots=SNAPSHOT_SLOTS,
        shares=(1,),
        rank_slice=rank_slice,
        list_bytes=list_bytes_of(base_files),
    )
    try:
        return prepare_store(
            context,
            [wanted.path],
            geometry,
            identity=identity,
            overwrite=isinstance(start, StartOver),
            base_files=base_files,
            queue=context.open_queue(),
            what="snapshot",
        )
    except EnvironmentFailure as failure:
        raise _unusable(failure) from failure


def start_snapshots(
    context: RunContext, store: Store, target: Store | None, hardware: HardwareProfile
) -> Snapshots | None:
    """Start the thread that copies the store's generations to `target` during training; None without `target`."""
    wanted, log, ranks = context.config.storage.snapshot, context.log, context.ranks
    if wanted is None or target is None:
        return None
    if ranks.size > 1:
        ranks.wait_for_all()  # where a snapshot is new, all of it was written
        _go_to_common_step(context, target)
    return context.resources.enter_context(
        Snapshots(
            store,
            target,
            every=wanted.every,
            bytes_per_second=_bytes_per_second(hardware),
            notice=log.notice,
            warn=log.warn,
            after_copy=lambda step: log.say(snapshot_line(step)),
            ranks=AllRanks(of_all=partial(_of_all, ranks), meet=ranks.wait_for_all),
        )
    )


def _of_all(ranks: Ranks, is_busy: bool, is_over: bool) -> tuple[bool, bool]:
    known = ranks.gathered([is_busy, is_over])
    return any(busy for busy, _ in known), any(over for _, over in known)


def _go_to_common_step(context: RunContext, target: Store) -> None:
    """Let the snapshots of all ranks be of the same step, if they have one in common, so that all keep it while they
    copy the next one."""
    before = _NONE if target.step_before is None else target.step_before
    known = context.ranks.gathered([_NONE, _NONE] if target.is_new else [target.progress.step, before])
    newest = newest_snapshot([(int(step), None if before == _NONE else int(before)) for step, before in known])
    if newest not in (None, _NONE, target.progress.step):
        try:
            target.fall_back(None)
        except RatelError as failure:  # the next copy reports what is wrong with the device
            context.log.warn(f"the snapshot is not that of the other ranks: {failure.message}")


def _reject_other_run(config: RunConfig, path: Path, start: Start) -> None:
    """Raise BadInput if there is a snapshot of another run, or its store, which `start` does not replace.

    Without a record, the store's identity decides.
    """
    record = read_record(path) if Store.exists([path]) else None
    if record is None or not is_of_other_run(config, path, record):
        return
    theirs = recorded_config(Path(record.run))
    if theirs is not None and os.path.realpath(path) in map(os.path.realpath, theirs.storage.paths):
        raise BadInput(
            f"storage.snapshot.path: {path} holds {describe_store(config, [path])}, which the snapshot would replace",
            "set storage.snapshot.path to a directory that only this run uses",
        )
    if start == StartOver(replaces_others=True):
        return
    raise BadInput(
        f"storage.snapshot.path: {path} holds {describe_store(config, [path], what='snapshot')}",
        "set storage.snapshot.path to a directory that only this run uses; or replace that snapshot with "
        "--resume no --overwrite-store",
    )


def _open(context: RunContext, wanted: SnapshotConfig, identity: StoreIdentity) -> Store:
    queue = context.open_queue()
    try:
        return context.open_store([wanted.path], identity=identity, queue=queue)
    except BadInput as error:
        raise BadInput(
            f"storage.snapshot.path: {error.message}",
            "set storage.snapshot.path to another directory, or start over with --resume no",
        ) from error
    except IntegrityFailure as failure:
        raise IntegrityFailure(
            f"storage.snapshot.path: {failure.message}",
            f"remove {wanted.path / DATA_FILE_NAME}, so that the run makes a new snapshot; "
            "or set storage.snapshot.path to another directory",
        ) from failure
    except EnvironmentFailure as failure:
        raise _unusable(failure) from failure


def _unusable(failure: EnvironmentFailure) -> EnvironmentFailure:
    return EnvironmentFailure(
        f"storage.snapshot.path: {failure.message}",
        "set storage.snapshot.path to a directory that only this run uses, with enough space and write permission",
    )


def _bytes_per_second(hardware: HardwareProfile) -> float:
    return _SHARE * hardware.nvme.read_bytes_per_second
