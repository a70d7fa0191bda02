"""The I/O queue: what the store submits transfers to. Two engines, the same bytes.

`open_queue` picks the engine; the store, scratch files and the NVMe measurements submit pieces and
wait on tickets. A queue cuts pieces into requests of at most ``request_bytes`` and keeps at most
``depth`` of them in flight per direction.

Who learns of a failure: a request that fails, fails its ticket only. A thread that fails, or a
request that does not complete within ``timeout_seconds``, breaks its direction: every unfinished
ticket and every later submit there raises, with the cause. In a broken direction the kernel may
still write into buffers whose tickets have ended: they are not unmapped before it is done, but must
not be reused either, so the run has to end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, Self

from ratel_cli.closing import Closing
from ratel_cli.errors import EnvironmentFailure
from ratel_cli.io.buffers import address_of
from ratel_cli.io.requests import Direction, Lane, Request
from ratel_cli.io.tickets import Ticket
from ratel_cli.sizes import PAGE_BYTES

EngineName = Literal["io_uring", "threads"]
EngineChoice = Literal["auto", "io_uring", "threads"]

# Measured in a 2-core virtual machine on huge pages (scripts/bench/io.py, 2026-11): requests of 4 MiB,
# 16 in flight, reach 0.95 to 1.02 of the best that a C loop or fio reaches with io_uring, and 0.89 to
# 1.00 with threads. One drive is as fast with 2 in flight, at twice the CPU time (fewer completions
# come together), and with 16 of 1 MiB likewise; 16 leave several drives enough.
DEFAULT_REQUEST_BYTES = 4 << 20
DEFAULT_DEPTH = 16
DEFAULT_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A range of a file and the memory it is moved from or to; pages throughout, for O_DIRECT."""

    fd: int
    offset: int
    memory: memoryview

    def __post_init__(self) -> None:
        assert self.memory.format == "B" and self.memory.contiguous
        assert self.offset >= 0 and self.offset % PAGE_BYTES == 0, "a piece starts on a page of the file"
        assert len(self.memory) % PAGE_BYTES == 0, "a piece is whole pages"
        assert not self.memory or address_of(self.memory) % PAGE_BYTES == 0, "a piece starts on a page of memory"


class IoQueue(Protocol):
    """Moves pieces between files and memory. Any thread may submit; see the module for failures."""

    @property
    def engine(self) -> str:
        """The name of the engine in use."""
        ...

    @property
    def read_bytes(self) -> int:
        """Bytes read by completed requests since the queue was opened."""
        ...

    @property
    def written_bytes(self) -> int:
        """Bytes written by completed requests since the queue was opened."""
        ...

    def read(self, pieces: Sequence[Piece]) -> Ticket:
        """Fill every piece's memory from its file."""
        ...

    def write(self, pieces: Sequence[Piece]) -> Ticket:
        """Write every piece's memory to its file. The memory must not change until the ticket is done."""
        ...

    def close(self) -> None:
        """End both directions; transfers in flight are waited for, those not yet begun fail. Idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class LanedQueue(Closing):
    """The queue of both engines: cuts pieces into requests for the lane of their direction."""

    def __init__(self, engine: EngineName, open_lane: Callable[[Direction], Lane], *, request_bytes: int) -> None:
        assert request_bytes > 0 and request_bytes % PAGE_BYTES == 0
        self._engine = engine
        self._request_bytes = request_bytes
        self._reads = open_lane("read")
        try:
            self._writes = open_lane("write")
        except BaseException:
            self._reads.close()
            raise

    @property
    def engine(self) -> str:
        return self._engine

    @property
    def read_bytes(self) -> int:
        return self._reads.moved_bytes

    @property
    def written_bytes(self) -> int:
        return self._writes.moved_bytes

    def read(self, pieces: Sequence[Piece]) -> Ticket:
        return self._submit(self._reads, "read", pieces)

    def write(self, pieces: Sequence[Piece]) -> Ticket:
        return self._submit(self._writes, "write", pieces)

    def close(self) -> None:
        try:
            self._reads.close()
        finally:
            self._writes.close()

    def _submit(self, lane: Lane, direction: Direction, pieces: Sequence[Piece]) -> Ticket:
        cuts = [(piece, start) for piece in pieces for start in range(0, len(piece.memory), self._request_bytes)]
        ticket = Ticket(num_parts=len(cuts), buffers=[piece.memory for piece in pieces])
        lane.submit(
            [
                Request(
                    ticket=ticket,
                    direction=direction,
                    fd=piece.fd,
                    offset=piece.offset + start,
                    memory=piece.memory[start : start + self._request_bytes],
                )
                for piece, start in cuts
            ]
        )
        return ticket


def open_queue(
    engine: EngineChoice,
    *,
    notice: Callable[[str], None],
    request_bytes: int = DEFAULT_REQUEST_BYTES,
    depth: int = DEFAULT_DEPTH,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> IoQueue:
    """Open the engine asked for; ``auto`` takes threads, with one notice, where io_uring is refused."""
    from ratel_cli.io.threads import ThreadedLane

    if engine != "threads":
        try:
            return _open_io_uring(request_bytes=request_bytes, depth=depth, timeout_seconds=timeout_seconds)
        except EnvironmentFailure as refusal:
            if engine == "io_uring":
                raise
            notice(f"{refusal.message}; transfers use threads, with the same results")
    return LanedQueue(
        "threads",
        lambda direction: ThreadedLane(direction, depth=depth, timeout_seconds=timeout_seconds),
        request_bytes=request_bytes,
    )


def _open_io_uring(*, request_bytes: int, depth: int, timeout_seconds: float) -> IoQueue:
    try:
        from ratel_cli.io.uring import UringLane
    except ImportError as exc:
        raise EnvironmentFailure(
            f"io_uring is not available: {exc}", "install the liburing package, or set storage.engine to threads"
        ) from exc
    return LanedQueue(
        "io_uring",
        lambda direction: UringLane(direction, depth=depth, timeout_seconds=timeout_seconds),
        request_bytes=request_bytes,
    )
