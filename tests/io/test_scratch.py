"""Scratch space: reads what was written, and leaves nothing behind."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from ratel_cli.errors import BadInput, EnvironmentFailure, IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.checksum_workers import PART_BYTES
from ratel_cli.io.queue import IoQueue
from ratel_cli.io.requests import Direction
from ratel_cli.io.scratch import Scratch
from ratel_cli.sizes import PAGE_BYTES
from tests.fakes import Fault, FaultyQueue, filled


@pytest.mark.parametrize("num_directories", [1, 2, 3])
def test_what_was_written_is_read(tmp_path: Path, queue: IoQueue, pool: BufferPool, num_directories: int) -> None:
    paths = [tmp_path / f"drive{index}" for index in range(num_directories)]
    num_pages = 50
    expected = bytearray(num_pages * PAGE_BYTES)
    random_state = random.Random(num_directories)
    with Scratch(paths, num_pages * PAGE_BYTES, queue, stripe_bytes=3 * PAGE_BYTES) as scratch:
        for start, stop in [(0, num_pages), (0, 1), (7, 30), (num_pages - 1, num_pages), (5, 5)]:
            part = random_state.randbytes((stop - start) * PAGE_BYTES)
            expected[start * PAGE_BYTES : stop * PAGE_BYTES] = part
            scratch.write(start * PAGE_BYTES, filled(pool, part)).wait()
        for start, stop in [(0, num_pages), (3, 17), (49, 50), (9, 9)]:
            memory = pool.lease((stop - start) * PAGE_BYTES, "test").memory
            scratch.read(start * PAGE_BYTES, memory).wait()
            assert memory == expected[start * PAGE_BYTES : stop * PAGE_BYTES]
        assert [list(path.iterdir()) for path in paths] == [[]] * num_directories


@pytest.mark.parametrize("weights", [(1,), (1, 2), (8, 1, 3)])
def test_directories_get_their_shares(tmp_path: Path, pool: BufferPool, weights: tuple[int, ...]) -> None:
    paths = [tmp_path / f"drive{index}" for index in range(len(weights))]
    expected = random.Random(1).randbytes(3 * sum(weights) * PAGE_BYTES)
    with (
        FaultyQueue(request_bytes=PAGE_BYTES) as queue,
        Scratch(paths, len(expected), queue, shares=weights, stripe_bytes=PAGE_BYTES) as scratch,
    ):
        scratch.write(0, filled(pool, expected)).wait()
        memory = pool.lease(len(expected), "test").memory
        scratch.read(0, memory).wait()
        assert memory == expected
        written = Counter(call.fd for call in queue.calls if call.direction == "write")
        assert [written[fd] for fd in sorted(written)] == [3 * weight for weight in weights]


def test_scratch_space_of_no_bytes(tmp_path: Path, queue: IoQueue) -> None:
    with Scratch([tmp_path], 0, queue) as scratch:
        scratch.write(0, memoryview(bytearray())).wait()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_bytes", [0, PAGE_BYTES, PART_BYTES, PART_BYTES + PAGE_BYTES])
@pytest.mark.parametrize("direction", ["write", "read"])
def test_a_flipped_bit_in_sealed_bytes_is_noticed(
    tmp_path: Path, pool: BufferPool, num_bytes: int, direction: Direction
) -> None:
    """In the last request of a transfer: its last part is as well checked as the first."""
    with FaultyQueue() as queue, Scratch([tmp_path], 2 * num_bytes, queue) as scratch:
        memory = filled(pool, random.Random(2).randbytes(num_bytes))
        for start in (0, num_bytes):
            scratch.write_sealed(start, memory).wait()
            scratch.read_sealed(start, memory, "the unit").wait()
        if not num_bytes:
            return
        num_requests = -(-num_bytes // (1 << 20))
        last = num_requests - 1 if direction == "write" else 2 * num_requests - 1
        queue._faults[len(queue.calls) + last] = Fault(flipped_bit=77)
        scratch.write_sealed(num_bytes, memory).wait()
        with pytest.raises(IntegrityFailure, match="the unit: the bytes read are not the bytes written"):
            scratch.read_sealed(num_bytes, memory, "the unit").wait()


def test_an_address_past_the_end_is_a_bug(tmp_path: Path, queue: IoQueue, pool: BufferPool) -> None:
    with Scratch([tmp_path], PAGE_BYTES, queue) as scratch, pytest.raises(AssertionError):
        scratch.write(PAGE_BYTES, filled(pool, bytes(PAGE_BYTES)))


def test_close_waits_for_transfers_and_may_be_repeated(tmp_path: Path, pool: BufferPool) -> None:
    with FaultyQueue(shuffle_seed=1) as queue:
        scratch = Scratch([tmp_path], 64 * PAGE_BYTES, queue)
        tickets = [scratch.write(page * PAGE_BYTES, filled(pool, bytes(PAGE_BYTES))) for page in range(64)]
        scratch.close()
        assert all(ticket.done for ticket in tickets)
        scratch.close()


def test_the_error_says_how_much_space_is_needed(tmp_path: Path, queue: IoQueue) -> None:
    with pytest.raises(EnvironmentFailure, match=rf"needs 1024 TiB on {tmp_path}/new, .* available \(short by .*\)"):
        Scratch([tmp_path / "new"], 1 << 50, queue)
    assert list(tmp_path.iterdir()) == []


def test_unusable_directories_are_errors(tmp_path: Path, queue: IoQueue) -> None:
    with pytest.raises(BadInput, match=r"storage\.paths is empty"):
        Scratch([], PAGE_BYTES, queue)
    with pytest.raises(BadInput, match="twice"):
        Scratch([tmp_path, tmp_path / "x" / ".."], PAGE_BYTES, queue)
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFailure, match="cannot be created"):
        Scratch([tmp_path / "file"], PAGE_BYTES, queue)
