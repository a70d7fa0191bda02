"""The timeline: overlapping work counts once, waits add up by cause, and taking starts over."""

from __future__ import annotations

import random
import threading
from time import perf_counter

import pytest

from ratel_cli.engine.measure.telemetry import SpanLabel, StepTimes, Timeline
from ratel_cli.io.tickets import Ticket
from ratel_cli.planning.time.step_time import RESOURCES, Resource

WORK = SpanLabel(text="weights of layer 0", block=1, stage="forward")


def times(*spans: tuple[Resource, float, float]) -> StepTimes:
    timeline = Timeline()
    record(timeline, *spans)
    return timeline.take()


def record(timeline: Timeline, *spans: tuple[Resource, float, float]) -> None:
    for resource, start, end in spans:
        timeline.record(resource, WORK, start, end)


def test_nothing_happened() -> None:
    assert times() == StepTimes(busy=dict.fromkeys(RESOURCES, 0.0), stalled=dict.fromkeys(RESOURCES, 0.0), spans=())


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([(1, 3)], 2),
        ([(1, 1)], 0),
        ([(1, 3), (5, 6)], 3),
        ([(1, 3), (3, 6)], 5),
        ([(1, 4), (2, 6)], 5),
        ([(2, 6), (1, 4)], 5),
        ([(1, 9), (2, 3), (4, 5)], 8),
        ([(1, 3), (1, 3)], 2),
    ],
)
def test_work_that_overlaps_counts_once(spans: list[tuple[float, float]], seconds: float) -> None:
    found = times(*(("nvme read", start, end) for start, end in spans))
    assert found.busy == {resource: seconds if resource == "nvme read" else 0.0 for resource in RESOURCES}


def test_work_that_overlaps_counts_once_by_brute_force() -> None:
    draw = random.Random(7)
    for _ in range(100):
        spans = [(start, start + draw.randrange(5)) for start in draw.choices(range(30), k=draw.randrange(12))]
        seconds = len({second for start, end in spans for second in range(start, end)})
        assert times(*(("up", start, end) for start, end in spans)).busy["up"] == seconds


def test_resources_count_apart() -> None:
    found = times(("compute", 1, 3), ("optimizer", 2, 5), ("nvme write", 2, 3))
    assert (found.busy["compute"], found.busy["optimizer"], found.busy["nvme write"]) == (2, 3, 1)


def test_work_that_overlaps_what_an_earlier_step_counted_counts_once() -> None:
    """A transfer may begin in one step and end in the next. No resource is busy for longer than time has passed."""
    timeline = Timeline()
    record(timeline, ("nvme write", 1, 4))
    assert timeline.take().busy["nvme write"] == 3
    record(timeline, ("nvme write", 2, 3), ("nvme write", 3, 6), ("nvme read", 1, 2))
    found = timeline.take()
    assert (found.busy["nvme write"], found.busy["nvme read"]) == (2, 1)


def test_taking_starts_over() -> None:
    timeline = Timeline()
    record(timeline, ("compute", 1, 3))
    with timeline.stalled_on("up"):
        pass
    assert len(timeline.take().spans) == 1
    assert timeline.take().spans == ()
    assert set(timeline.take().stalled.values()) == {0.0}


def test_stalls_add_up_by_cause() -> None:
    timeline = Timeline()
    before = perf_counter()
    for _ in range(3):
        with timeline.stalled_on("nvme read"):
            threading.Event().wait(0.01)
    elapsed = perf_counter() - before
    stalled = timeline.take().stalled
    assert 0.025 < stalled.pop("nvme read") <= elapsed
    assert set(stalled.values()) == {0.0}


def test_a_wait_counts_only_while_nothing_is_computed() -> None:
    """A GPU may compute while the thread that drives it waits."""
    timeline = Timeline()
    record(timeline, ("compute", 1, 3), ("compute", 4, 5), ("nvme read", 0, 9))
    timeline.record_stall("nvme read", 2, 6)
    timeline.record_stall("up", 1, 2.5)
    timeline.record_stall("down", 0, 10)
    timeline.record_stall("optimizer", 6, 7)
    stalled = timeline.take().stalled
    assert (stalled["nvme read"], stalled["up"], stalled["down"], stalled["optimizer"]) == (2, 0, 7, 1)


def test_a_wait_counts_only_while_nothing_is_computed_by_brute_force() -> None:
    draw = random.Random(11)
    for _ in range(100):
        timeline, moments = Timeline(), sorted(draw.sample(range(60), 2 * draw.randrange(8)))
        computing = list(zip(moments[::2], moments[1::2], strict=True))
        draw.shuffle(computing)
        record(timeline, *(("compute", start, end) for start, end in computing))
        waits = [(start, start + draw.randrange(9)) for start in draw.choices(range(60), k=draw.randrange(6))]
        for start, end in waits:
            timeline.record_stall("up", start, end)
        busy = {second for start, end in computing for second in range(start, end)}
        assert timeline.take().stalled["up"] == sum(len(set(range(*wait)) - busy) for wait in waits)


def test_a_span_names_its_work() -> None:
    timeline = Timeline()
    before = perf_counter()
    label = SpanLabel(text="update of layer 3", block=4, stage="update", group=2)
    with timeline.during("optimizer", label):
        pass
    after = perf_counter()
    (span,) = timeline.take().spans
    assert (span.resource, span.label) == ("optimizer", label)
    assert before <= span.start <= span.end <= after


def test_work_and_waits_that_fail_are_noted() -> None:
    timeline = Timeline()
    with pytest.raises(ValueError, match="full"), timeline.during("compute", WORK):
        raise ValueError("full")
    with pytest.raises(ValueError, match="full"), timeline.stalled_on("down"):
        raise ValueError("full")
    found = timeline.take()
    assert len(found.spans) == 1
    assert found.stalled["down"] > 0


def test_a_transfer_lies_where_its_ticket_says() -> None:
    timeline, ticket = Timeline(), Ticket(num_parts=1)
    ticket.begin_part()
    ticket.finish_part()
    timeline.transfer("nvme read", WORK, ticket)
    (span,) = timeline.take().spans
    assert (span.start, span.end) == ticket.span
    assert span.label == WORK


def test_every_thread_may_record() -> None:
    timeline = Timeline()

    def work() -> None:
        for _ in range(200):
            with timeline.during("optimizer", WORK):
                pass

    threads = [threading.Thread(target=work, name=f"recorder {index}") for index in range(4)]
    for thread in threads:
        thread.start()
    num_spans = 0
    while any(thread.is_alive() for thread in threads):
        num_spans += len(timeline.take().spans)
    for thread in threads:
        thread.join()
    assert num_spans + len(timeline.take().spans) == 800
