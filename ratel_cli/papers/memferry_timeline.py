"""How long a step takes when the GPU reads some weights in host memory, where they are (MemFerry, section IV-B). Pure.

Each layer has one of three modes:

    GFGB    uploaded before its forward, and kept for its backward
    DHA     read in place in forward and in backward (direct host access)
    DFGB    read in place in forward, uploaded for backward

Forward. Uploads of GFGB layers follow each other on the link from the beginning of the step. A GFGB layer computes when
its upload is over and the layer before it is. One number carries what the link is ahead by: the link time that is over
and that no layer so far has needed (the paper's T_res). Reading in place takes link time from the uploads that run next
to it (`forward_link_seconds`). The paper takes reads and uploads to be independent, which is 0 of it; two transfers in
one direction share one link, so Ratel's own numbers are the time of the bytes that are read.

Backward. Weights of DFGB layers go up in the order of backward, in the window between the end of the uploads of forward
and the first gradient, which is that of the last layer. A copy that is made while a layer is read in place does no
harm: both only read. What goes up by then is there when its layer needs it, except for the last layer, which waits.

Left out is what all plans have alike: gradients, which go the other way on the link, and the update.

Invariants: where plans are compared, they are compared by `timeline`. Waiting is the only time beside computing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ratel_cli.planning.profile.placement import AccessMode

_ROUNDING = 1e-9
"""The share by which sums in another order may differ."""


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
