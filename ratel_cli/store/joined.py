"""A generation whose blocks lie in slices, in several stores, read as if it lay in one; and slices of one, read as if
each were a store's.

Invariant: what is read is what the slices have, in the order of ranks; a step is the same in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ratel_cli.errors import IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.tickets import Ticket
from ratel_cli.sizes import BLOCK_ALIGNMENT
from ratel_cli.store.layout import StoredBlock
from ratel_cli.store.manifest import Progress
from ratel_cli.units import align_down, align_up


class Readable(Protocol):
    """What export, evaluation and the like read of a generation: all of it, or one rank's slices."""

    @property
    def progress(self) -> Progress:
        """How far training had come when it was committed."""

    @property
    def blocks(self) -> tuple[StoredBlock, ...]:
        """Length and record of each block, or of the rank's slice of it."""

    @property
    def chunk_elements(self) -> int:
        """Reads begin at a multiple of this, and end at one or at the end of a block."""

    def read(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> Ticket:
        """Read elements [start, stop) of a field into `memory`. The ticket raises IntegrityFailure if it is damaged."""


def check_same_step(steps: Sequence[float]) -> None:
    """Raise IntegrityFailure unless the slices of all ranks are of one step. `steps`: of each rank."""
    if len(set(steps)) > 1:
        failure = IntegrityFailure(
            f"the slices of the ranks are of different steps: {', '.join(f'{step:.0f}' for step in steps)}",
            "name a step that all ranks have saved, or resume the run",
        )
        failure.reported_by = 0
        raise failure


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedGeneration:
    """All slices of a generation. Reads are done when they return."""

    slices: Sequence[Readable]
    """The slices of each rank, in the order of ranks."""
    blocks: tuple[StoredBlock, ...]
    """Length and record of each block, whole."""
    pool: BufferPool

    def __post_init__(self) -> None:
        """Raise IntegrityFailure if slices are of different steps."""
        check_same_step([each.progress.step for each in self.slices])

    @property
    def progress(self) -> Progress:
        """See Readable."""
        return self.slices[0].progress

    @property
    def chunk_elements(self) -> int:
        """See Readable. It has whole pages of every field; one of quantised weights has more elements than others."""
        fields = (field for block in self.blocks for field in block.record.fields)
        return max(BLOCK_ALIGNMENT, *(field.page_elements for field in fields))

    def read(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> Ticket:
        """See Readable. Raises IntegrityFailure itself."""
        found, begin = self.blocks[block].record.field(field), 0
        for each in self.slices:
            end = begin + each.blocks[block].num_elements
            first, last = max(start, begin), min(stop, end)
            if first < last:
                offset = found.offset(first - start)
                part = memory[offset:][: found.num_bytes(last - first, first - begin)]
                self._read_part(each, block, field, first - begin, last - begin, part)
            begin = end
        return Ticket(num_parts=0)

    def _read_part(self, of: Readable, block: int, field: str, start: int, stop: int, memory: memoryview) -> None:
        """Elements of one rank's slice: with it, the rest of the chunks that they lie in."""
        found, number = self.blocks[block].record.field(field), of.blocks[block].num_elements
        first = align_down(start, of.chunk_elements)
        last = min(align_up(stop, of.chunk_elements), number)
        if (first, last) == (start, stop):
            of.read(block, field, first, last, memory).wait()
            return
        with self.pool.lease(found.num_bytes(last - first), "a rank's slice", crosses_link=False) as lease:
            of.read(block, field, first, last, lease.memory).wait()
            memory[:] = lease.memory[found.offset(start - first) :][: len(memory)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedGeneration:
    """A slice of each block of a generation."""

    whole: Readable
    starts: Sequence[int]
    """The element of each block at which its slice begins."""
    blocks: tuple[StoredBlock, ...]
    """Length and record of each block's slice."""

    @property
    def progress(self) -> Progress:
        """See Readable."""
        return self.whole.progress

    @property
    def chunk_elements(self) -> int:
        """See Readable. Slices begin at multiples of it."""
        return self.whole.chunk_elements

    def read(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> Ticket:
        """See Readable."""
        begin = self.starts[block]
        return self.whole.read(block, field, begin + start, begin + stop, memory)
