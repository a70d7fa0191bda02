"""Open files that are read and written striped, one for each drive.

Invariant: no transfer outlives the files (`StripedFiles.settle` before closing). A late write to a descriptor that was
closed and reused would land in another file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock

from ratel_cli import _native
from ratel_cli.io.queue import Extent, IoQueue
from ratel_cli.io.striping import StripeMap
from ratel_cli.io.tickets import Ticket, settle


class StripedFiles:
    """One range of logical addresses, spread over open files. Borrows the descriptors; their owner closes them."""

    def __init__(self, fds: Sequence[int], stripes: StripeMap, queue: IoQueue) -> None:
        assert len(fds) == len(stripes.shares)
        self._fds = tuple(fds)
        self._stripes = native_stripes(stripes)
        self._queue = queue
        self._lock = Lock()
        self._in_flight: list[Ticket] = []

    @property
    def num_drives(self) -> int:
        """Number of files, each on a drive of its own."""
        return len(self._fds)

    def read(self, address: int, memory: memoryview, *, check: Callable[[], None] | None = None) -> Ticket:
        """Fill `memory` from logical `address` on. Both are whole pages.

        `check` runs on a thread for checksums when the bytes are there; the ticket's `wait` raises what it raises.
        """
        ticket = self._queue.read(self._extents([(address, memory)]))
        return self._watch(ticket if check is None else self._queue.checksums.after(ticket, check))

    def write(self, address: int, memory: memoryview, *, take: Callable[[], None] | None = None) -> Ticket:
        """Write `memory` to logical `address` on. Both are whole pages.

        `take` runs on a thread for checksums during the write; the ticket is done when both are.
        """
        ticket = self._queue.write(self._extents([(address, memory)]))
        return self._watch(ticket if take is None else self._queue.checksums.during(ticket, take))

    def read_parts(self, parts: Sequence[tuple[int, memoryview]]) -> Ticket:
        """Fill several memories, each from its logical address on, as one transfer."""
        return self._watch(self._queue.read(self._extents(parts)))

    def write_parts(self, parts: Sequence[tuple[int, memoryview]]) -> Ticket:
        """Write several memories, each to its logical address on, as one transfer."""
        return self._watch(self._queue.write(self._extents(parts)))

    def settle(self) -> None:
        """Wait until no transfer is in flight."""
        with self._lock:
            in_flight, self._in_flight = self._in_flight, []
        settle(in_flight)

    def _extents(self, parts: Sequence[tuple[int, memoryview]]) -> list[Extent]:
        return self._stripes.extents(parts, self._fds, Extent)

    def _watch(self, ticket: Ticket) -> Ticket:
        with self._lock:  # a reading and a writing thread may both be here
            self._in_flight = [each for each in (*self._in_flight, ticket) if not each.done]
        return ticket


def native_stripes(stripes: StripeMap) -> _native.Stripes:
    """What cuts transfers into ranges of the files of this map."""
    return _native.Stripes(
        turns=stripes.turns,
        weights=stripes.shares,
        stripe_bytes=stripes.stripe_bytes,
        header_bytes=stripes.header_bytes,
    )
