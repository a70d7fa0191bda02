"""A run of several ranks: what is one rank's of a config, and what all of them must agree on.

Rank 0 has the run: its output directory, its terminal, its trackers, the export. Every other rank has a directory
within it, `run/ranks/N`, with what a run records, and a store of its own. Each reads the data by itself, rank 0 first,
so that what it has tokenised is there for the others on its machine.

Invariant: ranks that differ in model, data, settings or version are rejected by name before anything is trained.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.engine.ranks.launched import OfAllRanks, local_rank
from ratel_cli.engine.ranks.ranks import Ranks
from ratel_cli.errors import Interrupted
from ratel_cli.hardware.host import boot_id
from ratel_cli.hardware.shares import RankLayout
from ratel_cli.hardware.spec import HardwareProfile, Network
from ratel_cli.io.files import device_of
from ratel_cli.run.files.origin import OriginRecord, read_origin, write_origin
from ratel_cli.run.files.run_directory import paths_in, rank_directory, recorded_config
from ratel_cli.run.inputs.of_ranks import reject_unsupported
from ratel_cli.run.train.start import GoBack, Resume, Start, StartOver
from ratel_cli.store.open import stored_rank_slice, stored_step
from ratel_cli.store.store import Store, StoreIdentity
from ratel_cli.training.stopping import StopRequest
from ratel_cli.units import MIB, counted

RANK_TIMEOUT_SECONDS = 1800.0
"""A rank that does not answer for so long is taken for dead."""
_WHAT_DIFFERS = {
    "model_hash": "another model",
    "config_hash": "other settings",
    "data_hash": "other data",
    "seed": "another seed",
    "software": "other software",
    "config": "other settings",
}
_OF_EACH_RANK: Any = {
    "output_dir": True,
    "report_to": True,
    "hub_model_id": True,
    "limits": True,
    "storage": {"paths": True, "snapshot": {"path": True}},
}
"""Keys of a config that ranks may have of their own."""
_MEASURED_BYTES = 32 * MIB
"""What a rank sends to measure the network: as much as a small block."""
_HASH_BITS = 52
"""Bits of a hash that goes from rank to rank as a number."""


def config_of_rank(config: RunConfig, ranks: Ranks) -> RunConfig:
    """What this rank works with. Raises as `reject_unsupported`."""
    reject_unsupported(config, ranks.size)
    config, rank = config.of_rank(ranks.size), ranks.rank
    if not rank:
        return config
    directory = rank_directory(config.output_dir, rank)
    # Where paths are the same for all ranks, each has a directory in them.
    paths = paths_in(config.storage.paths, rank)
    recorded = recorded_config(directory)
    if recorded is not None and not Store.exists(paths) and Store.exists(recorded.storage.paths):
        paths = recorded.storage.paths
    snapshot = config.storage.snapshot
    if snapshot is not None:
        [place] = paths_in([snapshot.path], rank)
        snapshot = snapshot.model_copy(update={"path": place})
    storage = config.storage.model_copy(update={"paths": paths, "snapshot": snapshot})
    changes = {"output_dir": directory, "storage": storage, "report_to": (), "hub_model_id": None}
    return config.model_copy(update=changes)


def check_same_options(ranks: Ranks, *options: object) -> None:
    """Raise OfAllRanks if ranks were started with other options of the command: they would not do the same swaps."""
    known = [number for (number,) in ranks.gathered([_number(repr(options))])]
    for rank, number in enumerate(known):
        if number != known[0]:
            raise OfAllRanks(
                f"rank {rank} was started with other options than rank 0", "start all ranks with the same command"
            )


@contextmanager
def first_rank_first(ranks: Ranks) -> Iterator[None]:
    """A context that rank 0 leaves before any other enters it, however long it takes."""
    if ranks.rank:
        ranks.wait_for_all()
    yield
    if not ranks.rank:
        ranks.wait_for_all()


def measured_in_turn(ranks: Ranks, measure: Callable[[], HardwareProfile]) -> HardwareProfile:
    """What `measure` gives, in each rank of a machine while the others wait. Raises what it raises."""
    own = local_rank()
    last = max(int(number) for (number,) in ranks.gathered([own]))
    for _ in range(own):
        ranks.wait_for_all()
    measured = measure()
    for _ in range(own, last):
        ranks.wait_for_all()
    return measured


def layout_of(ranks: Ranks, paths: Sequence[Path]) -> RankLayout:
    """Where the ranks are; `paths`: this one's directories. Raises as `Channel.swap`."""
    here, drives = boot_id(), sorted(set(map(device_of, paths)))
    known = ranks.gathered([_number(here), _number(f"{here} {drives}")])
    on_machine, on_drives = (column.count(column[ranks.rank]) for column in zip(*known, strict=True))
    return RankLayout(num_ranks=ranks.size, on_machine=on_machine, on_drives=on_drives)


def measured_network(ranks: Ranks) -> Network | None:
    """The rate at which each rank sends to all others, while all do; None if it is alone. Raises as `Channel.swap`."""
    if ranks.size == 1:
        return None
    part_bytes = _MEASURED_BYTES // (ranks.size - 1)
    sent, received = memoryview(bytearray(part_bytes)), [memoryview(bytearray(part_bytes)) for _ in range(ranks.size)]
    ranks.weights.swap([sent] * ranks.size, received)  # the first one waits for the slowest rank
    start = time.perf_counter()
    ranks.weights.swap([sent] * ranks.size, received)
    seconds = max(taken for (taken,) in ranks.gathered([time.perf_counter() - start]))
    return Network(bytes_per_second=part_bytes * (ranks.size - 1) / seconds)


def with_shape_of_first(ranks: Ranks, config: RunConfig, written: RunConfig) -> RunConfig:
    """The config with the micro-batches, and the chunks of the head, that rank 0 has, where `written` leaves them to a
    plan: they decide the bits. With micro-batches it names this rank's part of the step, and no tokens of all."""
    if ranks.size == 1:
        return config
    own_chunk = config.head_chunk if isinstance(config.head_chunk, int) else 0
    own_size = 0 if config.split is None else config.split[0]
    first_chunk, first_size = map(int, ranks.gathered([own_chunk, own_size])[0])
    if first_chunk and written.is_chunk_planned:
        config = config.chunked_by(first_chunk)
    if first_size and written.split is None:
        config = config.split_by(first_size)
    return config if config.split is None else config.model_copy(update={"tokens_per_step": None})


def paths_of_all(ranks: Ranks, paths: Sequence[Path]) -> list[list[Path]]:
    """By rank, the directories of its store."""
    return [list(map(Path, json.loads(each))) for each in texts_of_all(ranks, json.dumps(list(map(str, paths))))]


def texts_of_all(ranks: Ranks, text: str) -> list[str]:
    """By rank, what each gives."""
    own = text.encode()
    lengths = [int(length) for (length,) in ranks.gathered([len(own)])]
    received = [bytearray(length) for length in lengths]
    received[ranks.rank][:] = own
    ranks.control.swap([memoryview(bytearray(own))] * ranks.size, [memoryview(each) for each in received])
    return [each.decode() for each in received]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Where all ranks of a run begin."""

    start: Start
    ranks_before: int
    """How many ranks the run had, if it resumes after its last step; else 0."""


def common_beginning(ranks: Ranks, paths: Sequence[Path], start: Start, *, first_step: int) -> Beginning:
    """Where all ranks begin, by the stores that they have in `paths`: as `start` says, or at the beginning if not all
    have come to the end of their import, which commits `first_step`.

    Raises OfAllRanks if one of them has lost its store, or if a run goes back with another number of ranks.
    """
    if isinstance(start, StartOver):
        return Beginning(start=start, ranks_before=0)
    found = stored_rank_slice(paths) if Store.exists(paths) else None
    step = stored_step(paths) if found is not None else None
    size = 0 if found is None else found.size
    known = ranks.gathered([size, 0 if step is None else step, step is not None and step > first_step])
    had = int(known[0][0])
    others = [int(step) for size, step, _ in known if size not in (0, ranks.size)]
    if not had and others:
        raise _lost(0, max(others))
    begins = Beginning(start=start, ranks_before=had if isinstance(start, Resume) else 0)
    if had in (0, ranks.size):
        # Beside a store of rank 0, one of another number of ranks is left of an earlier run.
        lost = [rank for rank, (size, _, _) in enumerate(known) if size != ranks.size]
        if not lost or len(lost) == ranks.size:
            return begins
        if not any(has_trained for size, _, has_trained in known if size == ranks.size):
            return Beginning(start=StartOver(), ranks_before=0)
        raise _lost(lost[0], max(int(step) for size, step, _ in known if size == ranks.size))
    if isinstance(start, GoBack):
        raise OfAllRanks(
            f"the run has {counted(had, 'rank')}, and this command {ranks.size}: both may not change at once",
            f"go back with --ranks {had}, or resume from the last step",
        )
    return begins


def _lost(rank: int, newest: int) -> OfAllRanks:
    return OfAllRanks(
        f"rank {rank} has no store, and the others are at step {newest}",
        "mount its drives; or start over with --resume no",
    )


def share_origin(ranks: Ranks, config: RunConfig) -> None:
    """Let all ranks have what rank 0 has recorded of the run that this one started from."""
    if ranks.size == 1:
        return
    record = read_origin(config)
    first = json.loads(texts_of_all(ranks, json.dumps(None if record is None else asdict(record)))[0])
    found = None if first is None else OriginRecord(**first)
    if found != record:
        write_origin(config, found)


def check_same(ranks: Ranks, identity: StoreIdentity, config: RunConfig, start: Start) -> None:
    """Raise OfAllRanks if ranks differ in what decides the bits, or in what they do together."""
    common = config.model_dump(mode="json", exclude=_OF_EACH_RANK)
    own = [str(getattr(identity, name)) for name in list(_WHAT_DIFFERS)[:-1]]
    known = ranks.gathered([_number(text) for text in (*own, json.dumps([common, repr(start)], sort_keys=True))])
    for rank, found in enumerate(known):
        differs = [
            words for words, own, first in zip(_WHAT_DIFFERS.values(), found, known[0], strict=True) if own != first
        ]
        if differs:
            raise OfAllRanks(
                f"rank {rank} has {' and '.join(dict.fromkeys(differs))} than rank 0",
                "start all ranks with the same command, the same config and data, and the same versions",
            )


def stop_together(ranks: Ranks, stop: StopRequest) -> None:
    """Raise Interrupted in all ranks if a signal was received in any."""
    received = [int(number) for (number,) in ranks.gathered([stop.received or 0])]
    if any(received):  # a signal that comes from now on counts the next time, in all of them
        stop.note(next(filter(None, received)))
        try:
            stop.check()
        except Interrupted as stopped:
            stopped.reported_by = 0
            raise


def _number(text: str) -> float:
    digest = blake2b(text.encode(), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> (64 - _HASH_BITS))
