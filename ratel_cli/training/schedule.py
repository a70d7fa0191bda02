"""Learning rate and loss scale: pure functions of the step, so that a resumed run continues exactly.

Invariant: the learning rates are bitwise equal to those of `transformers.get_scheduler`, and the loss scales to those
of `torch.amp.GradScaler` for the same overflows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

SchedulerName = Literal["constant", "linear", "cosine"]

_GROWTH_STEPS = 2000
_LEAST_SCALE = 1.0
_GREATEST_SCALE = 2.0**24
"""GradScaler has neither bound. A scale below 1 does not help: at 1 the gradients are those of the loss itself. A scale
above 2^24 would only make the next overflow certain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateSchedule:
    """Linear warm-up to `peak`; then constant, or decaying to zero at `num_steps`."""

    scheduler: SchedulerName
    peak: float
    num_warmup_steps: int
    num_steps: int

    def at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return self.peak * self._share(step)

    def _share(self, step: int) -> float:
        """The rate as a share of the peak. The operations have the order of transformers, for the same rounding."""
        if step < self.num_warmup_steps:
            return step / self.num_warmup_steps
        num_decay_steps = max(1, self.num_steps - self.num_warmup_steps)
        match self.scheduler:
            case "constant":
                return 1.0
            case "linear":
                return max(0.0, (self.num_steps - step) / num_decay_steps)
            case "cosine":
                progress = (step - self.num_warmup_steps) / num_decay_steps
                return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """Dynamic loss scaling for fp16. The scale is a power of two, so that scaling never rounds.

    It is halved when a step overflows, which is then not applied, and doubled after 2000 applied steps in a row.
    """

    scale: float
    good_steps: int
    """Steps that were applied since the scale changed."""

    def after(self, *, applied: bool) -> LossScale:
        """The scale of the next step, given whether this one was applied."""
        if not applied:
            return LossScale(scale=max(_LEAST_SCALE, self.scale / 2), good_steps=0)
        if self.good_steps + 1 < _GROWTH_STEPS:
            return replace(self, good_steps=self.good_steps + 1)
        return LossScale(scale=min(_GREATEST_SCALE, self.scale * 2), good_steps=0)

    @property
    def exhausted(self) -> bool:
        """Whether the scale cannot get smaller: then the gradients are not finite at any scale."""
        return self.scale <= _LEAST_SCALE
