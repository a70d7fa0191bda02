"""Counts what a step wrote, so that a commit can insist on all of it.

Used by `shadow`. A write counts when it was waited for and succeeded: a failed write whose ticket
nobody looked at, or a group of parameters that was left out, stops the commit.
"""

from __future__ import annotations

from threading import Lock

from ratel_cli.io.tickets import Ticket, follow


class StepWrites:
    """The writes of one step: how many bytes were submitted, and how many are known to have been written."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.submitted_bytes = 0
        self.confirmed_bytes = 0

    def count(self, write: Ticket, num_bytes: int) -> Ticket:
        """The write, confirmed once it was waited for and has succeeded."""

        def confirm() -> None:
            with self._lock:
                self.confirmed_bytes += num_bytes

        with self._lock:
            self.submitted_bytes += num_bytes
        return follow(write, confirm)
