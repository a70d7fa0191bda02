"""The fast I/O engine: io_uring through the ``liburing`` package, one ring and one thread a direction.

`queue.open_queue` uses it where the kernel allows. Measured rules that shape it (architecture.md
section 6): the binding's own wait holds the GIL, so the thread blocks in the read of an eventfd
that the ring and ``submit`` both signal; freed places are refilled before tickets are told, since
the thread may lose the GIL then; a negative result raises, and its completion must be marked as seen
nevertheless; and what an ``Iovec`` is made from is never freed (see `Ring.prepare`).

Left out: registered files and buffers. In the C loop of scripts/bench/io.py they save 0.002 CPU seconds
per GB, and from nothing to 5 % of the time (2-core virtual machine, Linux 6.18, 2026-11). The lane reaches
0.95 to 1.02 of the better loop without them, at 0.011 to 0.013 CPU seconds per GB; with them it would have
to follow every buffer that the pool makes and drops, and RLIMIT_MEMLOCK, often 8 MiB, would refuse to pin
more than the memory of two requests.

Phases of a request: 1 submitted, from any thread; 2 waiting in the lane; 3 in the kernel, again for
the rest after a short transfer; 4 counted; 5 its ticket told. Only the lane's thread touches the
ring. Invariant: from 3 to its completion the lane refers to a request's memory, even after a timeout.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock, Thread
from time import monotonic

import liburing  # type: ignore[import-untyped]

from ratel_cli.errors import EnvironmentFailure, RatelError
from ratel_cli.io.buffers import address_of
from ratel_cli.io.requests import Direction, Request, closed_error, lane_error, timeout_error

_TIMER_KEY = 0
# io_uring_submit may be told to come back (EAGAIN, EBUSY, EINTR); this often in a row is a fault.
_MAX_SUBMITS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flight:
    """A request in the kernel's hands; holds what must live until its completion."""

    request: Request
    memory: memoryview
    since_seconds: float


class UringLane:
    """A lane (requests.py) on a ring of its own. Tests inject `open_ring`, which gets the number of entries."""

    def __init__(
        self,
        direction: Direction,
        *,
        depth: int,
        timeout_seconds: float,
        open_ring: Callable[[int], Ring] | None = None,
    ) -> None:
        assert depth > 0 and timeout_seconds > 0
        self._depth = depth
        self._timeout_seconds = timeout_seconds
        self._ring = (open_ring or Ring)(depth + 1)  # one more for the timer
        self._lock = Lock()  # for these three
        self._submitted: deque[Request] = deque()
        self._broken: BaseException | None = None
        self._closed = False
        self._moved_bytes = 0  # from here on, of the lane's thread alone
        self._waiting: deque[Request] = deque()
        self._flights: dict[int, _Flight] = {}
        self._ended: deque[tuple[Request, RatelError | None]] = deque()
        self._abandoned: dict[int, _Flight] = {}
        self._next_key = _TIMER_KEY + 1
        self._timer_runs = False
        self._thread = Thread(target=self._run, name=f"ratel-io-{direction}", daemon=True)
        self._thread.start()

    @property
    def moved_bytes(self) -> int:
        return self._moved_bytes

    def submit(self, requests: Sequence[Request]) -> None:
        with self._lock:
            if self._broken is not None:
                raise lane_error(self._broken)
            assert not self._closed, "a transfer was submitted to a closed queue"
            self._submitted.extend(requests)
            self._ring.wake()

    def close(self) -> None:
        with self._lock:
            first, self._closed = not self._closed, True
            if first:
                self._ring.wake()
        self._thread.join()
        if first:
            self._ring.close()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as cause:  # noqa: BLE001 - every ticket must end, whatever failed
            self._break(cause)
            self._tell_ended()
            for key in list(self._flights):
                self._abandon(key, lane_error(cause))

    def _turn(self) -> bool:
        """Block, reap, refill, tell. False ends the lane. What completes after the wait ends the next one at once."""
        self._ring.wait()
        for key, result in self._ring.reap():
            self._complete(key, result)
        closing = self._take_submitted()
        self._refill()
        self._tell_ended()
        return not closing or bool(self._flights)

    def _complete(self, key: int, result: int | OSError) -> None:
        if key == _TIMER_KEY:
            self._timer_runs = False
            self._abandon_the_late()
            return
        flight = self._flights.get(key)
        if flight is None:
            self._abandoned.pop(key, None)  # late, but the kernel has let go of its memory
            return
        try:
            self._moved_bytes += flight.request.advance(result)
        except RatelError as error:
            self._ended.append((flight.request, error))
        else:
            if flight.request.memory:
                self._waiting.appendleft(flight.request)
            else:
                self._ended.append((flight.request, None))
        del self._flights[key]

    def _tell_ended(self) -> None:
        while self._ended:
            request, error = self._ended.popleft()
            request.finish(error)

    def _take_submitted(self) -> bool:
        """Move what other threads submitted to the waiting; whether close() was called."""
        with self._lock:
            self._waiting.extend(self._submitted)
            self._submitted.clear()
            closed, broken = self._closed, self._broken
        if broken is not None:
            self._fail_waiting(lane_error(broken))
        elif closed:
            self._fail_waiting(closed_error())
        return closed

    def _refill(self) -> None:
        now_seconds = monotonic()
        while self._waiting and len(self._flights) < self._depth:
            request = self._waiting.popleft()
            key, self._next_key = self._next_key, self._next_key + 1
            self._flights[key] = _Flight(request=request, memory=request.memory, since_seconds=now_seconds)
            self._ring.prepare(request, key)
            request.ticket.begin_part()
        if self._flights and not self._timer_runs:
            self._ring.prepare_timer(self._timeout_seconds / 4, _TIMER_KEY)
            self._timer_runs = True
        self._ring.submit()

    def _abandon_the_late(self) -> None:
        since_seconds = monotonic() - self._timeout_seconds
        for key, flight in list(self._flights.items()):
            if flight.since_seconds <= since_seconds:
                error = timeout_error(flight.request, self._timeout_seconds)
                self._break(error)
                self._abandon(key, error)

    def _abandon(self, key: int, error: RatelError) -> None:
        flight = self._flights.pop(key)
        self._abandoned[key] = flight
        flight.request.finish(error)

    def _break(self, cause: BaseException) -> None:
        with self._lock:
            self._broken = self._broken or cause
            self._waiting.extend(self._submitted)
            self._submitted.clear()
        self._fail_waiting(lane_error(cause))

    def _fail_waiting(self, error: RatelError) -> None:
        while self._waiting:
            self._waiting.popleft().finish(error)


class Ring:
    """The few calls of the binding that a lane needs, with types."""

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
                f"io_uring is refused here: {exc.strerror or exc}", "set storage.engine to threads"
            ) from exc

    def prepare(self, request: Request, key: int) -> None:
        """Put a request on the ring. The caller refers to its memory until it has completed.

        The binding (2026.3.30) never releases the view that an Iovec is made from: each would pin its
        buffer for ever. So Iovecs are made from views that own nothing, which address and length
        define, and are kept: the same buffers come back, so there are few.
        """
        place = address_of(request.memory), len(request.memory)
        iovec = self._iovecs.get(place)
        if iovec is None:
            unowned = (ctypes.c_char * place[1]).from_address(place[0])
            iovec = self._iovecs[place] = liburing.Iovec([memoryview(unowned).cast("B")])
        entry = liburing.io_uring_get_sqe(self._ring)
        assert entry is not None, "the ring is larger than the lane is deep"
        prepare = liburing.io_uring_prep_readv if request.direction == "read" else liburing.io_uring_prep_writev
        prepare(entry, request.fd, iovec, request.offset)
        entry.user_data = key

    def prepare_timer(self, seconds: float, key: int) -> None:
        """Put a timer on the ring, which completes after ``seconds``. One at a time."""
        self._timer = liburing.timespec(seconds)
        entry = liburing.io_uring_get_sqe(self._ring)
        assert entry is not None, "the ring is larger than the lane is deep"
        liburing.io_uring_prep_timeout(entry, self._timer, 0, 0)
        entry.user_data = key

    def submit(self) -> None:
        """Hand everything prepared to the kernel, which may take it in several goes."""
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
        """The completions that are there now, by key."""
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
        """Block, without the GIL, until something has completed or ``wake`` was called since the last wait."""
        os.eventfd_read(self._event)

    def wake(self) -> None:
        os.eventfd_write(self._event, 1)

    def close(self) -> None:
        """The kernel keeps its own hold on the pages of what it has not completed."""
        liburing.io_uring_queue_exit(self._ring)
        os.close(self._event)
