"""Measures what a model's blocks cost, without training the model.

One micro-batch goes through embedding, layers and head, forward and backward, one block after another (Ratel section
IV-B: the unoptimised iteration). Times and sizes depend on shapes and not on values, so the weights are random numbers
in one buffer that all blocks share: no store, no file, memory for the largest block. Layers with the same shapes and
the same arguments cost the same, so one of each kind is run.

Invariant: nothing of the model changes but its device, and the weights that are bound while it runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from ratel_cli.data.packing import MicroBatch
from ratel_cli.engine.loss import loss_and_gradients
from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.engine.replay.tape import Replayer
from ratel_cli.engine.state import place
from ratel_cli.model.blocks import DecoderModel
from ratel_cli.model.layer_runner import LayerCall, last_hidden_state
from ratel_cli.model.operators import tensors_in
from ratel_cli.model.spec import BlockSpec
from ratel_cli.planning.activations import tokens_per_chunk
from ratel_cli.planning.recorded import BlockSeconds, UnitRecord

_NUM_RUNS = 5
"""Runs of each block; fewer if they take longer than `_ENOUGH_SECONDS`. The first warms up (code is loaded, memory
allocated) and counts only if it is the only one. The others are samples of one quantity, like micro-batches."""
_ENOUGH_SECONDS = 5.0
_DEVIATION = 0.02
"""Standard deviation of the random weights."""


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of one block."""

    forward: float
    """Seconds."""
    backward: float
    """Seconds."""
    unit: UnitRecord | None = None


class BlockProfiler:
    """Runs and times a model's blocks on random weights."""

    def __init__(
        self, model: DecoderModel, *, dtype: torch.dtype, device: torch.device, chunk_tokens: int | None = None
    ) -> None:
        """`chunk_tokens`: tokens whose logits are computed at once; None: as many as have 64 MiB of logits."""
        model.place(device)
        self._model = model
        self._layer_runner = model.layer_runner
        self._device = device
        self._chunk_tokens = chunk_tokens or tokens_per_chunk(model.spec.vocab_size)
        largest = max(model.spec.block_elements)
        generator = torch.Generator(device).manual_seed(0)
        self._weights = torch.empty(largest, dtype=dtype, device=device).normal_(std=_DEVIATION, generator=generator)
        self._outside: dict[int, list[_Run]] = {}

    def record(self, batch: MicroBatch) -> tuple[dict[tuple[int, int], UnitRecord], dict[int, BlockSeconds]]:
        """Run every kind of block on one micro-batch, tensors `[batch, tokens]`.

        Returns the operators of every layer, by (block, sample), and the seconds of a block on one micro-batch, by
        block.
        """
        embedding, *layers, head = self._model.spec.blocks
        [batch] = place([batch], self._device)
        hidden, calls = self._embedding(embedding, batch)
        runs: dict[int, list[_Run]] = {}
        kinds: dict[object, int] = {}
        for block, call in zip(layers, calls, strict=True):
            kind = (
                tuple(parameter.shape for parameter in block.parameters),
                tuple(id(tensor) for tensor in tensors_in((call.arguments, call.keywords))),
            )
            first = kinds.setdefault(kind, block.index)
            if first == block.index:
                runs[block.index], hidden = self._layer(block, call, hidden)
            else:
                runs[block.index] = runs[first]
        self._head(head, embedding, batch, hidden)
        num_samples = min(len(samples) for samples in runs.values())
        units = {
            (block, sample): run.unit
            for block, samples in runs.items()
            for sample, run in enumerate(samples[:num_samples])
            if run.unit is not None
        }
        return units, {block: _seconds(samples) for block, samples in (runs | self._outside).items()}

    def _embedding(self, block: BlockSpec, batch: MicroBatch) -> tuple[torch.Tensor, tuple[LayerCall, ...]]:
        with self._bound(block) as parameters:

            def run() -> _Run:
                start = self._now()
                embedded = self._layer_runner.embed(batch.input_ids, batch.position_ids)
                middle = self._now()
                gradient = torch.zeros_like(embedded.hidden)
                torch.autograd.grad(embedded.hidden, parameters, gradient, allow_unused=True)
                return _Run(middle - start, self._now() - middle)

            self._outside[block.index] = _samples(run)
            with torch.no_grad():
                embedded = self._layer_runner.embed(batch.input_ids, batch.position_ids)
        return embedded.hidden, embedded.calls

    def _layer(self, block: BlockSpec, call: LayerCall, hidden: torch.Tensor) -> tuple[list[_Run], torch.Tensor]:
        layer = block.index - 1
        outputs: list[torch.Tensor] = []
        with self._bound(block) as parameters:

            def run() -> _Run:
                leaf, recording = hidden.detach().requires_grad_(), StepRecording()
                recorder = recording.recorder(
                    parameters, (), block=block.index, micro_batch=0, module=self._layer_runner.layers[layer]
                )
                start = self._now()
                with recorder.recording():
                    outputs[:] = [self._layer_runner.run_layer(layer, leaf, call).detach()]
                middle = self._now()
                tape, _ = recorder.finish()
                with Replayer(tape):
                    again = self._layer_runner.run_layer(layer, leaf, call)
                torch.autograd.grad(again, (leaf, *parameters), torch.zeros_like(again), allow_unused=True)
                return _Run(middle - start, self._now() - middle, recording.units()[block.index, 0])

            return _samples(run), outputs[0]

    def _head(self, block: BlockSpec, embedding: BlockSpec, batch: MicroBatch, hidden: torch.Tensor) -> None:
        with contextlib.ExitStack() as bound:
            parameters = bound.enter_context(self._bound(block))
            if self._model.spec.tied:
                parameters = (*parameters, self._model.tie(bound.enter_context(self._bound(embedding))))

            def run() -> _Run:
                start = self._now()
                leaf = hidden.detach().requires_grad_()
                finished = self._layer_runner.finish(leaf, batch.input_ids, batch.position_ids)
                _, gradient = loss_and_gradients(
                    self._layer_runner,
                    finished,
                    batch.targets,
                    parameters,
                    lambda gradients: None,
                    chunk_tokens=self._chunk_tokens,
                    num_targets=batch.num_targets,
                    loss_scale=1.0,
                )
                torch.autograd.grad(last_hidden_state(finished), (leaf, *parameters), gradient, allow_unused=True)
                return _Run(0.0, self._now() - start)

            self._outside[block.index] = _samples(run)

    def _now(self) -> float:
        """Seconds of `perf_counter` at which all work that was queued is done."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return perf_counter()

    @contextlib.contextmanager
    def _bound(self, block: BlockSpec) -> Iterator[tuple[torch.nn.Parameter, ...]]:
        try:
            yield self._model.bind(block, self._weights[: block.num_elements])
        finally:
            self._model.release(block)


def _samples(run: Callable[[], _Run]) -> list[_Run]:
    runs: list[_Run] = []
    while len(runs) < _NUM_RUNS and sum(each.forward + each.backward for each in runs) < _ENOUGH_SECONDS:
        runs.append(run())
    return runs[1:] or runs


def _seconds(samples: list[_Run]) -> BlockSeconds:
    return BlockSeconds(
        forward=median(run.forward for run in samples), backward=median(run.backward for run in samples)
    )
