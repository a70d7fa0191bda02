"""The I/O queue: moves bytes between files and memory. Its engines move the same bytes.

A queue cuts transfers into requests of at most `request_bytes` and keeps at most `depth` of them in flight per
direction. A failed request fails its ticket only. A thread that fails, or a request that does not complete within
`timeout_seconds`, breaks its direction: every unfinished ticket and every later submit there raises, with the cause.

Invariant: every ticket ends. In a broken direction the kernel may still write into buffers whose tickets have ended.
They are not unmapped before it is done, but must not be reused, so the run has to end.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

from ratel_cli.closing import Closing
from ratel_cli.errors import EnvironmentFailure
from ratel_cli.io.checksum_workers import ChecksumWorkers
from ratel_cli.io.requests import Direction, Lane, Request
from ratel_cli.io.threads import ThreadedLane
from ratel_cli.io.tickets import Ticket
from ratel_cli.sizes import PAGE_BYTES

EngineName = Literal["io_uring", "liburing", "threads"]
EngineChoice = Literal["auto", "io_uring", "liburing", "threads"]

# Measured in a 2-core virtual machine on huge pages (scripts/bench/io.py, 2026-11): requests of 4 MiB, 16 in flight,
# reach 0.95 to 1.02 of the best that a C loop or fio reaches with io_uring, and 0.89 to 1.00 with threads. One drive is
# as fast with 2 in flight, at twice the CPU time (fewer completions come together), and with 16 of 1 MiB likewise; 16
# leave several drives enough.
DEFAULT_REQUEST_BYTES = 4 << 20
DEFAULT_DEPTH = 16
DEFAULT_TIMEOUT_SECONDS = 60.0
_DEPTH_PER_DRIVE = 4


class Extent(NamedTuple):
    """A contiguous range of a file, and the memory that it is read into or written from. Whole pages, for O_DIRECT.

    A tuple, because an optimizer's group has a hundred of them and a dataclass takes three times as long to make.
    """

    fd: int
    offset: int
    memory: memoryview


def depth_for(num_drives: int) -> int:
    """Requests in flight per direction that keep this many drives busy: at least four for each."""
    return max(DEFAULT_DEPTH, _DEPTH_PER_DRIVE * num_drives)


class IoQueue(Closing):
    """Moves extents between files and memory. Any thread may submit."""

    engine: str
    """The name of the engine in use."""
    checksums: ChecksumWorkers
    """Takes and compares the checksums of what the queue moves; ends with the queue."""

    @property
    @abstractmethod
    def read_bytes(self) -> int:
        """Bytes read by completed requests since the queue was opened."""

    @property
    @abstractmethod
    def written_bytes(self) -> int:
        """Bytes written by completed requests since the queue was opened."""

    @abstractmethod
    def read(self, extents: Sequence[Extent]) -> Ticket:
        """Fill every extent's memory from its file."""

    @abstractmethod
    def write(self, extents: Sequence[Extent]) -> Ticket:
        """Write every extent's memory to its file. The memory must not change until the ticket is done."""

    @abstractmethod
    def close(self) -> None:
        """End both directions. Transfers in the kernel's hands are waited for, the others fail. Idempotent."""


class LanedQueue(IoQueue):
    """The queue of all engines: one lane for each direction."""

    def __init__(self, engine: EngineName, open_lane: Callable[[Direction], Lane], *, request_bytes: int) -> None:
        assert request_bytes > 0 and request_bytes % PAGE_BYTES == 0
        from ratel_cli import _native  # here, since a planner imports this module for the names of the engines

        self.engine = engine
        self._cut = partial(_native.cut_extents, most_bytes=request_bytes, page_bytes=PAGE_BYTES)
        self._reads = open_lane("read")
        try:
            self._writes = open_lane("write")
        except BaseException:
            self._reads.close()
            raise
        self.checksums = ChecksumWorkers()

    @property
    def read_bytes(self) -> int:
        return self._reads.moved_bytes

    @property
    def written_bytes(self) -> int:
        return self._writes.moved_bytes

    def read(self, extents: Sequence[Extent]) -> Ticket:
        return self._submit(self._reads, "read", extents)

    def write(self, extents: Sequence[Extent]) -> Ticket:
        return self._submit(self._writes, "write", extents)

    def close(self) -> None:
        try:
            self._reads.close()
        finally:
            self._writes.close()
            self.checksums.close()

    def _submit(self, lane: Lane, direction: Direction, extents: Sequence[Extent]) -> Ticket:
        pieces = self._cut(extents)
        ticket = Ticket(num_parts=len(pieces), buffers=extents)
        lane.submit([Request(ticket, direction, fd, offset, memory) for fd, offset, memory in pieces])
        return ticket


def open_queue(
    engine: EngineChoice,
    *,
    notice: Callable[[str], None],
    request_bytes: int = DEFAULT_REQUEST_BYTES,
    depth: int = DEFAULT_DEPTH,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> IoQueue:
    """Open a queue of this engine. `auto` takes threads, with one notice, where io_uring is not available.

    Raises EnvironmentFailure if `io_uring` or `liburing` is asked for and not available.
    """

    def open_with(name: EngineName, lane: Callable[..., Lane]) -> IoQueue:
        return LanedQueue(
            name,
            lambda direction: lane(direction, depth=depth, timeout_seconds=timeout_seconds),
            request_bytes=request_bytes,
        )

    if engine != "threads":
        from ratel_cli.io.liburing_ring import LiburingRing  # here, for the same reason
        from ratel_cli.io.uring import UringLane

        if engine == "liburing":
            return open_with("liburing", partial(UringLane, open_ring=LiburingRing))
        try:
            return open_with("io_uring", UringLane)
        except EnvironmentFailure as failure:
            if engine == "io_uring":
                raise
            notice(f"{failure.message}; transfers use threads, with the same results")
    return open_with("threads", ThreadedLane)
