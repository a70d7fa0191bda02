"""Fills a generation of a store, wherever its bytes come from, and commits it.

A source has the bytes of every field, and hands them over part after part: a copy of another generation is one
(`Copied`), whether that lies in a store, in a snapshot, or in slices of several ranks (store/joined.py). Weights that
begin a run are others (model/files/import_weights.py).

Invariants: only what has passed the checks of its source is written; a generation counts when all of it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle
from typing import Final, NamedTuple, Protocol

from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.tickets import Ticket, in_flight, join
from ratel_cli.store.joined import Readable
from ratel_cli.store.layout import StoredBlock
from ratel_cli.store.manifest import Progress
from ratel_cli.store.store import Store

_PART_ELEMENTS: Final = 1 << 20
"""A multiple of every chunk size in use: 4 MiB of fp32, what the queues move in one request."""
_WIDEST_BYTES: Final = 4
COPY_BYTES: Final = 2 * _PART_ELEMENTS * _WIDEST_BYTES
"""Memory that a copy needs: one part is read while another is written."""


class StatePart(NamedTuple):
    """Elements [start, stop) of some fields of a block, whole chunks, in memory."""

    block: int
    start: int
    stop: int
    fields: Mapping[str, memoryview]


class StateSource(Protocol):
    """What a generation of a store is filled from."""

    @property
    def progress(self) -> Progress:
        """How far training has come with it."""

    def parts(self, blocks: Sequence[tuple[int, StoredBlock]], pool: BufferPool) -> Generator[StatePart, None, None]:
        """Every field of these blocks of the store, by their numbers. A part's memory is its own until the next part is
        asked for; it is given back when there is none, or the generator is closed."""


def fill(store: Store, source: StateSource, pool: BufferPool, *, progress: Callable[[int], None]) -> None:
    """Write all of `source` as the next generation of the store, and commit it. Frozen blocks are written into a new
    store only, since they never change.

    `progress` is called with the bytes of each part. What it raises ends the filling, and nothing is committed; so does
    what the source and the store raise: IntegrityFailure for damaged bytes, DoesNotFit without memory in `pool`.
    """
    is_new = store.is_new
    if not is_new:
        store.begin_step()
    target = store.shadow()
    blocks = [(index, block) for index, block in enumerate(store.blocks) if is_new or not block.is_frozen]
    with closing(source.parts(blocks, pool)) as parts:
        for block, start, stop, fields in parts:
            join([target.write(block, name, start, stop, memory) for name, memory in fields.items()]).wait()
            progress(sum(map(len, fields.values())))
    commit = store.commit_import if is_new else store.commit
    commit(source.progress)


@dataclass(frozen=True, slots=True)
class Copied:
    """All of another generation, checked as it is read.

    The stores may differ in directories, stripes and slots. They hold the same blocks in the same layout.
    """

    generation: Readable

    @property
    def progress(self) -> Progress:
        """See StateSource."""
        return self.generation.progress

    def parts(self, blocks: Sequence[tuple[int, StoredBlock]], pool: BufferPool) -> Generator[StatePart, None, None]:
        """See StateSource. A part is read while the one before it is written."""
        fields = {field for _, block in blocks for field in block.record.fields}
        largest_bytes = max((field.num_bytes(_PART_ELEMENTS) for field in fields), default=0)  # of fixed ones even more
        with (
            pool.lease(max(COPY_BYTES, 2 * largest_bytes), "a copy of the state", crosses_link=False) as lease,
            closing(in_flight(self._reads(blocks, lease.memory), at_most=2)) as finished,
        ):
            yield from finished

    def _reads(
        self, blocks: Sequence[tuple[int, StoredBlock]], memory: memoryview
    ) -> Iterator[tuple[StatePart, Ticket]]:
        """The parts in the order in which they lie in the store, alternating between the two halves of `memory`."""
        halves = cycle((memory[: len(memory) // 2], memory[len(memory) // 2 :]))
        for index, block in blocks:
            assert block == self.generation.blocks[index]
            for field in block.record.fields:
                for start, stop in field.ranges(block.num_elements, _PART_ELEMENTS):
                    part = next(halves)[: field.num_bytes(stop - start)]
                    read = self.generation.read(index, field.name, start, stop, part)
                    yield StatePart(index, start, stop, {field.name: part}), read
