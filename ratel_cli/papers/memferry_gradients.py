"""Which gradients are made in host memory, where the GPU has not enough for all (GO-MemFerry, section IV-D). Pure.

A gradient is kept on the GPU until it is downloaded, or the GPU writes it straight into host memory, which makes the
layer's backward longer (T_GBP in place of T_CBP). The reserve factor S_req is the share of all gradients' bytes that
may be kept. The gradients to keep are those that save the most time within these bytes:

    D[i, j] = max(D[i-1, j], D[i-1, j - s_i] + T_GBP(i) - T_CBP(i))

The table has a column for every byte. What is computed here are its steps: the pairs of bytes and time that no other
pair beats in time with as few bytes. One front answers every reserve factor, so that a larger one is never slower.

Invariants: the kept bytes are at most S_req of all. With up to `_MOST_STEPS` steps the result is exact (fewer where
there are many hundreds of gradients); with more, the bytes are divided into that many parts, and each part keeps its
last step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge

_LEAST_STEPS, _MOST_STEPS, _MOST_WORK = 50, 2000, 1_000_000
"""The most steps of the table for few and for many gradients, and their product with the number of gradients, which
takes some seconds."""

_Kept = tuple[int, "_Kept"] | None
"""The places of the kept gradients, the last one first."""
_Step = tuple[int, float, _Kept]
"""Bytes that are kept, seconds that this saves, and which gradients these are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedGradient:
    """One layer's gradient."""

    num_bytes: int
    """On the GPU, if it is kept there [s_i]."""
    backward: float
    """Seconds of the layer's backward if it is kept [T_CBP]."""
    direct_backward: float
    """Seconds of the layer's backward if it is written straight into host memory [T_GBP]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientPlan:
    """Which gradients are kept on the GPU for one reserve factor."""

    kept: frozenset[int]
    """Their places."""
    kept_bytes: int
    seconds: float
    """Backward of all layers."""


class GradientFront:
    """The best gradients to keep for any amount of the GPU's memory."""

    def __init__(self, gradients: Sequence[OffloadedGradient]) -> None:
        self.total_bytes = sum(each.num_bytes for each in gradients)
        self._most_seconds = sum(each.direct_backward for each in gradients)
        steps: list[_Step] = [(0, 0.0, None)]
        most = max(_LEAST_STEPS, min(_MOST_STEPS, _MOST_WORK // max(1, len(gradients))))
        for number, each in enumerate(gradients):
            saved = each.direct_backward - each.backward
            if saved > 0.0:
                more: list[_Step] = [
                    (kept + each.num_bytes, gain + saved, (number, chain)) for kept, gain, chain in steps
                ]
                steps = _thinned(list(_steps(steps, more)), self.total_bytes, most)
        self._steps = steps

    def plan(self, reserve: float) -> GradientPlan:
        """The plan with at most this share of all bytes on the GPU [S_req], from 0 to 1."""
        place = bisect_right(self._steps, int(reserve * self.total_bytes), key=lambda step: step[0])
        kept_bytes, gain, chain = self._steps[place - 1]
        return GradientPlan(kept=frozenset(_places(chain)), kept_bytes=kept_bytes, seconds=self._most_seconds - gain)


def _steps(without: Iterable[_Step], with_it: Iterable[_Step]) -> Iterator[_Step]:
    """Yield the steps of both that save more than all that keep as few bytes. Both are in the order of bytes, and so is
    the result."""
    most = -1.0
    for step in merge(without, with_it, key=lambda step: (step[0], -step[1])):
        if step[1] > most:
            most = step[1]
            yield step


def _thinned(steps: list[_Step], total_bytes: int, most: int) -> list[_Step]:
    """The steps, or the first, and the last one of each of `most` parts of the bytes."""
    if len(steps) <= most:
        return steps
    last_of_part = {step[0] * most // (total_bytes + 1): step for step in steps}
    return [steps[0], *(step for step in last_of_part.values() if step is not steps[0])]


def _places(chain: _Kept) -> Iterator[int]:
    while chain is not None:
        place, chain = chain
        yield place
