"""One generation of the store's state, to be read: the current one, a pinned one, or the shadow.

`Generation.read` checks what it reads before its ticket's `wait` returns. The optimizer reads with `read_unchecked`
instead: its kernel computes the checksums in the pass of the update, so that the bytes are fetched from main memory
once, and `check_digests` compares them.

Invariant: no bytes are used before they passed their checksums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from threading import Lock

from ratel_cli.errors import BadInput, IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.files import StripedFiles
from ratel_cli.io.tickets import Ticket, follow, in_flight
from ratel_cli.sizes import BLOCK_ALIGNMENT
from ratel_cli.store.checksums import ChunkTable
from ratel_cli.store.layout import ChunkMap, RecordMap
from ratel_cli.store.manifest import GenerationEntry

_READ_AHEAD = 8
"""Chunks that `check_all` reads ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSlots:
    """What all generations of one store share: its files and the addresses in them."""

    files: StripedFiles
    records: RecordMap
    chunks: ChunkMap | None
    """Which values share a checksum; None if the store has no checksums."""
    store_id: bytes


class Generation:
    """Reads one slot of a store. Reads may come from any thread."""

    def __init__(self, slots: StoreSlots, entry: GenerationEntry, table: ChunkTable | None = None) -> None:
        """`table` None: the checksum table is read from the slot when it is first needed."""
        self.progress = entry.progress
        """How far training had come when this generation was committed."""
        self.slot = entry.slot
        """The slot that holds this generation."""
        self.layout = slots.records.layout
        """The fields of every record."""
        self.block_elements = slots.records.block_elements
        """Number of elements of each block, gaps between parameters included."""
        self._slots = slots
        self._entry = entry
        self._table = table
        self._lock = Lock()  # for the table

    def with_entry(self, entry: GenerationEntry) -> Generation:
        """This generation, described by another entry of a manifest."""
        assert entry.slot == self.slot
        return Generation(self._slots, entry, self._table)

    def read(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> Ticket:
        """Read elements [start, stop) of a field, whole chunks, into `memory`.

        The ticket's `wait` raises IntegrityFailure if a chunk is damaged.
        """
        ticket = self.read_unchecked(block, field, start, stop, memory)
        return follow(ticket, lambda: self._check(block, field, start, stop, memory))

    def read_unchecked(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> Ticket:
        """Like `read`, but without the check.

        The caller must call `check_digests` before it writes or hands on anything that was computed from these bytes.
        """
        return self._slots.files.read(self.address(block, field, start, stop, memory), memory)

    def seeds(self, block: int, start: int, stop: int, fields: Collection[str]) -> list[int | None]:
        """Seeds for a kernel that computes the checksums of these fields (`ChunkTable.seeds`).

        Only for stores with checksums.
        """
        return self._checksum_table().seeds(block, start, stop, fields)

    def check_digests(self, block: int, start: int, stop: int, digests: Sequence[int | None]) -> None:
        """Raise IntegrityFailure unless these are the checksums of elements [start, stop). None: not computed."""
        self._checksum_table().check_digests(block, start, stop, digests)

    def check_all(self, pool: BufferPool, *, progress: Callable[[int], None]) -> None:
        """Read every byte and check it. `progress` is called with the bytes of each chunk.

        Raises IntegrityFailure for the first damaged chunk, and BadInput if the store has no checksums.
        """
        chunks = self._slots.chunks
        if chunks is None:
            raise BadInput("the store was made without checksums, so it cannot be verified")
        largest_bytes = 4 * chunks.chunk_elements
        with pool.lease(_READ_AHEAD * largest_bytes, "chunks to check") as lease:
            reads = self._read_chunks(chunks, lease.memory, largest_bytes)
            with closing(in_flight(reads, at_most=_READ_AHEAD)) as finished:
                for num_bytes in finished:
                    progress(num_bytes)

    def address(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> int:
        """Logical address of element `start` of a field. [start, stop) must lie in the block and fill `memory`."""
        assert start <= stop <= self.block_elements[block] and stop % BLOCK_ALIGNMENT == 0, (start, stop)
        assert len(memory) == (stop - start) * self._size(field), len(memory)
        return self._slots.records.address(self.slot, block, field, start)

    def _read_chunks(self, chunks: ChunkMap, memory: memoryview, largest_bytes: int) -> Iterator[tuple[int, Ticket]]:
        """Read chunk after chunk, each into the next `largest_bytes` of `memory`. Yields the bytes of each."""
        for number, (block, field, start, stop) in enumerate(chunks.ranges()):
            first, num_bytes = number * largest_bytes % len(memory), (stop - start) * self._size(field)
            yield num_bytes, self.read(block, field, start, stop, memory[first : first + num_bytes])

    def _size(self, field: str) -> int:
        return self.layout.field(field).bytes_per_element

    def _check(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> None:
        if self._slots.chunks is not None:
            self._checksum_table().check_chunks(block, field, start, stop, memory)

    def _checksum_table(self) -> ChunkTable:
        chunks = self._slots.chunks
        assert chunks is not None
        with self._lock:
            if self._table is None:
                with BufferPool(None) as pool, pool.lease(chunks.table_bytes, "checksums") as lease:
                    self._slots.files.read(self._slots.records.table_address(self.slot), lease.memory).wait()
                    try:
                        self._table = ChunkTable.from_bytes(
                            chunks, self._slots.store_id, lease.memory, self._entry.root_checksum
                        )
                    except IntegrityFailure as failure:
                        message = f"step {self.progress.step}: {failure.message}"
                        raise IntegrityFailure(message, failure.hint) from failure
            return self._table
