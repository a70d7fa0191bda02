"""The fast I/O engine: io_uring through the ``liburing`` package, with one ring and one thread per direction.

Measured rules that shape it: the package's own wait holds the GIL, so the thread blocks in the read of an eventfd that
the ring and `submit` both signal; free places of the ring are refilled before tickets end, because the thread may lose
the GIL there; a negative result raises, and its completion must be marked as seen nevertheless; what an ``Iovec`` is
made from is never freed (see `Ring.prepare`).

Left out: registered files and buffers. In the C loop of scripts/bench/io.py they save 0.002 CPU seconds per GB, and
between nothing and 5 % of the time (2-core virtual machine, Linux 6.18, 2026-11). Without them the lane reaches 0.95 to
1.02 of the better loop, at 0.011 to 0.013 CPU seconds per GB. With them it would have to follow every buffer that the
pool makes and drops, and RLIMIT_MEMLOCK, often 8 MiB, would reject more than the memory of two requests.

Phases of a request: 1 submitted, from any thread; 2 waits in the lane; 3 in the kernel, and again after a short
transfer; 4 counted; 5 its part of the ticket ends. Only the lane's thread touches the ring. Invariant: from phase 3 to
its completion the lane refers to a request's memory, even after a timeout.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from time import monotonic

import liburing  # type: ignore[import-untyped]

from ratel_cli.errors import EnvironmentFailure, RatelError
from ratel_cli.io.buffers import address_of
from ratel_cli.io.requests import Direction, Lane, Request, closed_error, lane_error, timeout_error

_TIMER_KEY = 0
_MAX_SUBMITS = 1000
"""io_uring_submit may ask to be called again (EAGAIN, EBUSY, EINTR). This often in a row is a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flight:
    """A request in the kernel's hands. Holds what must live until its completion."""

    request: Request
    memory: memoryview
    since_seconds: float


class UringLane(Lane):
    """A lane on a ring of its own. Tests pass another `open_ring`, which gets the number of entries."""

    def __init__(
        self,
        direction: Direction,
        *,
        depth: int,
        timeout_seconds: float,
        open_ring: Callable[[int], Ring] | None = None,
    ) -> None:
        super().__init__(depth=depth, timeout_seconds=timeout_seconds)
        self._ring = (open_ring or Ring)(depth + 1)  # one more for the timer
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

    def _complete(self, key: int, result: int | OSError) -> None:
        if key == _TIMER_KEY:
            self._timer_runs = False
            self._abandon_late()
            return
        flight = self._flights.get(key)
        if flight is None:
            self._abandoned.pop(key, None)  # it timed out before; now the kernel has let go of its memory
            return
        try:
            self.moved_bytes += flight.request.advance(result)
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
            self._ring.prepare(request, key)
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


class Ring:
    """The few calls of liburing that a lane needs, with types."""

    def __init__(self, num_entries: int) -> None:
        self._ring = liburing.Ring()
        self._completion = liburing.Cqe()
        self._iovecs: dict[tuple[int, int], object] = {}  # by address and length
        self._timer: object = None
        try:
            liburing.io_uring_queue_init(num_entries, self._ring, 0)
            try:
                self._event = os.eventfd(0, os.EFD_CLOEXEC)
                liburing.io_uring_register_eventfd(self._ring, self._event)
            except BaseException:
                liburing.io_uring_queue_exit(self._ring)
                raise
        except OSError as exc:
            raise EnvironmentFailure(
                f"io_uring is not available here: {exc.strerror or exc}", "set storage.engine to threads"
            ) from exc

    def prepare(self, request: Request, key: int) -> None:
        """Put a request on the ring. The caller refers to its memory until it has completed.

        liburing (2026.3.30) never releases the view that an Iovec is made from, so each view would keep its buffer
        mapped for ever. Iovecs are therefore made from views that own nothing, one per address and length, and
        cached: the same buffers come back, so there are few.
        """
        place = address_of(request.memory), len(request.memory)
        iovec = self._iovecs.get(place)
        if iovec is None:
            unowned = (ctypes.c_char * place[1]).from_address(place[0])
            iovec = self._iovecs[place] = liburing.Iovec([memoryview(unowned).cast("B")])
        entry = liburing.io_uring_get_sqe(self._ring)
        assert entry is not None, "the ring has an entry for every request and for the timer"
        prepare = liburing.io_uring_prep_readv if request.direction == "read" else liburing.io_uring_prep_writev
        prepare(entry, request.fd, iovec, request.offset)
        entry.user_data = key

    def prepare_timer(self, seconds: float, key: int) -> None:
        """Put a timer on the ring, which completes after `seconds`. One at a time."""
        self._timer = liburing.timespec(seconds)
        entry = liburing.io_uring_get_sqe(self._ring)
        assert entry is not None, "the ring has an entry for every request and for the timer"
        liburing.io_uring_prep_timeout(entry, self._timer, 0, 0)
        entry.user_data = key

    def submit(self) -> None:
        """Hand everything prepared to the kernel, in several calls if need be. Raises OSError if it takes no more."""
        for _ in range(_MAX_SUBMITS):
            if liburing.io_uring_sq_ready(self._ring) == 0:
                return
            try:
                liburing.io_uring_submit(self._ring)
            except OSError as exc:
                if exc.errno not in (errno.EAGAIN, errno.EBUSY, errno.EINTR):
                    raise
        raise OSError(errno.EBUSY, "io_uring accepts no more requests")

    def reap(self) -> list[tuple[int, int | OSError]]:
        """The completions that are there now, as (key, bytes moved or error)."""
        completions: list[tuple[int, int | OSError]] = []
        for _ in range(liburing.io_uring_cq_ready(self._ring)):
            liburing.io_uring_peek_cqe(self._ring, self._completion)
            entry = self._completion[0]
            key: int = entry.user_data
            try:
                completions.append((key, entry.res))
            except OSError as exc:
                completions.append((key, exc))
            liburing.io_uring_cqe_seen(self._ring, entry)
        return completions

    def wait(self) -> None:
        """Block, without the GIL, until something has completed or `wake` was called since the last wait."""
        os.eventfd_read(self._event)

    def wake(self) -> None:
        """Let `wait` return. From any thread."""
        os.eventfd_write(self._event, 1)

    def close(self) -> None:
        """Close the ring. The kernel keeps its own hold on the pages of what it has not completed."""
        liburing.io_uring_queue_exit(self._ring)
        os.close(self._event)
