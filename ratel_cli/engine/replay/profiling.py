"""Measures what a model's segments cost, without training the model.

One micro-batch goes through embedding, layers and head, forward and backward, one block after another (Ratel section
IV-B: the unoptimised iteration). Times and sizes depend on shapes and not on values, so the weights are random numbers
in one buffer that all blocks share: no store, no file, memory for the largest block. Layers with the same shapes and
the same arguments cost the same, so one of each kind is run. A block does what it does in a step: its gradients are
added to sums, parameter by parameter, and its times are those of runs that record no operators.

Invariant: nothing of the model changes but its device, and the weights that are bound while it runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Generic

import torch

from ratel_cli.engine.device.device import Device
from ratel_cli.engine.device.gpu import translate_errors
from ratel_cli.engine.optimizer.accumulators import DeviceSums
from ratel_cli.engine.optimizer.gradient_sums import gradient_sum
from ratel_cli.engine.optimizer.segment_sum import SegmentSum, adding_to
from ratel_cli.engine.reading.embedding_rows import EmbeddingRows
from ratel_cli.engine.reading.program import AnyBatch, Program, tokens_looked_up, trained_of
from ratel_cli.engine.replay.loss import MeanLoss, loss_and_gradients
from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.engine.replay.tape import Recorder, Replayer
from ratel_cli.errors import BadInput, first_line
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.views import VALUE_DTYPES
from ratel_cli.model.values.carried import Carried, Embedded, LayerCall, LayerOutput
from ratel_cli.model.values.row_lookup import DistinctTokens
from ratel_cli.planning.profile.activations import tokens_per_chunk
from ratel_cli.planning.profile.placement import num_looked_up
from ratel_cli.planning.profile.recorded import BlockSeconds, UnitRecord
from ratel_cli.schedule.segments import Segment

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
    """Runs and times a model's blocks on random weights."""

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
        self._pool = pool
        self._sums = sums
        self._device = device
        self._torch_device = device.torch_device
        self._chunk_tokens = chunk_tokens or tokens_per_chunk(program.spec.vocab_size)
        largest = max(block.num_elements for block in program.spec.blocks)
        generator = torch.Generator(self._torch_device).manual_seed(0)
        weights = torch.empty(largest, dtype=dtype, device=self._torch_device)
        self._weights = weights.normal_(std=_DEVIATION, generator=generator)
        self._outside: dict[int, list[_Run]] = {}
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
        embedding, *layers, head = self._program.spec.segments
        tokens = self._distinct_tokens(batch)
        batch = batch.to(self._torch_device)
        # As in a step: on a thread of its own, backward would drop its last tensors whenever that is scheduled.
        with torch.autograd.set_multithreading_enabled(False):
            with self._running(embedding, progress):
                embedded = self._embedding(embedding, batch, tokens, most_runs)
            hidden = embedded.hidden.detach()
            runs: dict[int, list[_Run]] = {}
            kinds: dict[object, int] = {}
            carried = Carried(embedded)
            for index, layer in enumerate(layers):
                kind = (
                    self._program.spec.has_backward(layer),
                    self._program.spec.passes_on(layer),
                    layer.block_kinds,
                    tuple(parameter.shape for parameter in layer.parameters),
                    embedded.cost_key(index),
                )
                first = kinds.setdefault(kind, layer.index)
                if first == layer.index:
                    with self._running(layer, progress):
                        if not self._program.spec.has_backward(layer):
                            runs[layer.index], hidden = self._forward(layer, carried, hidden, most_runs)
                            continue
                        runs[layer.index], hidden = self._layer(layer, carried, hidden, most_runs, beside)
                    beside = None
                    continue
                runs[layer.index] = runs[first]
                if carried.links_layers:  # layers above may read what this one leaves
                    with self._running(layer, progress), self._bound(layer), torch.no_grad():
                        carried.forward(index, partial(self._program.run, index, hidden))
            with self._running(head, progress):
                self._head(head, batch, hidden, most_runs)
        num_samples = min((len(samples) for samples in runs.values() if samples[0].unit is not None), default=0)
        units = {
            (index, sample): run.unit
            for index, samples in runs.items()
            for sample, run in enumerate(samples[:num_samples])
            if run.unit is not None
        }
        return units, {index: _seconds(samples) for index, samples in (runs | self._outside).items()}

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

    def _embedding(self, segment: Segment, batch: AnyBatch, tokens: DistinctTokens | None, most_runs: int) -> Embedded:
        borrowed = self._program.spec.head.borrowed_lookups
        holds, is_single = self._device.is_host and not borrowed, self._sums.num_micro_batches == 1
        with self._bound(segment, tokens) as parameters, self._sum_of(segment, holds, is_single=is_single) as total:

            def run() -> _Run:
                self._begin_again(total)
                start = self._now()
                embedded = self._program.begin(batch)
                middle = self._now()
                made = [each for each in (embedded.hidden, *embedded.carried) if each.requires_grad]
                inputs = trained_of(parameters)
                if made and inputs:
                    gradients = list(map(torch.zeros_like, made))
                    _add(total, torch.autograd.grad(made, inputs, gradients, allow_unused=True))
                return _Run(middle - start, self._now() - middle)

            self._outside[segment.index] = self._with_rounding(_samples(run, most_runs), total)
            return self._program.begin(batch)

    def _distinct_tokens(self, batch: AnyBatch) -> DistinctTokens | None:
        """The tokens whose rows a GPU gets of the embedding; None if it gets the matrix, or if the CPU computes."""
        if self._device.is_host:
            return None
        spec, tokens = self._program.spec, tokens_looked_up(self._program, [batch])
        most_rows = num_looked_up(spec, sum(each.numel() for each in tokens))
        rows = EmbeddingRows.of(spec, tokens, self._torch_device, most_rows=most_rows)
        return None if rows is None else rows.tokens

    def _forward(
        self, layer: Segment, carried: Carried, hidden: torch.Tensor, most_runs: int
    ) -> tuple[list[_Run], torch.Tensor]:
        """A layer that backward does not reach. Returns its output, too."""
        outputs: list[torch.Tensor] = []

        def run() -> _Run:
            start = self._now()
            outputs[:] = [carried.forward(layer.index - 1, partial(self._program.run, layer.index - 1, hidden))]
            return _Run(self._now() - start, 0.0)

        with self._bound(layer):
            return _samples(run, most_runs), outputs[0]

    def _layer(
        self, layer: Segment, carried: Carried, hidden: torch.Tensor, most_runs: int, beside: Beside | None
    ) -> tuple[list[_Run], torch.Tensor]:
        place = layer.index - 1
        module = self._program.module(place)
        outputs: list[torch.Tensor] = []
        holds, is_single = self._sums.holds_layers, self._sums.num_micro_batches == 1
        with self._bound(layer) as parameters, self._sum_of(layer, holds, is_single=is_single) as total:
            trained = trained_of(parameters)

            def recorded(recorder: Recorder) -> torch.Tensor:
                """Forward as a step runs it. Returns its input."""
                leaf = hidden.detach().requires_grad_(self._program.spec.passes_on(layer))

                def forward(call: LayerCall) -> LayerOutput:
                    with recorder.recording():
                        return self._program.run(place, leaf, call)

                outputs[:] = [carried.forward(place, forward, has_backward=True).detach()]
                return leaf

            def run() -> _Run:
                self._begin_again(total)
                recorder = Recorder(parameters)
                start = self._now()
                leaf = recorded(recorder)
                tape, _ = recorder.finish()
                middle = self._now()
                with Replayer(tape):
                    again, roots = carried.replay(place, partial(self._program.run, place, leaf))
                with _dropping(trained) if total is None else adding_to(trained, total, is_last=False):
                    inputs = [leaf, *trained, *roots.inputs] if leaf.requires_grad else [*trained, *roots.inputs]
                    if again.requires_grad:  # an encoder's end has nothing to do with what is looked up for the decoder
                        again.backward(torch.zeros_like(again), inputs=inputs)
                return _Run(middle - start, self._now() - middle)

            def operators() -> UnitRecord:
                """What operators cost, which takes time of its own."""
                recording = StepRecording()
                recorder = recording.recorder(parameters, (), block=layer.index, micro_batch=0, module=module)
                recorded(recorder)
                recorder.finish()
                self._now()
                return recording.units()[layer.index, 0]

            runs = [replace(each, unit=operators()) for each in _samples(run, most_runs)]
            if beside is not None and max(each.forward + each.backward for each in runs) > _LEAST_SECONDS:
                self.sharing = _sharing(run, runs, beside)
            if carried.links_layers:
                recorded(Recorder(parameters))  # layers above may read what this one has left
            return self._with_rounding(runs, total), outputs[0]

    def _head(self, head: Segment, batch: AnyBatch, hidden: torch.Tensor, most_runs: int) -> None:
        with self._bound(head) as bound, self._sum_of(head, self._sums.holds_head) as total:
            parameters, take = trained_of(bound), partial(_add, total)

            def run() -> _Run:
                start = self._now()
                leaf = hidden.detach().requires_grad_(self._program.spec.passes_on(head))
                loss_and_gradients(
                    self._program.finish(leaf, batch),
                    leaf,
                    parameters,
                    take,
                    mean=MeanLoss(max(1, batch.num_targets), 1.0),
                    chunk_tokens=self._chunk_tokens,
                )
                return _Run(0.0, self._now() - start)

            self._outside[head.index] = self._with_rounding(_samples(run, most_runs), total)

    def _with_rounding(self, runs: Sequence[_Run], total: SegmentSum | None) -> list[_Run]:
        """The runs with their part of what a step does once with the block's sums, which end: rounding them, and taking
        their norms. On a GPU that is one pass over memory, and left out."""
        start = self._now()
        if self._device.is_host and total is not None:
            for each in total.blocks:
                each.finish().release()
        seconds = (self._now() - start) / self._sums.num_micro_batches
        return [replace(each, backward=each.backward + seconds) for each in runs]

    def _now(self) -> float:
        """Seconds of `perf_counter` at which all work that was queued is done."""
        if not self._device.is_host:
            torch.accelerator.synchronize(self._torch_device)
        return perf_counter()

    def _begin_again(self, total: SegmentSum | None) -> None:
        """Forget the contribution to the sum of a step with a single micro-batch, which takes one."""
        if total is not None and self._sums.num_micro_batches == 1:
            for each in total.blocks:
                assert isinstance(each.sums, DeviceSums)
                each.sums.clear()

    @contextlib.contextmanager
    def _bound(
        self, segment: Segment, tokens: DistinctTokens | None = None
    ) -> Iterator[tuple[torch.nn.Parameter, ...]]:
        """The segment with random weights; with `tokens`, an embedding with their rows alone."""
        parameters: list[torch.nn.Parameter] = []
        try:
            for block in segment.bound:
                sizes, of_rows = [block.num_elements], tokens if block is self._program.spec.lookup_block else None
                if of_rows is not None:
                    behind = block.parameters[1].start if len(block.parameters) > 1 else block.num_elements
                    sizes = [len(of_rows) * block.parameters[0].shape[1], block.num_elements - behind]
                weights = [self._weights[:size].to(VALUE_DTYPES[block.dtype]) for size in sizes]
                parameters += self._program.bind(block, *weights, tokens=of_rows)
            yield tuple(parameters)
        finally:
            self._program.release(segment)

    @contextlib.contextmanager
    def _sum_of(self, segment: Segment, holds: bool, *, is_single: bool = False) -> Iterator[SegmentSum | None]:
        """The sum of a segment's gradients; None where they are dropped."""
        if not holds:
            yield None
            return
        sums = (
            gradient_sum(block, self._pool, self._device, single=is_single)
            for block in segment.bound
            if block.is_trained
        )
        with SegmentSum.of(sums) as total:
            yield total


def _add(total: SegmentSum | None, gradients: Sequence[torch.Tensor | None]) -> None:
    if total is not None:
        total.add(gradients)


@contextlib.contextmanager
def _dropping(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """While a backward runs inside: drop each parameter's gradient as soon as autograd has made it."""
    hooks = [parameter.register_post_accumulate_grad_hook(_drop) for parameter in parameters]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


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
