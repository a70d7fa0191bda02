"""Ratel with all state on disk, as a contestant of `scripts/bench/contestants.py`."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from ratel_cli.engine.measure.telemetry import Span
from ratel_cli.engine.measure.trace import TraceFile
from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.hardware.host import default_limit_bytes, peak_resident_bytes
from ratel_cli.io.buffers import BufferPool
from ratel_cli.planning.profile.placement import ActivationPolicy
from ratel_cli.planning.search.plan import Plan
from ratel_cli.planning.time.step_time import RESOURCES, Resource
from ratel_cli.store.store import Store
from ratel_cli.units import GIB
from scripts.bench.ceilings import mixed_bytes_per_second
from scripts.bench.contestants import Measured, Task, batches_of, run_as
from scripts.bench.ratel_run import RatelRun, TimedStep, open_run


def run_ratel(task: Task) -> Measured:
    """Train with Ratel: the first step is recorded, and the others follow the plan that it gives."""
    activations: ActivationPolicy = "recompute" if task.contestant == "ratel-recompute" else "auto"
    limit_bytes = default_limit_bytes() if task.host_memory_gib is None else int(task.host_memory_gib * GIB)
    with ExitStack() as resources:
        run = resources.enter_context(open_run(task, limit_bytes=limit_bytes, activations=activations))
        rates = [_drive_rate(run)]
        trace = resources.enter_context(TraceFile(Path(task.trace), warn=run.context.log.warn)) if task.trace else None
        plan, totals = _run_steps(run, trace)
        weights_sha256 = _store_sha256(run.store, run.context.pool)
        rates.append(_drive_rate(run))
        return Measured(
            num_parameters=plan.num_parameters,
            step_seconds=totals.step_seconds,
            losses=totals.losses,
            all_seconds=totals.all_seconds,
            peak_bytes=peak_resident_bytes(),
            weights_sha256=weights_sha256,
            busy_seconds={str(resource): spent for resource, spent in totals.busy.items()},
            waited_seconds={str(resource): spent for resource, spent in totals.waited.items()},
            overlapped_fraction=overlapped_fraction(totals.spans),
            drive_idle_seconds=sum(totals.step_seconds) - drive_seconds(totals.spans),
            nvme_bytes=totals.nvme_bytes,
            predicted_nvme_bytes=(plan.traffic.read_bytes + plan.traffic.written_bytes) * (task.steps - task.warm_up),
            mixed_bytes_per_second=sum(rates) / len(rates),
            predicted_seconds=plan.time.total,
            processor_seconds=totals.processor_seconds,
            num_cores=len(os.sched_getaffinity(0)),
            placement=_placement_text(plan),
        )


@dataclass(slots=True)
class _Totals:
    """Sums over the steps that count. The losses and `all_seconds` are those of all steps."""

    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    all_seconds: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    busy: dict[Resource, float] = field(default_factory=lambda: dict.fromkeys(RESOURCES, 0.0))
    waited: dict[Resource, float] = field(default_factory=lambda: dict.fromkeys(RESOURCES, 0.0))
    nvme_bytes: int = 0
    processor_seconds: float = 0.0

    def add(self, step: TimedStep) -> None:
        """Count one step."""
        self.step_seconds.append(step.seconds)
        self.spans += step.times.spans
        for resource in RESOURCES:
            self.busy[resource] += step.times.busy[resource]
            self.waited[resource] += step.times.stalled[resource]


def _run_steps(run: RatelRun, trace: TraceFile | None) -> tuple[Plan, _Totals]:
    """Run all steps of the task. Nothing is left to write afterwards."""
    task, totals, queue = run.task, _Totals(), run.context.queue
    first, *others = batches_of(task)
    recording, estimate = StepRecording(), run.estimate()
    with run.under(run.planner.plan_recording(estimate)) as steps:
        recorded = steps.run(first, recording=recording)
        _note(totals, trace, recorded, 0, task)
        plan = run.planner.plan(run.planner.recorded(recording, recorded.times.spans, estimate=estimate))
        steps.follow(plan)
        for number, batches in enumerate(others, start=1):
            if number == task.warm_up:
                steps.settle()
                totals.nvme_bytes = -(queue.read_bytes + queue.written_bytes)
                totals.processor_seconds = -time.process_time()
            _note(totals, trace, steps.run(batches, settled=number == len(others)), number, task)
    totals.nvme_bytes += queue.read_bytes + queue.written_bytes
    totals.processor_seconds += time.process_time()
    return plan, totals


def _note(totals: _Totals, trace: TraceFile | None, step: TimedStep, number: int, task: Task) -> None:
    totals.losses.append(step.outcome.loss)
    totals.all_seconds.append(step.seconds)
    if trace is not None:
        trace.write_step(number + 1, step.times.spans, start=step.start, end=step.end)
    if number >= task.warm_up:
        totals.add(step)


def overlapped_fraction(spans: Sequence[Span]) -> float:
    """The fraction of the time of drives and optimizer in which the compute thread was computing."""
    edges: list[tuple[float, int, int]] = []
    for span in spans:
        which = 0 if span.resource == "compute" else 1
        edges += [(span.start, 1, which), (span.end, -1, which)]
    counts, worked, overlapped, last = [0, 0], 0.0, 0.0, 0.0
    for moment, change, which in sorted(edges):
        if counts[1]:
            worked += moment - last
            overlapped += moment - last if counts[0] else 0.0
        counts[which] += change
        last = moment
    return overlapped / worked if worked else 1.0


def drive_seconds(spans: Sequence[Span]) -> float:
    """Seconds in which a read or a write was in flight."""
    total, end = 0.0, 0.0
    for span in sorted(spans, key=lambda each: each.start):
        if span.resource in ("nvme read", "nvme write"):
            total += max(0.0, span.end - max(span.start, end))
            end = max(end, span.end)
    return total


def _placement_text(plan: Plan) -> str:
    placement = plan.placement
    return (
        f"{placement.prefetch_blocks} blocks ahead, {placement.pending_updates} updates pending; of "
        f"{plan.num_blocks} blocks {len(placement.resident_weights)} weights and {len(placement.resident_states)} "
        f"states resident, {len(placement.deferred)} deferred; "
        f"{plan.offloaded.total_bytes / GIB:.2f} of {plan.swappable_bytes / GIB:.2f} GiB of activations offloaded, "
        f"{plan.offloaded.written_bytes / GIB:.2f} on NVMe"
    )


def _drive_rate(run: RatelRun) -> float:
    context = run.context
    return mixed_bytes_per_second(context.config.storage.paths, context.queue, context.pool)


def _store_sha256(store: Store, pool: BufferPool) -> str:
    """The hash of every byte of the current generation."""
    digest = hashlib.sha256()
    for index, block in enumerate(store.blocks):
        for each in block.record.fields:
            with pool.lease(each.num_bytes(block.num_elements), "hashing") as lease:
                store.current().read(index, each.name, 0, block.num_elements, lease.memory).wait()
                digest.update(lease.memory)
        pool.trim()
    return digest.hexdigest()


if __name__ == "__main__":
    run_as(run_ratel)
