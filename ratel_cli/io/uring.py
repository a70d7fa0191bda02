"""The fast I/O engine: io_uring, with one ring (kernels/bindings/ring.cpp) and one thread per direction.

The thread blocks in the read of an eventfd that the ring and `submit` both signal. Free places of the ring are refilled
before tickets end, because the thread may lose the GIL there.

Left out: registered files and buffers. In the C loop of scripts/bench/io.py they save 0.002 CPU seconds per GB, and
between nothing and 5 % of the time (2-core virtual machine, Linux 6.18, 2026-11). Without them the lane reaches 0.95 to
1.02 of the better loop, at 0.011 to 0.013 CPU seconds per GB. With them it would have to follow every buffer that the
pool makes and drops, and RLIMIT_MEMLOCK, often 8 MiB, would reject more than the memory of two requests.

Phases of a request: 1 submitted, from any thread; 2 waits in the lane; 3 in the kernel, and again after a short
transfer; 4 counted; 5 its part of the ticket ends. Only the lane's thread touches the ring. Invariant: from phase 3 to
its completion the lane refers to a request's memory, even after a timeout.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from time import monotonic

from ratel_cli._native import Ring
from ratel_cli.errors import EnvironmentFailure, RatelError
from ratel_cli.io.liburing_ring import LiburingRing
from ratel_cli.io.requests import Direction, Lane, Request, closed_error, lane_error, timeout_error

_TIMER_KEY = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flight:
    """A request in the kernel's hands. Holds what must live until its completion."""

    request: Request
    memory: memoryview
    since_seconds: float


class UringLane(Lane):
    """A lane on a ring of its own. `open_ring` opens another one than the kernels' and gets the number of entries."""

    def __init__(
        self,
        direction: Direction,
        *,
        depth: int,
        timeout_seconds: float,
        open_ring: Callable[[int], Ring | LiburingRing] = Ring,
    ) -> None:
        super().__init__(depth=depth, timeout_seconds=timeout_seconds)
        try:
            self._ring = open_ring(depth + 1)  # one more for the timer
        except OSError as exc:
            raise EnvironmentFailure(
                f"io_uring is not available here: {exc.strerror or exc}", "set storage.engine to threads"
            ) from exc
        # What follows is for the lane's thread alone.
        self._flights: dict[int, _Flight] = {}
        self._ended: deque[tuple[Request, RatelError | None]] = deque()
        self._abandoned: dict[int, _Flight] = {}
        self._next_key = _TIMER_KEY + 1
        self._timer_runs = False
        self._thread = Thread(target=self._run, name=f"ratel-io-{direction}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
            if is_first:
                self._ring.wake()
        self._thread.join()
        if is_first:
            self._ring.close()

    def _wake(self, num_requests: int) -> None:  # noqa: ARG002 - one thread serves them all
        self._ring.wake()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as cause:  # noqa: BLE001 - every ticket must end, whatever failed
            self._break(cause)
            self._end_tickets()
            for key in list(self._flights):
                self._abandon(key, lane_error(cause))

    def _turn(self) -> bool:
        """Block, reap, refill, end tickets. False ends the lane. A completion after the block ends the next one."""
        self._ring.wait()
        for key, result in self._ring.reap():
            self._complete(key, result)
        with self._lock:
            is_closed = self._is_closed
            if self._broken is not None:
                self._fail_waiting(lane_error(self._broken))
            elif is_closed:
                self._fail_waiting(closed_error())
        self._refill()
        self._end_tickets()
        return not is_closed or bool(self._flights)

    def _complete(self, key: int, result: int) -> None:
        if key == _TIMER_KEY:
            self._timer_runs = False
            self._abandon_late()
            return
        flight = self._flights.get(key)
        if flight is None:
            self._abandoned.pop(key, None)  # it timed out before; now the kernel has let go of its memory
            return
        try:
            self.moved_bytes += flight.request.advance(
                result if result >= 0 else OSError(-result, os.strerror(-result))
            )
        except RatelError as error:
            self._ended.append((flight.request, error))
        else:
            if flight.request.memory:
                with self._lock:
                    self._waiting.appendleft(flight.request)
            else:
                self._ended.append((flight.request, None))
        del self._flights[key]

    def _end_tickets(self) -> None:
        while self._ended:
            request, error = self._ended.popleft()
            request.finish(error)

    def _refill(self) -> None:
        now_seconds = monotonic()
        while len(self._flights) < self._depth and (request := self._take_waiting()) is not None:
            key, self._next_key = self._next_key, self._next_key + 1
            self._flights[key] = _Flight(request=request, memory=request.memory, since_seconds=now_seconds)
            self._ring.prepare(
                writes=request.direction == "write",
                fd=request.fd,
                memory=request.memory,
                offset=request.offset,
                key=key,
            )
            request.ticket.begin_part()
        if self._flights and not self._timer_runs:
            self._ring.prepare_timer(self._timeout_seconds / 4, _TIMER_KEY)
            self._timer_runs = True
        self._ring.submit()

    def _abandon_late(self) -> None:
        latest = monotonic() - self._timeout_seconds
        for key, flight in list(self._flights.items()):
            if flight.since_seconds <= latest:
                error = timeout_error(flight.request, self._timeout_seconds)
                self._break(error)
                self._abandon(key, error)

    def _abandon(self, key: int, error: RatelError) -> None:
        """End the request's ticket, and keep its memory until the kernel has completed it."""
        flight = self._flights.pop(key)
        self._abandoned[key] = flight
        flight.request.finish(error)
