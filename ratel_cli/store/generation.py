"""One generation of the store's state, to be read: the current one, the shadow, or one that is kept.

Handed out by `store`. `read` is for everybody: what it brings is checked before its ticket's `wait` returns. The
optimizer reads with `read_unchecked`, takes the checksums in its own pass, so that the bytes are fetched from main
memory once, and has them compared (engine/optimizer/groups.py).

Invariant: bytes that were not checked are named so by whoever asked for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from threading import Lock

from ratel_cli.errors import IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.files import StripedFiles
from ratel_cli.io.tickets import Ticket, follow
from ratel_cli.sizes import BLOCK_ALIGNMENT, CHUNK_ELEMENTS
from ratel_cli.store.checksums import ChunkMap, ChunkTable
from ratel_cli.store.layout import RecordLayout, RecordMap
from ratel_cli.store.manifest import Pin, Progress

_AHEAD = 8
"""Chunks that `check_all` reads ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSlots:
    """What all generations of one store share: where their slots lie, and what has a checksum."""

    files: StripedFiles
    records: RecordMap
    chunks: ChunkMap | None
    """None: nothing has."""
    store_id: bytes


class Generation:
    """Reads may come from any thread."""

    def __init__(self, slots: StoreSlots, pin: Pin, table: ChunkTable | None = None) -> None:
        """`table` None: it is read when it is needed first. A store without checksums never needs one."""
        self._slots = slots
        self._pin = pin
        self._table = table
        self._lock = Lock()  # for the table

    @property
    def progress(self) -> Progress:
        return self._pin.progress

    @property
    def slot(self) -> int:
        return self._pin.slot

    @property
    def layout(self) -> RecordLayout:
        return self._slots.records.layout

    @property
    def block_elements(self) -> tuple[int, ...]:
        return self._slots.records.block_elements

    def committed(self, pin: Pin) -> Generation:
        """The same slot as what a manifest calls it."""
        assert pin.slot == self.slot
        return Generation(self._slots, pin, self._table)

    def read(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> Ticket:
        """Elements ``[start, stop)`` of a field, whole chunks. Waiting raises IntegrityFailure if they are damaged."""
        ticket = self.read_unchecked(block, field, start, stop, memory)
        return follow(ticket, lambda: self._check(block, field, start, stop, memory))

    def read_unchecked(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> Ticket:
        """The same, unchecked: whoever asks compares checksums before anything made of it is written or handed on."""
        return self._slots.files.read(self.address(block, field, start, stop, memory), memory)

    def seeds(self, block: int, start: int, stop: int, fields: Collection[str]) -> list[int | None]:
        """For checksums of these fields of whole chunks, taken elsewhere. Only where there are checksums."""
        return self._table_of_checksums().seeds(block, start, stop, fields)

    def compare(self, block: int, start: int, stop: int, digests: Sequence[int | None]) -> None:
        """Raise IntegrityFailure unless these are they; None: not taken."""
        self._table_of_checksums().compare(block, start, stop, digests)

    def check_all(self, pool: BufferPool, *, progress: Callable[[int], None]) -> None:
        """Read every byte and check it. `progress` is told the bytes of each chunk.

        Raises IntegrityFailure for the first chunk that is damaged. Without checksums only reading is checked.
        """
        chunks = self._slots.chunks or ChunkMap(self.layout, self.block_elements, CHUNK_ELEMENTS)
        largest_bytes = 4 * chunks.chunk_elements
        waiting: list[tuple[Ticket, int]] = []
        with pool.lease(_AHEAD * largest_bytes, "chunks to check") as lease:
            try:
                for number, (block, field, start, stop) in enumerate(chunks.ranges()):
                    if len(waiting) == _AHEAD:
                        _finish(waiting, progress)
                    first, num_bytes = number % _AHEAD * largest_bytes, (stop - start) * self._size(field)
                    memory = lease.memory[first : first + num_bytes]
                    waiting.append((self.read(block, field, start, stop, memory), num_bytes))
                while waiting:
                    _finish(waiting, progress)
            finally:
                self._slots.files.settle()

    def address(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> int:
        """Where element `start` lies; the range must be the block's, and the memory as large."""
        assert start <= stop <= self.block_elements[block] and stop % BLOCK_ALIGNMENT == 0, (start, stop)
        assert len(memory) == (stop - start) * self._size(field), len(memory)
        return self._slots.records.address(self.slot, block, field, start)

    def _size(self, field: str) -> int:
        return self.layout.field(field).bytes_per_element

    def _check(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> None:
        if self._slots.chunks is not None:
            self._table_of_checksums().check(block, field, start, stop, memory)

    def _table_of_checksums(self) -> ChunkTable:
        chunks = self._slots.chunks
        assert chunks is not None
        with self._lock:
            if self._table is None:
                with BufferPool(None) as pool, pool.lease(chunks.table_bytes, "checksums") as lease:
                    self._slots.files.read(self._slots.records.table_address(self.slot), lease.memory).wait()
                    try:
                        self._table = ChunkTable.from_bytes(
                            chunks, self._slots.store_id, lease.memory, self._pin.root_checksum
                        )
                    except IntegrityFailure as failure:
                        message = f"step {self.progress.step}: {failure.message}"
                        raise IntegrityFailure(message, failure.hint) from failure
            return self._table


def _finish(waiting: list[tuple[Ticket, int]], progress: Callable[[int], None]) -> None:
    ticket, num_bytes = waiting.pop(0)
    ticket.wait()
    progress(num_bytes)
