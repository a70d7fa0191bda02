"""Requests: short transfers, retries and errors, which are handled alike for both engines.

The results are injected through a FaultyQueue, so these tests check the fake too.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
from pathlib import Path

import pytest

from ratel_cli.errors import EnvironmentFailure, IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import Extent, IoQueue
from ratel_cli.io.requests import MAX_ATTEMPTS
from ratel_cli.sizes import PAGE_BYTES
from tests.fakes import Fault, FaultyQueue, filled


def _write_pages(queue: IoQueue, num_pages: int, fd: int) -> None:
    contents = random.Random(4).randbytes(num_pages * PAGE_BYTES)
    with BufferPool(None) as pool:
        queue.write([Extent(fd=fd, offset=0, memory=filled(pool, contents))]).wait()
        copy = pool.lease(len(contents), "copy").memory
        queue.read([Extent(fd=fd, offset=0, memory=copy)]).wait()
        assert copy == contents
        assert queue.read_bytes == queue.written_bytes == len(contents)


@pytest.mark.parametrize("short_bytes", [PAGE_BYTES, 3 * PAGE_BYTES, PAGE_BYTES + 1, 2 * PAGE_BYTES - 1])
def test_short_transfers_continue_from_a_whole_page(short_bytes: int) -> None:
    faults = {number: Fault(short_bytes=short_bytes) for number in (0, 1, 3, 7)}
    with FaultyQueue(faults, files={7: bytearray()}, request_bytes=8 * PAGE_BYTES) as queue:
        _write_pages(queue, 20, 7)
        assert all(call.offset % PAGE_BYTES == 0 and call.num_bytes % PAGE_BYTES == 0 for call in queue.calls)
        assert queue.calls[1].offset == short_bytes // PAGE_BYTES * PAGE_BYTES
        assert len(queue.calls) == 3 + 3 + 4


@pytest.mark.parametrize("error_number", [errno.EAGAIN, errno.EINTR])
def test_transient_errors_are_retried(error_number: int) -> None:
    faults = {number: Fault(error_number=error_number) for number in range(MAX_ATTEMPTS)}
    with FaultyQueue(faults, files={7: bytearray()}) as queue:
        _write_pages(queue, 3, 7)
        assert len(queue.calls) == MAX_ATTEMPTS + 2


def test_transient_errors_are_retried_a_limited_number_of_times() -> None:
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
    faults = {0: Fault(hangs=True), 1: Fault(failure=ValueError("bug"))}
    with FaultyQueue(faults, files={7: bytearray()}) as queue, BufferPool(None) as pool:
        extent = Extent(fd=7, offset=0, memory=pool.lease(PAGE_BYTES, "test").memory)
        tickets = [queue.write([extent]) for _ in range(4)]
        queue.release()  # only now: a broken lane takes no more
        tickets[0].wait()
        for ticket in tickets[1:]:
            with pytest.raises(IntegrityFailure, match="transfers have stopped: bug") as raised:
                ticket.wait()
            assert isinstance(raised.value.__cause__, ValueError)
        with pytest.raises(IntegrityFailure, match="transfers have stopped: bug"):
            queue.write([extent])


def test_completions_in_any_order_give_the_same_bytes() -> None:
    files = {7: bytearray()}
    with FaultyQueue(files=files, shuffle_seed=5, request_bytes=PAGE_BYTES, depth=8) as queue:
        _write_pages(queue, 64, 7)
        assert len(queue.calls) == 128


@pytest.mark.parametrize("bit", [0, 5, 8 * PAGE_BYTES + 7, 8 * 2 * PAGE_BYTES])
def test_the_fake_flips_a_bit_in_memory_or_on_the_drive(bit: int) -> None:
    contents = random.Random(6).randbytes(2 * PAGE_BYTES)
    wanted = bytearray(contents)
    wanted[bit // 8 % len(wanted)] ^= 1 << bit % 8
    with BufferPool(None) as pool:
        written = filled(pool, contents)
        for call, on_the_drive in ((0, bytes(wanted)), (1, contents)):
            files = {7: bytearray()}
            with FaultyQueue({call: Fault(flipped_bit=bit)}, files=files) as queue:
                queue.write([Extent(fd=7, offset=0, memory=written)]).wait()
                found = pool.lease(len(contents), "found").memory
                queue.read([Extent(fd=7, offset=0, memory=found)]).wait()
            assert found == wanted
            assert files[7] == on_the_drive
            assert written == contents


@pytest.mark.parametrize("fault", [Fault(dropped=True), Fault(misplaced_bytes=-PAGE_BYTES)])
@pytest.mark.parametrize("call", [1, 2])
def test_the_fake_drops_or_misplaces_transfers(fault: Fault, call: int) -> None:
    first, second = (random.Random(seed).randbytes(PAGE_BYTES) for seed in (1, 2))
    files = {7: bytearray(first)}
    with FaultyQueue({call: fault}, files=files) as queue, BufferPool(None) as pool:
        found = filled(pool, bytes(PAGE_BYTES))
        queue.write([Extent(fd=7, offset=PAGE_BYTES, memory=filled(pool, bytes(PAGE_BYTES)))]).wait()
        queue.write([Extent(fd=7, offset=PAGE_BYTES, memory=filled(pool, second))]).wait()
        queue.read([Extent(fd=7, offset=PAGE_BYTES, memory=found)]).wait()
        if call == 1:
            assert files[7] == (first if fault.dropped else second) + bytes(PAGE_BYTES)
            assert found == bytes(PAGE_BYTES)
        else:
            assert files[7] == first + second
            assert found == (bytes(PAGE_BYTES) if fault.dropped else first)


def test_a_call_that_hangs_keeps_its_file_open_and_locked(tmp_path: Path) -> None:
    """As in the kernel: a late write must not land in another file with the same descriptor."""
    fd = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with BufferPool(None) as pool, FaultyQueue({0: Fault(hangs=True)}, timeout_seconds=0.1) as queue:
        stuck = queue.write([Extent(fd=fd, offset=0, memory=filled(pool, b"x" * PAGE_BYTES))])
        with pytest.raises(IntegrityFailure, match="did not complete"):
            stuck.wait()
        os.close(fd)
        other = os.open(tmp_path / "data", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        queue.release()
        fcntl.flock(other, fcntl.LOCK_EX)
    assert os.pread(other, PAGE_BYTES, 0) == b"x" * PAGE_BYTES
    os.close(other)
