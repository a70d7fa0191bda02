"""An I/O queue that is slowed down to a drive of a known speed.

A real queue moves the bytes, and no transfer is done before a drive of that speed would be done. Each direction moves
one transfer after the other, so that reads do not slow down writes. Bytes and errors are the real queue's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Lock

from ratel_cli.io.queue import Extent, IoQueue
from ratel_cli.io.tickets import Ticket


class ThrottledQueue(IoQueue):
    """An IoQueue over another, which it borrows: whoever opened that one may still use and must close it."""

    def __init__(self, queue: IoQueue, *, read_bytes_per_second: float, write_bytes_per_second: float) -> None:
        self.engine = queue.engine
        self.checksums = queue.checksums
        self._queue = queue
        self._reads = _Direction(read_bytes_per_second)
        self._writes = _Direction(write_bytes_per_second)

    @property
    def read_bytes(self) -> int:
        return self._queue.read_bytes

    @property
    def written_bytes(self) -> int:
        return self._queue.written_bytes

    def read(self, extents: Sequence[Extent]) -> Ticket:
        return _LateTicket(self._queue.read(extents), *self._reads.take(extents))

    def write(self, extents: Sequence[Extent]) -> Ticket:
        return _LateTicket(self._queue.write(extents), *self._writes.take(extents))

    def close(self) -> None:
        """Do nothing: the real queue belongs to whoever opened it."""


class _Direction:
    """One direction of the drive: when it is done with what it was given so far."""

    def __init__(self, bytes_per_second: float) -> None:
        assert bytes_per_second > 0
        self._bytes_per_second = bytes_per_second
        self._lock = Lock()
        self._free_at = 0.0

    def take(self, extents: Sequence[Extent]) -> tuple[float, float]:
        """When the drive begins with these extents and when it is done, by `perf_counter`."""
        num_bytes = sum(len(extent.memory) for extent in extents)
        with self._lock:
            begins = max(self._free_at, time.perf_counter())
            self._free_at = begins + num_bytes / self._bytes_per_second
            return begins, self._free_at


class _LateTicket(Ticket):
    """Another ticket's, not done before `due`."""

    def __init__(self, ticket: Ticket, begins: float, due: float) -> None:
        super().__init__(num_parts=0)
        self._ticket = ticket
        self._begins = begins
        self._due = due

    @property
    def done(self) -> bool:
        return self._ticket.done and time.perf_counter() >= self._due

    @property
    def span(self) -> tuple[float, float]:
        return self._begins, max(self._ticket.span[1], self._due)

    def _await(self) -> None:
        try:
            self._ticket.wait()
        finally:
            time.sleep(max(0.0, self._due - time.perf_counter()))
