"""MemFerry's own planner, as its paper prints it: Algorithm 1 and the backward greedy (section IV-B). Pure.

It is what `papers/memferry_search.py` is compared with, and where that begins. As printed, Algorithm 1 has errors:

1. `backtrack` returns the whole time so far and `update` adds it to the whole time so far. The times are then only
   compared with each other, but `update` adds the overlap that is left to the overlap before it was used, so T_res is
   too large from then on, and later layers wait where the plan has them compute.
2. It turns layers to DHA that have this mode already, and counts their gain again.
3. The comparison uses the time before the first change for every further change, but the overlap after it.
4. A layer that `backtrack` turns to DHA itself is set to GFGB when it returns.

Invariant: nothing is mended here. Where no layer was hidden yet (tag is -1), there is nothing to go back to.
"""

from __future__ import annotations

from collections.abc import Sequence

from ratel_cli.papers.memferry_timeline import DirectLayer, timeline
from ratel_cli.planning.profile.placement import AccessMode


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
