"""The I/O queue: both engines end every ticket and then drop its memory, whatever fails, hangs or is closed."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from pathlib import Path

import pytest

from ratel_cli.errors import EnvironmentFailure, IntegrityFailure
from ratel_cli.io.buffers import BufferPool, address_of
from ratel_cli.io.queue import EngineName, Extent, IoQueue, open_queue
from ratel_cli.sizes import PAGE_BYTES
from tests.fakes import REQUEST_BYTES, Fault, FaultyQueue, filled, open_direct


def test_bad_descriptors_fail_only_their_ticket(queue: IoQueue, pool: BufferPool, fd: int, tmp_path: Path) -> None:
    memory = filled(pool, bytes(40 * PAGE_BYTES))
    queue.write([Extent(fd=fd, offset=0, memory=memory)]).wait()
    read_only = os.open(tmp_path / "data", os.O_RDONLY)
    closed = os.open(tmp_path / "data", os.O_RDONLY)
    os.close(closed)
    failing = [
        queue.write([Extent(fd=read_only, offset=0, memory=memory)]),
        queue.read([Extent(fd=fd, offset=0, memory=memory), Extent(fd=closed, offset=0, memory=memory)]),
    ]
    healthy = queue.read([Extent(fd=fd, offset=0, memory=memory)])
    for ticket in failing:
        with pytest.raises(IntegrityFailure, match="Bad file descriptor") as raised:
            ticket.wait()
        assert isinstance(raised.value.__cause__, OSError) and raised.value.__cause__.errno == errno.EBADF
    healthy.wait()
    queue.write([Extent(fd=fd, offset=0, memory=memory)]).wait()
    os.close(read_only)


def test_a_full_device_is_an_environment_failure(queue: IoQueue, pool: BufferPool) -> None:
    full = os.open("/dev/full", os.O_RDWR)
    with pytest.raises(EnvironmentFailure, match="/dev/full failed: No space left") as raised:
        queue.write([Extent(fd=full, offset=0, memory=filled(pool, bytes(PAGE_BYTES)))]).wait()
    assert isinstance(raised.value.__cause__, OSError) and raised.value.__cause__.errno == errno.ENOSPC
    assert raised.value.hint is not None and queue.written_bytes == 0
    os.close(full)


@pytest.mark.parametrize("file_bytes", [0, PAGE_BYTES, 20 * PAGE_BYTES, 20 * PAGE_BYTES + 100])
def test_reading_past_the_end_fails(queue: IoQueue, pool: BufferPool, tmp_path: Path, file_bytes: int) -> None:
    (tmp_path / "short").write_bytes(bytes(file_bytes))
    short = open_direct(tmp_path / "short")
    with pytest.raises(IntegrityFailure, match=r"short.*the file ends there"):
        queue.read([Extent(fd=short, offset=0, memory=pool.lease(32 * PAGE_BYTES, "test").memory)]).wait()
    os.close(short)


def test_a_failing_thread_breaks_its_direction_and_ends_every_ticket(queue: IoQueue, pool: BufferPool, fd: int) -> None:
    memory = filled(pool, bytes(PAGE_BYTES))
    queue.write([Extent(fd=fd, offset=0, memory=memory)]).wait()
    with pytest.raises(IntegrityFailure, match="transfers have stopped") as raised:
        queue.write([Extent(fd=1 << 40, offset=0, memory=memory)]).wait()
    kind = TypeError if queue.engine == "io_uring" else OverflowError
    assert isinstance(raised.value.__cause__, kind)  # no descriptor has such a number
    with pytest.raises(IntegrityFailure, match="transfers have stopped") as raised:
        queue.write([Extent(fd=fd, offset=0, memory=memory)])
    kind = TypeError if queue.engine == "io_uring" else OverflowError
    assert isinstance(raised.value.__cause__, kind)
    queue.read([Extent(fd=fd, offset=0, memory=memory)]).wait()


def test_close_joins_its_threads_and_leaves_no_descriptor_open(engine: EngineName, pool: BufferPool, fd: int) -> None:
    memory = filled(pool, bytes(PAGE_BYTES))
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(5):
        queue = open_queue(engine, notice=pytest.fail)
        assert queue.engine == engine
        names = {thread.name for thread in threading.enumerate()}
        assert any(name.startswith("ratel-io-read") for name in names)
        assert any(name.startswith("ratel-io-write") for name in names)
        queue.write([Extent(fd=fd, offset=0, memory=memory)]).wait()
        queue.close()
        queue.close()
        assert not any(thread.name.startswith("ratel-io") for thread in threading.enumerate())
        for submit in (queue.read, queue.write):
            with pytest.raises(AssertionError, match="closed queue"):
                submit([Extent(fd=fd, offset=0, memory=memory)])
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_close_under_load_ends_every_ticket(engine: EngineName, pool: BufferPool, fd: int, tmp_path: Path) -> None:
    rng, size = random.Random(3), 64 * REQUEST_BYTES
    contents = rng.randbytes(size)
    queue = open_queue(engine, notice=pytest.fail, request_bytes=REQUEST_BYTES, depth=2)
    queue.write([Extent(fd=fd, offset=0, memory=filled(pool, contents))]).wait()
    targets = [pool.lease(size, "test").memory for _ in range(6)]
    tickets = [queue.read([Extent(fd=fd, offset=0, memory=target)]) for target in targets]
    queue.close()
    for ticket, target in zip(tickets, targets, strict=True):
        assert ticket.done
        try:
            ticket.wait()
        except IntegrityFailure as failure:
            assert "closed before this transfer began" in failure.message
        else:
            assert target == contents


class _Blockage:
    """A queue of depth 1 whose reads of `fd` complete only after `end` was called.

    io_uring reads an empty pipe, which preadv cannot do, so the threads' call to the kernel is replaced.
    """

    def __init__(self, engine: EngineName, *, timeout_seconds: float) -> None:
        self.fd, self._pipe = os.pipe()
        self._hanging: FaultyQueue | None = None
        self.queue: IoQueue
        if engine == "threads":
            contents = {self.fd: bytearray(b"x" * PAGE_BYTES)}
            self._hanging = FaultyQueue({0: Fault(hangs=True)}, files=contents, timeout_seconds=timeout_seconds)
            self.queue = self._hanging
        else:
            self.queue = open_queue(engine, notice=pytest.fail, depth=1, timeout_seconds=timeout_seconds)

    def end(self) -> None:
        if self._hanging is not None:
            self._hanging.release()
        else:
            os.write(self._pipe, b"x" * PAGE_BYTES)

    def close(self) -> None:
        if self._hanging is not None:
            self._hanging.release()
        self.queue.close()
        os.close(self.fd)
        os.close(self._pipe)


def test_close_waits_for_requests_in_the_kernel_and_fails_the_others(engine: EngineName, pool: BufferPool) -> None:
    blockage = _Blockage(engine, timeout_seconds=20.0)
    memory = pool.lease(PAGE_BYTES, "test").memory
    held = blockage.queue.read([Extent(fd=blockage.fd, offset=0, memory=memory)])
    waiting = blockage.queue.read([Extent(fd=blockage.fd, offset=0, memory=pool.lease(PAGE_BYTES, "test").memory)])
    timer = threading.Timer(0.2, blockage.end)
    timer.start()
    time.sleep(0.05)
    assert not held.done and not waiting.done
    blockage.queue.close()
    assert held.done and waiting.done
    held.wait()
    assert memory.tobytes() == b"x" * PAGE_BYTES
    with pytest.raises(IntegrityFailure, match="closed before this transfer began"):
        waiting.wait()
    timer.join()
    blockage.close()


def test_a_request_that_never_completes_breaks_its_direction_after_the_timeout(
    engine: EngineName, pool: BufferPool, fd: int
) -> None:
    blockage = _Blockage(engine, timeout_seconds=0.2)
    memory = filled(pool, bytes(PAGE_BYTES))
    stuck = blockage.queue.read([Extent(fd=blockage.fd, offset=0, memory=memory)])
    behind = blockage.queue.read([Extent(fd=fd, offset=0, memory=memory)])
    started = time.monotonic()
    with pytest.raises(IntegrityFailure, match=r"did not complete within 0\.2 seconds"):
        stuck.wait()
    assert 0.2 <= time.monotonic() - started < 60
    with pytest.raises(IntegrityFailure, match=r"transfers have stopped.*did not complete") as raised:
        behind.wait()
    assert isinstance(raised.value.__cause__, IntegrityFailure)
    with pytest.raises(IntegrityFailure, match="transfers have stopped"):
        blockage.queue.read([Extent(fd=fd, offset=0, memory=memory)])
    blockage.queue.write([Extent(fd=fd, offset=0, memory=memory)]).wait()  # the other direction still works
    started = time.monotonic()
    blockage.queue.close()
    assert time.monotonic() - started < 60
    blockage.close()


def test_memory_of_a_stuck_request_stays_mapped_until_the_kernel_completes_it(engine: EngineName) -> None:
    num_bytes = 3 << 20
    blockage = _Blockage(engine, timeout_seconds=0.2)
    pool = BufferPool(None)
    lease = pool.lease(num_bytes, "test")
    lease.memory[:] = bytes(num_bytes)
    address = address_of(lease.memory)
    stuck = blockage.queue.read([Extent(fd=blockage.fd, offset=0, memory=lease.memory[:PAGE_BYTES])])
    with pytest.raises(IntegrityFailure, match="did not complete"):
        stuck.wait()
    lease.release()
    pool.close()
    del lease, pool, stuck
    assert _is_mapped(address)
    blockage.end()
    assert _is_unmapped_soon(address)
    blockage.close()


def test_nothing_refers_to_memory_after_its_transfer(queue: IoQueue, fd: int) -> None:
    with BufferPool(None) as pool, pool.lease(3 << 20, "test") as lease:
        address = address_of(lease.memory)
        for transfer in (queue.write, queue.read):
            transfer([Extent(fd=fd, offset=0, memory=lease.memory)]).wait()
    del lease, pool
    assert _is_unmapped_soon(address)


def _is_unmapped_soon(address: int) -> bool:
    """A thread drops the last reference shortly after it has ended the ticket."""
    give_up = time.monotonic() + 60
    while _is_mapped(address) and time.monotonic() < give_up:
        time.sleep(0.01)
    return not _is_mapped(address)


def _is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            return True
    return False
