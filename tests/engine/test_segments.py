"""A segment of another kind needs its class alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.engine.device.device import Device
from ratel_cli.engine.optimizer.gradients import taken_gradient
from ratel_cli.engine.optimizer.segment_sum import SegmentSum, adding_to
from ratel_cli.engine.reading.program import Program
from ratel_cli.engine.reading.weights import SegmentWeights
from ratel_cli.engine.segments import passes
from ratel_cli.engine.segments.layer import Layer
from ratel_cli.engine.segments.segment import RunnableSegment
from ratel_cli.engine.steps.state import PassState, StepState
from ratel_cli.schedule.segments import Segment
from tests.engine.architectures import tiny_config
from tests.engine.exactness import check_training
from tests.engine.machine import machine
from tests.reference import Recipe


class Recomputed(RunnableSegment[MicroBatch]):
    """A layer that keeps its input, and lets autograd run it again: no tape, and nothing offloaded."""

    number_of_backwards = 0

    def __init__(self, segment: Segment, program: Program[MicroBatch], device: Device) -> None:
        super().__init__(segment, program, device)
        self._inputs: dict[int, torch.Tensor] = {}

    def forward(self, state: PassState[MicroBatch], number: int, weights: SegmentWeights) -> None:
        with self.computing("forward"), torch.no_grad():
            state.seed_draws(self.segment.index, number)
            self._inputs[number] = state.hidden[number]
            run = partial(self._program.run, self.segment.index - 1, state.hidden[number])
            has_backward = isinstance(state, StepState)
            state.hidden[number] = state.carried[number].forward(self.segment.index - 1, run, has_backward=has_backward)

    def summing(self, state: StepState[MicroBatch]) -> SegmentSum:
        return state.services.gradient_sums.of_layer(self.segment, single=state.is_single, scale=state.gradient_scale)

    def backward(self, state: StepState[MicroBatch], number: int, weights: SegmentWeights, sums: SegmentSum) -> None:
        leaf = self._inputs.pop(number).detach().requires_grad_()
        with self.computing("backward"), adding_to(weights.trained, sums, is_last=number == state.last):
            state.seed_draws(self.segment.index, number)
            run = partial(self._program.run, self.segment.index - 1, leaf)
            output, roots = state.carried[number].replay(self.segment.index - 1, run)
            torch.autograd.backward(
                [output, *roots.tensors],
                [state.gradients[number], *roots.gradients],
                inputs=[leaf, *weights.trained, *roots.inputs],
            )
        state.gradients[number] = taken_gradient(leaf)
        Recomputed.number_of_backwards += 1


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_kind_of_segment_is_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    """Its bits are those of plain PyTorch, with dropout too."""

    def chosen(segment: Segment, program: Program[MicroBatch], device: Device) -> RunnableSegment[MicroBatch]:
        return (Recomputed if segment.index == 2 else Layer)(segment, program, device)

    monkeypatch.setattr(passes, "Layer", chosen)
    monkeypatch.setattr(Recomputed, "number_of_backwards", 0)
    check_training(machine, tmp_path, tiny_config(architecture), Recipe(max_grad_norm=0.5), num_micro_batches=2)
    assert Recomputed.number_of_backwards
