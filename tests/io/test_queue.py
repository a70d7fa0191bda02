"""The I/O queue: both engines move and count exactly the bytes asked for, and threads can replace io_uring."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import Extent, IoQueue, depth_for
from ratel_cli.io.tickets import Ticket, join
from ratel_cli.sizes import PAGE_BYTES
from tests.fakes import filled, open_direct


@pytest.mark.parametrize("num_pages", [0, 1, 2, 15, 16, 17, 31, 32, 33, 16 * 9 + 1])
def test_exactly_the_bytes_asked_for_are_moved(
    num_pages: int, queue: IoQueue, pool: BufferPool, fd: int, tmp_path: Path
) -> None:
    num_bytes, rng = num_pages * PAGE_BYTES, random.Random(num_pages)
    before = rng.randbytes(num_bytes + 4 * PAGE_BYTES)
    os.pwrite(fd, filled(pool, before), 0)
    payload = rng.randbytes(num_bytes)
    queue.write([Extent(fd=fd, offset=2 * PAGE_BYTES, memory=filled(pool, payload))]).wait()
    expected = before[: 2 * PAGE_BYTES] + payload + before[2 * PAGE_BYTES + num_bytes :]
    assert (tmp_path / "data").read_bytes() == expected
    assert (queue.read_bytes, queue.written_bytes) == (0, num_bytes)

    target = filled(pool, bytes([0xAA]) * (num_bytes + 2 * PAGE_BYTES))
    inner = target[PAGE_BYTES : PAGE_BYTES + num_bytes]
    queue.read([Extent(fd=fd, offset=PAGE_BYTES, memory=inner)]).wait()
    assert inner == expected[PAGE_BYTES : PAGE_BYTES + num_bytes]
    assert set(target[:PAGE_BYTES]) == set(target[PAGE_BYTES + num_bytes :]) == {0xAA}
    assert (queue.read_bytes, queue.written_bytes) == (num_bytes, num_bytes)


def test_many_extents_in_several_files_are_one_ticket(queue: IoQueue, pool: BufferPool, tmp_path: Path) -> None:
    rng = random.Random(1)
    files = [open_direct(tmp_path / f"data{i}") for i in range(3)]
    sizes = [rng.choice([1, 2, 15, 16, 17, 40]) * PAGE_BYTES for _ in range(200)]
    memory = filled(pool, rng.randbytes(sum(sizes)))
    extents, ends, start = [], [0, 0, 0], 0
    for size in sizes:
        i = rng.randrange(3)
        extents.append(Extent(fd=files[i], offset=ends[i], memory=memory[start : start + size]))
        ends[i] += size
        start += size
    rng.shuffle(extents)
    queue.write(extents).wait()
    for i in range(3):
        of_file = sorted((extent for extent in extents if extent.fd == files[i]), key=lambda extent: extent.offset)
        assert (tmp_path / f"data{i}").read_bytes() == b"".join(extent.memory for extent in of_file)
    copy = pool.lease(sum(sizes), "copy").memory
    start = 0
    copies = []
    for extent in extents:
        copies.append(copy[start : start + len(extent.memory)])
        start += len(extent.memory)
    queue.read(
        [Extent(fd=extent.fd, offset=extent.offset, memory=part) for extent, part in zip(extents, copies, strict=True)]
    ).wait()
    assert all(extent.memory == part for extent, part in zip(extents, copies, strict=True))
    assert queue.read_bytes == queue.written_bytes == sum(sizes)
    for opened in files:
        os.close(opened)


def test_spans_lie_between_submitting_and_waiting_in_order(queue: IoQueue, pool: BufferPool, fd: int) -> None:
    memory = filled(pool, bytes(64 * PAGE_BYTES))
    for submit in (queue.write, queue.read):
        last_end = 0.0
        for _ in range(3):
            submitted = time.perf_counter()
            tickets = [submit([Extent(fd=fd, offset=0, memory=memory)]) for _ in range(2)]
            joined = join(tickets)
            joined.wait()
            waited = time.perf_counter()
            began, ended = joined.span
            assert last_end <= submitted <= began < ended <= waited
            spans = [ticket.span for ticket in tickets]
            assert (began, ended) == (min(began for began, _ in spans), max(ended for _, ended in spans))
            last_end = ended


def test_no_extents_and_empty_extents_are_done_at_once(queue: IoQueue, pool: BufferPool, fd: int) -> None:
    for extents in ([], [Extent(fd=fd, offset=0, memory=pool.lease(0, "nothing").memory)]):
        for ticket in (queue.read(extents), queue.write(extents)):
            assert ticket.done
            ticket.wait()
    assert queue.read_bytes == queue.written_bytes == 0


def test_reads_and_writes_interleave(queue: IoQueue, pool: BufferPool, fd: int, tmp_path: Path) -> None:
    rng, num_slots, slot_bytes = random.Random(2), 24, 18 * PAGE_BYTES
    model = [rng.randbytes(slot_bytes) for _ in range(num_slots)]
    queue.write([Extent(fd=fd, offset=0, memory=filled(pool, b"".join(model)))]).wait()
    for _ in range(20):
        order = rng.sample(range(num_slots), num_slots)
        tickets: list[Ticket] = []
        leases, reads = [], []
        for position, slot in enumerate(order):
            lease = pool.lease(slot_bytes, "slot")
            leases.append(lease)
            extent = Extent(fd=fd, offset=slot * slot_bytes, memory=lease.memory)
            if position % 2:
                model[slot] = rng.randbytes(slot_bytes)
                lease.memory[:] = model[slot]
                tickets.append(queue.write([extent]))
            else:
                tickets.append(queue.read([extent]))
                reads.append((slot, lease))
        join(tickets).wait()
        assert all(lease.memory == model[slot] for slot, lease in reads)
        for lease in leases:
            lease.release()
    assert (tmp_path / "data").read_bytes() == b"".join(model)


def test_many_threads_submit_at_once_and_counters_are_exact(queue: IoQueue, pool: BufferPool, fd: int) -> None:
    num_threads, num_turns, part_bytes = 6, 15, 19 * PAGE_BYTES
    os.ftruncate(fd, num_threads * part_bytes)
    wrong: list[int] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        with pool.lease(part_bytes, "out") as out, pool.lease(part_bytes, "back") as back:
            for _ in range(num_turns):
                out.memory[:] = rng.randbytes(part_bytes)
                queue.write([Extent(fd=fd, offset=number * part_bytes, memory=out.memory)]).wait()
                queue.read([Extent(fd=fd, offset=number * part_bytes, memory=back.memory)]).wait()
                if out.memory != back.memory:
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert queue.read_bytes == queue.written_bytes == num_threads * num_turns * part_bytes


def test_extents_that_are_not_whole_pages_are_a_bug(queue: IoQueue, pool: BufferPool, fd: int) -> None:
    memory = pool.lease(2 * PAGE_BYTES, "test").memory
    for offset, part in ((1, memory), (-PAGE_BYTES, memory), (0, memory[:-1]), (0, memory[8 : PAGE_BYTES + 8])):
        for move in (queue.read, queue.write):
            with pytest.raises(ValueError, match="whole pages"):
                move([Extent(fd=fd, offset=0, memory=memory), Extent(fd=fd, offset=offset, memory=part)])
    assert queue.read_bytes == queue.written_bytes == 0


def test_auto_takes_threads_with_one_notice_when_the_kernel_forbids_io_uring(tmp_path: Path) -> None:
    """In a process of its own, with a system call filter that forbids io_uring as containers do."""
    command = [sys.executable, "-m", "tests.io.without_io_uring", str(tmp_path / "data")]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=600)


@pytest.mark.parametrize(("num_drives", "depth"), [(1, 16), (4, 16), (5, 20), (12, 48)])
def test_each_drive_has_several_requests_in_flight(num_drives: int, depth: int) -> None:
    assert depth_for(num_drives) == depth
