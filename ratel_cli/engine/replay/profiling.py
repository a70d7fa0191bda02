"""Measures what a model's segments cost, without training the model.

One micro-batch goes through embedding, layers and head, forward and backward, one block after another (Ratel section
IV-B: the unoptimised iteration). Times and sizes depend on shapes and not on values, so the weights are random numbers
in one buffer that all blocks share: no store, no file, memory for the largest block. Layers with the same shapes and
the same arguments cost the same, so one of each kind is run. A segment does what it does in a step (engine/segments),
as if it shared no blocks with others: its gradients are added to sums, parameter by parameter, and its times are those
of runs that record no operators.

Invariant: nothing of the model changes but its device, and the weights that are bound while it runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Generic

import torch

from ratel_cli.engine.cache.activations import ActivationOffloader
from ratel_cli.engine.device.device import Device
from ratel_cli.engine.device.gpu import translate_errors
from ratel_cli.engine.measure.telemetry import Timeline
from ratel_cli.engine.optimizer.accumulators import DeviceSums
from ratel_cli.engine.optimizer.gradient_sums import GradientSums
from ratel_cli.engine.optimizer.gradients import GpuGradientSum
from ratel_cli.engine.optimizer.host_sums import SumThread
from ratel_cli.engine.optimizer.lookup_sum import LookupSum
from ratel_cli.engine.optimizer.segment_sum import SegmentSum
from ratel_cli.engine.reading.embedding_rows import EmbeddingRows
from ratel_cli.engine.reading.program import AnyBatch, Program, tokens_looked_up
from ratel_cli.engine.reading.weights import SegmentWeights, weights_in_place
from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.engine.segments.passes import runnable_segments
from ratel_cli.engine.segments.segment import RunnableSegment
from ratel_cli.engine.steps.state import Draws, PassState, StepServices, StepState
from ratel_cli.errors import BadInput, first_line
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.views import VALUE_DTYPES
from ratel_cli.planning.profile.activations import tokens_per_chunk
from ratel_cli.planning.profile.placement import Placement, num_looked_up
from ratel_cli.planning.profile.recorded import BlockSeconds, UnitRecord
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.schedule.segments import Segment
from ratel_cli.schedule.uses import step_uses

_NUM_RUNS = 5
"""Runs of each block; fewer if they take longer than `_ENOUGH_SECONDS`. The first warms up (code is loaded, memory
allocated) and counts only if it is the only one. The others are samples of one quantity, like micro-batches."""
_ENOUGH_SECONDS = 5.0
_LEAST_SECONDS = 0.01
"""A layer that takes less is not run next to other work: that takes longer than anything it could show."""
_DEVIATION = 0.02
"""Standard deviation of the random weights."""
_CANNOT_RUN = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, NotImplementedError)
"""What torch and the model's own code raise. Our own errors are none of these."""

Beside = Callable[[], contextlib.AbstractContextManager[Callable[[], float]]]
"""Opens work that goes on while blocks run. Yields a function that returns how many seconds the work that was done so
far would have taken alone."""


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of one block."""

    forward: float
    """Seconds."""
    backward: float
    """Seconds."""
    unit: UnitRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Where the sums of gradients are that runs add to, as the plan of a step has it."""

    num_micro_batches: int
    """Micro-batches of a step. With one, nothing is added in fp32."""
    holds_layers: bool
    """Whether the device that computes has the sums of layers' gradients. If not, gradients are dropped."""
    holds_head: bool
    """Whether the device that computes has the sums of the head's gradients. If not, gradients are dropped."""


class BlockProfiler(Generic[AnyBatch]):
    """Runs and times a model's segments on random weights."""

    def __init__(
        self,
        program: Program[AnyBatch],
        pool: BufferPool,
        *,
        dtype: torch.dtype,
        device: Device,
        sums: Sums,
        chunk_tokens: int | None = None,
    ) -> None:
        """`pool`: host memory for sums of gradients. `chunk_tokens`: tokens whose logits are computed at once; None: as
        many as have 64 MiB of logits."""
        program.move_to(device.torch_device)
        self._program = program
        self._num_micro_batches = sums.num_micro_batches
        self._device = device
        self._torch_device = device.torch_device
        self._segments = runnable_segments(program, device, [_alone(each) for each in program.spec.segments])
        staying = Placement(gpu_units_from=0)
        activations = ActivationOffloader(pool, None, staying, device=device, timeline=Timeline())
        self._services = StepServices(
            pool=pool,
            device=device,
            gradient_sums=_SumsOfOne(pool, device, sums),
            activations=activations,
            swapped={},
            chunk_tokens=chunk_tokens or tokens_per_chunk(program.spec.vocab_size),
            substitutes=program.spec.substitutes,
        )
        largest = max(block.num_elements for block in program.spec.blocks)
        generator = torch.Generator(self._torch_device).manual_seed(0)
        weights = torch.empty(largest, dtype=dtype, device=self._torch_device)
        self._weights = weights.normal_(std=_DEVIATION, generator=generator)
        self.sharing: float | None = None
        """Seconds of computing that are lost to a second of what ran `beside`; None before that was measured."""

    def record(
        self,
        batch: AnyBatch,
        *,
        most_runs: int = _NUM_RUNS,
        beside: Beside | None = None,
        progress: Callable[[Segment], None] = lambda segment: None,
    ) -> tuple[dict[tuple[int, int], UnitRecord], dict[int, BlockSeconds]]:
        """Run every kind of segment on one micro-batch, tensors `[batch, tokens]`, each at most `most_runs` times.

        Returns the operators of every layer, by (segment, sample), and the seconds of a segment on one micro-batch, by
        segment. `beside`: work next to which the first layer runs once more, for `sharing`. `progress` is called with
        each segment before it runs.
        Raises BadInput if a segment cannot run, with its name and why; DoesNotFit if a GPU has too little memory.
        """
        state, runs, kinds = self._state(batch), dict[int, list[_Run]](), dict[object, int]()
        # As in a step: on a thread of its own, backward would drop its last tensors whenever that is scheduled.
        with torch.autograd.set_multithreading_enabled(False), state.resources:
            state.resources.callback(self._services.activations.reset)
            for each in self._segments:
                index = each.segment.index
                first = kinds.setdefault(each.kind(state), index)
                if first == index:
                    with self._running(each.segment, progress):
                        runs[index] = self._runs_of(each, state, most_runs, beside)
                    beside = beside if runs[index][0].unit is None else None
                    continue
                runs[index] = runs[first]
                if state.carried[0].links_layers:  # layers above may read what this one leaves
                    with self._running(each.segment, progress), self._bound(each.segment, state) as weights:
                        _pass_through(each, state, weights)
        num_samples = min((len(samples) for samples in runs.values() if samples[0].unit is not None), default=0)
        units = {
            (index, sample): run.unit
            for index, samples in runs.items()
            for sample, run in enumerate(samples[:num_samples])
            if run.unit is not None
        }
        return units, {index: _seconds(samples) for index, samples in runs.items()}

    @contextlib.contextmanager
    def _running(self, segment: Segment, progress: Callable[[Segment], None]) -> Iterator[None]:
        """Raises what goes wrong inside as an error about the segment."""
        progress(segment)
        try:
            with translate_errors("measuring the model needs more than is available"):
                yield
        except _CANNOT_RUN as error:
            dtype, device = str(self._weights.dtype).removeprefix("torch."), self._torch_device.type
            raise BadInput(
                f"{self._program.spec.architecture}: its {segment.name} cannot run forward and backward in {dtype} "
                f"on {device}: {first_line(error)}",
                "another dtype, device or attn_implementation may run it; if transformers trains this model, "
                "please report it",
            ) from error

    def _state(self, batch: AnyBatch) -> _StateOfOne[AnyBatch]:
        """What segments hand to each other. A GPU gets the rows of the batch's tokens, where it can."""
        spec, tokens = self._program.spec, tokens_looked_up(self._program, [batch])
        most_rows = None if self._device.is_host else num_looked_up(spec, sum(each.numel() for each in tokens))
        state = _StateOfOne(
            [batch],
            self._services,
            tokens=tokens,
            num_targets=max(1, batch.num_targets),
            draws=Draws(0, 0, 0),
            loss_scale=1.0,
            recording=None,
            rows=EmbeddingRows.of(spec, tokens, self._torch_device, most_rows=most_rows),
        )
        state.is_single, state.last = self._num_micro_batches == 1, -1  # gradients stay, so that it can run again
        return state

    def _runs_of(
        self,
        segment: RunnableSegment[AnyBatch],
        state: _StateOfOne[AnyBatch],
        most_runs: int,
        beside: Beside | None,
    ) -> list[_Run]:
        """Run a segment as a step does, again and again. It replaces `state.hidden`."""
        index, given, activations = segment.segment.index, state.hidden, self._services.activations
        stages = {use.stage for use in step_uses(self._program.spec.segments) if use.segment.index == index}
        with segment.summing(state) as sums, self._bound(segment.segment, state) as weights:

            def forward() -> None:
                state.hidden = dict(given)
                if "forward" in stages:
                    segment.forward(state, 0, weights)

            def run() -> _Run:
                self._begin_again(sums)
                start = self._now()
                forward()
                middle = self._now()
                if "backward" in stages:
                    state.come_back()
                    segment.backward(state, 0, weights, sums)
                return _Run(middle - start, self._now() - middle)

            def operators() -> UnitRecord | None:
                """What operators cost, which takes time of its own; None if the segment has no unit."""
                state.recording = recording = StepRecording()
                forward()
                self._now()
                state.recording = None
                activations.reset()
                return recording.units().get((index, 0))

            runs = _samples(run, most_runs)
            if len(stages) > 1:
                runs = [replace(each, unit=operators()) for each in runs]
            is_long = max(each.forward + each.backward for each in runs) > _LEAST_SECONDS
            if beside is not None and is_long and runs[0].unit is not None:
                self.sharing = _sharing(run, runs, beside)
            if state.carried[0].links_layers and "forward" in stages:
                forward()  # layers above may read what this one has left
                activations.reset()
            return self._with_rounding(runs, sums)

    def _with_rounding(self, runs: Sequence[_Run], sums: SegmentSum) -> list[_Run]:
        """The runs with their part of what a step does once with the block's sums, which end: rounding them, and taking
        their norms. On a GPU that is one pass over memory, and left out."""
        start = self._now()
        for each in sums.blocks if self._device.is_host else ():
            each.finish().release()
        seconds = (self._now() - start) / self._num_micro_batches
        return [replace(each, backward=each.backward + seconds) for each in runs]

    def _now(self) -> float:
        """Seconds of `perf_counter` at which all work that was queued is done."""
        if not self._device.is_host:
            torch.accelerator.synchronize(self._torch_device)
        return perf_counter()

    def _begin_again(self, sums: SegmentSum) -> None:
        """Forget the contribution to the sum of a step with a single micro-batch, which takes one."""
        for each in sums.blocks if self._num_micro_batches == 1 else ():
            assert isinstance(each.sums, DeviceSums)
            each.sums.clear()

    def _bound(self, segment: Segment, state: _StateOfOne[AnyBatch]) -> SegmentWeights:
        """The segment with random weights: of a matrix that tokens are looked up in, the rows of the state."""
        parts: list[tuple[BlockSpec, torch.Tensor]] = []
        for block in segment.bound:
            sizes, rows = [block.num_elements], state.rows
            if rows is not None and rows.block is block:
                sizes = [rows.num_elements, block.num_elements - rows.others_start]
            parts += [(block, self._weights[:size].to(VALUE_DTYPES[block.dtype])) for size in sizes]
        return weights_in_place(self._program, segment, parts, rows=state.rows)


class _StateOfOne(StepState[AnyBatch]):
    """A step of one micro-batch, whose segments run by themselves."""

    def seed_draws(self, block: int, micro_batch: int) -> None:
        """No-op: times do not depend on what is drawn."""

    def come_back(self) -> None:
        """Let backward get gradients of the shapes that the segments above would have made."""
        self.gradients = {number: torch.zeros_like(each) for number, each in self.hidden.items()}
        carried = self.carried[0]
        for each in (*carried.from_layers, *(tensor for call in carried.calls for tensor in call.tensors)):
            if each.requires_grad:
                each.grad = torch.zeros_like(each)


class _SumsOfOne(GradientSums):
    """The sums of segments that run by themselves. Where the device that computes does not have them, gradients are
    dropped."""

    def __init__(self, pool: BufferPool, device: Device, sums: Sums) -> None:
        super().__init__(pool, device, SumThread(Timeline()), Placement())
        self._given = sums

    def of_layer(self, layer: Segment, *, single: bool, scale: float) -> SegmentSum:
        if self._given.holds_layers:
            return self._on_device(layer, single=single, scale=scale)
        dropped = ((block, _Dropped(block, dtype=torch.float32, single=False)) for block in layer.trained)
        return SegmentSum.of(GpuGradientSum(*each, self._pool, self._device, scale=scale) for each in dropped)

    def of_head(self, head: Segment, *, scale: float) -> SegmentSum:
        return self._on_device(head, single=False, scale=scale) if self._given.holds_head else SegmentSum(())

    def of_embedding(
        self,
        embedding: Segment,
        lookup_sum: LookupSum | None,  # noqa: ARG002 - nobody has begun one
        *,
        single: bool,
        scale: float,
        rows: EmbeddingRows | None,  # noqa: ARG002 - only where the CPU computes, which has the matrix
    ) -> SegmentSum:
        """A step adds rows alone to a matrix that another segment borrows."""
        holds = self._device.is_host and not any(block.borrowers for block in embedding.trained)
        return self._on_device(embedding, single=single, scale=scale) if holds else SegmentSum(())


class _Dropped(DeviceSums):
    """An accumulator that drops what is added."""

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """No-op."""


def _alone(segment: Segment) -> Segment:
    """The segment, as if it shared no blocks with others: all that it binds is its own."""
    own = (block if block.is_looked_up else replace(block, borrowers=()) for block in segment.blocks)
    borrowed = (replace(block, borrowers=(), is_looked_up=False) for block in segment.borrowed)
    return Segment((*own, *borrowed), (), segment.index, segment.name)


def _pass_through(segment: RunnableSegment[AnyBatch], state: PassState[AnyBatch], weights: SegmentWeights) -> None:
    """Run a segment forward for what it leaves for others."""
    passing = PassState(state.batches, rows=state.rows)
    passing.hidden, passing.carried = dict(state.hidden), state.carried
    with torch.no_grad():
        segment.forward(passing, 0, weights)


def _sharing(run: Callable[[], _Run], alone: Sequence[_Run], beside: Beside) -> float | None:
    """Seconds of a block's computing that are lost to a second of the work `beside`; None if nothing of it was done."""
    alone_seconds = median(each.forward + each.backward for each in alone)
    with beside() as worked:
        before, lost, number = worked(), 0.0, 0
        while number < _NUM_RUNS and (not number or worked() - before < _ENOUGH_SECONDS):
            taken = run()
            lost += taken.forward + taken.backward - alone_seconds
            number += 1
        done = worked() - before
    return max(0.0, lost) / done if done > 0.0 else None


def _samples(run: Callable[[], _Run], most_runs: int) -> list[_Run]:
    runs: list[_Run] = []
    while len(runs) < most_runs and sum(each.forward + each.backward for each in runs) < _ENOUGH_SECONDS:
        runs.append(run())
    return runs[1:] or runs


def _seconds(samples: list[_Run]) -> BlockSeconds:
    return BlockSeconds(
        forward=median(run.forward for run in samples), backward=median(run.backward for run in samples)
    )
