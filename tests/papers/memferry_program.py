"""A step in MemFerry's three modes as an integer program, whose bound no plan can beat; for networks of any depth.

Three variables of each layer say which mode it has, and one says when its forward ends. The program is a little looser
than the timeline: the last layer does not wait for an upload of its own, if that fits into the window.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import pytest


class _Solved(Protocol):
    status: int
    mip_dual_bound: float


def lower_bound(net: dict[str, list[float]], *, gap: float) -> float:
    """Seconds that a step takes at least; the best step of the program takes at most `gap` more, as a share."""
    optimize = pytest.importorskip("scipy.optimize")
    number = len(net["U"])
    uploaded, direct, both, ends = (np.arange(number) + part * number for part in range(4))
    rows: list[tuple[np.ndarray[tuple[int], np.dtype[np.float64]], float, float]] = []

    def require(terms: list[tuple[int, float]], least: float, most: float = np.inf) -> None:
        row = np.zeros(4 * number)
        for column, factor in terms:
            row[column] += factor
        rows.append((row, least, most))

    for n in range(number):
        modes = (uploaded[n], direct[n], both[n])
        require([(column, 1.0) for column in modes], 1.0, 1.0)
        computing = [(uploaded[n], -net["F"][n]), (direct[n], -net["H"][n]), (both[n], -net["H"][n])]
        before = [(ends[n - 1], -1.0)] if n else []
        require([(ends[n], 1.0), *before, *computing], net["A"][n])
        all_uploads = sum(net["U"][: n + 1]) + sum(net["R"][: n + 1])
        link = [term for k in range(n + 1) for term in _link(net, k, uploaded[k], direct[k], both[k])]
        waits = net["F"][n] + net["A"][n] - all_uploads  # binds only if the layer is uploaded
        require([(ends[n], 1.0), *link, (uploaded[n], -all_uploads)], waits)
    last = number - 1
    window = [(ends[last], 1.0), (uploaded[last], net["B"][last]), (both[last], net["B"][last])]
    window.append((direct[last], net["HB"][last] - net["RB"][last]))
    link = [term for k in range(number) for term in _link(net, k, uploaded[k], direct[k], both[k])]
    require([*window, *link, *((both[k], -net["U"][k]) for k in range(number))], -net["AB"][last])
    seconds = np.zeros(4 * number)
    seconds[ends[last]] = 1.0
    seconds[uploaded] = seconds[both] = net["B"]
    seconds[direct] = net["HB"]
    matrix, least, most = (np.array(column) for column in zip(*rows, strict=True))
    solved: _Solved = optimize.milp(
        seconds,
        constraints=optimize.LinearConstraint(matrix, least, most),
        bounds=optimize.Bounds(0, np.where(np.arange(4 * number) < 3 * number, 1.0, np.inf)),
        integrality=(np.arange(4 * number) < 3 * number).astype(int),
        options={"mip_rel_gap": gap},
    )
    assert solved.status == 0
    return solved.mip_dual_bound + sum(net["AB"])


def _link(net: dict[str, list[float]], n: int, uploaded: int, direct: int, both: int) -> list[tuple[int, float]]:
    """The link time that forward takes, with a minus."""
    return [(uploaded, -net["U"][n]), (direct, -net["R"][n]), (both, -net["R"][n])]
