"""One generation of the store's state, to be read: the current one, a pinned one, or the shadow.

`Generation.read` has what it reads checked before its ticket's `wait` returns, by the threads of the queue that take
checksums (io/checksum_workers.py), one part next to the other. The optimizer reads with `read_unchecked`
instead: its kernel computes the checksums in the pass of the update, so that the bytes are fetched from main memory
once, and compares them with the table.

Invariant: no bytes are used before they passed their checksums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from threading import Lock

from ratel_cli import _native
from ratel_cli.errors import BadInput, IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.checksum_workers import parts_of
from ratel_cli.io.striped_files import StripedFiles
from ratel_cli.io.tickets import Ticket, in_flight, join
from ratel_cli.sizes import BLOCK_ALIGNMENT
from ratel_cli.store.checksums import ChunkTable
from ratel_cli.store.layout import ChunkMap, RecordMap
from ratel_cli.store.manifest import GenerationEntry

_READ_AHEAD = 8
"""Chunks for each drive that `check_all` reads ahead."""


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
        self.chunk_elements = BLOCK_ALIGNMENT if slots.chunks is None else slots.chunks.chunk_elements
        """Reads begin at a multiple of so many elements, and end at one or at the end of a block."""
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
        [(address, _)], chunks = self.parts(block, start, stop, {field: memory}), self._slots.chunks
        if chunks is None:
            return self._slots.files.read(address, memory)
        size = self._size(field)
        unit_bytes = chunks.chunk_elements * size
        reads = []
        for first, last in parts_of(len(memory), unit_bytes=unit_bytes):
            part = memory[first:last]
            elements = start + first // size, start + last // size
            check = partial(self._check, block, field, *elements, part)
            reads.append(self._slots.files.read(address + first, part, check=check))
        return join(reads)

    def read_unchecked(self, block: int, start: int, stop: int, memories: Mapping[str, memoryview]) -> Ticket:
        """Read elements [start, stop) of several fields, each into its memory, without a check.

        The caller must compare the checksums (`to_compare`) before it writes or hands on anything that was computed
        from these bytes.
        """
        return self._slots.files.read_parts(self.parts(block, start, stop, memories))

    def to_compare(self, block: int, fields: frozenset[str]) -> _native.ChunkChecksums:
        """What a kernel needs to compare the checksums of these fields of a block itself (`ChunkTable.of_block`).

        Only for stores with checksums.
        """
        return self._checksum_table().of_block(block, fields)

    def mismatch(self, block: int, start: int, stop: int, *, field_index: int, chunk: int) -> IntegrityFailure:
        """The error for a chunk in elements [start, stop) whose checksum is another one (`ChunkTable.mismatch`)."""
        return self._checksum_table().mismatch(block, start, stop, field_index=field_index, chunk=chunk)

    def check_all(self, pool: BufferPool, *, progress: Callable[[int], None]) -> None:
        """Read every byte and check it. `progress` is called with the bytes of each chunk.

        Raises IntegrityFailure for the first damaged chunk, and BadInput if the store has no checksums.
        """
        chunks = self._slots.chunks
        if chunks is None:
            raise BadInput("the store was made without checksums, so it cannot be verified")
        largest_bytes = 4 * chunks.chunk_elements
        at_most = _READ_AHEAD * self._slots.files.num_drives
        with pool.lease(at_most * largest_bytes, "chunks to check", crosses_link=False) as lease:
            reads = self._read_chunks(chunks, lease.memory, largest_bytes)
            with closing(in_flight(reads, at_most=at_most)) as finished:
                for num_bytes in finished:
                    progress(num_bytes)

    def parts(
        self, block: int, start: int, stop: int, memories: Mapping[str, memoryview]
    ) -> list[tuple[int, memoryview]]:
        """The logical address of element `start` of each field, and the field's memory.

        [start, stop) must lie in the block and fill every memory.
        """
        assert start <= stop <= self.block_elements[block] and stop % BLOCK_ALIGNMENT == 0, (start, stop)
        records, parts = self._slots.records, []
        for field, memory in memories.items():
            assert len(memory) == records.field_bytes(field, stop - start), len(memory)
            parts.append((records.address(self.slot, block, field, start), memory))
        return parts

    def _read_chunks(self, chunks: ChunkMap, memory: memoryview, largest_bytes: int) -> Iterator[tuple[int, Ticket]]:
        """Read chunk after chunk, each into the next `largest_bytes` of `memory`. Yields the bytes of each."""
        for number, (block, field, start, stop) in enumerate(chunks.ranges()):
            first, num_bytes = number * largest_bytes % len(memory), (stop - start) * self._size(field)
            yield num_bytes, self.read(block, field, start, stop, memory[first : first + num_bytes])

    def _size(self, field: str) -> int:
        return self.layout.field(field).bytes_per_element

    def _check(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> None:
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
