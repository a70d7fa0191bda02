"""Requests: what a result that no healthy device gives means. The same code serves both engines.

The results are injected through a FaultyQueue, so this also shows that the fake does what it says.
"""

from __future__ import annotations

import errno
import random

import pytest

from ratel_cli.errors import EnvironmentFailure, IntegrityFailure
from ratel_cli.movement.buffers import PAGE_BYTES, BufferPool
from ratel_cli.movement.queue import IoQueue, Piece
from ratel_cli.movement.requests import MAX_ATTEMPTS
from tests.fakes import Fault, FaultyQueue, filled


def _write_pages(queue: IoQueue, num_pages: int, fd: int) -> None:
    contents = random.Random(4).randbytes(num_pages * PAGE_BYTES)
    with BufferPool(None) as pool:
        queue.write([Piece(fd=fd, offset=0, memory=filled(pool, contents))]).wait()
        copy = pool.lease(len(contents), "copy").memory
        queue.read([Piece(fd=fd, offset=0, memory=copy)]).wait()
        assert copy == contents
        assert queue.read_bytes == queue.written_bytes == len(contents)


@pytest.mark.parametrize("short_bytes", [PAGE_BYTES, 3 * PAGE_BYTES, PAGE_BYTES + 1, 2 * PAGE_BYTES - 1])
def test_short_transfers_go_on_with_the_rest_from_a_whole_page(short_bytes: int) -> None:
    faults = {number: Fault(short_bytes=short_bytes) for number in (0, 1, 3, 7)}
    with FaultyQueue(faults, files={7: bytearray()}, request_bytes=8 * PAGE_BYTES) as queue:
        _write_pages(queue, 20, 7)
        assert all(call.offset % PAGE_BYTES == 0 and call.num_bytes % PAGE_BYTES == 0 for call in queue.calls)
        assert queue.calls[1].offset == short_bytes // PAGE_BYTES * PAGE_BYTES
        assert len(queue.calls) == 3 + 3 + 4


@pytest.mark.parametrize("error_number", [errno.EAGAIN, errno.EINTR])
def test_transient_refusals_are_retried(error_number: int) -> None:
    faults = {number: Fault(error_number=error_number) for number in range(MAX_ATTEMPTS)}
    with FaultyQueue(faults, files={7: bytearray()}) as queue:
        _write_pages(queue, 3, 7)
        assert len(queue.calls) == MAX_ATTEMPTS + 2


def test_transient_refusals_are_not_retried_for_ever() -> None:
    with FaultyQueue(lasting=Fault(error_number=errno.EAGAIN), files={7: bytearray()}) as queue:
        with pytest.raises(IntegrityFailure, match="temporarily unavailable"):
            _write_pages(queue, 3, 7)
        assert len(queue.calls) == MAX_ATTEMPTS + 1


@pytest.mark.parametrize(
    ("error_number", "kind"),
    [(errno.EIO, IntegrityFailure), (errno.ENOSPC, EnvironmentFailure), (errno.EDQUOT, EnvironmentFailure)],
)
@pytest.mark.parametrize("number", [0, 2, 4])
def test_an_error_of_any_request_fails_the_ticket_with_its_cause(
    error_number: int, kind: type[EnvironmentFailure | IntegrityFailure], number: int
) -> None:
    files = {7: bytearray()}
    with FaultyQueue({number: Fault(error_number=error_number)}, files=files, request_bytes=PAGE_BYTES) as queue:
        with pytest.raises(kind, match=f"write of 4096 bytes at {number * PAGE_BYTES} of ") as raised:
            _write_pages(queue, 5, 7)
        assert isinstance(raised.value.__cause__, OSError) and raised.value.__cause__.errno == error_number
        assert len(queue.calls) == 5 and queue.written_bytes == 4 * PAGE_BYTES


def test_a_failing_thread_breaks_the_lane_and_ends_every_ticket() -> None:
    with FaultyQueue({1: Fault(failure=ValueError("bug"))}, files={7: bytearray()}) as queue, BufferPool(None) as pool:
        piece = Piece(fd=7, offset=0, memory=pool.lease(PAGE_BYTES, "test").memory)
        tickets = [queue.write([piece]) for _ in range(4)]
        tickets[0].wait()
        for ticket in tickets[1:]:
            with pytest.raises(IntegrityFailure, match="transfers have stopped: bug") as raised:
                ticket.wait()
            assert isinstance(raised.value.__cause__, ValueError)
        with pytest.raises(IntegrityFailure, match="transfers have stopped: bug"):
            queue.write([piece])


def test_completions_in_any_order_are_the_same_bytes() -> None:
    files = {7: bytearray()}
    with FaultyQueue(files=files, shuffle_seed=5, request_bytes=PAGE_BYTES, depth=8) as queue:
        _write_pages(queue, 64, 7)
        assert len(queue.calls) == 128
