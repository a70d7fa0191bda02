"""Ratel with all state on disk, as a contestant of `scripts/contestants.py`."""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ratel_cli.engine.adamw import AdamWSettings
from ratel_cli.engine.opening import open_engine
from ratel_cli.engine.step import StepEngine
from ratel_cli.engine.telemetry import RESOURCES, Resource, Span, StepTimes, Timeline
from ratel_cli.engine.trace import TraceFile
from ratel_cli.engine.update import UpdateSettings
from ratel_cli.hardware.host import default_limit_bytes, peak_resident_bytes, resident_bytes, return_freed_memory
from ratel_cli.hardware.measure import measure
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.model.blocks import DecoderModel, find_blocks
from ratel_cli.model.initialise import RandomSource
from ratel_cli.model.load import import_weights
from ratel_cli.model.skeleton import build_skeleton
from ratel_cli.model.spec import ModelSpec
from ratel_cli.movement.buffers import BufferPool
from ratel_cli.movement.queue import IoQueue, open_queue
from ratel_cli.movement.records import record_layout
from ratel_cli.movement.scratch import Scratch
from ratel_cli.movement.store import Progress, Store, StoreIdentity
from ratel_cli.planning.capacity import Workload
from ratel_cli.planning.plan import Decisions, Plan, make_plan
from ratel_cli.planning.traffic import StateBytes
from ratel_cli.units import GIB
from scripts.contestants import LEARNING_RATE, Measured, Task, batches_of, config_of, run_as
from scripts.mixed_rate import mixed_rate

_CPU = torch.device("cpu")


def run_ratel(task: Task) -> Measured:
    """All state in a store that is deleted afterwards."""
    return_freed_memory()
    skeleton = build_skeleton(config_of(task), dtype="bfloat16", attn_implementation="sdpa")
    model = find_blocks(skeleton, name="bench")
    with ExitStack() as resources:
        directory = Path(resources.enter_context(tempfile.TemporaryDirectory(dir=task.directory)))
        queue = resources.enter_context(open_queue("auto", notice=_tell))
        limit_bytes = default_limit_bytes() if task.host_memory_gib is None else int(task.host_memory_gib * GIB)
        pool = resources.enter_context(BufferPool(limit_bytes))
        hardware = measure([directory], queue, pool, dtype=torch.bfloat16, device=_CPU)
        plan = _plan(task, model.spec, hardware, limit_bytes)
        store = resources.enter_context(_open_store(model, plan, directory, queue, pool))
        rates = [mixed_rate([directory], queue, pool)]
        timeline, totals = Timeline(), _Totals()
        scratch = None
        if plan.spilled_bytes:
            scratch = resources.enter_context(Scratch([directory], plan.spilled_bytes, queue))
        engine = resources.enter_context(
            open_engine(
                model,
                store,
                pool,
                adamw=AdamWSettings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0),
                updates=UpdateSettings(
                    gradient_dtype=torch.bfloat16,
                    max_grad_norm=1.0 if task.clip else None,
                    hold=plan.decisions.in_place,
                    held_in_memory_bytes=plan.held_in_memory_bytes,
                    overlap=task.overlap,
                ),
                placement=plan.placement,
                seed=0,
                device=_CPU,
                timeline=timeline,
                scratch=scratch,
            )
        )
        trace = resources.enter_context(TraceFile(Path(task.trace), warn=_tell)) if task.trace else None
        _train(task, engine, store, queue, timeline, trace, totals)
        weights_sha256 = _hash(store, pool)
        rates.append(mixed_rate([directory], queue, pool))
        return Measured(
            num_parameters=model.spec.num_parameters,
            step_seconds=totals.step_seconds,
            losses=totals.losses,
            peak_bytes=peak_resident_bytes(),
            weights_sha256=weights_sha256,
            busy_seconds={str(resource): spent for resource, spent in totals.busy.items()},
            waited_seconds={str(resource): spent for resource, spent in totals.waited.items()},
            hidden_fraction=hidden_fraction(totals.spans),
            nvme_bytes=totals.nvme_bytes,
            predicted_nvme_bytes=(plan.traffic.read_bytes + plan.traffic.written_bytes) * (task.steps - task.warm_up),
            mixed_bytes_per_second=sum(rates) / len(rates),
            predicted_seconds=plan.time.total,
            placement=_words(plan),
        )


@dataclass(slots=True)
class _Totals:
    """Of the steps that count; the losses are those of all."""

    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    busy: dict[Resource, float] = field(default_factory=lambda: dict.fromkeys(RESOURCES, 0.0))
    waited: dict[Resource, float] = field(default_factory=lambda: dict.fromkeys(RESOURCES, 0.0))
    nvme_bytes: int = 0

    def add(self, seconds: float, times: StepTimes) -> None:
        """Count one step."""
        self.step_seconds.append(seconds)
        self.spans += times.spans
        for resource in RESOURCES:
            self.busy[resource] += times.busy[resource]
            self.waited[resource] += times.waited[resource]


def _train(
    task: Task,
    engine: StepEngine,
    store: Store,
    queue: IoQueue,
    timeline: Timeline,
    trace: TraceFile | None,
    totals: _Totals,
) -> None:
    """All steps; those that count begin and end with nothing left to write."""
    before = 0
    for step, batches in enumerate(batches_of(task)):
        if step == task.warm_up:
            _settle(engine, store, step)
            before = queue.read_bytes + queue.written_bytes
        start = time.perf_counter()
        outcome = engine.run(
            batches,
            step=step,
            update=step + 1,
            learning_rate=LEARNING_RATE,
            commit_previous=lambda step=step: store.commit(_progress(step)),  # type: ignore[misc]
        )
        assert outcome.applied
        totals.losses.append(outcome.loss)
        if step == task.steps - 1:
            _settle(engine, store, step + 1)
        end, times = time.perf_counter(), timeline.take()
        if trace is not None:
            trace.write_step(step + 1, times.spans, start=start, end=end)
        if step >= task.warm_up:
            totals.add(end - start, times)
    totals.nvme_bytes = queue.read_bytes + queue.written_bytes - before


def _settle(engine: StepEngine, store: Store, step: int) -> None:
    if engine.is_unsettled:
        engine.settle()
        store.commit(_progress(step))


def _open_store(model: DecoderModel, plan: Plan, directory: Path, queue: IoQueue, pool: BufferPool) -> Store:
    """A store with random weights."""
    store = Store.create(
        [directory],
        identity=StoreIdentity(model_hash="", config_hash="", data_hash="", seed=0, software=""),
        layout=record_layout("bfloat16"),
        block_elements=[block.num_elements for block in model.spec.blocks],
        num_slots=plan.decisions.num_slots,
        in_place=plan.decisions.in_place,
        queue=queue,
    )
    import_weights(model.spec, RandomSource(model.skeleton, 0), store, pool, progress=lambda count: None)
    store.commit_import(_progress(0))
    pool.trim()
    return store


def hidden_fraction(spans: Sequence[Span]) -> float:
    """Of the time in which drives or optimizer worked, the fraction in which the compute thread computed."""
    edges: list[tuple[float, int, int]] = []
    for span in spans:
        which = 0 if span.resource == "compute" else 1
        edges += [(span.start, 1, which), (span.end, -1, which)]
    counts, worked, hidden, last = [0, 0], 0.0, 0.0, 0.0
    for moment, change, which in sorted(edges):
        if counts[1]:
            worked += moment - last
            hidden += moment - last if counts[0] else 0.0
        counts[which] += change
        last = moment
    return hidden / worked if worked else 1.0


def _plan(task: Task, spec: ModelSpec, hardware: HardwareProfile, limit_bytes: int) -> Plan:
    decisions = Decisions(
        holds_gradients=task.clip or task.in_place,
        num_slots=1 if task.in_place else 2,
        host_limit_bytes=limit_bytes,
        activations="recompute" if task.contestant == "ratel" else "auto",
        overlap=task.overlap,
    )
    workload = Workload(micro_batch_size=1, num_micro_batches=task.micro_batches, sequence_len=task.tokens)
    return make_plan(
        spec,
        StateBytes(compute=2, record=12, gradient=2),
        workload,
        decisions,
        hardware,
        process_bytes=resident_bytes(),
    )


def _words(plan: Plan) -> str:
    placement = plan.placement
    return (
        f"{placement.prefetch_blocks} blocks ahead, {placement.pending_updates} updates pending; of "
        f"{plan.num_blocks} blocks {len(placement.resident_weights)} weights and {len(placement.resident_states)} "
        f"states resident, {len(placement.deferred)} deferred; "
        f"{placement.activation_bytes / GIB:.2f} GiB of activations"
    )


def _hash(store: Store, pool: BufferPool) -> str:
    """Of every byte of the current generation."""
    digest = hashlib.sha256()
    for block, num_elements in enumerate(store.block_elements):
        for each in store.layout.fields:
            with pool.lease(num_elements * each.bytes_per_element, "hashing") as lease:
                store.read(block, each.name, 0, num_elements, lease.memory).wait()
                digest.update(lease.memory)
        pool.trim()
    return digest.hexdigest()


def _progress(step: int) -> Progress:
    return Progress(step=step, updates=step, loss_scale=1.0, good_steps=0, tokens=0)


def _tell(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    run_as(run_ratel)
