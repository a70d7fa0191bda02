"""The generation in the making: what a step writes, counted and sealed, so that a commit can insist on all of it.

Made by `store` for an import and for each step, and dropped with it. Whoever computes a chunk seals it while it is in
the caches, and then writes it.

Invariant: nothing is committed whose writes were not waited for, or whose chunks were not sealed.
"""

from __future__ import annotations

from collections.abc import Sequence

from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.tickets import Ticket
from ratel_cli.store.checksums import ChunkTable
from ratel_cli.store.generation import Generation, StoreSlots
from ratel_cli.store.manifest import Pin
from ratel_cli.store.writes import StepWrites


class Shadow:
    """One slot that is being filled. Chunks may come from two threads."""

    def __init__(self, slots: StoreSlots, pin: Pin, *, step: int) -> None:
        """In the slot of `pin`, by `step` (0: the import)."""
        self._slots = slots
        self._table = None if slots.chunks is None else ChunkTable(slots.chunks, slots.store_id, step)
        self._writes = StepWrites()
        self.generation = Generation(slots, pin, self._table)
        """To read what was written and waited for."""

    @property
    def slot(self) -> int:
        return self.generation.slot

    @property
    def submitted_bytes(self) -> int:
        return self._writes.submitted_bytes

    def seal(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> None:
        """Take the checksums of what is about to be written: whole chunks."""
        if self._table is not None:
            self._table.seal(block, field, start, stop, memory)

    def seeds(self, block: int, start: int, stop: int) -> list[int | None]:
        """For the checksums of all fields of whole chunks, taken elsewhere. Only where there are checksums."""
        assert self._table is not None
        return self._table.seeds(block, start, stop, [field.name for field in self.generation.layout.fields])

    def take(self, block: int, start: int, stop: int, digests: Sequence[int | None]) -> None:
        """Those checksums: like `seal`."""
        assert self._table is not None
        self._table.take(block, start, stop, digests)

    def write(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> Ticket:
        """Elements ``[start, stop)`` of a field, sealed and not changed since. The ticket must be waited for."""
        address = self.generation.address(block, field, start, stop, memory)
        return self._writes.count(self._slots.files.write(address, memory), len(memory))

    def leave_zeros(self) -> None:
        """What was not written is zero, as the store was made; for an import."""
        if self._table is not None:
            self._table.seal_zeros()

    def check_written(self) -> None:
        """Every byte of every record was written once; anything else is a bug."""
        assert self._writes.confirmed_bytes == self._slots.records.records_bytes, (
            "a step writes every byte of every record once"
        )

    def check_waited(self) -> None:
        """Every write was waited for, and every chunk sealed; anything else is a bug."""
        assert self._writes.confirmed_bytes == self._writes.submitted_bytes, "a write was not waited for, or failed"
        assert self._table is None or self._table.is_complete, "a chunk was written and not sealed"

    def write_table(self) -> str:
        """Write the checksums behind the records. Returns their root."""
        if self._table is None or self._slots.chunks is None:
            return ""
        with BufferPool(None) as pool, pool.lease(self._slots.chunks.table_bytes, "checksums") as lease:
            root = self._table.store_into(lease.memory)
            self._slots.files.write(self._slots.records.table_address(self.slot), lease.memory).wait()
        return root
