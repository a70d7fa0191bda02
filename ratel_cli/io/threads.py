"""The I/O engine that works everywhere: preadv and pwritev on threads, which block in the kernel without the GIL.

A lane has one thread per request in flight, and a thread that watches for requests which the kernel does not complete.

Phases of a request: 1 submitted, from any thread; 2 waits in the lane; 3 in the kernel, and again after a short
transfer; 4 counted; 5 its part of the ticket ends. Invariant: in phase 3 a thread refers to the request's memory, even
after a timeout.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Condition, Event, Thread
from time import monotonic

from ratel_cli.errors import RatelError
from ratel_cli.io.requests import Direction, Lane, Request, closed_error, lane_error, timeout_error

Transfer = Callable[[Direction, int, memoryview, int], int]
"""(direction, file descriptor, memory, offset) -> bytes moved. Raises OSError. Called on many threads at once."""

_GRACE_SECONDS = 0.5
"""How long `close` waits for a thread whose request timed out, before it leaves that thread behind."""


def transfer_with_kernel(direction: Direction, fd: int, memory: memoryview, offset: int) -> int:
    """One preadv or pwritev. Returns the bytes moved, which may be fewer than `memory` has."""
    return os.preadv(fd, [memory], offset) if direction == "read" else os.pwritev(fd, [memory], offset)


class ThreadedLane(Lane):
    """A lane on threads. Tests pass another `transfer`."""

    def __init__(
        self, direction: Direction, *, depth: int, timeout_seconds: float, transfer: Transfer = transfer_with_kernel
    ) -> None:
        super().__init__(depth=depth, timeout_seconds=timeout_seconds)
        self._transfer = transfer
        self._in_flight: dict[Request, float] = {}
        """When each request was last handed to the kernel, by `monotonic`. Under the lock."""
        self._has_work = Condition(self._lock)
        self._is_idle = Condition(self._lock)
        self._has_ended = Event()
        targets = [(str(number), self._run) for number in range(depth)] + [("watch", self._watch)]
        # Daemons: a thread that is stuck in the kernel holds up neither close nor exit.
        self._threads = [
            Thread(target=target, name=f"ratel-io-{direction}-{name}", daemon=True) for name, target in targets
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._fail_waiting(closed_error())
            self._has_work.notify_all()
            self._is_idle.wait_for(lambda: not self._in_flight)
        self._has_ended.set()
        give_up = monotonic() + _GRACE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, give_up - monotonic()))

    def _wake(self, num_requests: int) -> None:
        self._has_work.notify(num_requests)

    def _run(self) -> None:
        while (request := self._next()) is not None:
            self._finish(request, self._move(request))

    def _move(self, request: Request) -> RatelError | None:
        """Hand the request to the kernel until it is finished. Returns the error that ended it, if one did."""
        try:
            while request.memory:
                result = self._call_kernel(request)
                with self._lock:
                    if request not in self._in_flight:  # it timed out, and its ticket has ended
                        return None
                    self.moved_bytes += request.advance(result)
                    self._in_flight[request] = monotonic()
        except RatelError as error:
            return error
        except BaseException as cause:  # noqa: BLE001 - every ticket must end, whatever failed
            self._break(cause)
            return lane_error(cause)
        return None

    def _next(self) -> Request | None:
        """Take a request, or None to end the thread."""
        with self._lock:
            self._has_work.wait_for(lambda: self._waiting or self._is_closed)
            request = self._take_waiting()
            if request is not None:
                self._in_flight[request] = monotonic()
                request.ticket.begin_part()
            return request

    def _call_kernel(self, request: Request) -> int | OSError:
        try:
            return self._transfer(request.direction, request.fd, request.memory, request.offset)
        except OSError as exc:
            return exc

    def _finish(self, request: Request, error: RatelError | None) -> None:
        """End the request's part of its ticket, unless it timed out before."""
        with self._lock:
            if self._in_flight.pop(request, None) is not None:
                request.finish(error)
            if not self._in_flight:
                self._is_idle.notify_all()

    def _watch(self) -> None:
        """Give up requests that the kernel does not complete. Their threads keep their memory until it does."""
        while not self._has_ended.wait(self._timeout_seconds / 4):
            with self._lock:
                latest = monotonic() - self._timeout_seconds
                for request in [request for request, since in self._in_flight.items() if since <= latest]:
                    error = timeout_error(request, self._timeout_seconds)
                    self._break(error)
                    self._finish(request, error)
