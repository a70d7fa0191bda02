"""An I/O queue over simulated drives: each has a rate and a latency, and moves one request at a time.

The bytes are moved in real files, one for each drive, but no request completes before a drive of that kind would
complete it: it begins when the drive has moved all earlier requests, takes its bytes divided by the rate, and is known
to the host one latency later. Reads and writes share the drive. So a drive is busy all the time if, and only if, the
next request is in its queue when one ends. Requests, tickets, depth and errors are those of the real queues
(`LanedQueue`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Condition, Lock, Thread
from time import perf_counter

from ratel_cli.errors import RatelError
from ratel_cli.io.queue import LanedQueue
from ratel_cli.io.requests import Direction, Lane, Request, closed_error, lane_error
from ratel_cli.io.threads import transfer_with_kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveKind:
    """What one simulated drive can do."""

    bytes_per_second: float
    """Of reads and writes together."""
    latency_seconds: float
    """From the end of a transfer until the host knows of it. The drive moves the next request meanwhile."""


class SimulatedDrive:
    """When a drive is done with what it was given so far."""

    def __init__(self, kind: DriveKind) -> None:
        self._kind = kind
        self._lock = Lock()
        self._free_at = 0.0
        self.busy_seconds = 0.0

    def take(self, num_bytes: int) -> float:
        """When the host will know that a request which comes now is done, by `perf_counter`."""
        seconds = num_bytes / self._kind.bytes_per_second
        with self._lock:
            self._free_at = max(self._free_at, perf_counter()) + seconds
            self.busy_seconds += seconds
            return self._free_at + self._kind.latency_seconds


class SimulatedDrives(LanedQueue):
    """A queue over drives of one kind, one for each file that is used, in the order of their first use."""

    def __init__(self, kind: DriveKind, *, request_bytes: int, depth: int) -> None:
        self._kind = kind
        self._lock = Lock()
        self._by_file: dict[int, SimulatedDrive] = {}
        super().__init__(
            "threads",
            lambda direction: _SimulatedLane(direction, self._drive, depth=depth),
            request_bytes=request_bytes,
        )

    @property
    def drives(self) -> Sequence[SimulatedDrive]:
        """The drives that were used so far."""
        with self._lock:
            return tuple(self._by_file.values())

    def _drive(self, fd: int) -> SimulatedDrive:
        with self._lock:
            return self._by_file.setdefault(fd, SimulatedDrive(self._kind))


@dataclass(order=True, slots=True)
class _Flight:
    due: float
    number: int
    request: Request = field(compare=False)


class _SimulatedLane(Lane):
    """One direction: a thread that hands requests to the drives and completes them when they are due."""

    def __init__(self, direction: Direction, drive: Callable[[int], SimulatedDrive], *, depth: int) -> None:
        super().__init__(depth=depth, timeout_seconds=60.0)
        self._drive = drive
        self._changed = Condition(self._lock)
        self._flights: list[_Flight] = []
        self._next_number = 0
        self._thread = Thread(target=self._run, name=f"ratel-io-{direction}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._fail_waiting(closed_error())
            self._changed.notify_all()
        self._thread.join()

    def _wake(self, num_requests: int) -> None:  # noqa: ARG002 - one thread serves them all
        self._changed.notify_all()

    def _run(self) -> None:
        while (flight := self._next()) is not None:
            self._complete(flight.request)

    def _next(self) -> _Flight | None:
        """Hand what waits to the drives, and return the first request that is due. None ends the lane."""
        with self._lock:
            while True:
                while len(self._flights) < self._depth and (request := self._take_waiting()) is not None:
                    request.ticket.begin_part()
                    due = self._drive(request.fd).take(len(request.memory))
                    heapq.heappush(self._flights, _Flight(due, self._next_number, request))
                    self._next_number += 1
                if not self._flights:
                    if self._is_closed:
                        return None
                    self._changed.wait()
                elif (seconds := self._flights[0].due - perf_counter()) > 0:
                    self._changed.wait(seconds)
                else:
                    return heapq.heappop(self._flights)

    def _complete(self, request: Request) -> None:
        """Move the bytes, and end the request's part of its ticket."""
        error: RatelError | None = None
        try:
            while request.memory:
                result: int | OSError
                try:
                    result = transfer_with_kernel(request.direction, request.fd, request.memory, request.offset)
                except OSError as failure:
                    result = failure
                self.moved_bytes += request.advance(result)
        except RatelError as failure:
            error = failure
        except BaseException as cause:  # noqa: BLE001 - every ticket must end, whatever failed
            self._break(cause)
            error = lane_error(cause)
        request.finish(error)
