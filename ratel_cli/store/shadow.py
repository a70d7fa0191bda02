"""The shadow: the generation that an import or a step is writing. It counts only once it is committed.

The store makes a shadow for an import and for each step, and drops it with the commit or the discard. It counts the
bytes that were written and the chunks that have a checksum, so that a commit can insist on all of them. An import also
writes the frozen region; a step cannot.

Invariant: nothing is committed whose writes were not waited for, or whose chunks have no checksum.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock

from ratel_cli import _native
from ratel_cli.io.tickets import Ticket
from ratel_cli.store.generation import Generation, StoreRegions
from ratel_cli.store.manifest import GenerationEntry
from ratel_cli.store.region import OpenRegion


class Shadow:
    """Fills one slot of a store. Different chunks may come from different threads."""

    def __init__(self, regions: StoreRegions, entry: GenerationEntry, *, step: int, is_import: bool = False) -> None:
        """Fills the slot of `entry`. `step` is the step that writes it, 0 for an import."""
        self._regions = regions
        self._own = OpenRegion.to_write(regions.slot(entry.slot), name=f"step {step}", step=step)
        self.is_import = is_import
        """True if frozen blocks are written, too."""
        self._lock = Lock()  # for the two counts
        self.submitted_bytes = 0
        """Bytes of all writes so far, whether they have completed or not."""
        self._confirmed_bytes = 0
        self.generation = Generation(regions, entry, self._own)
        """Reads what was written to the shadow and waited for."""

    def write(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> Ticket:
        """Compute the checksums of elements [start, stop) of a field, whole chunks, and write them.

        The ticket must be waited for before the commit. The memory must not change until then.
        """
        region = self._region(block)
        if region.chunks is not None:
            region.table().set_chunks(block, field, start, stop, memory)
        return self._write(region, block, start, stop, {field: memory})

    def write_hashed(self, block: int, start: int, stop: int, memories: Mapping[str, memoryview]) -> Ticket:
        """Like `write`, for several fields, each from its memory, whose checksums a kernel has entered (`to_enter`)."""
        return self._write(self._region(block), block, start, stop, memories)

    def to_enter(self, block: int) -> _native.ChunkChecksums:
        """What a kernel needs to enter the checksums of all fields of a block itself.

        Only for stores with checksums.
        """
        fields = self.generation.blocks[block].record.fields
        return self._own.table().of_block(block, frozenset(field.name for field in fields))

    def leave_zeros(self) -> None:
        """Take what was not written for zeros, which is what a new store holds. For imports only."""
        for region in self._to_write:
            if region.chunks is not None:
                region.table().set_zeros()

    def check_written(self) -> None:
        """Insist that every byte of every record was written once. Anything else is a bug."""
        assert self._confirmed_bytes == sum(region.records_bytes for region in self._to_write), (
            "a step writes every byte of every record once"
        )

    def check_waited(self) -> None:
        """Insist that every write was waited for and every chunk has a checksum. Anything else is a bug."""
        assert self._confirmed_bytes == self.submitted_bytes, "a write was not waited for, or failed"
        for region in self._to_write:
            assert region.chunks is None or region.table().is_complete, "a chunk was written without a checksum"

    def write_tables(self) -> tuple[str, str]:
        """Write the checksum tables behind the records. Returns the roots: of the slot, and of the frozen region.

        A root is "" if there are no checksums, or if that region was not written.
        """
        return self._own.write_table(), self._regions.frozen.write_table() if self.is_import else ""

    @property
    def _to_write(self) -> tuple[OpenRegion, ...]:
        return (self._own, self._regions.frozen) if self.is_import else (self._own,)

    def _region(self, block: int) -> OpenRegion:
        if not self.generation.blocks[block].is_frozen:
            return self._own
        assert self.is_import, "a step does not write frozen blocks"
        return self._regions.frozen

    def _write(
        self, region: OpenRegion, block: int, start: int, stop: int, memories: Mapping[str, memoryview]
    ) -> Ticket:
        num_bytes = sum(map(len, memories.values()))
        ticket = region.write(block, start, stop, memories)
        with self._lock:
            self.submitted_bytes += num_bytes
        return ticket.then(lambda: self._confirm(num_bytes))

    def _confirm(self, num_bytes: int) -> None:
        with self._lock:
            self._confirmed_bytes += num_bytes
