"""A ticket stands for one transfer in flight: who submits gets it, and waits on it exactly once.

The I/O queues issue tickets; the store and the engine wait on them. A ticket is done when the last
of its requests is, so after ``wait`` -- whether it returns or raises -- the kernel has left the
buffers (except in a broken queue; see queue.py). Until then it refers to them, so that nothing in
flight can be unmapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event, Lock
from time import perf_counter

from ratel_cli.errors import RatelError


class Ticket:
    """One transfer of ``num_parts`` requests."""

    def __init__(self, *, num_parts: int, buffers: Sequence[memoryview] = ()) -> None:
        assert num_parts >= 0
        self._lock = Lock()
        self._finished = Event()
        self._waited = False
        self._num_parts_left = num_parts
        self._error: RatelError | None = None
        self._buffers = tuple(buffers)
        self._began: float | None = None
        self._ended = 0.0
        if num_parts == 0:
            self._finish()

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""
        return self._finished.is_set()

    @property
    def span(self) -> tuple[float, float]:
        """When the first request was handed to the kernel and when the last one ended, by `perf_counter`."""
        assert self.done, "the span of a transfer is known when it has ended"
        return self._ended if self._began is None else self._began, self._ended

    def wait(self) -> None:
        """Block until every request has ended; raise the first failure, with its cause."""
        assert not self._waited, "a ticket is waited on exactly once"
        self._waited = True
        self._await()

    def begin_part(self) -> None:
        """Called by the queue as it hands a request to the kernel. The first call counts."""
        if self._began is None:
            self._began = perf_counter()

    def finish_part(self, error: RatelError | None = None) -> None:
        """Called by the queue that issued this ticket, once for each request, from any thread."""
        with self._lock:
            assert self._num_parts_left > 0, "a request finished twice"
            self._num_parts_left -= 1
            if error is not None and self._error is None:
                self._error = error
            if self._num_parts_left == 0:
                self._finish()

    def _await(self) -> None:
        self._finished.wait()
        if self._error is not None:
            raise self._error

    def _finish(self) -> None:
        self._buffers = ()
        self._ended = perf_counter()
        self._finished.set()


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


class _FollowedTicket(Ticket):
    def __init__(self, ticket: Ticket, action: Callable[[], None]) -> None:
        super().__init__(num_parts=0)
        self._ticket = ticket
        self._action = action

    @property
    def done(self) -> bool:
        return self._ticket.done

    @property
    def span(self) -> tuple[float, float]:
        return self._ticket.span

    def _await(self) -> None:
        self._ticket.wait()
        self._action()


def follow(ticket: Ticket, action: Callable[[], None]) -> Ticket:
    """The same transfer, after which whoever waits for it carries out `action`, if it succeeded. Takes over waiting."""
    return _FollowedTicket(ticket, action)


def join(tickets: Sequence[Ticket]) -> Ticket:
    """One ticket for all of them. It takes over waiting on them: they must not be waited on elsewhere."""
    return _JoinedTicket(tickets)
