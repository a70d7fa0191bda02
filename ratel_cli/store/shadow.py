"""The shadow: the generation that an import or a step is writing. It counts only once it is committed.

The store makes a shadow for an import and for each step, and drops it with the commit or the discard. It counts the
bytes that were written and the chunks that have a checksum, so that a commit can insist on all of them.

Invariant: nothing is committed whose writes were not waited for, or whose chunks have no checksum.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock

from ratel_cli import _native
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.tickets import Ticket
from ratel_cli.store.checksums import ChunkTable
from ratel_cli.store.generation import Generation, StoreSlots
from ratel_cli.store.manifest import GenerationEntry


class Shadow:
    """Fills one slot of a store. Different chunks may come from different threads."""

    def __init__(self, slots: StoreSlots, entry: GenerationEntry, *, step: int) -> None:
        """Fills the slot of `entry`. `step` is the step that writes it, 0 for an import."""
        self._slots = slots
        self._table = None if slots.chunks is None else ChunkTable(slots.chunks, slots.store_id, step)
        self._fields = frozenset(field.name for field in slots.records.layout.fields)
        self._lock = Lock()  # for the two counts
        self.submitted_bytes = 0
        """Bytes of all writes so far, whether they have completed or not."""
        self._confirmed_bytes = 0
        self.generation = Generation(slots, entry, self._table)
        """Reads what was written to the shadow and waited for."""

    def write(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> Ticket:
        """Compute the checksums of elements [start, stop) of a field, whole chunks, and write them.

        The ticket must be waited for before the commit. The memory must not change until then.
        """
        if self._table is not None:
            self._table.set_chunks(block, field, start, stop, memory)
        return self.write_hashed(block, start, stop, {field: memory})

    def write_hashed(self, block: int, start: int, stop: int, memories: Mapping[str, memoryview]) -> Ticket:
        """Like `write`, for several fields, each from its memory, whose checksums a kernel has entered (`to_enter`)."""
        num_bytes = sum(map(len, memories.values()))
        ticket = self._slots.files.write_parts(self.generation.parts(block, start, stop, memories))
        with self._lock:
            self.submitted_bytes += num_bytes
        return ticket.then(lambda: self._confirm(num_bytes))

    def to_enter(self, block: int) -> _native.ChunkChecksums:
        """What a kernel needs to enter the checksums of all fields of a block itself.

        Only for stores with checksums.
        """
        assert self._table is not None
        return self._table.of_block(block, self._fields)

    def leave_zeros(self) -> None:
        """Take what was not written for zeros, which is what a new store holds. For imports only."""
        if self._table is not None:
            self._table.set_zeros()

    def check_written(self) -> None:
        """Insist that every byte of every record was written once. Anything else is a bug."""
        assert self._confirmed_bytes == self._slots.records.records_bytes, (
            "a step writes every byte of every record once"
        )

    def check_waited(self) -> None:
        """Insist that every write was waited for and every chunk has a checksum. Anything else is a bug."""
        assert self._confirmed_bytes == self.submitted_bytes, "a write was not waited for, or failed"
        assert self._table is None or self._table.is_complete, "a chunk was written without a checksum"

    def write_table(self) -> str:
        """Write the checksum table behind the records. Returns its root, or "" if the store has no checksums."""
        if self._table is None or self._slots.chunks is None:
            return ""
        with BufferPool(None) as pool, pool.lease(self._slots.chunks.table_bytes, "checksums") as lease:
            root = self._table.write_into(lease.memory)
            self._slots.files.write(self._slots.records.table_address(self.generation.slot), lease.memory).wait()
        return root

    def _confirm(self, num_bytes: int) -> None:
        with self._lock:
            self._confirmed_bytes += num_bytes
