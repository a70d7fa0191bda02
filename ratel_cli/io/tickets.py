"""Tickets: one for each transfer in flight. The submitter waits on its ticket exactly once.

A ticket is done when the last of its requests is. After `wait`, whether it returns or raises, the kernel no longer
uses the buffers (except in a broken queue, see queue.py). Until then the ticket refers to them, so that nothing in
flight can be unmapped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from threading import Lock
from time import perf_counter
from typing import Self, TypeVar

from ratel_cli.errors import RatelError

T = TypeVar("T")
_POLL_SECONDS = 0.002


class Ticket:
    """One transfer of `num_parts` requests."""

    def __init__(self, *, num_parts: int, buffers: Sequence[object] = ()) -> None:
        """`buffers`: objects that keep the memory of the transfer alive."""
        assert num_parts >= 0
        self._lock = Lock()
        self._in_flight = Lock()  # held until the last request has ended: an Event takes ten times as long to make
        self._in_flight.acquire()
        self._is_done = False
        self._waited = False
        self._num_parts_left = num_parts
        self._error: Exception | None = None
        self._buffers = buffers
        self._action: Callable[[], None] | None = None
        self._began: float | None = None
        self._ended = 0.0
        if num_parts == 0:
            self._finish()

    @property
    def done(self) -> bool:
        """True if `wait` would return or raise at once."""
        return self._is_done

    @property
    def span(self) -> tuple[float, float]:
        """Seconds by `perf_counter`: when the first request went to the kernel, and when the last one ended."""
        assert self.done, "the span of a transfer is known when it has ended"
        return self._ended if self._began is None else self._began, self._ended

    def wait(self) -> None:
        """Block until every request has ended. Raises the first failure, with its cause."""
        assert not self._waited, "a ticket is waited on exactly once"
        self._waited = True
        self._await()
        if self._action is not None:
            self._action()

    def then(self, action: Callable[[], None]) -> Self:
        """Let `wait` call `action` after a success. Returns the ticket itself."""
        assert self._action is None, "a ticket has one action"
        self._action = action
        return self

    def begin_part(self) -> None:
        """Note that a request goes to the kernel. The first call counts. For the queue that issued the ticket."""
        if self._began is None:
            self._began = perf_counter()

    def finish_part(self, error: Exception | None = None) -> None:
        """End one request, with its error if it failed. From any thread, for the queue that issued the ticket."""
        with self._lock:
            assert self._num_parts_left > 0, "a request finished twice"
            self._num_parts_left -= 1
            if error is not None and self._error is None:
                self._error = error
            if self._num_parts_left == 0:
                self._finish()

    def _await(self) -> None:
        with self._in_flight:
            pass
        if self._error is not None:
            raise self._error

    def _finish(self) -> None:
        self._buffers = ()
        self._ended = perf_counter()
        self._is_done = True
        self._in_flight.release()


class _JoinedTicket(Ticket):
    def __init__(self, tickets: Sequence[Ticket]) -> None:
        super().__init__(num_parts=0)
        self._tickets = tuple(tickets)

    @property
    def done(self) -> bool:
        return all(ticket.done for ticket in self._tickets)

    @property
    def span(self) -> tuple[float, float]:
        spans = [ticket.span for ticket in self._tickets] or [super().span]
        return min(began for began, _ in spans), max(ended for _, ended in spans)

    def _await(self) -> None:
        first: RatelError | None = None
        for ticket in self._tickets:
            try:
                ticket.wait()
            except RatelError as error:
                first = first or error
        if first is not None:
            raise first


def settle(tickets: Collection[Ticket]) -> None:
    """Return when every transfer has ended, failed or not. The queue ends each one, at its timeout at the latest."""
    while not all(ticket.done for ticket in tickets):
        time.sleep(_POLL_SECONDS)


def in_flight(transfers: Iterable[tuple[T, Ticket]], *, at_most: int) -> Generator[T, None, None]:
    """Begin the transfers one after another, and yield what each is for, in order, when it has ended.

    Less than `at_most` transfers are in flight when the next one begins. Close the generator if it is not exhausted:
    it then waits for those in flight. Raises the first failure.
    """
    window: deque[tuple[T, Ticket]] = deque()

    def first() -> T:
        what, ticket = window[0]
        ticket.wait()
        window.popleft()
        return what

    try:
        for transfer in transfers:
            window.append(transfer)
            if len(window) == at_most:
                yield first()
        while window:
            yield first()
    finally:
        settle([ticket for _, ticket in window])


def join(tickets: Sequence[Ticket]) -> Ticket:
    """One ticket for all transfers. The given tickets must not be waited on themselves."""
    return _JoinedTicket(tickets)
