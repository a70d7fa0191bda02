"""Counts what a step wrote, so that a commit can insist on all of it.

Used by `store`. A write counts when it was waited for and succeeded: a failed write whose ticket
nobody looked at, or a group of parameters that was left out, stops the commit.
"""

from __future__ import annotations

from threading import Lock

from ratel_cli.movement.tickets import Ticket


class StepWrites:
    """The writes of one step: how many bytes were submitted, and how many are known to have been written."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.submitted_bytes = 0
        self.confirmed_bytes = 0

    def submit(self, num_bytes: int) -> None:
        with self._lock:
            self.submitted_bytes += num_bytes

    def confirm(self, num_bytes: int) -> None:
        with self._lock:
            self.confirmed_bytes += num_bytes


class CountedWrite(Ticket):
    """A write that counts for the commit only when it was waited for, and succeeded."""

    def __init__(self, ticket: Ticket, writes: StepWrites, num_bytes: int) -> None:
        super().__init__(num_parts=0)
        self._ticket = ticket
        self._writes = writes
        self._num_bytes = num_bytes
        writes.submit(num_bytes)

    @property
    def done(self) -> bool:
        return self._ticket.done

    @property
    def span(self) -> tuple[float, float]:
        return self._ticket.span

    def _await(self) -> None:
        self._ticket.wait()
        self._writes.confirm(self._num_bytes)
