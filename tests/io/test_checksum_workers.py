"""Checksums are taken by threads of their own, next to transfers; what they find is raised where bytes are awaited."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from time import perf_counter

import pytest

from ratel_cli.errors import IntegrityFailure
from ratel_cli.io.checksum_workers import NUM_THREADS, PART_BYTES, ChecksumWorkers, parts_of
from ratel_cli.io.tickets import Ticket

SECONDS = 30.0


@pytest.fixture
def workers() -> Iterator[ChecksumWorkers]:
    with ChecksumWorkers() as workers:
        yield workers


def test_a_read_is_done_when_it_was_checked(workers: ChecksumWorkers) -> None:
    transfer, checking, proceed, threads = Ticket(num_parts=1), threading.Event(), threading.Event(), []

    def check() -> None:
        threads.append(threading.current_thread().name)
        checking.set()
        assert proceed.wait(SECONDS)

    ticket = workers.after(transfer, check)
    assert not checking.wait(0.01), "nothing is checked before it is there"
    transfer.begin_part()
    transfer.finish_part()
    assert checking.wait(SECONDS)
    assert not ticket.done
    proceed.set()
    ticket.wait()
    assert ticket.done
    assert threads[0].startswith("ratel-checksum")
    assert ticket.span[1] <= perf_counter()


def test_a_write_is_done_when_its_checksum_is_too(workers: ChecksumWorkers) -> None:
    transfer, taken = Ticket(num_parts=1), threading.Event()
    ticket = workers.during(transfer, taken.set)
    assert taken.wait(SECONDS), "the checksum is taken during the write"
    assert not ticket.done
    transfer.finish_part()
    ticket.wait()


def test_what_the_check_finds_is_raised_by_wait(workers: ChecksumWorkers) -> None:
    def fail() -> None:
        raise IntegrityFailure("a flipped bit")

    for start in (workers.after, workers.during):
        with pytest.raises(IntegrityFailure, match="a flipped bit"):
            start(Ticket(num_parts=0), fail).wait()


def test_a_bug_in_a_check_is_raised_too(workers: ChecksumWorkers) -> None:
    with pytest.raises(ZeroDivisionError):
        workers.after(Ticket(num_parts=0), lambda: print(1 // 0)).wait()


def test_what_did_not_arrive_is_not_checked(workers: ChecksumWorkers) -> None:
    for start, expected in ((workers.after, []), (workers.during, ["taken"])):
        called: list[str] = []
        transfer = Ticket(num_parts=1)
        transfer.finish_part(IntegrityFailure("bad sector"))
        with pytest.raises(IntegrityFailure, match="bad sector"):
            start(transfer, lambda called=called: called.append("taken")).wait()  # type: ignore[misc]
        assert called == expected


def test_checks_run_next_to_each_other(workers: ChecksumWorkers) -> None:
    """As many as there are threads must meet before one may end."""
    barrier = threading.Barrier(NUM_THREADS, timeout=SECONDS)
    tickets = [workers.after(Ticket(num_parts=0), lambda: print(barrier.wait())) for _ in range(NUM_THREADS)]
    for ticket in tickets:
        ticket.wait()


def test_close_waits_for_what_was_begun_and_may_be_repeated() -> None:
    workers = ChecksumWorkers()
    tickets = [workers.after(Ticket(num_parts=0), lambda: None) for _ in range(20)]
    workers.close()
    assert all(ticket.done for ticket in tickets)
    workers.close()


@pytest.mark.parametrize("num_bytes", [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES])
@pytest.mark.parametrize("unit_bytes", [1, 3 << 18, PART_BYTES, 5 * PART_BYTES])
def test_parts_cover_everything_in_whole_units(num_bytes: int, unit_bytes: int) -> None:
    parts = list(parts_of(num_bytes, unit_bytes=unit_bytes))
    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts)][: len(parts)]
    assert (parts[-1][1] if parts else 0) == num_bytes
    assert all(start % unit_bytes == 0 and 0 < stop - start <= max(PART_BYTES, unit_bytes) for start, stop in parts)
