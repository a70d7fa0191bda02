"""Simulated drives move the right bytes and are no faster than they say; the optimizer keeps twelve of them busy."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import pytest

from ratel_cli.errors import IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import Extent
from ratel_cli.sizes import PAGE_BYTES
from ratel_cli.units import MIB
from scripts.bench import group_python
from scripts.bench.many_drives import Drives, measure
from scripts.bench.simulated_drives import DriveKind, SimulatedDrives
from tests.fakes import filled, open_direct

FAST = DriveKind(bytes_per_second=1e9, latency_seconds=1e-3)


@pytest.fixture
def pool() -> Iterator[BufferPool]:
    with BufferPool(None) as opened:
        yield opened


@pytest.fixture
def fds(tmp_path: Path) -> Iterator[list[int]]:
    opened = [open_direct(tmp_path / f"drive{number}") for number in range(2)]
    yield opened
    for fd in opened:
        os.close(fd)


def test_what_was_written_is_read(fds: list[int], pool: BufferPool) -> None:
    contents = random.Random(1).randbytes(20 * PAGE_BYTES)
    with SimulatedDrives(FAST, request_bytes=3 * PAGE_BYTES, depth=4) as queue:
        queue.write([Extent(fd=fd, offset=PAGE_BYTES, memory=filled(pool, contents)) for fd in fds]).wait()
        memory = pool.lease(len(contents), "test").memory
        for fd in fds:
            memory[:] = bytes(len(memory))
            queue.read([Extent(fd=fd, offset=PAGE_BYTES, memory=memory)]).wait()
            assert memory == contents
        assert (queue.read_bytes, queue.written_bytes) == (2 * len(contents), 2 * len(contents))
        assert len(queue.drives) == 2


def test_reads_and_writes_share_the_rate_of_a_drive(fds: list[int], pool: BufferPool) -> None:
    kind = DriveKind(bytes_per_second=20 * MIB, latency_seconds=0.02)
    contents = bytes(MIB)
    with SimulatedDrives(kind, request_bytes=MIB // 4, depth=16) as queue:
        queue.write([Extent(fd=fds[0], offset=0, memory=filled(pool, contents))]).wait()
        memories = [filled(pool, contents) for _ in range(2)]
        start = perf_counter()
        tickets = [
            queue.write([Extent(fd=fds[0], offset=0, memory=memories[0])]),
            queue.read([Extent(fd=fds[0], offset=0, memory=memories[1])]),
        ]
        for ticket in tickets:
            ticket.wait()
        assert perf_counter() - start >= 2 * MIB / kind.bytes_per_second + kind.latency_seconds
        start = perf_counter()
        queue.write([Extent(fd=fd, offset=0, memory=memory) for fd, memory in zip(fds, memories, strict=True)]).wait()
        [first, second] = queue.drives
        assert (first.busy_seconds, second.busy_seconds) == pytest.approx((0.2, 0.05))
        assert perf_counter() - start < 10


def test_a_failed_request_fails_its_ticket(fds: list[int], pool: BufferPool) -> None:
    with SimulatedDrives(FAST, request_bytes=MIB, depth=1) as queue:
        with pytest.raises(IntegrityFailure, match=os.strerror(errno.EBADF)):
            queue.read([Extent(fd=12345, offset=0, memory=filled(pool, bytes(PAGE_BYTES)))]).wait()
        with pytest.raises(IntegrityFailure, match="the file ends there"):
            queue.read([Extent(fd=fds[0], offset=0, memory=filled(pool, bytes(PAGE_BYTES)))]).wait()


def test_close_ends_every_ticket(fds: list[int], pool: BufferPool) -> None:
    slow = DriveKind(bytes_per_second=10 * MIB, latency_seconds=0.0)
    queue = SimulatedDrives(slow, request_bytes=MIB // 8, depth=1)
    ticket = queue.write([Extent(fd=fds[0], offset=0, memory=filled(pool, bytes(MIB)))])
    queue.close()
    assert ticket.done
    with pytest.raises(IntegrityFailure, match="closed"):
        ticket.wait()
    queue.close()


@pytest.mark.nightly
def test_the_optimizer_keeps_twelve_drives_busy(tmp_path: Path) -> None:
    """At 90 % of their summed rate with the groups that a plan chooses; groups for one drive leave them idle.

    The rates are low, so that a loaded machine can follow, and the best of three rounds counts.
    """
    least = 0.9
    drives = Drives(count=12, kind=DriveKind(bytes_per_second=4e6, latency_seconds=8e-3), scale=64)
    rounds: dict[str, list[float]] = {}
    for _ in range(3):
        with_names = measure(tmp_path / str(len(rounds.get("chosen", []))), drives, num_groups=16, rounds=1)
        for name, shares in with_names.items():
            rounds.setdefault(name, []).extend(shares)
        if max(rounds["chosen"]) >= least:
            break
    assert max(rounds["chosen"]) >= least
    assert max(rounds["one group"]) < 0.7


def test_every_request_of_a_group_is_counted(tmp_path: Path) -> None:
    found = group_python.measure(tmp_path, num_drives=2, elements=1 << 21, rounds=1)
    stripes = (4 + 4 + 8 + 8) << 20 >> 22
    assert 2 * stripes <= found.pop("requests") <= 2 * (stripes + 4), "a field may begin within a stripe"
    assert all(seconds >= 0 for seconds in found.values())


@pytest.mark.nightly
def test_python_does_little_for_a_large_group(tmp_path: Path) -> None:
    """In CPU time, twice the goal of 0.3 ms: caches are colder on a loaded machine. The best of three counts."""
    found = []
    for number in range(3):
        each = group_python.measure(tmp_path / str(number), num_drives=12, elements=1 << 24, rounds=10)
        found.append(each["read"] + each["update"] + each["write"])
        if found[-1] < 0.6e-3:
            break
    assert min(found) < 0.6e-3
