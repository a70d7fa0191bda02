"""The throttled queue moves the same bytes, no faster than its rate, and fails as the real queue does."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratel_cli.errors import IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import Extent, IoQueue, open_queue
from ratel_cli.io.scratch import Scratch
from ratel_cli.io.tickets import join
from ratel_cli.sizes import PAGE_BYTES
from ratel_cli.units import MIB
from scripts.bench.throttled_queue import ThrottledQueue
from tests.fakes import Fault, FaultyQueue, filled


@pytest.fixture
def pool() -> Iterator[BufferPool]:
    with BufferPool(None) as opened:
        yield opened


@pytest.fixture
def queue() -> Iterator[IoQueue]:
    with open_queue("threads", notice=pytest.fail) as opened:
        yield opened


@pytest.mark.nightly
def test_transfers_are_no_faster_than_the_rate(queue: IoQueue, pool: BufferPool, tmp_path: Path) -> None:
    throttled = ThrottledQueue(queue, read_bytes_per_second=20 * MIB, write_bytes_per_second=10 * MIB)
    contents = bytes(range(256)) * (MIB // 256)
    with Scratch([tmp_path], 2 * MIB, throttled) as scratch:
        start = time.perf_counter()
        writes = [scratch.write(offset, filled(pool, contents)) for offset in (0, MIB)]
        assert not writes[0].done
        join(writes).wait()
        assert writes[1].span[0] >= writes[0].span[0] + 0.099, "one transfer after the other"
        assert time.perf_counter() - start >= 0.2
        start, back = time.perf_counter(), pool.lease(MIB, "test").memory
        read = scratch.read(MIB, back)
        read.wait()
        assert read.done
        assert time.perf_counter() - start >= 0.05
    assert bytes(back) == contents
    assert (throttled.engine, throttled.read_bytes, throttled.written_bytes) == ("threads", MIB, 2 * MIB)


def test_directions_do_not_wait_for_each_other(queue: IoQueue, pool: BufferPool, tmp_path: Path) -> None:
    throttled = ThrottledQueue(queue, read_bytes_per_second=10 * MIB, write_bytes_per_second=10 * MIB)
    memories = [filled(pool, bytes(MIB)) for _ in range(2)]
    with Scratch([tmp_path], 2 * MIB, throttled) as scratch:
        scratch.write(0, memories[0]).wait()
        write, read = scratch.write(MIB, memories[0]), scratch.read(0, memories[1])
        join([write, read]).wait()
        assert max(write.span[0], read.span[0]) < min(write.span[1], read.span[1])


def test_a_failure_is_the_real_queues(pool: BufferPool, tmp_path: Path) -> None:
    with FaultyQueue(lasting=Fault(error_number=errno.EIO)) as faulty, (tmp_path / "file").open("wb") as file:
        throttled = ThrottledQueue(faulty, read_bytes_per_second=1e9, write_bytes_per_second=1e9)
        extent = Extent(fd=file.fileno(), offset=0, memory=filled(pool, bytes(PAGE_BYTES)))
        with throttled, pytest.raises(IntegrityFailure, match="failed"):
            throttled.write([extent]).wait()
