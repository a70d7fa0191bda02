"""MemFerry, as its paper has it: GPUs that use weights and gradients where they are in host memory. Pure.

**The time of a step** (`timeline`; section IV-B). Each layer has one of three modes:

    GFGB    uploaded before its forward, and kept for its backward
    DHA     read in place in forward and in backward (direct host access)
    DFGB    read in place in forward, uploaded for backward

Forward. Uploads of GFGB layers follow each other on the link from the beginning of the step. A GFGB layer computes when
its upload is over and the layer before it is. One number carries what the link is ahead by: the link time that is over
and that no layer so far has needed (the paper's T_res). Reading in place takes link time from the uploads that run next
to it (`forward_link`). The paper takes reads and uploads to be independent, which is 0 of it; two transfers in one
direction share one link, so Ratel's own numbers are the time of the bytes that are read.

Backward. Weights of DFGB layers go up in the order of backward, in the window between the end of the uploads of forward
and the first gradient, which is that of the last layer. A copy that is made while a layer is read in place does no
harm: both only read. What goes up by then is there when its layer needs it, except for the last layer, which waits.

Left out is what all plans have alike: gradients, which go the other way on the link, and the update.

**Its planner** (`printed_plan`): Algorithm 1 and the backward greedy, as printed. `memferry_search.py` begins there and
is compared with it. Nothing is mended here, and as printed, Algorithm 1 has errors:

1. `backtrack` returns the whole time so far and `update` adds it to the whole time so far. The times are then only
   compared with each other, but `update` adds the overlap that is left to the overlap before it was used, so T_res is
   too large from then on, and later layers wait where the plan has them compute.
2. It turns layers to DHA that have this mode already, and counts their gain again.
3. The comparison uses the time before the first change for every further change, but the overlap after it.
4. A layer that `backtrack` turns to DHA itself is set to GFGB when it returns.

Where no layer was hidden yet (tag is -1), there is nothing to go back to.

**Which gradients are made in host memory** (`GradientFront`; GO-MemFerry, section IV-D), where the GPU has not enough
for all. A gradient is kept on the GPU until it is downloaded, or the GPU writes it straight into host memory, which
makes the layer's backward longer (T_GBP in place of T_CBP). The reserve factor S_req is the share of all gradients'
bytes that may be kept. The gradients to keep are those that save the most time within these bytes:

    D[i, j] = max(D[i-1, j], D[i-1, j - s_i] + T_GBP(i) - T_CBP(i))

The table has a column for every byte. What is computed here are its steps: the pairs of bytes and time that no other
pair beats in time with as few bytes. One front answers every reserve factor, so that a larger one is never slower.

Invariants: where plans are compared, they are compared by `timeline`. Waiting is the only time beside computing. Kept
gradients are at most S_req of all. With up to `_MOST_STEPS` steps the front is exact (fewer where there are many
hundreds of gradients); with more, the bytes are divided into that many parts, and each part keeps its last step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge

from ratel_cli.planning.profile.placement import AccessMode

_ROUNDING = 1e-9
"""The share by which sums in another order may differ."""
_LEAST_STEPS, _MOST_STEPS, _MOST_WORK = 50, 2000, 1_000_000
"""The most steps of the table for few and for many gradients, and their product with the number of gradients, which
takes some seconds."""

_Step = tuple[int, float]
"""Bytes that are kept, and seconds that this saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectLayer:
    """What one layer, or one parameter of it, takes in each mode, in seconds. The paper's names are in brackets."""

    name: str = ""
    upload: float
    """To upload its weights [T_trans]."""
    forward: float
    """Forward with its weights on the GPU [T_FP]."""
    backward: float
    """[T_BP]"""
    direct_forward: float
    """Forward that reads its weights in place [T^H_FP]."""
    direct_backward: float
    """[T^H_BP]"""
    forward_link: float = 0.0
    """The part of `direct_forward` in which the link is busy; 0 if uploads proceed as if it were not."""
    backward_link: float = 0.0
    """The part of `direct_backward` in which the link is busy; 0 if uploads proceed as if it were not."""
    then_forward: float = 0.0
    """Forward of what has no weights between this layer and the next [T_FP(A)]."""
    then_backward: float = 0.0
    """[T_BP(A)]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectTime:
    """The times of a step with one mode for each layer, in seconds."""

    forward: float
    backward: float
    window: float
    """Link time between the end of the uploads of forward and the first gradient, without what the last layer takes."""
    moved: float
    """Link time of all other DFGB layers."""

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    @property
    def fits(self) -> bool:
        """Whether what DFGB layers upload fits into the window."""
        return fits_window(self.moved, self.window)


def fits_window(moved: float, window: float) -> bool:
    """Whether uploads of `moved` seconds fit into a window; both are sums that were rounded."""
    return moved <= window * (1 + _ROUNDING)


def after_forward(layer: DirectLayer, mode: AccessMode, ahead: float) -> tuple[float, float]:
    """The seconds that a layer's forward takes, and what the link is ahead by then. `ahead`: what it was before."""
    if mode == "GFGB":
        busy = layer.forward + layer.then_forward
        return max(layer.upload - ahead, 0.0) + busy, max(ahead - layer.upload, 0.0) + busy
    busy = layer.direct_forward + layer.then_forward
    return busy, ahead + busy - layer.forward_link


def until_first_gradient(layer: DirectLayer, mode: AccessMode, ahead: float) -> tuple[float, float]:
    """The seconds of the last layer's backward, and the window that other layers have. `ahead`: after forward."""
    ahead += layer.then_backward
    if mode == "GFGB":
        return layer.then_backward + layer.backward, ahead + layer.backward
    if mode == "DHA":
        window = ahead + layer.direct_backward - layer.backward_link
        return layer.then_backward + layer.direct_backward, window
    waited = max(layer.upload - ahead, 0.0)
    return layer.then_backward + waited + layer.backward, max(ahead - layer.upload, 0.0) + layer.backward


def backward_seconds(layer: DirectLayer, mode: AccessMode) -> float:
    """The seconds of the backward of any other layer, whose weights are there when they are needed."""
    return layer.then_backward + (layer.direct_backward if mode == "DHA" else layer.backward)


def timeline(layers: Sequence[DirectLayer], modes: Sequence[AccessMode]) -> DirectTime:
    """The step's times with these modes, one for each layer in the order of forward."""
    forward = ahead = 0.0
    for layer, mode in zip(layers, modes, strict=True):
        seconds, ahead = after_forward(layer, mode, ahead)
        forward += seconds
    if not layers:
        return DirectTime(forward=0.0, backward=0.0, window=0.0, moved=0.0)
    last, window = until_first_gradient(layers[-1], modes[-1], ahead)
    below = list(zip(layers[:-1], modes[:-1], strict=True))
    return DirectTime(
        forward=forward,
        backward=last + sum(backward_seconds(layer, mode) for layer, mode in below),
        window=window,
        moved=sum(layer.upload for layer, mode in below if mode == "DFGB"),
    )


def printed_plan(layers: Sequence[DirectLayer]) -> tuple[AccessMode, ...]:
    """The modes that the paper's planner gives: Algorithm 1, then DFGB for the greatest benefit first."""
    return greedy_backward(layers, printed_forward(layers))


def printed_forward(layers: Sequence[DirectLayer]) -> tuple[AccessMode, ...]:
    """GFGB or DHA for each layer, by Algorithm 1."""
    modes: list[AccessMode] = ["GFGB"] * len(layers)
    total = ahead = 0.0
    tag = -1
    for number, layer in enumerate(layers):
        if layer.direct_forward <= layer.forward + max(layer.upload, 0.0):
            modes[number] = "DHA"
            total, ahead = total + layer.direct_forward, ahead + layer.direct_forward
        else:
            if layer.upload < ahead:
                tag = number if tag == -1 else tag
                total, ahead = total + layer.forward, ahead + layer.forward - layer.upload
            else:
                base, left, tag = _backtrack(layers, modes, number, tag, total, ahead)
                total += base
                ahead += max(left - layer.upload, 0.0) + layer.forward
            modes[number] = "GFGB"
        total, ahead = total + layer.then_forward, ahead + layer.then_forward
    return tuple(modes)


def _backtrack(
    layers: Sequence[DirectLayer], modes: list[AccessMode], number: int, tag: int, total: float, ahead: float
) -> tuple[float, float, int]:
    """The time and the overlap with layers from `tag` on turned to DHA, and the next tag. Changes `modes`."""
    layer = layers[number]
    base = total + layer.upload + layer.forward - ahead
    for index in range(tag if tag != -1 else number, number + 1):
        other = layers[index]
        gain = other.upload + other.direct_forward - other.forward
        changed = max(layer.upload - ahead - gain, 0.0) + total + other.direct_forward - other.forward + layer.forward
        if changed < base:
            modes[index], tag = "DHA", index + 1
            base, ahead = changed, ahead + gain
            if ahead >= layer.upload:
                break
    return base, ahead, tag


def greedy_backward(layers: Sequence[DirectLayer], modes: Sequence[AccessMode]) -> tuple[AccessMode, ...]:
    """The plan with DFGB in the place of DHA, the greatest benefit first, as long as the window has the time.

    The last layer keeps its mode: the window ends with its gradient.
    """
    chosen, left = list(modes), timeline(layers, modes).window
    direct = [number for number in range(len(layers) - 1) if modes[number] == "DHA"]
    for number in sorted(direct, key=lambda each: layers[each].backward - layers[each].direct_backward):
        layer = layers[number]
        if layer.direct_backward > layer.backward and layer.upload <= left:
            chosen[number], left = "DFGB", left - layer.upload
    return tuple(chosen)


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
class KeptGradients:
    """What one reserve factor takes."""

    reserve_factor: float
    kept_bytes: int
    """Gradients that stay on the GPU until they are downloaded."""
    added_seconds: float
    """What the gradients that are written straight into host memory add to backward."""


class GradientFront:
    """The best gradients to keep for any amount of the GPU's memory."""

    def __init__(self, gradients: Sequence[OffloadedGradient]) -> None:
        self.total_bytes = sum(each.num_bytes for each in gradients)
        self._least_seconds = sum(each.backward for each in gradients)
        self._most_seconds = sum(each.direct_backward for each in gradients)
        steps: list[_Step] = [(0, 0.0)]
        most = max(_LEAST_STEPS, min(_MOST_STEPS, _MOST_WORK // max(1, len(gradients))))
        for each in gradients:
            saved = each.direct_backward - each.backward
            if saved > 0.0:
                more: list[_Step] = [(kept + each.num_bytes, gain + saved) for kept, gain in steps]
                steps = _thinned(list(_steps(steps, more)), self.total_bytes, most)
        self._steps = steps

    def kept(self, reserve: float) -> KeptGradients:
        """What is kept with at most this share of all bytes on the GPU [S_req], from 0 to 1."""
        place = bisect_right(self._steps, int(reserve * self.total_bytes), key=lambda step: step[0])
        kept_bytes, gain = self._steps[place - 1]
        added_seconds = max(0.0, self._most_seconds - gain - self._least_seconds)
        return KeptGradients(reserve_factor=reserve, kept_bytes=kept_bytes, added_seconds=added_seconds)


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
