"""Threads that take and compare the checksums of what is transferred, so that no other thread has to.

A checksum takes about as long as the transfer itself where many drives are read, and the thread that submits a transfer
has other things to do: it drives the compute device. So a few threads, owned by the I/O queue, do this work. xxhash
releases the GIL meanwhile. Large transfers are cut into parts (`parts_of`), whose checksums run next to each other and
to the transfer of the next parts.

Invariant: a ticket from here is not done before its checksums are, and its `wait` raises what they found: whoever waits
for the bytes has checked bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from ratel_cli.closing import Closing
from ratel_cli.io.tickets import Ticket

NUM_THREADS = 4
"""At 12 to 25 GB/s each (XXH3-64 from main memory), more than any set of drives reads."""
PART_BYTES = 32 << 20
"""Small against what is transferred at once, large against what it costs to hand it to a thread."""


class ChecksumWorkers(Closing):
    """A few threads for checksums. Any thread may call it; what is called does not block."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="ratel-checksum")

    def after(self, transfer: Ticket, check: Callable[[], None]) -> Ticket:
        """A ticket for a read whose `wait` has called `check` when the bytes were there, and raises what it raises.

        `check` runs on a thread of this pool. `transfer` itself must not be waited on any more.
        """

        def work() -> None:
            transfer.wait()
            check()

        return self._start(transfer, work)

    def during(self, transfer: Ticket, take: Callable[[], None]) -> Ticket:
        """A ticket for a write that is done when `take` has ended, too, which begins at once.

        `take` runs on a thread of this pool. `transfer` itself must not be waited on any more.
        """

        def work() -> None:
            try:
                take()
            finally:
                transfer.wait()

        return self._start(transfer, work)

    def start(self, work: Callable[[], None]) -> None:
        """Let a thread of this pool do `work`, which raises nothing: a ticket of the caller's says how it ended."""
        self._threads.submit(work)

    def close(self) -> None:
        """End the threads. The transfers that they wait for must have ended or be about to. Idempotent."""
        self._threads.shutdown()

    def _start(self, transfer: Ticket, work: Callable[[], None]) -> Ticket:
        ticket = _WorkTicket(transfer)
        self._threads.submit(ticket.run, work)
        return ticket


class _WorkTicket(Ticket):
    """A transfer and the work on its bytes. Its span is the transfer's."""

    def __init__(self, transfer: Ticket) -> None:
        super().__init__(num_parts=1)
        self._transfer = transfer

    @property
    def span(self) -> tuple[float, float]:
        return self._transfer.span

    def run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - raised by `wait`
            self.finish_part(error)
        else:
            self.finish_part()


def parts_of(num_bytes: int, *, unit_bytes: int = 1, most_bytes: int = PART_BYTES) -> Iterator[tuple[int, int]]:
    """Cut `num_bytes` into parts [start, stop) of at most `most_bytes`, each a multiple of `unit_bytes`; at least one
    unit. The last part is the rest."""
    size = max(1, most_bytes // unit_bytes) * unit_bytes
    for start in range(0, num_bytes, size):
        yield start, min(start + size, num_bytes)
