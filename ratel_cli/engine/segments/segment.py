"""What a walk over the uses asks of a segment, whatever kind of segment it is.

A use of a segment has these phases:

    1. summing   in backward: open the sums of its gradients, before its weights are opened
    2. forward, or backward: with its weights bound, once for each micro-batch
    3. the walk takes the sums and gives the weights up; then the context of the sums ends

Invariant: what uses hand to each other is in the state of their pass, by micro-batch; a segment itself keeps nothing
that a step computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Generic

from ratel_cli.engine.device.device import Device
from ratel_cli.engine.measure.telemetry import SpanLabel
from ratel_cli.engine.optimizer.segment_sum import SegmentSum
from ratel_cli.engine.reading.program import AnyBatch, Program
from ratel_cli.engine.reading.weights import SegmentWeights
from ratel_cli.engine.steps.state import PassState, StepState
from ratel_cli.schedule.segments import Segment
from ratel_cli.schedule.uses import Stage


class RunnableSegment(ABC, Generic[AnyBatch]):
    """A segment that runs one micro-batch at a time, while its weights are bound."""

    def __init__(self, segment: Segment, program: Program[AnyBatch], device: Device) -> None:
        self.segment = segment
        self._program = program
        self._device = device

    @abstractmethod
    def forward(self, state: PassState[AnyBatch], number: int, weights: SegmentWeights) -> None:
        """Replace `state.hidden[number]` by what the segment makes of it."""

    @abstractmethod
    def summing(self, state: StepState[AnyBatch]) -> AbstractContextManager[SegmentSum]:
        """The sums of its gradients over all micro-batches, open from before its weights are until these are given
        up."""

    @abstractmethod
    def backward(self, state: StepState[AnyBatch], number: int, weights: SegmentWeights, sums: SegmentSum) -> None:
        """Add a micro-batch's gradients to `sums`, and replace `state.gradients[number]` by that of the segment's
        input, if something below is trained."""

    def kind(self, state: PassState[AnyBatch]) -> object:  # noqa: ARG002 - of a kind that may have several, it decides
        """Equal for segments that cost the same where they come next. By default no other one is like it."""
        return self.segment.index

    def computing(self, stage: Stage) -> AbstractContextManager[None]:
        """Record what is queued inside as its computing."""
        return self._device.computing(SpanLabel.of(stage, self.segment, stage))
