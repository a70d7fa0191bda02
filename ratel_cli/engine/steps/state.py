"""What the phases of one step hand to each other, and what the step returns.

Invariant: nothing in a `StepState` outlives its step; every random draw of training is a function of (seed, step,
block, micro-batch) and of nothing else. So a resumed run needs no generator state, and the order in which blocks run
does not matter.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic

import torch

from ratel_cli.engine.optimizer.partial_sums import PartialSums
from ratel_cli.engine.reading.embedding_rows import EmbeddingRows
from ratel_cli.engine.reading.program import AnyBatch
from ratel_cli.engine.replay.loss import Figures, MeanLoss
from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.engine.replay.tape import Tapes
from ratel_cli.model.values.carried import Carried
from ratel_cli.model.values.row_lookup import DistinctTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What one step did."""

    loss: float
    """The mean of the losses over the step's targets."""
    grad_norm: float
    """Global 2-norm of the gradients before clipping. It may be why `applied` is False: then it is not finite."""
    forward_seconds: float
    """Seconds from the start of the step to the last layer's output, without the head."""
    swapped_bytes: int
    """Bytes offloaded in forward for backward, layers' inputs included."""
    applied: bool
    """False if the loss or a gradient was not finite. The store's current generation is then unchanged."""
    clipped: bool
    """True if the gradients were scaled down to the limit on their norm."""
    first_not_finite: str | None
    """What was not finite: "the loss", or the first parameter whose gradient was not; None if only the global norm was
    not, or if all were finite."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Means over the micro-batches whose rows are compared, by name (`sizes.FIGURES`)."""


@dataclass(frozen=True, slots=True)
class Draws:
    """What decides the random draws of one step."""

    seed: int
    step: int
    first_micro_batch: int
    """The number of the first micro-batch among those of all ranks."""

    def seed_of(self, block: int, micro_batch: int) -> int:
        """The seed for the draws of one block on one micro-batch."""
        return draw_seed(self.seed, step=self.step, block=block, micro_batch=self.first_micro_batch + micro_batch)


class StepState(Generic[AnyBatch]):
    """What the phases of one step hand to each other."""

    def __init__(
        self,
        batches: Sequence[AnyBatch],
        *,
        tokens: Sequence[torch.Tensor],
        num_targets: int,
        draws: Draws,
        loss_scale: float,
        recording: StepRecording | None,
        rows: EmbeddingRows | None,
        substitutes: Sequence[int],
        partial_sums: PartialSums,
        device: torch.device,
    ) -> None:
        """`tokens`: those that each micro-batch looks up, `[batch, tokens]`, in host memory. `num_targets`: of all
        ranks."""
        self.batches = [batch.to(device) for batch in batches]
        self.rows = rows
        """What is used of the embedding's matrix to look up tokens; None: all of it."""
        self.mean = MeanLoss(num_targets, loss_scale)
        self.gradient_scale = 1.0 / loss_scale
        self.carried: list[Carried] = []
        """For each micro-batch: what later uses get besides hidden states."""
        self.tapes = Tapes()
        self.recording = recording
        self.resources = contextlib.ExitStack()
        """What one phase opens and a later one closes. Closed with the step, however the step ends."""
        self.figures = Figures()
        """Figures of the micro-batches whose rows are compared."""
        self.partial_sums = self.resources.enter_context(partial_sums)
        """The gradients of blocks that several segments bind."""
        self._tokens = tokens
        self._substitutes = substitutes
        self._draws = draws
        self._device = device

    @cached_property
    def distinct_tokens(self) -> torch.Tensor:
        """The distinct tokens that the step may look up, sorted `[rows]`, on the compute device."""
        if self.rows is not None:
            return self.rows.tokens.on_device
        return DistinctTokens.of(self._tokens, self._device, substitutes=self._substitutes).on_device

    def seed_draws(self, block: int, micro_batch: int) -> None:
        """Seed the generators of the CPU and of the compute device for the draws of one block on one micro-batch."""
        seed = self._draws.seed_of(block, micro_batch)
        # torch.manual_seed takes a millisecond: it notes the call, with its traceback, for each kind of idle device.
        torch.default_generator.manual_seed(seed)
        if self._device.type != "cpu":
            torch.get_device_module(self._device).manual_seed_all(seed)


def draw_seed(seed: int, *, step: int, block: int, micro_batch: int) -> int:
    """A 63-bit seed for the draws of one block on one micro-batch of one step."""
    key = f"{seed}/{step}/{block}/{micro_batch}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
