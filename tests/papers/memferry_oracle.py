"""What MemFerry's timeline and plans must give, found in other ways: a simulation, closed forms over all choices, and
the listing of Algorithm 1, line by line. A network is a dictionary of lists, one number for each layer.

The keys: `U` upload, `F` and `B` forward and backward, `H` and `HB` the same in place, `R` and `RB` the link time of
these, `A` and `AB` what comes behind a layer in forward, and before it in backward.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, product

import numpy as np
import numpy.typing as npt

GFGB, DHA, DFGB = range(3)
Network = dict[str, list[float]]
Floats = npt.NDArray[np.float64]


def random_network(draw: random.Random, num_layers: int, *, shares_link: bool) -> Network:
    """Uploads that take longer than computing at times. `shares_link`: reads in place take link time."""
    layers = []
    for _ in range(num_layers):
        upload, forward = draw.uniform(0, 10), draw.uniform(0, 6)
        then = draw.choice([0.0, 0.0, draw.uniform(0, 2)])
        if shares_link:
            read = upload * draw.choice([0.1, 1, 1, 2, 8])
            read_back = read * draw.choice([0, 1])
            direct, direct_back = max(forward, read), max(2 * forward, read_back)
        else:
            read = read_back = 0.0
            direct = forward + draw.uniform(0, draw.choice([1.5, 4])) * upload
            direct_back = 2 * forward * draw.uniform(1, 2)
        layers.append((upload, forward, 2 * forward, direct, direct_back, read, read_back, then, 2 * then))
    keys = ("U", "F", "B", "H", "HB", "R", "RB", "A", "AB")
    return {key: list(column) for key, column in zip(keys, zip(*layers, strict=True), strict=True)}


def every_total(net: Network) -> tuple[npt.NDArray[np.int8], Floats]:
    """All 3^L choices of modes `[choices, layers]`, and the seconds of a step with each; infinite if uploads for
    backward do not fit into the window.

    Forward ends with the longest path: computing alone, or link time up to an upload, and computing from it on.
    """
    arrays = {key: np.array(values) for key, values in net.items()}
    modes = np.array(list(product(range(3), repeat=len(net["U"]))), dtype=np.int8)
    is_uploaded = modes == GFGB
    computing = np.where(is_uploaded, arrays["F"], arrays["H"]) + arrays["A"]
    link = np.where(is_uploaded, arrays["U"], arrays["R"])
    from_here = np.cumsum(computing[:, ::-1], axis=1)[:, ::-1]
    paths = np.where(is_uploaded, np.cumsum(link, axis=1) + from_here, 0.0)
    forward = np.maximum(from_here[:, 0], paths.max(axis=1))
    last, begun = modes[:, -1], forward + net["AB"][-1]
    moved_first = link.sum(axis=1) + np.where(last == DFGB, net["U"][-1], 0.0)
    begun = np.where(last == DFGB, np.maximum(begun, moved_first), begun)
    first_gradient = begun + np.where(last == DHA, net["HB"][-1], net["B"][-1])
    moved = np.where(modes[:, :-1] == DFGB, arrays["U"][:-1], 0.0).sum(axis=1)
    in_place = np.where(last == DHA, net["RB"][-1], 0.0)
    fits = moved_first + in_place + moved <= first_gradient * (1 + 1e-12)
    below = np.where(modes[:, :-1] == DHA, arrays["HB"][:-1], arrays["B"][:-1]) + arrays["AB"][:-1]
    return modes, np.where(fits, first_gradient + below.sum(axis=1), np.inf)


class Simulation:
    """One step, moment by moment: what computes takes its part of the link, and uploads get the rest."""

    def __init__(self, net: Network, modes: Sequence[int]) -> None:
        numbers = range(len(modes))
        self.now = 0.0
        self.queue = [n for n in numbers if modes[n] == GFGB]
        self.queue += [n for n in reversed(numbers) if modes[n] == DFGB]
        self.left = [net["U"][n] for n in self.queue]
        self.arrived_at: dict[int, float] = {}
        for n in numbers:
            if modes[n] == GFGB:
                self._wait_for(n)
            self._compute(*((net["F"][n], 0.0) if modes[n] == GFGB else (net["H"][n], net["R"][n])))
            self._compute(net["A"][n], 0.0)
        self.forward = self.now
        self.first_gradient = 0.0
        for n in reversed(numbers):
            self._compute(net["AB"][n], 0.0)
            if modes[n] == DFGB:
                self._wait_for(n)
            self._compute(*((net["HB"][n], net["RB"][n]) if modes[n] == DHA else (net["B"][n], 0.0)))
            self.first_gradient = self.first_gradient or self.now
        self.fits = all(
            at <= self.first_gradient * (1 + 1e-12) for n, at in self.arrived_at.items() if modes[n] == DFGB
        ) and not any(self.left)

    def _compute(self, seconds: float, link_seconds: float) -> None:
        if seconds > 0:
            self._pass(seconds, 1 - link_seconds / seconds)

    def _wait_for(self, number: int) -> None:
        while number not in self.arrived_at:
            self._pass(self.left[0], 1.0)

    def _pass(self, seconds: float, rate: float) -> None:
        end = self.now + seconds
        while self.left and self.now + (self.left[0] / rate if rate > 0 else float("inf")) <= end:
            self.now += self.left.pop(0) / rate
            self.arrived_at[self.queue.pop(0)] = self.now
        if self.left:
            self.left[0] -= (end - self.now) * rate
        self.now = end


def algorithm_1(net: Network) -> list[int]:
    """The paper's listing, with the numbers of its lines. Its layers count from 1.

    Where `tag` is -1 the loop of line 20 has layer l alone.
    """
    upload, forward, direct, then = ([0.0, *net[key]] for key in ("U", "F", "H", "A"))
    number = len(upload) - 1
    plan = [GFGB] * (number + 1)
    all_time, reserved, tag = 0.0, 0.0, -1  # 1
    for layer in range(1, number + 1):  # 2
        if direct[layer] <= forward[layer] + max(upload[layer], 0):  # 3
            plan[layer] = DHA  # 4
            all_time, reserved = all_time + direct[layer], reserved + direct[layer]  # 5
        else:
            if upload[layer] < reserved:  # 7
                if tag == -1:
                    tag = layer  # 8
                all_time, reserved = all_time + forward[layer], reserved + (forward[layer] - upload[layer])  # 9
            else:  # 11, 18 to 30
                all_before, reserved_before = all_time, reserved
                base = all_before + upload[layer] + forward[layer] - reserved_before  # 19
                for i in range(tag if tag != -1 else layer, layer + 1):  # 20
                    gain = upload[i] + direct[i] - forward[i]  # 21
                    all_i = (
                        max(upload[layer] - reserved_before - gain, 0)
                        + all_before
                        + (direct[i] - forward[i] + forward[layer])
                    )  # 22, 23
                    if all_i < base:  # 24
                        plan[i], tag = DHA, i + 1  # 25
                        base, reserved_before = all_i, reserved_before + gain  # 26
                        if reserved_before >= upload[layer]:  # 27
                            break
                all_time, reserved = (
                    all_time + base,
                    reserved + (max(reserved_before - upload[layer], 0) + forward[layer]),
                )  # 30, 31, 32
            plan[layer] = GFGB  # 13
        all_time, reserved = all_time + then[layer], reserved + then[layer]  # 15
    return plan[1:]


def knapsack(sizes: Sequence[int], gains: Sequence[float], limit: int) -> float:
    """The most that any subset within the limit gains."""
    places = range(len(sizes))
    subsets = (subset for count in range(len(sizes) + 1) for subset in combinations(places, count))
    return max(sum(gains[n] for n in each) for each in subsets if sum(sizes[n] for n in each) <= limit)
