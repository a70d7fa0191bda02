"""The split of a step into micro-batches: every split is tried. Pure.

Larger micro-batches recompute and transfer as much in fewer, larger pieces, and need more GPU memory. The prediction
takes computing to be proportional to the tokens, whatever the pieces are. A device is never faster with smaller ones,
so of splits that are predicted to be as fast within 1 %, the largest micro-batch is taken.

Invariant: no split that fits is predicted to be faster than the one found by more than that percent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isqrt

from ratel_cli.planning.profile.placement import Workload

LEAST_GAIN = 0.01
"""The share of tokens per second that another split must gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRate:
    """What one split is predicted to give."""

    workload: Workload
    tokens_per_second: float
    """Where the split does not fit, a prediction for a machine with enough memory, or 0."""
    shortfall_bytes: int
    """Bytes of memory that the split is short of; 0 if it fits."""
    unclipped_tokens_per_second: float | None = None
    """Tokens per second of a step that is not clipped; None where it takes as long as one that is, or where that is not
    asked for."""

    @property
    def fits(self) -> bool:
        """Whether the split fits."""
        return not self.shortfall_bytes


def best_split(workload: Workload, rate: Callable[[Workload], SplitRate]) -> SplitRate:
    """The fastest split of the workload's step that fits; where none fits, the one that is short of the least."""
    rates = [rate(each) for each in splits(workload)]
    fitting = [each for each in rates if each.fits]
    if not fitting:
        return min(rates, key=lambda each: each.shortfall_bytes)
    fastest = max(each.tokens_per_second for each in fitting)
    as_fast = [each for each in fitting if each.tokens_per_second >= (1 - LEAST_GAIN) * fastest]
    return max(as_fast, key=lambda each: each.workload.micro_batch_size)


def splits(workload: Workload) -> list[Workload]:
    """All splits of the workload's step into equal micro-batches, the smallest micro-batches first."""
    rows = workload.micro_batch_size * workload.num_micro_batches
    return [replace(workload, micro_batch_size=size, num_micro_batches=rows // size) for size in divisors(rows)]


def divisors(number: int) -> list[int]:
    """The numbers that divide `number`, ascending."""
    small = [each for each in range(1, isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})
