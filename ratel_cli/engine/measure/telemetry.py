"""Where the time of a step goes: when each resource worked, and how long computing stalled on each resource.

Every thread of the engine records into one `Timeline`: spans of work on a resource, and waits of the compute thread
for a resource. `Timeline.take` sums them up. A GPU may compute while the thread that drives it waits; so a wait counts
as a stall only as far as no span of computing covers it.

Invariants: a span is recorded once it is over and ends no earlier than it starts; stalls never overlap computing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from threading import Lock
from time import perf_counter
from typing import NamedTuple, Self

from ratel_cli.io.tickets import Ticket
from ratel_cli.planning.time.step_time import RESOURCES, Resource
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.schedule.segments import Segment
from ratel_cli.schedule.uses import Stage


class SpanLabel(NamedTuple):
    """What a piece of work is for.

    A tuple, as spans are, because threads that share the GIL with the compute thread make them: a frozen dataclass
    takes twice as long.
    """

    text: str
    """The text that the user reads, such as "forward of layer 3"."""
    block: int
    """Index of the segment that the work is for."""
    stage: Stage
    """The stage of the step that the work is for: transfers of weights belong to the stage that computes with them."""
    group: int = 0
    """Number of the optimizer's group within the block, from 0; 0 for work that is not done in groups."""

    @classmethod
    def of(cls, what: str, owner: BlockSpec | Segment, stage: Stage, group: int = 0) -> Self:
        """The label of `what` of a block or a segment."""
        index = owner.segment if isinstance(owner, BlockSpec) else owner.index
        return cls(f"{what} of {owner.name}", index, stage, group)


class Span(NamedTuple):
    """One piece of work on one resource, in seconds of `time.perf_counter`."""

    resource: Resource
    label: SpanLabel
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """How one step spent its time, in seconds."""

    busy: dict[Resource, float]
    """How long each resource had work. Overlapping spans count once."""
    stalled: dict[Resource, float]
    """How long computing stalled on each resource."""
    spans: tuple[Span, ...]


class Timeline:
    """Collects spans and waits, from any thread, until `take` returns them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._spans: list[Span] = []
        self._waits: list[tuple[Resource, float, float]] = []
        self._counted: dict[Resource, float] = dict.fromkeys(RESOURCES, 0.0)
        """By resource: the time up to which `take` has counted its work."""

    def record(self, resource: Resource, label: SpanLabel, start: float, end: float) -> None:
        """Record work that is over."""
        with self._lock:
            self._spans.append(Span(resource, label, start, end))

    @contextlib.contextmanager
    def during(self, resource: Resource, label: SpanLabel) -> Iterator[None]:
        """Record the work that is done inside the `with` statement."""
        start = perf_counter()
        try:
            yield
        finally:
            self.record(resource, label, start, perf_counter())

    def transfer(self, resource: Resource, label: SpanLabel, ticket: Ticket) -> None:
        """Record a transfer that has ended."""
        self.record(resource, label, *ticket.span)

    @contextlib.contextmanager
    def stalled_on(self, cause: Resource) -> Iterator[None]:
        """Record the time inside the `with` statement, in which the compute thread waits, as a stall on `cause`."""
        start = perf_counter()
        try:
            yield
        finally:
            self.record_stall(cause, start, perf_counter())

    def record_stall(self, cause: Resource, start: float, end: float) -> None:
        """Record a wait for `cause`. Only the time in which nothing is computed will count as a stall."""
        with self._lock:
            self._waits.append((cause, start, end))

    def take(self) -> StepTimes:
        """Return and forget everything that was recorded since the last call."""
        with self._lock:
            spans, self._spans = self._spans, []
            waits, self._waits = self._waits, []
        return StepTimes(
            busy={resource: self._busy(resource, spans) for resource in RESOURCES},
            stalled=_stalled(waits, [(span.start, span.end) for span in spans if span.resource == "compute"]),
            spans=tuple(spans),
        )

    def _busy(self, resource: Resource, spans: Iterable[Span]) -> float:
        """Seconds in which at least one of the spans runs, without those that an earlier `take` has counted."""
        seconds, counted = 0.0, self._counted[resource]
        for start, end in sorted((span.start, span.end) for span in spans if span.resource == resource):
            seconds += max(0.0, end - max(start, counted))
            counted = max(counted, end)
        self._counted[resource] = counted
        return seconds


def _stalled(
    waits: Iterable[tuple[Resource, float, float]], computing: Iterable[tuple[float, float]]
) -> dict[Resource, float]:
    """By cause: seconds of the waits in which no span of computing runs."""
    stalled: dict[Resource, float] = dict.fromkeys(RESOURCES, 0.0)
    busy = sorted(computing)
    first = 0
    for cause, start, end in sorted(waits, key=lambda wait: wait[1]):
        while first < len(busy) and busy[first][1] <= start:
            first += 1
        stalled[cause] += end - start
        position = first
        while position < len(busy) and busy[position][0] < end:
            stalled[cause] -= max(0.0, min(end, busy[position][1]) - max(start, busy[position][0]))
            position += 1
    return stalled
