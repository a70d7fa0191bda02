"""Completions of io_uring with errors or short results are handled like the threads' results (test_requests)."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ratel_cli.errors import EnvironmentFailure, IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import Extent, IoQueue, LanedQueue, open_queue
from ratel_cli.io.requests import MAX_ATTEMPTS
from ratel_cli.sizes import PAGE_BYTES
from tests.fakes import filled

Results = list[int | None]
"""Bytes that moved, or the negative number of an error."""
NUM_PAGES = 6


@pytest.fixture(autouse=True)
def _with_io_uring() -> None:
    try:
        open_queue("io_uring", notice=pytest.fail).close()
    except EnvironmentFailure as failure:
        pytest.skip(failure.message)


def queue_with(results: Results) -> IoQueue:
    """A queue on real rings whose first results are replaced by these. None leaves a result as it is."""
    from ratel_cli._native import Ring
    from ratel_cli.io.uring import UringLane

    class ChangedRing(Ring):
        def __init__(self, num_entries: int) -> None:
            super().__init__(num_entries)
            self._results = list(results)

        def reap(self) -> list[tuple[int, int]]:
            return [(key, self._changed(result) if key else result) for key, result in super().reap()]

        def _changed(self, result: int) -> int:
            instead = self._results.pop(0) if self._results else None
            return result if instead is None else instead

    return LanedQueue(
        "io_uring",
        lambda direction: UringLane(direction, depth=2, timeout_seconds=10.0, open_ring=ChangedRing),
        request_bytes=4 * PAGE_BYTES,
    )


def errors_of(error_number: int, count: int) -> Results:
    return [-error_number] * count


@pytest.mark.parametrize(
    "results",
    [
        errors_of(errno.EAGAIN, 1),
        errors_of(errno.EINTR, 3),
        errors_of(errno.EAGAIN, MAX_ATTEMPTS),
        [PAGE_BYTES],
        [PAGE_BYTES + 1, None, *errors_of(errno.EAGAIN, 1), PAGE_BYTES],
    ],
)
def test_interrupted_and_short_transfers_are_continued(
    results: Results, pool: BufferPool, fd: int, tmp_path: Path
) -> None:
    contents = random.Random(3).randbytes(NUM_PAGES * PAGE_BYTES)
    with queue_with(results) as queue:
        queue.write([Extent(fd=fd, offset=0, memory=filled(pool, contents))]).wait()
        assert (tmp_path / "data").read_bytes() == contents
        memory = pool.lease(len(contents), "test").memory
        queue.read([Extent(fd=fd, offset=0, memory=memory)]).wait()
        assert memory == contents
        assert queue.read_bytes == queue.written_bytes == len(contents)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: errors_of(errno.EAGAIN, 2 * MAX_ATTEMPTS + 2), IntegrityFailure),
        (lambda: errors_of(errno.EIO, 1), IntegrityFailure),
        (lambda: errors_of(errno.ENOSPC, 1), EnvironmentFailure),
        (lambda: [0], IntegrityFailure),
        (lambda: [PAGE_BYTES - 1], IntegrityFailure),
    ],
    ids=["EAGAIN for good", "EIO", "ENOSPC", "nothing", "less than a page"],
)
def test_other_results_fail_only_their_ticket(
    make: Callable[[], Results], kind: type[IntegrityFailure | EnvironmentFailure], pool: BufferPool, fd: int
) -> None:
    memory = filled(pool, bytes(NUM_PAGES * PAGE_BYTES))
    with queue_with(make()) as queue:
        with pytest.raises(kind):
            queue.write([Extent(fd=fd, offset=0, memory=memory)]).wait()
        queue.write([Extent(fd=fd, offset=0, memory=memory)]).wait()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_a_read_that_the_kernel_cut_short_is_continued(pool: BufferPool, pipe: tuple[int, int]) -> None:
    """A read of a pipe returns what is there."""
    reading, writing = pipe
    contents = random.Random(2).randbytes(3 * PAGE_BYTES)
    memory = pool.lease(len(contents), "test").memory
    os.write(writing, contents[:PAGE_BYTES])
    with open_queue("io_uring", notice=pytest.fail) as queue:
        ticket = queue.read([Extent(fd=reading, offset=0, memory=memory)])
        time.sleep(0.05)
        assert not ticket.done
        rest = threading.Thread(target=os.write, args=(writing, contents[PAGE_BYTES:]))
        rest.start()
        ticket.wait()
        rest.join()
        assert memory == contents
        assert queue.read_bytes == len(contents)
