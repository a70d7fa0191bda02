"""Learning rate and loss scale: pure functions of the step, so that a resumed run continues exactly.

Invariant: the learning rates are bitwise equal to those of `transformers.get_scheduler`, and the loss scales to those
of `torch.amp.GradScaler` for the same overflows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

SchedulerName = Literal[
    "constant",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]
RampName = Literal["linear", "cosine", "1-sqrt"]
Number = TypeVar("Number", int, float)

_GROWTH_STEPS = 2000
_LEAST_SCALE = 1.0
_GREATEST_SCALE = 2.0**24
"""GradScaler has neither bound. A scale below 1 does not help: at 1 the gradients are those of the loss itself. A scale
above 2^24 would only make the next overflow certain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOptions:
    """What else a schedule needs to know, under the names and with the defaults of transformers. None: its default."""

    num_cycles: float | None = None
    """Cosine periods after the warm-up; half a period falls from the peak to the end. With restarts, whole ones."""
    min_lr: float | None = None
    min_lr_rate: float | None = None
    """`min_lr` as a share of the peak."""
    warmup_lr_rate: float | None = None
    """The rate of the first step, as a share of the peak, of `cosine_warmup_with_min_lr`."""
    lr_end: float | None = None
    """The rate at the end of `polynomial`."""
    power: float | None = None
    timescale: int | None = None
    """The steps in which `inverse_sqrt` falls to 0.71 of the peak; None: the warm-up, or 10 000 without one."""
    num_stable_steps: int | None = None
    num_decay_steps: int | None = None
    warmup_type: RampName | None = None
    decay_type: RampName | None = None
    min_lr_ratio: float | None = None
    """Where `warmup_stable_decay` begins and ends, as a share of the peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateSchedule:
    """Linear warm-up to `peak`; then what the scheduler's name says, until `num_steps`."""

    scheduler: SchedulerName
    peak: float
    num_warmup_steps: int
    num_steps: int
    options: ScheduleOptions = ScheduleOptions()
    group_peaks: tuple[float, ...] = ()
    """Peaks of the groups of parameters that have rates of their own. They have the shares of `peak`, as in torch's
    schedulers."""

    def at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return self.peak * self._share(step)

    def groups_at(self, step: int) -> tuple[float, ...]:
        """The learning rates of the groups at a step, counted from 0."""
        return tuple(peak * self._share(step) for peak in self.group_peaks)

    def _share(self, step: int) -> float:
        """The rate as a share of the peak. The operations have the order of transformers, for the same rounding."""
        if self.scheduler == "warmup_stable_decay":
            return self._stable_then_decay(step)
        if self.scheduler == "cosine_warmup_with_min_lr":
            return self._cosine_counted_from_one(step)
        if step < self.num_warmup_steps:
            return step / self.num_warmup_steps
        return self._decayed(step)

    def _decayed(self, step: int) -> float:
        """The share at a step after the warm-up."""
        num_decay_steps = max(1, self.num_steps - self.num_warmup_steps)
        progress = (step - self.num_warmup_steps) / num_decay_steps
        match self.scheduler:
            case "linear":
                return max(0.0, (self.num_steps - step) / num_decay_steps)
            case "cosine":
                return max(0.0, _cosine(_or(self.options.num_cycles, 0.5), progress))
            case "cosine_with_restarts":
                if progress >= 1.0:
                    return 0.0
                num_cycles = _or(self.options.num_cycles, 1.0)
                return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((num_cycles * progress) % 1.0))))
            case "cosine_with_min_lr":
                return max(0.0, _above(self._min_share, _cosine(_or(self.options.num_cycles, 0.5), progress)))
            case "polynomial":
                return self._polynomial(step)
            case "inverse_sqrt":
                timescale = _or(self.options.timescale, self.num_warmup_steps or 10_000)
                return 1.0 / math.sqrt((step + (timescale - self.num_warmup_steps)) / timescale)
            case _:
                return 1.0

    def _polynomial(self, step: int) -> float:
        end = _or(self.options.lr_end, 1e-7)
        if step > self.num_steps:
            return end / self.peak
        remaining = 1 - (step - self.num_warmup_steps) / max(1, self.num_steps - self.num_warmup_steps)
        power = float(_or(self.options.power, 1.0))
        return ((self.peak - end) * math.pow(remaining, power) + end) / self.peak

    def _cosine_counted_from_one(self, step: int) -> float:
        """`cosine_warmup_with_min_lr`: the first step has a rate already, the last one the least."""
        warmup = float(self.num_warmup_steps)
        if step < self.num_warmup_steps:
            first = self.options.warmup_lr_rate
            if first is None:
                return (step + 1.0) / max(1.0, warmup)
            return first + (1.0 - first) * step / max(1, warmup - 1)
        progress = (step - warmup + 1.0) / max(1.0, self.num_steps - warmup)
        return max(0.0, _above(self._min_share, _cosine(_or(self.options.num_cycles, 0.5), progress)))

    def _stable_then_decay(self, step: int) -> float:
        """`warmup_stable_decay`: warm-up, a constant rate, and a decay in the last `num_decay_steps`."""
        num_decay_steps = _or(self.options.num_decay_steps, 0)
        num_stable_steps = _or(self.options.num_stable_steps, self.num_steps - self.num_warmup_steps - num_decay_steps)
        least = _or(self.options.min_lr_ratio, 0.0)
        if step < self.num_warmup_steps:
            progress = step / self.num_warmup_steps
            match self.options.warmup_type:
                case "cosine":
                    rising = 0.5 * (1.0 - math.cos(math.pi * progress))
                case "1-sqrt":
                    rising = 1.0 - math.sqrt(1.0 - progress)
                case _:
                    rising = progress
            return max(0.0, _above(least, rising))
        start = self.num_warmup_steps + num_stable_steps
        if step < start:
            return 1.0
        if step >= start + num_decay_steps:
            return least
        progress = (step - self.num_warmup_steps - num_stable_steps) / max(1, num_decay_steps)
        match self.options.decay_type:
            case "linear":
                falling = 1.0 - progress
            case "1-sqrt":
                falling = 1.0 - math.sqrt(progress)
            case _:
                falling = _cosine(_or(self.options.num_cycles, 0.5), progress)
        return max(0.0, _above(least, falling))

    @property
    def _min_share(self) -> float:
        """`min_lr` or `min_lr_rate`, as a share of the peak."""
        if self.options.min_lr is not None:
            return self.options.min_lr / self.peak if self.peak else 0.0
        return _or(self.options.min_lr_rate, 0.0)


def _or(value: Number | None, default: Number) -> Number:
    return default if value is None else value


def _cosine(num_cycles: float, progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress))


def _above(least: float, factor: float) -> float:
    """A factor from 0 to 1 as one from `least` to 1."""
    return factor * (1 - least) + least


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
