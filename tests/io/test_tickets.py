"""Tickets: waited on exactly once, done with their last part, and the owners of their buffers until then."""

from __future__ import annotations

import threading
import weakref
from time import perf_counter

import pytest

from ratel_cli.errors import EnvironmentFailure, IntegrityFailure
from ratel_cli.io.tickets import Ticket, join


class _Buffer(bytearray):
    """A bytearray that can be weakly referred to."""


@pytest.mark.parametrize("num_parts", [1, 2, 7])
def test_is_done_with_its_last_part(num_parts: int) -> None:
    ticket = Ticket(num_parts=num_parts)
    for _ in range(num_parts):
        assert not ticket.done
        ticket.finish_part()
    assert ticket.done
    ticket.wait()


def test_without_parts_is_done_at_once() -> None:
    ticket = Ticket(num_parts=0)
    assert ticket.done
    ticket.wait()


def test_second_wait_is_a_bug() -> None:
    ticket = Ticket(num_parts=0)
    ticket.wait()
    with pytest.raises(AssertionError, match="exactly once"):
        ticket.wait()


def test_second_wait_is_a_bug_after_a_failure_too() -> None:
    ticket = Ticket(num_parts=1)
    ticket.finish_part(IntegrityFailure("bad sector"))
    with pytest.raises(IntegrityFailure, match="bad sector"):
        ticket.wait()
    with pytest.raises(AssertionError, match="exactly once"):
        ticket.wait()


def test_more_parts_than_announced_are_a_bug() -> None:
    ticket = Ticket(num_parts=1)
    ticket.finish_part()
    with pytest.raises(AssertionError, match="twice"):
        ticket.finish_part()


def test_first_failure_is_raised_only_after_the_last_part() -> None:
    ticket = Ticket(num_parts=3)
    cause = OSError(5, "Input/output error")
    first = IntegrityFailure("first")
    first.__cause__ = cause
    ticket.finish_part(first)
    assert not ticket.done
    ticket.finish_part(EnvironmentFailure("second"))
    ticket.finish_part()
    assert ticket.done
    with pytest.raises(IntegrityFailure, match="first") as raised:
        ticket.wait()
    assert raised.value.__cause__ is cause


def test_wait_blocks_until_another_thread_finishes_the_parts() -> None:
    ticket = Ticket(num_parts=2)
    waiting = threading.Event()
    seen: list[str] = []

    def finish() -> None:
        waiting.wait()
        seen.append("finishing")
        ticket.finish_part()
        ticket.finish_part()

    thread = threading.Thread(target=finish)
    thread.start()
    waiting.set()
    ticket.wait()
    assert seen == ["finishing"]
    thread.join()


def test_holds_its_buffers_until_done() -> None:
    buffer = _Buffer(16)
    alive = weakref.ref(buffer)
    ticket = Ticket(num_parts=1, buffers=[memoryview(buffer)])
    del buffer
    assert alive() is not None
    ticket.finish_part()
    assert alive() is None


def test_an_action_runs_in_the_wait_after_a_success() -> None:
    done: list[str] = []
    ticket = Ticket(num_parts=1)
    assert ticket.then(lambda: done.append("confirmed")) is ticket
    ticket.finish_part()
    assert done == []
    ticket.wait()
    assert done == ["confirmed"]


def test_no_action_runs_after_a_failure() -> None:
    done: list[str] = []
    ticket = Ticket(num_parts=1).then(lambda: done.append("confirmed"))
    ticket.finish_part(IntegrityFailure("bad sector"))
    with pytest.raises(IntegrityFailure, match="bad sector"):
        ticket.wait()
    assert done == []


def test_span_is_from_the_first_part_begun_to_the_last_one_ended() -> None:
    ticket = Ticket(num_parts=2)
    before = perf_counter()
    ticket.begin_part()
    first_begun = perf_counter()
    ticket.begin_part()
    ticket.finish_part()
    first_ended = perf_counter()
    ticket.finish_part(IntegrityFailure("bad sector"))
    began, ended = ticket.span
    assert before <= began <= first_begun <= first_ended <= ended <= perf_counter()


def test_span_of_what_never_began_is_empty() -> None:
    """A ticket without parts, or of a request that failed while it waited."""
    failed = Ticket(num_parts=1)
    failed.finish_part(IntegrityFailure("closed"))
    for ticket in (Ticket(num_parts=0), failed, join([])):
        began, ended = ticket.span
        assert began == ended <= perf_counter()


def test_span_before_the_end_is_a_bug() -> None:
    ticket = Ticket(num_parts=1)
    ticket.begin_part()
    for unfinished in (ticket, join([Ticket(num_parts=0), ticket])):
        with pytest.raises(AssertionError, match="when it has ended"):
            _ = unfinished.span


def test_joined_span_covers_the_tickets() -> None:
    first, second, third = (Ticket(num_parts=1) for _ in range(3))
    joined = join([join([third, second]), first])
    for ticket in (second, first, third):
        ticket.begin_part()
    for ticket in (first, third, second):
        ticket.finish_part()
    assert joined.span == (second.span[0], second.span[1])
    assert second.span[0] < first.span[0] < third.span[0]


def test_join_of_nothing_is_done() -> None:
    joined = join([])
    assert joined.done
    joined.wait()


def test_join_is_done_with_the_last_ticket() -> None:
    tickets = [Ticket(num_parts=1) for _ in range(3)]
    joined = join(tickets)
    for ticket in reversed(tickets):
        assert not joined.done
        ticket.finish_part()
    assert joined.done
    joined.wait()
    with pytest.raises(AssertionError, match="exactly once"):
        joined.wait()


def test_join_waits_for_all_and_raises_the_first_failure() -> None:
    tickets = [Ticket(num_parts=1) for _ in range(3)]
    joined = join([join(tickets[:2]), tickets[2]])
    tickets[0].finish_part()
    tickets[1].finish_part(IntegrityFailure("second ticket"))
    tickets[2].finish_part(IntegrityFailure("third ticket"))
    with pytest.raises(IntegrityFailure, match="second ticket"):
        joined.wait()
    for ticket in tickets:  # all were waited on by the join
        with pytest.raises(AssertionError, match="exactly once"):
            ticket.wait()
