"""What the phases of one step hand to each other. Made and used up by `engine.step`.

Invariant: nothing in it outlives the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ratel_cli.data.packing import MicroBatch
from ratel_cli.engine.activations import Activations
from ratel_cli.engine.optimizer.gradients import GradientSum, TiedSum
from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.engine.replay.tape import Tape
from ratel_cli.model.layer_runner import LayerCall


def place(batches: Sequence[MicroBatch], device: torch.device) -> Sequence[MicroBatch]:
    """The batches with their tensors on the compute device; on the CPU, the batches themselves."""
    if device.type == "cpu":
        return batches
    return [
        replace(
            batch,
            input_ids=batch.input_ids.to(device),
            targets=batch.targets.to(device),
            position_ids=batch.position_ids.to(device),
        )
        for batch in batches
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What one step did."""

    loss: float
    """Mean cross-entropy over the step's targets."""
    grad_norm: float
    """Global 2-norm before clipping; not finite when `applied` is False for that reason."""
    forward_seconds: float
    """From the start to the last layer's output; head, backward and update are the rest."""
    swapped_bytes: int
    """Offloaded in forward for backward, layers' inputs included."""
    applied: bool
    """False: the loss or a gradient was not finite, and the store is as it was."""
    first_not_finite: str | None
    """Where: "the loss", or the first parameter with such a gradient; None: nowhere, or in the norm of all alone."""


@dataclass(frozen=True, slots=True)
class Tied:
    """The embedding block's gradient, begun by the head."""

    total: GradientSum
    rows: TiedSum


class StepState:
    """What the phases of one step hand to each other."""

    def __init__(
        self,
        batches: Sequence[MicroBatch],
        step: int,
        loss_scale: float,
        activations: Activations,
        recording: StepRecording | None,
        *,
        device: torch.device,
    ) -> None:
        self.batches = place(batches, device)
        self.input_ids = [batch.input_ids for batch in batches]
        """In host memory."""
        self.step = step
        self.loss_scale = loss_scale
        self.num_targets = sum(batch.num_targets for batch in batches)
        self.calls: list[tuple[LayerCall, ...]] = []
        self.tapes: dict[tuple[int, int], Tape] = {}
        self.activations = activations
        self.recording = recording
        self.resources = contextlib.ExitStack()
        """What a phase leaves open for a later one; closed with the step, however it ends."""
