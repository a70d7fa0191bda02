"""Numbers of many steps made fit for a plot: bins, ranges of axes, and where their ticks are.

Invariants: a bin's mean, lowest and highest value are those of its own steps, and no step is left out; a value that is
not finite is never drawn as a number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ratel_cli.training.history import finite_mean

_SPACE = 0.06
"""Space at each end of a scale, as a share of the range of its values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Some steps that follow each other, as one point of a plot."""

    x: float
    """The middle of the steps."""
    mean: float
    """Over the values that are finite; NaN if there are none. So are the next two."""
    low: float
    high: float
    num_values: int
    """Steps in the bin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Maps values to places: `low` is at 0, `high` at 1."""

    low: float
    high: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """Where a value is; beyond 0 and 1 if it is outside."""
        if self.is_log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)


def binned(xs: Sequence[float], ys: Sequence[float], *, most: int) -> list[Bin]:
    """At most `most` bins of equal numbers of values. With fewer values each is a bin of its own."""
    size = max(1, -(-len(xs) // most))
    return [_bin(xs[start : start + size], ys[start : start + size]) for start in range(0, len(xs), size)]


def _bin(xs: Sequence[float], ys: Sequence[float]) -> Bin:
    middle, mean = (xs[0] + xs[-1]) / 2, finite_mean(ys)
    if mean is None:
        return Bin(x=middle, mean=math.nan, low=math.nan, high=math.nan, num_values=len(xs))
    finite = [y for y in ys if math.isfinite(y)]
    return Bin(x=middle, mean=mean, low=min(finite), high=max(finite), num_values=len(xs))


def scale_of(values: Sequence[float], *, from_zero: bool = False, may_be_log: bool = False) -> Scale:
    """A scale with all finite values in it, and a little space at its ends.

    `may_be_log`: logarithmic if the values are positive and the largest is more than 30 times the smallest.
    """
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if may_be_log and low > 0 and high / low > 30:
        return Scale(low=10 ** math.floor(math.log10(low)), high=10 ** math.ceil(math.log10(high)), is_log=True)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        half = abs(low) / 2 or 0.5
        low, high = low - half, high + half
    space = _SPACE * (high - low)
    return Scale(low=low if from_zero and low == 0 else low - space, high=high + space)


def ticks(scale: Scale, *, most: int = 5) -> list[float]:
    """Round values within the scale, from low to high."""
    if scale.is_log:
        first, last = round(math.log10(scale.low)), round(math.log10(scale.high))
        every = max(1, -(-(last - first) // most))
        return [10.0**power for power in range(first, last + 1, every)]
    step = _step(scale.low, scale.high, most)
    first, last = math.ceil(scale.low / step - 1e-9), math.floor(scale.high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def step_ticks(first: int, last: int, *, most: int = 6) -> list[int]:
    """Numbers of steps for an axis: round ones, and the last."""
    every = max(1, round(_step(0, max(1, last - first), most)))
    round_ones = range(-(-first // every) * every, last + 1, every)
    near = [number for number in round_ones if last - number >= 0.6 * every]
    return sorted({*near, last})


def _step(low: float, high: float, most: int) -> float:
    """1, 2 or 5 times a power of 10, so that at most about `most` of them lie between `low` and `high`."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
