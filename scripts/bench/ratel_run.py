"""Ratel with all state on a drive, ready to run steps under one plan after another.

Store, planner and engine are those of `ratel finetune`; weights and tokens are random. Everything lies in a temporary
directory, which is deleted afterwards. All engines work on one store, so that a new plan needs no new store.

Invariant: every step is committed before the next engine is opened.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedModel

from ratel_cli.config.keys.schema import DatasetConfig, LimitsConfig, RunConfig, StorageConfig
from ratel_cli.console import RunLog
from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.engine.measure.telemetry import StepTimes, Timeline
from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.engine.steps.state import StepOutcome
from ratel_cli.engine.steps.step import StepEngine
from ratel_cli.hardware.gpu import compute_device, determinism
from ratel_cli.hardware.host import return_large_buffers
from ratel_cli.io.queue import IoQueue
from ratel_cli.model.cut.decoder import DecoderModel
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.export.adapter_files import AdaptedSource
from ratel_cli.model.export.adapters import drawn_adapter, inject
from ratel_cli.model.files.import_weights import WeightSource, imported_weights
from ratel_cli.model.files.initialise import RandomSource
from ratel_cli.model.files.quantised_model import QuantisingSource, quantise_layers, quantised_weights
from ratel_cli.model.files.skeleton import build_skeleton
from ratel_cli.model.values.adapter_settings import AdapterSettings, base_name
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.planning.profile.placement import ActivationPolicy
from ratel_cli.planning.search.plan import Plan
from ratel_cli.run.context import RunContext, open_context
from ratel_cli.run.inputs.settings import new_geometry, rules_in
from ratel_cli.run.train.branch import beginning
from ratel_cli.run.train.engine import open_planned_engines
from ratel_cli.run.train.planner import Planner, estimated_profile, make_planner
from ratel_cli.run.train.profile_machine import measure_for_run
from ratel_cli.sizes import CHUNK_ELEMENTS
from ratel_cli.store.barrier import Barrier
from ratel_cli.store.fill import fill
from ratel_cli.store.store import Progress, Store, StoreIdentity
from ratel_cli.units import GIB
from scripts.bench.contestants import LEARNING_RATE, Task, model_config

NO_IDENTITY = StoreIdentity(model_hash="", config_hash="", data_hash="", seed=0, software="")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One step as it ran."""

    outcome: StepOutcome
    start: float
    end: float
    """When the step was decided, or settled where that was asked for, by `perf_counter`."""
    times: StepTimes

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class RatelRun:
    """One model and its store, and what its plans have in common."""

    task: Task
    context: RunContext
    model: DecoderModel
    planner: Planner
    store: Store

    def estimate(self) -> ModelProfile:
        """The model's profile from shapes alone."""
        return estimated_profile(self.planner, self.model)

    def record(self, batches: list[MicroBatch]) -> tuple[TimedStep, ModelProfile]:
        """Run one step that offloads nothing, settle it, and return it with the profile that it gives."""
        recording = StepRecording()
        estimate = self.estimate()
        with self.under(self.planner.plan_recording(estimate)) as steps:
            step = steps.run(batches, recording=recording, settled=True)
        return step, self.planner.recorded(recording, step.times.spans, estimate=estimate)

    @contextmanager
    def under(self, plan: Plan) -> Iterator[Steps]:
        """Steps as planned. The last one is settled at the end."""
        timeline = Timeline()
        with open_planned_engines(
            self.context, self.model, self.store, plan, timeline=timeline, drive_shares=(1,)
        ) as engine_for:
            steps = Steps(engine_for(plan), self.store, timeline, engine_for=engine_for)
            yield steps
            steps.settle()


class Steps:
    """The steps of an engine. They continue from the step at which the store is."""

    def __init__(
        self,
        engine: StepEngine[MicroBatch],
        store: Store,
        timeline: Timeline,
        *,
        engine_for: Callable[[Plan], StepEngine[MicroBatch]] | None = None,
    ) -> None:
        """`engine_for` makes the engine that follows another plan."""
        self._engine = engine
        self._engine_for = engine_for
        self._store = store
        self._timeline = timeline
        self._done = store.progress.step

    def follow(self, plan: Plan) -> None:
        """Run the steps that come under another plan."""
        assert self._engine_for is not None
        self._engine = self._engine_for(plan)

    def run(
        self, batches: list[MicroBatch], *, recording: StepRecording | None = None, settled: bool = False
    ) -> TimedStep:
        """Run one step. If it is to be settled, its time includes that."""
        done, start = self._done, time.perf_counter()
        outcome = self._engine.run(
            batches,
            step=done,
            update=done + 1,
            learning_rate=LEARNING_RATE,
            commit_previous=lambda: self._store.commit(progress_at(done)),
            recording=recording,
        )
        assert outcome.applied
        self._done += 1
        if settled:
            self.settle()
        return TimedStep(outcome=outcome, start=start, end=time.perf_counter(), times=self._timeline.take())

    def settle(self) -> None:
        """Write and commit what the last step left to do."""
        if self._engine.is_unsettled:
            self._engine.settle()
            self._store.commit(progress_at(self._done))


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
    """Measure the machine, and make a store with the weights of `source`, or with the initialiser's random weights."""
    return_large_buffers()
    device = compute_device(task.device)
    with ExitStack() as resources:
        if device.type != "cpu":
            resources.enter_context(determinism(True, device, notice=print))
        directory = Path(resources.enter_context(tempfile.TemporaryDirectory(dir=task.directory)))
        config = run_config(task, directory, limit_bytes=limit_bytes, activations=activations)
        model = find_blocks(trained_skeleton(task), name="bench", rules=rules_in(config))
        opened = resources.enter_context(open_context(config, RunLog(), device=device))
        context = replace(opened, queue=throttled(opened.queue))
        planner = make_planner(context, model.spec, measure_for_run(context, has_store=False))
        geometry = new_geometry(config, model.spec.stored_blocks, shares=(1,))
        geometry = replace(geometry, chunk_elements=chunk_elements)
        store = resources.enter_context(
            Store.create(config.storage.paths, geometry, identity=NO_IDENTITY, queue=context.queue, barrier=barrier)
        )
        # Nothing else refers to the initialiser, which keeps the last weight that it drew, in fp32.
        fill(
            store,
            imported_weights(
                model.spec,
                _adapted(source or RandomSource(_skeleton(task), config.seed), task, model, seed=config.seed),
                beginning(),
            ),
            context.pool,
            progress=lambda num_bytes: None,
        )
        context.pool.trim()
        yield RatelRun(task=task, context=context, model=model, planner=planner, store=store)


def _skeleton(task: Task) -> PreTrainedModel:
    return build_skeleton(model_config(task), dtype=task.dtype, attn_implementation="sdpa")


def trained_skeleton(task: Task) -> PreTrainedModel:
    """With quantised layers, and an adapter, if there are any."""
    skeleton = _skeleton(task)
    if task.quantised is not None:
        quantise_layers(skeleton, task.quantised)
    if task.lora:
        inject(skeleton, _adapter(task))
    return skeleton


def _adapter(task: Task) -> AdapterSettings:
    return AdapterSettings(rank=task.lora, alpha=2 * task.lora)


def _adapted(weights: WeightSource, task: Task, model: DecoderModel, *, seed: int) -> WeightSource:
    """The weights, quantised where the model's are, beside an adapter as PEFT draws it."""
    if task.quantised is not None:
        layers = {base_name(name): layer for name, layer in quantised_weights(model.skeleton).items()}
        weights = QuantisingSource(weights, layers, _skeleton(task))
    return (
        AdaptedSource(weights, lambda: drawn_adapter(_skeleton(task), _adapter(task), seed=seed))
        if task.lora
        else weights
    )


def run_config(task: Task, directory: Path, *, limit_bytes: int, activations: ActivationPolicy) -> RunConfig:
    """The task as a run's config, with its store in `directory`. Model and data are named, but never read."""
    gpu_bytes = None if task.gpu_memory_gib is None or task.device == "cpu" else int(task.gpu_memory_gib * GIB)
    return RunConfig(
        base_model="random weights",
        random_init=True,
        datasets=(DatasetConfig(path="random tokens"),),
        sequence_len=task.tokens // task.rows,
        micro_batch_size=task.rows,
        gradient_accumulation_steps=task.micro_batches,
        max_grad_norm=1.0 if task.clip else None,
        device=task.device,
        activations=activations,
        optimizer=task.optimizer,
        optimizer_overlap=task.overlap,
        storage=StorageConfig(paths=(directory,), durability="none" if task.in_place else "step", wear=task.wear),
        limits=LimitsConfig(gpu_memory=gpu_bytes, host_memory=limit_bytes),
        seed=0,
    )


def progress_at(step: int) -> Progress:
    """The progress of a run in which every step was applied, without its tokens."""
    return Progress(step=step, updates=step, loss_scale=1.0, good_steps=0, tokens=0)
