"""Lets rank 0 read all slices of a generation, those in the stores of other ranks through the channel `control`.

    1. ask     rank 0 tells all which rank's slice it wants, and what of it
    2. answer  that rank reads it and sends it
    3. end     rank 0 tells all that it is done

Invariant: while rank 0 reads, the others do nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ratel_cli.engine.ranks.ranks import Ranks
from ratel_cli.errors import RankLost
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.tickets import Ticket
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.store.generation import Generation
from ratel_cli.store.joined import JoinedGeneration, Readable, check_same_step
from ratel_cli.store.layout import RankSlice, StoredBlock
from ratel_cli.store.manifest import Progress

_REQUEST = struct.Struct("<5q")
"""Rank, block, number of the field, first element, end."""
_END = -1
_EMPTY = memoryview(b"")


@contextmanager
def read_by_first(ranks: Ranks, spec: ModelSpec, generation: Generation, pool: BufferPool) -> Iterator[Readable | None]:
    """For rank 0 the generation with the slices of all ranks; for the others None, after they have answered until rank
    0 has left the context. `spec`: of the whole model. Raises IntegrityFailure in all ranks if theirs are of different
    steps, and as `Channel.swap`."""
    if ranks.size == 1:
        yield generation
        return
    check_same_step([step for (step,) in ranks.gathered([generation.progress.step])])
    if ranks.rank:
        _serve(ranks, generation, pool)
        yield None
        return
    slices: list[Readable] = [generation]
    for rank in range(1, ranks.size):
        blocks = spec.sliced(RankSlice(rank, ranks.size)).stored_blocks
        slices.append(_RemoteSlices(ranks, rank, blocks, generation.progress, generation.chunk_elements))
    try:
        yield JoinedGeneration(slices=slices, blocks=spec.stored_blocks, pool=pool)
    finally:
        with suppress(RankLost):
            _tell(ranks, _END)


@dataclass(frozen=True, slots=True)
class _RemoteSlices:
    """The slices of a generation that another rank has."""

    ranks: Ranks
    rank: int
    blocks: tuple[StoredBlock, ...]
    progress: Progress
    chunk_elements: int

    def read(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> Ticket:
        """See Readable. It is done when it returns."""
        _tell(self.ranks, self.rank, block, self.blocks[block].record.index(field), start, stop)
        size = self.ranks.size
        self.ranks.control.swap([_EMPTY] * size, [memory if each == self.rank else _EMPTY for each in range(size)])
        return Ticket(num_parts=0)


def _tell(ranks: Ranks, *request: int) -> None:
    packed = memoryview(bytearray(_REQUEST.pack(*request, *[0] * (5 - len(request)))))
    ranks.control.swap([packed] * ranks.size, [_EMPTY] * ranks.size)


def _serve(ranks: Ranks, generation: Generation, pool: BufferPool) -> None:
    """Answer until rank 0 is done."""
    size = ranks.size
    while True:
        asked = memoryview(bytearray(_REQUEST.size))
        ranks.control.swap([_EMPTY] * size, [asked, *[_EMPTY] * (size - 1)])
        rank, block, number, start, stop = _REQUEST.unpack(asked)
        if rank == _END:
            return
        if rank != ranks.rank:
            continue
        field = generation.blocks[block].record.fields[number]
        with pool.lease(field.num_bytes(stop - start, start), "a slice for rank 0", crosses_link=False) as lease:
            generation.read(block, field.name, start, stop, lease.memory).wait()
            ranks.control.swap([lease.memory, *[_EMPTY] * (size - 1)], [_EMPTY] * size)
