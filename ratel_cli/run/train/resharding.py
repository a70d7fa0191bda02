"""Lets a run go on with another number of ranks: the stores of those that it had become stores of those that it has.

    1. begin    record which stores will be made and which will go
    2. copy     the newest step that all stores have, and saved steps, into new stores beside the old ones
    3. decide   record that the new stores count
    4. move     each of them to its place, over the old one there; delete old ones that have no successor
    5. end      delete the record

Rank 0 does all of it, so it must see the directories of all ranks. Before phase 3 the old stores are untouched but for
a return to the step that all have; what was begun is deleted at the next start. After it the next start goes on with
phase 4, whatever number of ranks it has.

Invariants: at any moment a whole set of stores has the newest step that was committed by all; nothing that Ratel did
not write is touched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.engine.ranks.commits import newest_common
from ratel_cli.engine.ranks.launched import OfAllRanks
from ratel_cli.engine.ranks.ranks import Ranks
from ratel_cli.errors import BadInput, EnvironmentFailure
from ratel_cli.io.files import SpaceNeed, check_space, sync_path
from ratel_cli.model.files.import_weights import WeightSource
from ratel_cli.model.files.in_place import base_files_of
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.run.context import RunContext
from ratel_cli.run.files.resharding_record import (
    NEW_STORE,
    ReshardingRecord,
    forget_resharding,
    read_resharding,
    write_resharding,
)
from ratel_cli.run.files.run_directory import rank_directory, recorded_config, store_of_rank
from ratel_cli.run.inputs.settings import as_recorded, new_geometry, settings_hash
from ratel_cli.run.train.open import sliced, slices_of
from ratel_cli.run.train.ranks import first_rank_first, paths_of_all
from ratel_cli.run.train.store import prepare_store
from ratel_cli.store.barrier import failpoint
from ratel_cli.store.fill import Copied
from ratel_cli.store.headers import read_header
from ratel_cli.store.layout import RankSlice
from ratel_cli.store.lock import DATA_FILE_NAME, OWNER_FILE_NAME, StoreLock
from ratel_cli.store.open import START_OVER, StoreMismatch, stored_rank_slice
from ratel_cli.store.run_record import RECORD_FILE_NAME
from ratel_cli.store.store import Store, StoreIdentity
from ratel_cli.units import counted

_WAIT_SECONDS = 2.0
"""Seconds to wait for a process that uses the stores."""


def finish_resharding(config: RunConfig, log: RunLog) -> None:
    """Bring what a crash has interrupted to its end, or back to the old stores.

    Raises EnvironmentFailure, also if another process is changing them; BadInput if the record cannot be read.
    """
    record = read_resharding(config)
    if record is None:
        return
    there = [path for path in (*record.made, *record.deleted) if (path / DATA_FILE_NAME).exists()]
    lock = StoreLock(there, create=False, wait_seconds=_WAIT_SECONDS, read_only=True) if there else nullcontext()
    with lock:
        end = "finished" if record.is_decided else "begun again"
        log.notice(f"the change to another number of ranks was interrupted; it is {end}")
        _finish(config, record)


def _finish(config: RunConfig, record: ReshardingRecord) -> None:
    """Phases 4 and 5; before phase 3 the old stores count. All stores must be locked."""
    try:
        if record.is_decided:
            _move(record)
        else:
            for directory in record.made:
                _delete_store(directory / NEW_STORE)
        forget_resharding(config)
    except OSError as error:
        raise EnvironmentFailure(f"{error.filename}: cannot be moved or deleted: {error.strerror}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Resharding:
    """A change to another number of ranks, with which a run resumes."""

    ranks: Ranks
    before: int
    """The number of ranks that the run had."""
    was: RunConfig | None
    """The config as those had it, with steps of the same micro-batches, in rank 0; None in others."""

    @classmethod
    def of(cls, config: RunConfig, ranks: Ranks, *, before: int, dry_run: bool) -> Resharding | None:
        """The change that a run of `before` ranks needs; None if it begins, or resumes with as many.

        Raises OfAllRanks in a dry run; BadInput if there is a snapshot of those, or if the steps of this number of
        ranks cannot be those of the run.
        """
        if before in (0, ranks.size):
            return None
        if dry_run:
            raise OfAllRanks(
                f"the run has {counted(before, 'rank')}: to continue with {ranks.size}, its stores must be "
                "redistributed",
                f"leave out --dry-run; or use --ranks {before}; `ratel plan --ranks {ranks.size}` predicts what it "
                "takes",
            )
        snapshot = config.storage.snapshot
        copied = None if snapshot is None or ranks.rank else stored_rank_slice([snapshot.path])
        if snapshot is not None and copied is not None and copied.size != ranks.size:
            raise BadInput(
                f"storage.snapshot.path: the snapshot in {snapshot.path} is one of {counted(copied.size, 'rank')}, and "
                f"this command has {ranks.size}",
                "set storage.snapshot.path to another directory; the old snapshot is of use until a new one is made",
            )
        was = None if ranks.rank else _as_of_ranks_before(config, before=before, size=ranks.size)
        return cls(ranks=ranks, before=before, was=was)

    def shaped(self, config: RunConfig) -> RunConfig:
        """The config with the micro-batches and the chunks of the head that the run has, in rank 0."""
        if self.was is None:
            return config
        config = config.split_by(self.was.known_split[0])
        return config.chunked_by(self.was.head_chunk) if isinstance(self.was.head_chunk, int) else config

    def make(self, context: RunContext, spec: ModelSpec, source: WeightSource, identity: StoreIdentity) -> None:
        """Phases 1 to 5. `source`: of the base model's weights. `identity`: of the new stores.

        Raises BadInput if a store is not here, or belongs to another run; OfAllRanks if a rank does not see its new
        one; IntegrityFailure if one is damaged, and NotEnoughSpace.
        """
        ranks, paths = self.ranks, context.config.storage.paths
        stores_of = paths_of_all(ranks, paths)
        with ExitStack() as changing:
            decide = None
            with first_rank_first(ranks):
                if self.was is not None:
                    made = _resharded(context, spec, source, identity, stores_of, before=self.before, was=self.was)
                    decide = changing.enter_context(made)
            _check_seen(ranks, paths)
            with first_rank_first(ranks):
                if decide is not None:
                    decide()


def _as_of_ranks_before(config: RunConfig, *, before: int, size: int) -> RunConfig:
    """The config as `before` ranks had it, whose steps have the same micro-batches as those of `size` ranks, with the
    chunks of the head that the store was made with. Raises BadInput if there is none."""
    number = config.sequences_per_step if config.split is None else config.split[1]
    if size * number % before:
        raise _other_steps(config, before=before, size=size)
    was = as_recorded(config.of_ranks(size, shared_by=before))
    if was.split is None:  # no split gives the settings of the store
        recorded = recorded_config(config.output_dir)
        if recorded is None or before * recorded.sequences_per_step != size * config.sequences_per_step:
            raise _other_steps(config, before=before, size=size)
        was = was.split_by(recorded.known_split[0])  # opening the stores says that settings differ
    if config.sequences_per_step % was.known_split[0]:
        raise _other_steps(config, before=before, size=size)
    return was


def _recorded_number(config: RunConfig, before: int) -> int | None:
    """Micro-batches of a step of all `before` ranks, as the run has recorded them."""
    recorded = recorded_config(config.output_dir)
    return None if recorded is None or recorded.split is None else before * recorded.split[1]


def _other_steps(config: RunConfig, *, before: int, size: int) -> BadInput:
    """A step would have other micro-batches than before."""
    recorded, hint = recorded_config(config.output_dir), f"resume it with --ranks {before}"
    if config.split is None:
        wanted = counted(size * config.sequences_per_step, "sequence")
        has = None if recorded is None else counted(before * recorded.sequences_per_step, "sequence")
    else:
        wanted, of_run = f"{size} x {config.split[1]}", _recorded_number(config, before)
        has = None if of_run is None else counted(of_run, "micro-batch", "micro-batches")
        if of_run is not None and not of_run % size:
            hint = f"set gradient_accumulation_steps={of_run // size}; it is that of each rank"
    if has is None:
        return BadInput(f"a step of this run has other micro-batches than {wanted}", hint)
    return BadInput(f"a step of this run has {has}, and not {wanted}", hint)


@contextmanager
def _resharded(
    context: RunContext,
    spec: ModelSpec,
    source: WeightSource,
    identity: StoreIdentity,
    stores_of: Sequence[Sequence[Path]],
    *,
    before: int,
    was: RunConfig,
) -> Iterator[Callable[[], None]]:
    """The stores of all ranks, made from those of the `before` ranks that the run had. For rank 0 alone.

    Yields what lets them count; if it is not called, they are deleted. `stores_of`: by rank, its directories.
    """
    config, size = context.config, len(stores_of)
    olds = [_real(paths) for paths in _stores_before(config, before)]
    news = [_real(paths) for paths in stores_of]
    made = tuple(path for paths in news for path in paths)
    record = ReshardingRecord(
        made=made, deleted=tuple(path for paths in olds for path in paths if path not in made), store_ids=()
    )
    with ExitStack() as opened:
        stores = [opened.enter_context(_open_old(context, paths, identity, was, before, size)) for paths in olds]
        _check_slices(stores, before)
        _check_free(record)
        slices = [RankSlice(rank, size) for rank in range(size)]
        base_files = [base_files_of(spec.sliced(each), source) for each in slices]
        geometries = [
            new_geometry(
                config,
                spec.sliced(each).stored_blocks,
                shares=_shares(stores[0], len(paths)),
                rank_slice=each,
                base_files=files,
            )
            for each, paths, files in zip(slices, news, base_files, strict=True)
        ]
        needs = zip(made, (num_bytes for each in geometries for num_bytes in each.file_bytes()), strict=True)
        check_space([SpaceNeed(directory=path, num_bytes=num_bytes) for path, num_bytes in needs])
        step = _go_to_common_step(context, stores)
        had = counted(before, "rank")
        context.log.say(f"the run had {had}, and has {size} now: its state after step {step} is copied")
        write_resharding(config, record)
        decided = False

        def decide() -> None:
            nonlocal decided
            counts = replace(record, store_ids=tuple(_store_id(path / NEW_STORE) for path in made))
            write_resharding(config, counts)
            decided = True
            failpoint("reshard.decided")
            _finish(config, counts)

        try:
            for rank, (paths, geometry, files) in enumerate(zip(news, geometries, base_files, strict=True)):
                new = [path / NEW_STORE for path in paths]
                of_rank = replace(context, config=_of_rank(config, rank))
                what = f"store of rank {rank}"
                with prepare_store(
                    of_rank, new, geometry, identity=identity, overwrite=False, base_files=files, what=what
                ) as store:
                    _copy(context, spec, stores, store)
                failpoint("reshard.copied")
            yield decide
        finally:
            if not decided:
                _finish(config, record)


def _check_seen(ranks: Ranks, paths: Sequence[Path]) -> None:
    """Raise OfAllRanks unless each rank sees the new store that rank 0 has made for it; `paths`: its directories."""
    sees = stored_rank_slice([path / NEW_STORE for path in paths]) == ranks.slice
    blind = [rank for rank, (found,) in enumerate(ranks.gathered([float(sees)])) if not found]
    if blind:
        raise OfAllRanks(
            f"rank {blind[0]} does not see the store that rank 0 has made for it",
            "to go on with another number of ranks, rank 0 must reach the directories of all",
        )


def _real(paths: Sequence[Path]) -> list[Path]:
    return [Path(os.path.realpath(path)) for path in paths]


def _open_old(
    context: RunContext, paths: Sequence[Path], identity: StoreIdentity, was: RunConfig, before: int, size: int
) -> Store:
    try:
        return context.open_store(paths, identity=replace(identity, config_hash=settings_hash(was)))
    except StoreMismatch as error:
        of_run = _recorded_number(context.config, before)
        is_other = of_run not in (None, size * context.config.known_split[1])
        if set(error.fields) <= {"config_hash", "data_hash"} and is_other:
            raise _other_steps(context.config, before=before, size=size) from error
        raise


def _store_id(directory: Path) -> str | None:
    """The id of the store in a directory; None if there is none."""
    identification = read_header(directory / DATA_FILE_NAME).identification
    return None if identification is None else identification.store_id.hex()


def _stores_before(config: RunConfig, before: int) -> list[Sequence[Path]]:
    found: list[Sequence[Path]] = [config.storage.paths]
    for rank in range(1, before):
        paths = store_of_rank(config, rank)
        if not Store.exists(paths):
            raise BadInput(
                f"the store of rank {rank} is not here: to go on with another number of ranks, rank 0 reads all stores",
                f"mount its drives; or resume with --ranks {before}",
            )
        found.append(paths)
    return found


def _check_slices(stores: Sequence[Store], before: int) -> None:
    for rank, store in enumerate(stores):
        if store.rank_slice != RankSlice(rank, before):
            raise BadInput(f"the store of rank {rank} belongs to another number of ranks", START_OVER)


def _check_free(record: ReshardingRecord) -> None:
    """What was begun earlier is deleted by now: what is there is not Ratel's."""
    for directory in record.made:
        if os.path.lexists(directory / NEW_STORE):
            raise BadInput(f"{directory / NEW_STORE} is in the way: a new store will be made there", "move it away")


def _of_rank(config: RunConfig, rank: int) -> RunConfig:
    output_dir = rank_directory(config.output_dir, rank) if rank else config.output_dir
    return config.model_copy(update={"output_dir": output_dir})


def _shares(store: Store, number: int) -> tuple[int, ...]:
    """The shares of a new store with this many directories: those of the old one, if it has as many, else equal
    ones."""
    return store.shares if len(store.shares) == number else (1,) * number


def _go_to_common_step(context: RunContext, stores: Sequence[Store]) -> int:
    """Let all be at the newest step that each of them has, and check every byte of it."""
    for rank, store in enumerate(stores):
        with context.bar(f"verifying the store of rank {rank}", store.generation_bytes) as advance:
            store.ensure_whole(context.pool, progress=advance, notice=context.log.notice)
    known = [(store.progress.step, store.step_before) for store in stores]
    newest = newest_common([{step for step in steps if step is not None} for steps in known])
    if newest is None:
        raise BadInput("the stores of the ranks have no step in common", START_OVER)
    for store in stores:
        if store.progress.step != newest:
            store.fall_back(context.pool)
    return newest


def _copy(context: RunContext, spec: ModelSpec, stores: Sequence[Store], target: Store) -> None:
    """The steps that all stores have saved, and the current one, into a new store."""
    current = stores[0].progress.step
    saved = set.intersection(*(set(store.pinned_steps) for store in stores))
    for step in sorted({*saved, current}):
        source = sliced(slices_of(stores, step), spec, context.pool, target.rank_slice)
        context.fill(target, Copied(source), f"copying step {step} to rank {target.rank_slice.rank}")
        if step in saved:
            target.pin()


def _move(record: ReshardingRecord) -> None:
    """Phase 4. What is done already is left alone."""
    for directory, wanted in zip(record.made, record.store_ids, strict=True):
        if wanted not in (_store_id(directory / NEW_STORE), _store_id(directory)):
            raise EnvironmentFailure(
                f"{directory}: the new store is not here; nothing was deleted", "connect the drive that it is on"
            )
    for directory in record.made:
        new = directory / NEW_STORE
        for name in (RECORD_FILE_NAME, DATA_FILE_NAME):  # the store last: it is there if anything has still to be done
            if (new / name).exists():
                os.replace(new / name, directory / name)
        sync_path(directory)
        _delete_store(new)
        failpoint("reshard.moved")
    for directory in record.deleted:
        _delete_store(directory)
        failpoint("reshard.deleted")


def _delete_store(directory: Path) -> None:
    """Delete a store of Ratel's, and its directory if nothing else is there."""
    if not directory.is_dir():
        return
    for name in (DATA_FILE_NAME, OWNER_FILE_NAME, RECORD_FILE_NAME):
        (directory / name).unlink(missing_ok=True)
    sync_path(directory)
    with suppress(OSError):  # something else is there
        directory.rmdir()
