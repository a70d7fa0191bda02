"""A run of several ranks: what is one rank's of a config, and what all of them must agree on.

Rank 0 has the run: its output directory, its terminal, its trackers, the export. Every other rank has a directory
within it, `run/ranks/N`, with what a run records, and a store of its own. Each reads the data by itself, rank 0 first,
so that what it has tokenised is there for the others on its machine.

Invariant: ranks that differ in model, data, settings or version are rejected by name before anything is trained.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from socket import gethostname

from ratel_cli.config.schema import RunConfig
from ratel_cli.engine.ranks.launched import OfAllRanks
from ratel_cli.engine.ranks.ranks import Ranks
from ratel_cli.run.files.run_directory import rank_directory
from ratel_cli.run.train.start import Start, StartOver
from ratel_cli.store.open import stored_rank_slice, stored_step
from ratel_cli.store.store import Store, StoreIdentity
from ratel_cli.training.stopping import StopRequest
from ratel_cli.units import counted

RANK_TIMEOUT_SECONDS = 1800.0
"""A rank that does not answer for so long is taken for dead."""
_WHAT_DIFFERS = {
    "model_hash": "another model",
    "config_hash": "other settings",
    "data_hash": "other data",
    "seed": "another seed",
    "software": "other software",
}
_HASH_BITS = 52
"""Of a hash that goes from rank to rank as a number."""


def config_of_rank(config: RunConfig, rank: int, *, has_origin: bool = False) -> RunConfig:
    """What a rank works with. `has_origin`: the run starts from another one. Raises OfAllRanks for what several ranks
    do not do."""
    if has_origin:
        raise OfAllRanks("--from is for one rank alone", "leave out --ranks")
    if config.split is None:
        raise OfAllRanks(
            "tokens_per_step is planned for one rank alone",
            "with several ranks, set micro_batch_size and gradient_accumulation_steps, which are those of each rank",
        )
    if config.storage.snapshot is not None:
        raise OfAllRanks("storage.snapshot is for one rank alone", "remove it")
    words = {"{rank}": str(rank), "{local_rank}": os.environ.get("LOCAL_RANK", "0"), "{host}": gethostname()}
    paths = [str(path) for path in config.storage.paths]
    for word, value in words.items():
        paths = [path.replace(word, value) for path in paths]
    # Where paths are the same for all ranks, each has a directory in them.
    own = tuple(Path(path) / f"rank-{rank}.store" if rank else Path(path) for path in paths)
    config = config.model_copy(update={"storage": config.storage.model_copy(update={"paths": own})})
    if not rank:
        return config
    directory = rank_directory(config.output_dir, rank)
    return config.model_copy(update={"output_dir": directory, "report_to": (), "hub_model_id": None})


@contextmanager
def first_rank_first(ranks: Ranks) -> Iterator[None]:
    """A context that rank 0 leaves before any other enters it."""
    if ranks.rank:
        ranks.gathered([0])
    yield
    if not ranks.rank:
        ranks.gathered([0])


def common_start(ranks: Ranks, paths: Sequence[Path], start: Start) -> Start:
    """Where all ranks begin, by the stores that they have in `paths`: as `start` says, or at the beginning if not all
    have come to the end of their import.

    Raises OfAllRanks if a run would go on with another number of ranks, or one of them has lost its store.
    """
    if isinstance(start, StartOver):
        return start
    found = stored_rank_slice(paths) if Store.exists(paths) else None
    step = stored_step(paths) if found is not None else None
    known = ranks.gathered([0 if found is None else found.size, 0 if step is None else step])
    sizes = {int(size) for size, _ in known}
    if sizes <= {0, ranks.size}:
        lost = [rank for rank, (size, _) in enumerate(known) if not size]
        if not lost or len(lost) == ranks.size:
            return start
        if not any(step for _, step in known):
            return StartOver()
        raise OfAllRanks(
            f"rank {lost[0]} has no store, and the others are at step {max(int(step) for _, step in known)}",
            "bring it back; or start over with --resume no",
        )
    made = max(sizes)
    raise OfAllRanks(
        f"the run was begun by {counted(made, 'rank')}, and goes on with {ranks.size}",
        f"resume it with --ranks {made}; or start over with --resume no",
    )


def check_same(ranks: Ranks, identity: StoreIdentity) -> None:
    """Raise OfAllRanks if ranks differ in what decides the bits."""
    names = list(_WHAT_DIFFERS)
    known = ranks.gathered([_number(str(getattr(identity, name))) for name in names])
    for rank, found in enumerate(known):
        differs = [_WHAT_DIFFERS[name] for name, own, first in zip(names, found, known[0], strict=True) if own != first]
        if differs:
            raise OfAllRanks(
                f"rank {rank} has {' and '.join(differs)} than rank 0",
                "start all ranks with the same command, the same config and data, and the same versions",
            )


def stop_together(ranks: Ranks, stop: StopRequest) -> None:
    """Raise Interrupted in all ranks if a signal was received in any."""
    received = [int(number) for (number,) in ranks.gathered([stop.received or 0])]
    if any(received):  # a signal that comes from now on counts the next time, in all of them
        stop.note(next(filter(None, received)))
        stop.check()


def _number(text: str) -> float:
    digest = blake2b(text.encode(), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> (64 - _HASH_BITS))
