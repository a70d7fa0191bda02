"""The ring of io_uring itself (kernels/bindings/ring.cpp): what it moves, and every call that it rejects."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratel_cli._native import Ring

_KEY = 7
_LARGEST_KEY = 2**64 - 1


@pytest.fixture
def ring() -> Iterator[Ring]:
    try:
        opened = Ring(4)
    except OSError as error:
        pytest.skip(f"io_uring is not available: {error}")
    yield opened
    opened.close()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def completions(ring: Ring, number: int) -> dict[int, int]:
    """The results of this many requests by key."""
    found: dict[int, int] = {}
    while len(found) < number:
        ring.wait()
        found |= dict(ring.reap())
    return found


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 4097, 1 << 20])
def test_what_is_written_is_read_again(ring: Ring, fd: int, num_bytes: int) -> None:
    contents = os.urandom(num_bytes)
    ring.prepare(writes=True, fd=fd, memory=memoryview(contents), offset=3, key=_LARGEST_KEY)
    ring.submit()
    assert completions(ring, 1) == {_LARGEST_KEY: num_bytes}
    memory = memoryview(bytearray(num_bytes))
    ring.prepare(writes=False, fd=fd, memory=memory, offset=3, key=0)
    ring.submit()
    assert completions(ring, 1) == {0: num_bytes}
    assert memory == contents


def test_entries_are_used_again_and_again(ring: Ring, fd: int) -> None:
    memories = [memoryview(bytes([number])) for number in range(4)]
    for turn in range(100):
        for number, memory in enumerate(memories):
            ring.prepare(writes=True, fd=fd, memory=memory, offset=4 * turn + number, key=number)
        ring.submit()
        assert completions(ring, 4) == dict.fromkeys(range(4), 1)
    assert os.pread(fd, 401, 0) == bytes(range(4)) * 100


def test_an_error_is_a_negative_number(ring: Ring) -> None:
    ring.prepare(writes=False, fd=-1, memory=memoryview(bytearray(8)), offset=0, key=_KEY)
    ring.submit()
    assert completions(ring, 1) == {_KEY: -errno.EBADF}


def test_a_timer_completes(ring: Ring) -> None:
    began = time.monotonic()
    ring.prepare_timer(0.05, _KEY)
    ring.submit()
    assert completions(ring, 1) == {_KEY: -errno.ETIME}
    assert time.monotonic() - began >= 0.05


def test_wake_ends_a_wait(ring: Ring) -> None:
    waiting = threading.Thread(target=ring.wait)
    waiting.start()
    ring.wake()
    waiting.join(timeout=60)
    assert not waiting.is_alive()
    assert ring.reap() == []


def test_nothing_prepared_is_nothing_submitted(ring: Ring) -> None:
    ring.submit()
    assert ring.reap() == []


def test_more_than_there_are_entries(ring: Ring, fd: int) -> None:
    memory = memoryview(b"x")
    for key in range(4):
        ring.prepare(writes=True, fd=fd, memory=memory, offset=key, key=key)
    with pytest.raises(IndexError, match="no free entry"):
        ring.prepare(writes=True, fd=fd, memory=memory, offset=4, key=4)
    ring.submit()
    assert completions(ring, 4) == dict.fromkeys(range(4), 1)


def test_more_completions_than_the_kernel_has_places_for_are_not_lost(ring: Ring, fd: int) -> None:
    memory = memoryview(b"x")
    for turn in range(8):
        for number in range(4):
            ring.prepare(writes=True, fd=fd, memory=memory, offset=0, key=4 * turn + number)
        ring.submit()
    assert completions(ring, 32) == dict.fromkeys(range(32), 1)


def test_arguments_that_cannot_be_meant(ring: Ring, fd: int) -> None:
    with pytest.raises(BufferError):
        ring.prepare(writes=False, fd=fd, memory=memoryview(b"read-only"), offset=0, key=_KEY)
    for seconds in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="seconds"):
            ring.prepare_timer(seconds, _KEY)
    with pytest.raises(OSError, match="Invalid argument"):
        Ring(0)


def test_a_closed_ring_says_so(ring: Ring, fd: int) -> None:
    ring.close()
    ring.close()
    with pytest.raises(ValueError, match="closed"):
        ring.prepare(writes=True, fd=fd, memory=memoryview(b"x"), offset=0, key=_KEY)
    for call in (ring.submit, ring.reap, ring.wait, ring.wake, lambda: ring.prepare_timer(1.0, _KEY)):
        with pytest.raises(ValueError, match="closed"):
            call()
