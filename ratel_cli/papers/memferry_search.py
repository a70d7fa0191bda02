"""The modes with which a step of MemFerry is shortest, in place of its own planner (`memferry.py`). Pure.

The search goes through the layers in the order of forward. Of the choices so far three numbers matter to what follows:
the seconds spent, those of backward included; how far the link is ahead; and the uploads for backward that still need a
window. A choice that is no better than another one in any of the three is dropped. For up to `EXACT_LAYERS` layers
nothing else is dropped, so the result is the best of all 3^L. Beyond, only some hundred choices are continued
(`_thinned`), and the plan is improved by changing the mode of one layer, or of two layers, at a time.

Invariants: a plan is never slower than uploading everything, nor than the paper's own plan: both are among those that
are compared. Among equal plans the one that uploads everything is taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import combinations

from ratel_cli.papers.memferry import (
    DirectLayer,
    DirectTime,
    after_forward,
    backward_seconds,
    fits_window,
    printed_plan,
    timeline,
    until_first_gradient,
)
from ratel_cli.planning.profile.placement import ACCESS_MODES, AccessMode

EXACT_LAYERS = 12
"""The most layers for which every choice is compared."""
_LEAST_WIDTH, _MOST_WIDTH, _MOST_CHOICES = 10, 300, 300_000
"""The fewest and the most choices that are continued from layer to layer beyond that, and the sum over all layers,
which takes some seconds."""
_LINK_WORTHS = (0.0, 0.3, 0.6, 1.0)
"""Seconds of a step that a second of the link may save."""
_MOST_STEPS = 2_000_000
"""Layers that are computed to improve a plan change by change: some seconds."""
_ROUNDING = 1e-9
"""The share of a step by which a plan must be faster than uploading everything: less is rounding."""

_Chain = tuple[AccessMode, "_Chain"] | None
"""The modes of the layers so far, the last one first."""
_State = tuple[float, float, float, _Chain]
"""Seconds spent, seconds that the link is ahead, seconds of uploads for backward, and the modes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectPlan:
    """One mode for each layer, and what the step takes with them."""

    modes: tuple[AccessMode, ...]
    time: DirectTime
    uploaded: DirectTime
    """The time if everything is uploaded."""
    is_exact: bool
    """Whether it is known that no plan is faster."""

    @property
    def gain(self) -> float:
        """The share of the time of uploading everything that the plan saves."""
        return 1 - self.time.total / self.uploaded.total if self.uploaded.total else 0.0


def plan_direct(layers: Sequence[DirectLayer], *, width: int | None = None) -> DirectPlan:
    """The fastest plan. `width`: the most choices that are continued; None compares all of them for few layers."""
    uploaded: tuple[AccessMode, ...] = tuple("GFGB" for _ in layers)
    is_exact = width is None and len(layers) <= EXACT_LAYERS
    without = timeline(layers, uploaded)
    best: tuple[AccessMode, ...] = uploaded
    best_time = without
    most = width or max(_LEAST_WIDTH, min(_MOST_WIDTH, _MOST_CHOICES // max(1, len(layers))))
    found = _searched(layers, None if is_exact else most)
    if not is_exact:
        found = [_improved(layers, modes) for modes in found]
    for modes in (printed_plan(layers), *found):
        time = timeline(layers, modes)
        if time.fits and time.total < best_time.total * (1 - _ROUNDING):
            best, best_time = modes, time
    return DirectPlan(modes=best, time=best_time, uploaded=without, is_exact=is_exact)


def _searched(layers: Sequence[DirectLayer], width: int | None) -> list[tuple[AccessMode, ...]]:
    """The best plan that the search finds; none without layers."""
    if not layers:
        return []
    states: list[_State] = [(0.0, 0.0, 0.0, None)]
    bounds = _bounds(layers)
    for layer, bound in zip(layers[:-1], bounds[1:-1], strict=True):
        states = _undominated(_next_states(layer, states))
        if width is not None and len(states) > width:
            states = _thinned(states, bound, width)
    return [_modes(chain) for chain in _finished(layers[-1], states)]


def _next_states(layer: DirectLayer, states: Iterable[_State]) -> list[_State]:
    found: list[_State] = []
    # To upload for backward only what that makes faster.
    modes: tuple[AccessMode, ...] = ACCESS_MODES if layer.backward < layer.direct_backward else ("GFGB", "DHA")
    for seconds, ahead, moved, chain in states:
        for mode in modes:
            forward, then_ahead = after_forward(layer, mode, ahead)
            spent = seconds + forward + backward_seconds(layer, mode)
            found.append((spent, then_ahead, moved + (layer.upload if mode == "DFGB" else 0.0), (mode, chain)))
    return found


def _undominated(states: list[_State]) -> list[_State]:
    """The states that are better than each other one in some number, the fastest first."""
    states.sort(key=lambda state: (state[0], -state[1], state[2]))
    found: list[_State] = []
    moved_of: list[float] = []  # rising, and so are the seconds ahead: of all states that are faster
    ahead_of: list[float] = []
    for state in states:
        _, ahead, moved, _ = state
        place = bisect_right(moved_of, moved)
        if place and ahead_of[place - 1] >= ahead:
            continue
        found.append(state)
        start = place - 1 if place and moved_of[place - 1] == moved else place
        stop = start
        while stop < len(ahead_of) and ahead_of[stop] <= ahead:
            stop += 1
        moved_of[start:stop], ahead_of[start:stop] = [moved], [ahead]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """The least that the layers from one on may take, in seconds."""

    forward: float = 0.0
    backward: float = 0.0
    link: float = 0.0

    def seconds(self, state: _State) -> float:
        """The least that a step may take with this state before them."""
        return state[0] + max(self.forward, self.link - state[1]) + self.backward

    def worth(self, state: _State, link_worth: float) -> float:
        """The least that a step may take with this state before them, where a second of the link counts as `link_worth`
        seconds of the step."""
        return self.seconds(state) - link_worth * (state[1] - state[2])


def _bounds(layers: Sequence[DirectLayer]) -> list[_Bound]:
    """Return the bound of each layer with all behind it, and one more for no layer."""
    bounds = [_Bound()]
    for layer in reversed(layers):
        behind = bounds[-1]
        bounds.append(
            _Bound(
                forward=behind.forward + min(layer.forward, layer.direct_forward) + layer.then_forward,
                backward=behind.backward + min(layer.backward, layer.direct_backward) + layer.then_backward,
                link=behind.link + min(layer.upload, layer.forward_link),
            )
        )
    return bounds[::-1]


def _thinned(states: list[_State], bound: _Bound, width: int) -> list[_State]:
    """At most `width` of the states: a third are the fastest of each cell of a grid over the seconds ahead and the
    uploads for backward; the others may lead to the shortest step, whatever a second of the link is worth."""
    most_ahead, most_moved = max(state[1] for state in states), max(state[2] for state in states)
    num_cells, cells = width**0.5, dict[tuple[int, int], _State]()
    while num_cells > 1:
        cells = {}
        for state in states:  # the fastest first
            cell = _cell(state[1], most_ahead, num_cells), _cell(state[2], most_moved, num_cells)
            cells.setdefault(cell, state)
        if len(cells) <= width // 3:
            break
        num_cells *= 0.8
    chosen = list(cells.values())
    share = (width - len(chosen)) // len(_LINK_WORTHS)
    for worth in _LINK_WORTHS:
        chosen += nsmallest(share, states, key=lambda state: bound.worth(state, worth))
    return list({id(state): state for state in chosen}.values())


def _cell(number: float, most: float, num_cells: float) -> int:
    return int(number / most * num_cells) if most > 0 else 0


def _finished(last: DirectLayer, states: Iterable[_State]) -> list[_Chain]:
    """The modes of the fastest step that ends with the last layer, if any fits into its window."""
    best: tuple[float, _Chain] | None = None
    for seconds, ahead, moved, chain in states:
        for mode in ACCESS_MODES:
            forward, then_ahead = after_forward(last, mode, ahead)
            backward, window = until_first_gradient(last, mode, then_ahead)
            total = seconds + forward + backward
            if fits_window(moved, window) and (best is None or total < best[0]):
                best = total, (mode, chain)
    return [] if best is None else [best[1]]


def _improved(layers: Sequence[DirectLayer], modes: Sequence[AccessMode]) -> tuple[AccessMode, ...]:
    """The plan after every change that makes the step faster, until there is none or it takes too long."""
    chosen, best = list(modes), timeline(layers, modes).total
    left, is_better = _MOST_STEPS // len(layers), True
    while is_better:
        is_better = False
        for change in _changes(chosen):
            if left <= 0:
                return tuple(chosen)
            left -= 1
            before = [(place, chosen[place]) for place, _ in change]
            for place, mode in change:
                chosen[place] = mode
            time = timeline(layers, chosen)
            if time.fits and time.total < best * (1 - _ROUNDING):
                best, is_better = time.total, True
            else:
                for place, mode in before:
                    chosen[place] = mode
    return tuple(chosen)


def _changes(modes: list[AccessMode]) -> Iterator[tuple[tuple[int, AccessMode], ...]]:
    """One layer in another mode, or two layers in each other's. Follows what becomes of `modes` meanwhile."""
    places = range(len(modes))
    for place in places:
        for mode in ACCESS_MODES:
            if mode != modes[place]:
                yield ((place, mode),)
    for first, second in combinations(places, 2):
        if modes[first] != modes[second]:
            yield (first, modes[second]), (second, modes[first])


def _modes(chain: _Chain) -> tuple[AccessMode, ...]:
    found: list[AccessMode] = []
    while chain is not None:
        mode, chain = chain
        found.append(mode)
    return tuple(reversed(found))
