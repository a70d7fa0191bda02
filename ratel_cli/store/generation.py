"""One generation of the store's state, to be read: the current one, a pinned one, or the shadow.

What is trained lies in the generation's slot. Frozen blocks lie in the store's frozen region, which all generations
share (store/region.py reads both).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass

from ratel_cli import _native
from ratel_cli.errors import BadInput, IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.striped_files import StripedFiles
from ratel_cli.io.tickets import Ticket, in_flight
from ratel_cli.sizes import BLOCK_ALIGNMENT
from ratel_cli.store.layout import ChunkMap, Geometry
from ratel_cli.store.manifest import GenerationEntry
from ratel_cli.store.region import OpenRegion, RegionPlace

_READ_AHEAD = 8
"""Chunks for each drive that `check_all` reads ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRegions:
    """What all generations of one store share: its files, its geometry, and its frozen region."""

    files: StripedFiles
    geometry: Geometry
    store_id: bytes
    frozen: OpenRegion

    def slot(self, number: int) -> RegionPlace:
        """Where a slot lies."""
        geometry = self.geometry
        return RegionPlace(
            files=self.files, shape=geometry.slot, address=geometry.slot_address(number), store_id=self.store_id
        )


class Generation:
    """Reads one generation of a store. Reads may come from any thread."""

    def __init__(self, regions: StoreRegions, entry: GenerationEntry, own: OpenRegion | None = None) -> None:
        """`own`: the generation's slot; None: as the store has it."""
        geometry, name = regions.geometry, f"step {entry.progress.step}"
        self.progress = entry.progress
        """How far training had come when this generation was committed."""
        self.slot = entry.slot
        """The slot that holds this generation."""
        self.blocks = geometry.blocks
        """What the store has of each block."""
        self.chunk_elements = geometry.chunk_elements or BLOCK_ALIGNMENT
        """Reads begin at a multiple of this number of elements, and end at one or at the end of a block."""
        self._regions = regions
        self._own = own or OpenRegion(regions.slot(entry.slot), name=name, root=entry.root_checksum)

    def with_entry(self, entry: GenerationEntry) -> Generation:
        """This generation, described by another entry of a manifest."""
        assert entry.slot == self.slot
        own = self._own.renamed(f"step {entry.progress.step}", root=entry.root_checksum)
        return Generation(self._regions, entry, own)

    def read(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> Ticket:
        """Read elements [start, stop) of a field, whole chunks, into `memory`.

        The ticket's `wait` raises IntegrityFailure if a chunk is damaged.
        """
        region = self._regions.frozen if self.blocks[block].is_frozen else self._own
        return region.read(block, field, start, stop, memory)

    def read_unchecked(self, block: int, start: int, stop: int, memories: Mapping[str, memoryview]) -> Ticket:
        """Read elements [start, stop) of several fields, each into its memory, without a check.

        The caller must compare the checksums (`to_compare`) before it writes or hands on anything that was computed
        from these bytes.
        """
        return self._own.read_unchecked(block, start, stop, memories)

    def to_compare(self, block: int, fields: frozenset[str]) -> _native.ChunkChecksums:
        """What a kernel needs to compare the checksums of these fields of a block itself (`ChunkTable.of_block`).

        Only for stores with checksums.
        """
        return self._own.table().of_block(block, fields)

    def mismatch(self, block: int, start: int, stop: int, *, field_index: int, chunk: int) -> IntegrityFailure:
        """The error for a chunk in elements [start, stop) whose checksum is another one (`ChunkTable.mismatch`)."""
        return self._own.table().mismatch(block, start, stop, field_index=field_index, chunk=chunk)

    def check_all(self, pool: BufferPool, *, progress: Callable[[int], None]) -> None:
        """Read every byte, of frozen blocks too, and check it. `progress` is called with the bytes of each chunk.

        Raises IntegrityFailure for the first damaged chunk, and BadInput if the store has no checksums.
        """
        if self._own.chunks is None:
            raise BadInput("the store was made without checksums, so it cannot be verified")
        largest_bytes = max(
            (field.num_bytes(self.chunk_elements) for block in self.blocks for field in block.record.fields), default=0
        )
        at_most = _READ_AHEAD * self._regions.files.num_drives
        with pool.lease(at_most * largest_bytes, "chunks to check", crosses_link=False) as lease:
            for chunks in (self._regions.frozen.chunks, self._own.chunks):
                if chunks is None:
                    continue
                reads = self._read_chunks(chunks, lease.memory, largest_bytes)
                with closing(in_flight(reads, at_most=at_most)) as finished:
                    for num_bytes in finished:
                        progress(num_bytes)

    def _read_chunks(self, chunks: ChunkMap, memory: memoryview, largest_bytes: int) -> Iterator[tuple[int, Ticket]]:
        """Read chunk after chunk, each into the next `largest_bytes` of `memory`. Yields the bytes of each."""
        for number, (block, field, start, stop) in enumerate(chunks.ranges()):
            first, num_bytes = number * largest_bytes % len(memory), field.num_bytes(stop - start)
            yield num_bytes, self.read(block, field.name, start, stop, memory[first : first + num_bytes])
