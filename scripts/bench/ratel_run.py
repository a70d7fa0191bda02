"""Ratel with all state on disk, ready to run steps under one plan after another.

For `contestant_ratel` and `sweep`. Everything lies in a temporary directory, which is deleted afterwards; weights and
tokens are random. One engine after another works on the same store, so that a new plan costs no new store.

Invariant: every step is committed before the next engine is opened.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ratel_cli.data.packing import MicroBatch
from ratel_cli.engine.build import open_engine
from ratel_cli.engine.device.open import open_device
from ratel_cli.engine.optimizer.adamw import AdamWSettings
from ratel_cli.engine.optimizer.update import UpdateSettings
from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.engine.state import StepOutcome
from ratel_cli.engine.step import StepEngine
from ratel_cli.engine.telemetry import StepTimes, Timeline
from ratel_cli.hardware.gpu import compute_device, gpu_limit_bytes, set_determinism
from ratel_cli.hardware.host import resident_bytes, return_freed_memory
from ratel_cli.hardware.measure import measure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.pinning import CudaPinning
from ratel_cli.io.queue import IoQueue, open_queue
from ratel_cli.io.scratch import Scratch
from ratel_cli.model.blocks import DecoderModel, find_blocks
from ratel_cli.model.import_weights import WeightSource, import_weights
from ratel_cli.model.initialise import RandomSource
from ratel_cli.model.skeleton import build_skeleton
from ratel_cli.planning.analytic import analytic_profile
from ratel_cli.planning.model_profile import ModelProfile
from ratel_cli.planning.placement import ActivationPolicy, StateBytes, Workload
from ratel_cli.planning.plan import Decisions, Plan
from ratel_cli.run.plan import Planner
from ratel_cli.sizes import CHUNK_ELEMENTS
from ratel_cli.store.barrier import Barrier
from ratel_cli.store.layout import record_layout
from ratel_cli.store.store import Progress, Store, StoreIdentity
from ratel_cli.units import GIB
from scripts.bench.contestants import LEARNING_RATE, Task, config_of

STATE = StateBytes(compute=2, record=12, num_fields=4, gradient=2)
"""Of a parameter in bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step as it ran."""

    outcome: StepOutcome
    start: float
    end: float
    """By `perf_counter`; when the step was decided, or settled where that was asked for."""
    times: StepTimes

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class RatelRun:
    """One model and its store, and what its plans have in common."""

    task: Task
    model: DecoderModel
    planner: Planner
    directory: Path
    queue: IoQueue
    pool: BufferPool
    store: Store
    device: torch.device

    def estimate(self) -> ModelProfile:
        """From shapes alone."""
        return analytic_profile(
            self.planner.spec,
            self.planner.state,
            traits=self.model.traits,
            micro_batch_tokens=self.task.tokens,
            sequence_len=self.task.tokens // self.task.rows,
        )

    def record(self, batches: list[MicroBatch]) -> tuple[Step, ModelProfile]:
        """One step that swaps nothing, settled, and the profile that it gives."""
        recording = StepRecording()
        with self.under(self.planner.plan_recording(self.estimate())) as steps:
            step = steps.run(batches, recording=recording, settled=True)
        return step, self.planner.recorded(recording, step.times.spans)

    @contextmanager
    def under(self, plan: Plan) -> Iterator[Steps]:
        """Steps as planned; the last one is settled in the end."""
        timeline = Timeline()
        with ExitStack() as resources:
            device = resources.enter_context(
                open_device(self.device, timeline, limit_bytes=plan.device_allocation_bytes)
            )

            def scratch(num_bytes: int) -> Scratch | None:
                return resources.enter_context(Scratch([self.directory], num_bytes, self.queue)) if num_bytes else None

            engine = resources.enter_context(
                open_engine(
                    self.model,
                    self.store,
                    self.pool,
                    adamw=AdamWSettings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0),
                    updates=UpdateSettings(
                        gradient_dtype=torch.bfloat16,
                        max_grad_norm=1.0 if self.task.clip else None,
                        hold=plan.decisions.in_place,
                        held_in_memory_bytes=plan.held_in_memory_bytes,
                        overlap=plan.decisions.overlap,
                    ),
                    placement=plan.placement,
                    seed=0,
                    device=device,
                    timeline=timeline,
                    scratch=scratch(plan.spilled_bytes),
                    activation_scratch=scratch(plan.offloaded.written_bytes),
                )
            )
            steps = Steps(engine, self.store, timeline)
            yield steps
            steps.settle()


class Steps:
    """The steps of one engine, counted on from what the store has."""

    def __init__(self, engine: StepEngine, store: Store, timeline: Timeline) -> None:
        self._engine = engine
        self._store = store
        self._timeline = timeline
        self._done = store.progress.step

    def run(self, batches: list[MicroBatch], *, recording: StepRecording | None = None, settled: bool = False) -> Step:
        """One step. If it is to be settled, its time includes that."""
        done, start = self._done, time.perf_counter()
        outcome = self._engine.run(
            batches,
            step=done,
            update=done + 1,
            learning_rate=LEARNING_RATE,
            commit_previous=lambda: self._store.commit(_progress(done)),
            recording=recording,
        )
        assert outcome.applied
        self._done += 1
        if settled:
            self.settle()
        return Step(outcome=outcome, start=start, end=time.perf_counter(), times=self._timeline.take())

    def settle(self) -> None:
        """Write and commit what the last step left to do."""
        if self._engine.is_unsettled:
            self._engine.settle()
            self._store.commit(_progress(self._done))


@contextmanager
def open_run(
    task: Task,
    *,
    limit_bytes: int,
    activations: ActivationPolicy,
    throttled: Callable[[IoQueue], IoQueue] = lambda queue: queue,
    chunk_elements: int = CHUNK_ELEMENTS,
    barrier: Barrier | None = None,
    source: WeightSource | None = None,
) -> Iterator[RatelRun]:
    """Measure the machine, and make a store with the weights of `source`, or drawn as the model draws them."""
    return_freed_memory()
    device = compute_device(task.device)
    if device.type == "cuda":
        set_determinism(True, device)
    model = find_blocks(build_skeleton(config_of(task), dtype="bfloat16", attn_implementation="sdpa"), name="bench")
    with ExitStack() as resources:
        directory = Path(resources.enter_context(tempfile.TemporaryDirectory(dir=task.directory)))
        queue = throttled(resources.enter_context(open_queue("auto", notice=_tell)))
        pool = resources.enter_context(_open_pool(device, limit_bytes))
        planner = Planner(
            spec=model.spec,
            state=STATE,
            workload=Workload(
                micro_batch_size=task.rows,
                num_micro_batches=task.micro_batches,
                sequence_len=task.tokens // task.rows,
            ),
            decisions=Decisions(
                holds_gradients=task.clip or task.in_place,
                num_slots=1 if task.in_place else 2,
                host_limit_bytes=limit_bytes,
                activations=activations,
                overlap=task.overlap,
                device_limit_bytes=_device_limit_bytes(task, device),
            ),
            hardware=measure([directory], queue, pool, dtype=torch.bfloat16, device=device),
            process_bytes=resident_bytes(),
        )
        store = resources.enter_context(
            Store.create(
                [directory],
                identity=StoreIdentity(model_hash="", config_hash="", data_hash="", seed=0, software=""),
                layout=record_layout("bfloat16"),
                block_elements=[block.num_elements for block in model.spec.blocks],
                num_slots=planner.decisions.num_slots,
                in_place=planner.decisions.in_place,
                queue=queue,
                chunk_elements=chunk_elements,
                barrier=barrier,
            )
        )
        weights = source or RandomSource(model.skeleton, 0)
        import_weights(model.spec, weights, store.shadow(), pool, progress=lambda count: None)
        store.commit_import(_progress(0))
        pool.trim()
        yield RatelRun(
            task=task,
            model=model,
            planner=planner,
            directory=directory,
            queue=queue,
            pool=pool,
            store=store,
            device=device,
        )


def _open_pool(device: torch.device, limit_bytes: int) -> BufferPool:
    if device.type == "cpu":
        return BufferPool(limit_bytes)
    return BufferPool(max(0, limit_bytes - resident_bytes()), pin=CudaPinning(_tell))


def _device_limit_bytes(task: Task, device: torch.device) -> int | None:
    if device.type == "cpu":
        return None
    return gpu_limit_bytes(device, None if task.gpu_memory_gib is None else int(task.gpu_memory_gib * GIB))


def _progress(step: int) -> Progress:
    return Progress(step=step, updates=step, loss_scale=1.0, good_steps=0, tokens=0)


def _tell(text: str) -> None:
    print(text, file=sys.stderr)
