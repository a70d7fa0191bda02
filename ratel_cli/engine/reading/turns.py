"""A thread that runs what it is given, one job after another, such as the swaps of one channel.

Invariant: after a job has failed, none that comes later runs; each of them fails with its error.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ratel_cli.closing import Closing
from ratel_cli.io.tickets import Ticket


class Turns(Closing):
    """Runs jobs in the order in which they are submitted. Use as a context manager."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"ratel-{name}")
        self._failure: Exception | None = None

    def submit(self, job: Callable[[], None]) -> Ticket:
        """Run `job` after those before it. The ticket is done when it has ended, and has its error."""
        ticket = Ticket(num_parts=1)
        self._thread.submit(self._run, job, ticket)
        return ticket

    def close(self) -> None:
        """End the thread, after the jobs that were submitted. Idempotent."""
        self._thread.shutdown()

    def _run(self, job: Callable[[], None], ticket: Ticket) -> None:
        if self._failure is None:
            ticket.begin_part()
            try:
                job()
            except Exception as error:  # noqa: BLE001  whoever waits for the ticket is raised it
                self._failure = error
        ticket.finish_part(self._failure)
