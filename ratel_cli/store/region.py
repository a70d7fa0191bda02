"""One region of an open store: a slot, or the frozen region. Its records are read and written here, with checksums.

Of blocks that stay in the base model's files a region has the checksums, and a reader (base_reader.py).

What a region reads has passed its checksums before the ticket's `wait` returns. The threads of the queue that take
checksums see to it (io/checksum_workers.py), one part next to the other. `read_unchecked` and `write` leave them to the
caller: the optimizer's kernel computes them in the pass of the update, so that the bytes are fetched from main memory
once.

Invariant: no bytes are used before they passed their checksums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from threading import Lock

from ratel_cli.errors import IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.checksum_workers import parts_of
from ratel_cli.io.striped_files import StripedFiles
from ratel_cli.io.tickets import Ticket, join
from ratel_cli.sizes import BLOCK_ALIGNMENT
from ratel_cli.store.base_reader import BaseFilesReader
from ratel_cli.store.checksums import ChunkTable
from ratel_cli.store.layout import ChunkMap, Region


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPlace:
    """Where a region of a store lies, and what shape it has."""

    files: StripedFiles
    shape: Region
    address: int
    """Its logical address."""
    store_id: bytes
    base_files: BaseFilesReader | None = None
    """Reads the blocks that lie in the base model's files; None: there are none."""


class OpenRegion:
    """Reads and writes the records of a region. Different threads may do so, with different chunks."""

    def __init__(self, place: RegionPlace, *, name: str, root: str = "", table: ChunkTable | None = None) -> None:
        """`name`: for messages. `table` None: the checksum table, which has this `root`, is read when it is first
        needed."""
        self._place = place
        self._name = name
        self._root = root
        self._table = table
        self._lock = Lock()  # for the table

    @classmethod
    def to_write(cls, place: RegionPlace, *, name: str, step: int) -> OpenRegion:
        """A region whose records `step` writes anew."""
        chunks = place.shape.chunks
        return cls(place, name=name, table=None if chunks is None else ChunkTable(chunks, place.store_id, step))

    def renamed(self, name: str, *, root: str) -> OpenRegion:
        """This region with another name for messages. `root`: of its table."""
        return OpenRegion(self._place, name=name, root=root, table=self._table)

    @property
    def chunks(self) -> ChunkMap | None:
        """Which elements share a checksum; None if there are no checksums."""
        return self._place.shape.chunks

    @property
    def records_bytes(self) -> int:
        """Size of all records."""
        return self._place.shape.records.num_bytes

    def read(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> Ticket:
        """See `Generation.read`."""
        if block in self._place.shape.records.in_files:
            return self._read_in_files(block, field, start, stop, memory)
        [(address, _)], files = self._parts(block, start, stop, {field: memory}), self._place.files
        chunks = self.chunks
        if chunks is None:
            return files.read(address, memory)
        unit = chunks.chunk_elements
        unit_bytes = self._place.shape.records.field_bytes(block, field, unit)
        reads = []
        for first, last in parts_of(len(memory), unit_bytes=unit_bytes):
            part = memory[first:last]
            elements = start + first // unit_bytes * unit, min(stop, start + -(-last // unit_bytes) * unit)
            check = partial(self._check, block, field, *elements, part)
            reads.append(files.read(address + first, part, check=check))
        return join(reads)

    def read_unchecked(self, block: int, start: int, stop: int, memories: Mapping[str, memoryview]) -> Ticket:
        """See `Generation.read_unchecked`."""
        return self._place.files.read_parts(self._parts(block, start, stop, memories))

    def write(self, block: int, start: int, stop: int, memories: Mapping[str, memoryview]) -> Ticket:
        """Write elements [start, stop) of several fields, each from its memory. Their checksums are set elsewhere.
        What lies in the base model's files stays there."""
        if block in self._place.shape.records.in_files:
            return Ticket(num_parts=0)
        return self._place.files.write_parts(self._parts(block, start, stop, memories))

    def table(self) -> ChunkTable:
        """The checksum table, which is read now if it is not in memory. Only for regions with checksums.

        Raises IntegrityFailure if it is damaged.
        """
        place, chunks = self._place, self.chunks
        assert chunks is not None
        with self._lock:
            if self._table is None:
                with BufferPool(None) as pool, pool.lease(chunks.table_bytes, "checksums") as lease:
                    place.files.read(place.address + self.records_bytes, lease.memory).wait()
                    try:
                        self._table = ChunkTable.from_bytes(chunks, place.store_id, lease.memory, self._root)
                    except IntegrityFailure as failure:
                        raise IntegrityFailure(f"{self._name}: {failure.message}", failure.hint) from failure
            return self._table

    def write_table(self) -> str:
        """Write the checksum table behind the records. Returns its root, or "" if there are no checksums."""
        place, table = self._place, self._table
        if table is None or self.chunks is None:
            return ""
        with BufferPool(None) as pool, pool.lease(self.chunks.table_bytes, "checksums") as lease:
            self._root = table.write_into(lease.memory)
            place.files.write(place.address + self.records_bytes, lease.memory).wait()
        return self._root

    def _read_in_files(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> Ticket:
        reader, records, chunks = self._place.base_files, self._place.shape.records, self.chunks
        assert reader is not None and start % BLOCK_ALIGNMENT == 0, block
        unit = BLOCK_ALIGNMENT if chunks is None else chunks.chunk_elements
        unit_bytes = records.field_bytes(block, field, unit)

        def check(first: int, last: int) -> None:
            if chunks is not None:
                for at in range(first, last, unit_bytes):  # chunk by chunk: the error names the files of one
                    begin, behind = start + at // unit_bytes * unit, min(last, at + unit_bytes)
                    try:
                        self._check(block, field, begin, min(stop, begin + unit), memory[at:behind])
                    except IntegrityFailure as failure:
                        raise reader.changed(block, first_byte + at, first_byte + behind) from failure

        first_byte = records.field_bytes(block, field, start)
        return reader.read(block, first_byte, memory, unit_bytes=unit_bytes, check=check)

    def _parts(
        self, block: int, start: int, stop: int, memories: Mapping[str, memoryview]
    ) -> list[tuple[int, memoryview]]:
        """The logical address of element `start` of each field, and the field's memory.

        [start, stop) must lie in the block and fill every memory.
        """
        records, parts = self._place.shape.records, []
        assert start <= stop <= records.num_elements[block] and stop % BLOCK_ALIGNMENT == 0, (start, stop)
        for field, memory in memories.items():
            assert len(memory) == records.field_bytes(block, field, stop - start, start), len(memory)
            parts.append((self._place.address + records.address(block, field, start), memory))
        return parts

    def _check(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> None:
        self.table().check_chunks(block, field, start, stop, memory)
