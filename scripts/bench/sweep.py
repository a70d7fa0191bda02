"""Steps of one batch size under plans that offload more and more, on a drive of known speed; a process of `bench.plan`.

Regime: one step is recorded. From its profile come a plan for each share of the activations, and the plan that the
planner chooses by itself. The plans take turns on one store, with the same small limit on memory.

Invariant: every plan reads, writes and offloads exactly the bytes that it predicted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice

from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.errors import DoesNotFit
from ratel_cli.hardware.host import default_limit_bytes
from ratel_cli.io.queue import IoQueue
from ratel_cli.planning.profile.placement import ActivationPolicy
from ratel_cli.planning.search.plan import Plan
from ratel_cli.run.train.planner import Planner
from scripts.bench.contestants import Task, batches_of, in_turns
from scripts.bench.ratel_run import RatelRun, open_run
from scripts.bench.throttled_queue import ThrottledQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What to measure. One process measures one sweep."""

    shape: str
    tokens: int
    """Tokens of a micro-batch."""
    micro_batches: int
    shares: list[float]
    """Shares of the bytes that could be offloaded: a point each."""
    rounds: int
    steps: int
    """Steps that count in each round. One more step before them does not count."""
    available_bytes: int
    """Memory on top of the least that a step needs."""
    nvme_bytes_per_second: float
    """The rate of the drive, in either direction."""
    directory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One plan, as predicted and as measured."""

    is_planned: bool
    """The planner chose the activations to offload, not the sweep."""
    swapped_bytes: int
    spilled_bytes: int
    """The part of `swapped_bytes` that goes to NVMe."""
    resident_bytes: int
    """Weights and optimizer states that stay in memory."""
    predicted_forward_seconds: float
    predicted_seconds: float
    bottleneck: str
    forward_seconds: list[float]
    seconds: list[float]
    """Seconds of each counted step, from one decision to the next; the last step includes the remaining writes."""


def main() -> None:
    """The main program: its argument is the sweep as JSON, its last line is the list of points as JSON."""
    print(json.dumps([asdict(point) for point in points(Sweep(**json.loads(sys.argv[1])))]))


def points(sweep: Sweep) -> list[SweepPoint]:
    """Measure one point for each share, and the planner's own."""
    task = Task(
        contestant="ratel",
        shape=sweep.shape,
        tokens=sweep.tokens,
        micro_batches=sweep.micro_batches,
        steps=1 + sweep.rounds * (1 + sweep.steps),
        directory=sweep.directory,
    )

    def throttled(queue: IoQueue) -> IoQueue:
        rate = sweep.nvme_bytes_per_second
        return ThrottledQueue(queue, read_bytes_per_second=rate, write_bytes_per_second=rate)

    with open_run(task, limit_bytes=default_limit_bytes(), activations="auto", throttled=throttled) as free:
        first, *others = batches_of(task)
        limit_bytes = _least_bytes(free) + sweep.available_bytes
        run = replace(free, planner=_deciding(free.planner, host_limit_bytes=limit_bytes))
        _, profile = run.record(first)
        wishes: list[ActivationPolicy] = [*sweep.shares, "auto"]
        plans = [_deciding(run.planner, activations=wish).plan(profile) for wish in wishes]
        found = [_point(plan) for plan in plans]
        batches = iter(others)
        rounds = [list(islice(batches, 1 + sweep.steps)) for _ in range(sweep.rounds)]
        for number, (plan, point) in in_turns(list(zip(plans, found, strict=True)), sweep.rounds):
            for forward_seconds, seconds in _measure(run, plan, rounds[number]):
                point.forward_seconds.append(forward_seconds)
                point.seconds.append(seconds)
        return found


def _least_bytes(run: RatelRun) -> int:
    """The least memory that a step needs."""
    try:
        _deciding(run.planner, host_limit_bytes=0).plan(run.estimate())
    except DoesNotFit as failure:
        return failure.shortfall_bytes
    raise AssertionError("a step needs memory")


def _deciding(
    planner: Planner, *, host_limit_bytes: int | None = None, activations: ActivationPolicy = "auto"
) -> Planner:
    before = planner.decisions
    limit_bytes = before.host_limit_bytes if host_limit_bytes is None else host_limit_bytes
    return replace(planner, decisions=replace(before, host_limit_bytes=limit_bytes, activations=activations))


def _point(plan: Plan) -> SweepPoint:
    return SweepPoint(
        is_planned=plan.decisions.activations == "auto",
        swapped_bytes=plan.offloaded.total_bytes,
        spilled_bytes=plan.offloaded.written_bytes,
        resident_bytes=plan.memory.resident,
        predicted_forward_seconds=plan.time.forward.total,
        predicted_seconds=plan.time.total,
        bottleneck=plan.time.bottleneck,
        forward_seconds=[],
        seconds=[],
    )


def _measure(run: RatelRun, plan: Plan, steps_batches: Sequence[list[MicroBatch]]) -> Iterator[tuple[float, float]]:
    """Seconds of the forward and of the whole step, of all steps but the first.

    What is left of the last step is written afterwards, and does not count.
    """
    queue, num_steps = run.context.queue, len(steps_batches)
    read_bytes, written_bytes = queue.read_bytes, queue.written_bytes
    with run.under(plan) as steps:
        for number, batches in enumerate(steps_batches):
            step = steps.run(batches)
            assert step.outcome.swapped_bytes == plan.offloaded.total_bytes
            if number:
                yield step.outcome.forward_seconds, step.seconds
    traffic = plan.traffic
    once_bytes = traffic.first_read_bytes + _last_bytes(run, plan)
    assert queue.read_bytes - read_bytes == num_steps * traffic.read_bytes + once_bytes
    assert queue.written_bytes - written_bytes == num_steps * traffic.written_bytes


def _last_bytes(run: RatelRun, plan: Plan) -> int:
    """Bytes read after the last step: the weights for its deferred updates. Otherwise a forward reads them."""
    deferred = plan.placement.deferred - plan.placement.resident_weights
    return sum(run.model.spec.segments[index].updated_bytes for index in deferred)


if __name__ == "__main__":
    main()
