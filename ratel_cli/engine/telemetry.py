"""Where the time of a step goes: what each resource did and when, and what the compute thread waited for.

Every thread of the engine records into one `Timeline`: spans of work on a resource, and waits of the
compute thread by the resource waited for. `training.loop` takes the sums at the end of each step;
`engine.trace` draws the spans. Where a GPU computes, the thread that drives it may stand still while the GPU goes on:
only what is left of such a wait when the GPU had nothing to compute counts.

Invariants: a span ends after it begins and is recorded once it is over; waits and computing never overlap.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from threading import Lock
from time import perf_counter
from typing import Literal, get_args

from ratel_cli.io.tickets import Ticket
from ratel_cli.planning.placement import Stage

Resource = Literal["compute", "up", "down", "nvme read", "nvme write", "optimizer"]
RESOURCES: tuple[Resource, ...] = get_args(Resource)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One piece of work on one resource, in seconds of `time.perf_counter`."""

    resource: Resource
    label: str
    """What the user reads: "forward of layer 3"."""
    start: float
    end: float
    block: int
    """Index of the block that it is about."""
    stage: Stage
    """What it is a part of: transfers of weights belong to the stage that computes with them."""
    part: int
    """The group of the optimizer, from 0; 0 for everything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of one step."""

    busy: dict[Resource, float]
    """For each resource, how long it had work: overlapping spans count once."""
    waited: dict[Resource, float]
    """For each resource, how long nothing was computed for want of it."""
    spans: tuple[Span, ...]


class Timeline:
    """Collects from any thread what happens, until `take`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._spans: list[Span] = []
        self._waits: list[tuple[Resource, float, float]] = []
        self._counted: dict[Resource, float] = dict.fromkeys(RESOURCES, 0.0)
        """Up to when each resource's work is in what `take` has returned."""

    def record(
        self, resource: Resource, label: str, start: float, end: float, *, block: int, stage: Stage, part: int = 0
    ) -> None:
        """Note work that is over."""
        span = Span(resource=resource, label=label, start=start, end=end, block=block, stage=stage, part=part)
        with self._lock:
            self._spans.append(span)

    @contextlib.contextmanager
    def during(self, resource: Resource, label: str, *, block: int, stage: Stage, part: int = 0) -> Iterator[None]:
        """Note the work inside."""
        start = perf_counter()
        try:
            yield
        finally:
            self.record(resource, label, start, perf_counter(), block=block, stage=stage, part=part)

    def transfer(
        self, resource: Resource, label: str, ticket: Ticket, *, block: int, stage: Stage, part: int = 0
    ) -> None:
        """Note a transfer that has ended."""
        start, end = ticket.span
        self.record(resource, label, start, end, block=block, stage=stage, part=part)

    @contextlib.contextmanager
    def waiting(self, cause: Resource) -> Iterator[None]:
        """Charge the time inside, in which the compute thread does nothing, to `cause`."""
        start = perf_counter()
        try:
            yield
        finally:
            self.record_stall(cause, start, perf_counter())

    def record_stall(self, cause: Resource, start: float, end: float) -> None:
        """Charge what nothing was computed in, of this time, to `cause`."""
        with self._lock:
            self._waits.append((cause, start, end))

    def take(self) -> StepTimes:
        """Everything since the last call."""
        with self._lock:
            spans, self._spans = self._spans, []
            waits, self._waits = self._waits, []
        return StepTimes(
            busy={resource: self._busy(resource, spans) for resource in RESOURCES},
            waited=_waited(waits, [(span.start, span.end) for span in spans if span.resource == "compute"]),
            spans=tuple(spans),
        )

    def _busy(self, resource: Resource, spans: Iterable[Span]) -> float:
        """Seconds in which at least one of the spans runs, but for those that an earlier `take` has counted."""
        seconds, counted = 0.0, self._counted[resource]
        for start, end in sorted((span.start, span.end) for span in spans if span.resource == resource):
            seconds += max(0.0, end - max(start, counted))
            counted = max(counted, end)
        self._counted[resource] = counted
        return seconds


def _waited(
    waits: Iterable[tuple[Resource, float, float]], computing: Iterable[tuple[float, float]]
) -> dict[Resource, float]:
    """Seconds of the waits in which nothing computed, by cause."""
    waited: dict[Resource, float] = dict.fromkeys(RESOURCES, 0.0)
    busy = sorted(computing)
    first = 0
    for cause, start, end in sorted(waits, key=lambda wait: wait[1]):
        while first < len(busy) and busy[first][1] <= start:
            first += 1
        waited[cause] += end - start
        position = first
        while position < len(busy) and busy[position][0] < end:
            waited[cause] -= max(0.0, min(end, busy[position][1]) - max(start, busy[position][0]))
            position += 1
    return waited
