"""Runs one layer of each kind, the embedding and the head on the device that computes, before anything is written.

    1. try      forward and backward on a few tokens: what cannot run, such as an operator without a deterministic
                kernel, is an error now, not in step 1, after the import
    2. measure  a full micro-batch, operator by operator, and the seconds of a usual one of the data, alone and next to
                AdamW: a plan from this profile has memory for the one and the time of the other

The plan from shapes comes first. A trial takes what that plan has for the block that computes, so it fits where the
plan fits. Where it would take too long, or more memory after all, step 1 is recorded instead.

Invariant: nothing is written, and the model is as before afterwards, but for its device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import Event, Thread
from typing import Any

import torch

from ratel_cli.data.samples.sample_batch import AnyModelBatch
from ratel_cli.engine.device.device import Device
from ratel_cli.engine.measure.telemetry import Timeline
from ratel_cli.engine.replay.profiling import Beside, BlockProfiler, Sums
from ratel_cli.errors import BadInput, DoesNotFit
from ratel_cli.hardware.host import return_free_memory
from ratel_cli.hardware.measure import ADAMW_BYTES, adamw_update, spare_bytes
from ratel_cli.hardware.spec import Host
from ratel_cli.io.buffers import BufferPool
from ratel_cli.model.cut.cut_model import AnyModel
from ratel_cli.model.files.skeleton import DTYPES
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.planning.profile.placement import Placement, Workload
from ratel_cli.planning.profile.recorded import BlockSeconds, UnitRecord, recorded_profile
from ratel_cli.planning.search.plan import Plan
from ratel_cli.run.context import RunContext
from ratel_cli.run.train.engine import open_planned_device
from ratel_cli.run.train.planner import Planner
from ratel_cli.schedule.segments import Segment
from ratel_cli.sizes import CHUNK_ELEMENTS, DtypeName
from ratel_cli.units import MIB, format_seconds

_TRIED_TOKENS = 64
_MOST_SECONDS = 120.0
"""Longer than this, a micro-batch is not measured before step 1."""
_ADAMW_BYTES = 128 * MIB
"""Gradients and states that AdamW works on next to a layer: more than a cache has, less where memory is short."""


def tried_profile(
    context: RunContext,
    model: AnyModel,
    batches: Sequence[AnyModelBatch],
    planner: Planner,
    plan: Plan,
    estimate: ModelProfile,
    *,
    is_packed: bool,
) -> ModelProfile | None:
    """The model's measured profile; None if step 1 has to be recorded. `plan` is the one from `estimate`.

    `batches`: micro-batches of the run, of whatever size. `is_packed`: their sequences may have several samples. Raises
    BadInput if the model cannot run as the config has it.
    """
    workload, log = planner.workload, context.log
    usual = min(batches, key=lambda each: abs(each.num_computed_tokens - workload.mean.micro_batch_tokens))
    full, is_usual = _of_full_size(batches[0], model, workload), workload.filling is None
    try:
        with (
            open_planned_device(context, plan, Timeline()) as device,
            log.bar("trying one layer of each kind", (2 if is_usual else 3) * len(model.spec.segments)) as bar,
        ):
            profiler = block_profiler(
                model, context.pool, device, dtype=context.config.dtype, placement=plan.placement, workload=workload
            )
            progress = _advancing(bar.advance)
            seconds = _try(profiler, model, workload, 2 if is_packed else 1, progress)
            if seconds > _MOST_SECONDS:
                log.notice(f"measuring a layer would take about {format_seconds(seconds)}; step 1 is recorded instead")
                return None
            beside = adamw_beside(context.pool, planner.hardware.host, device)
            record = partial(profiler.record, progress=progress)
            of_full = record(full, beside=beside) if is_usual else record(full, most_runs=1)
            of_usual = of_full if is_usual else record(usual, beside=beside)
    except DoesNotFit as failure:
        log.notice(f"the layers could not be measured before step 1: {failure.message}; step 1 is recorded instead")
        return None
    finally:
        context.pool.trim()
        return_free_memory()
        if context.device.type != "cpu":
            torch.accelerator.empty_cache()
    profile = _profile(of_full, planner.spec, workload, estimate)
    if not is_usual:
        step = replace(workload, micro_batch_size=1, sequence_len=usual.num_computed_tokens)
        timed = _profile(of_usual, planner.spec, step, estimate.of_tokens(usual.num_computed_tokens))
        profile = profile.timed_by(timed.of_tokens(workload.micro_batch_tokens))
    return replace(profile, adamw_share=profiler.sharing)


def _profile(
    recorded: tuple[Mapping[tuple[int, int], UnitRecord], Mapping[int, BlockSeconds]],
    spec: ModelSpec,
    workload: Workload,
    estimate: ModelProfile,
) -> ModelProfile:
    units, seconds = recorded
    return recorded_profile(units, seconds, spec, workload, num_micro_batches=1, estimate=estimate)


def block_profiler(
    model: AnyModel,
    pool: BufferPool,
    device: Device,
    *,
    dtype: DtypeName,
    placement: Placement,
    workload: Workload,
) -> BlockProfiler[Any]:
    """A profiler of the model's blocks whose gradients go where the placement has their sums."""
    is_single = workload.num_micro_batches == 1
    return BlockProfiler(
        model,
        pool,
        dtype=DTYPES[dtype],
        device=device,
        sums=Sums(
            num_micro_batches=workload.num_micro_batches,
            holds_layers=device.is_host or (placement.gpu_holds_sums and not is_single),
            holds_head=device.is_host or placement.gpu_holds_head,
        ),
        chunk_tokens=workload.chunk_tokens,
    )


def _try(
    profiler: BlockProfiler[Any],
    model: AnyModel,
    workload: Workload,
    num_samples: int,
    progress: Callable[[Segment], None],
) -> float:
    """Run every kind of block on a few tokens of some samples. Returns about how long measuring a micro-batch takes.

    Some models compute with chunks of a fixed length: what a short row cannot do is tried with a whole one.
    """
    num_tokens = min(_TRIED_TOKENS, workload.sequence_len)
    try:
        batch = model.any_batch(1, num_tokens, num_samples=num_samples)
        num_tokens = batch.width
        _, seconds = profiler.record(batch, most_runs=2, progress=progress)
    except BadInput as failure:
        if num_tokens == workload.sequence_len or failure.key:
            raise
        num_tokens = workload.sequence_len
        _, seconds = profiler.record(model.any_batch(1, num_tokens, num_samples=num_samples), most_runs=1)
    # Layers that are alike have the same seconds; it is measured at least twice, and its operators once.
    kinds = {(each.forward, each.backward) for each in seconds.values()}
    return 3 * sum(map(sum, kinds)) * workload.micro_batch_tokens / num_tokens


def _of_full_size(batch: AnyModelBatch, model: AnyModel, workload: Workload) -> AnyModelBatch:
    """The micro-batch; one that is made up if it is smaller than the plan's, as in data of few samples."""
    shape = workload.micro_batch_size, workload.sequence_len
    if batch.shape == shape:
        return batch
    made: AnyModelBatch = model.any_batch(*shape)
    return made


def _advancing(advance: Callable[[float], None]) -> Callable[[Segment], None]:
    """Advances a bar to each block of several passes through the model, as it comes."""
    last = 0

    def progress(block: Segment) -> None:
        nonlocal last
        advance(block.index - last if block.index > last else block.index)
        last = block.index

    return progress


def adamw_beside(pool: BufferPool, host: Host, device: Device) -> Beside | None:
    """AdamW as a step has it next to a layer; None if that takes nothing from the device that computes."""
    return partial(_updating, pool, host) if device.is_host else None


@contextmanager
def _updating(pool: BufferPool, host: Host) -> Iterator[Callable[[], float]]:
    """AdamW on a thread of its own, again and again.

    Yields a function that returns the seconds that all updates so far would have taken alone.
    """
    num_chunks = spare_bytes(pool, _ADAMW_BYTES) // (ADAMW_BYTES * CHUNK_ELEMENTS)
    number, stop, num_done = max(1, num_chunks) * CHUNK_ELEMENTS, Event(), 0
    update = adamw_update(number)

    def work() -> None:
        nonlocal num_done
        while not stop.is_set():
            update()
            num_done += 1

    thread = Thread(target=work, name="ratel-trial-adamw")
    thread.start()
    try:
        yield lambda: num_done * number / host.adam_parameters_per_second
    finally:
        stop.set()
        thread.join()
