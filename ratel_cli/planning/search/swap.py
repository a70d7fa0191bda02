"""The swap set, the outputs of operators to swap: prefixes of all candidates, sorted by benefit. Pure.

Ratel section IV-D, Eq. 6-8 and Algorithm 1, changed as docs/planning.md says. Layers' inputs are always offloaded. The
other outputs are sorted by what a byte saves (measured seconds, else FLOPs), and the step is predicted for prefixes of
that order. The time is convex over prefixes, so the best prefix lies next to the best of those that take whole groups:
one candidate in all layers that are alike. Within a group the last layers come first, because they are never spilled.

Invariant: `SwapOrder.prefix(k + 1)` swaps what `prefix(k)` does and one output more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import TypeVar

from ratel_cli.planning.profile.activations import LargestUnit
from ratel_cli.planning.profile.model_profile import LayerProfile, ModelProfile, SwapCandidate
from ratel_cli.planning.time.wear import Cost

AnyCost = TypeVar("AnyCost", float, Cost)
_SCANNED = 32
"""Up to this many prefixes in all are tried one by one."""
_STRIDES = 8
"""Where there are more prefixes, this many are tried around the best prefix of whole groups, then around the best of
those, and so on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateGroup:
    """One candidate in all layers that share a profile."""

    candidate: SwapCandidate
    profile: int
    """The place of that profile in `ModelProfile.profiles`."""
    blocks: tuple[int, ...]
    """The blocks of those layers, the last one first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapPrefix:
    """The first `num_outputs` outputs of the order. All numbers are for one micro-batch."""

    num_outputs: int
    num_bytes: int
    """Bytes swapped, layers' inputs left out."""
    flops: int
    """FLOPs that need not be recomputed."""
    seconds: float
    """Measured seconds that need not be recomputed; 0 if nothing was measured."""


class SwapOrder:
    """All candidates of a model, in the order in which they are swapped."""

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile
        ranked = []
        for number, layer in enumerate(profile.profiles):
            blocks = tuple(i + 1 for i in reversed(range(len(profile.layers))) if profile.layers[i] == number)
            ranked += [
                (rank, number, CandidateGroup(candidate=candidate, profile=number, blocks=blocks))
                for rank, candidate in zip(_ranks(layer), layer.candidates, strict=True)
                if blocks
            ]
        self.groups = tuple(group for _, _, group in sorted(ranked, key=lambda item: (-item[0], item[1])))
        self._ends = list(accumulate(len(group.blocks) for group in self.groups))
        self.unit_bytes = cache(self._unit_bytes)
        """The size of a unit for each layer when a prefix of this length is swapped, the layer's input included. A
        search asks for the same prefix at every level, hence the cache."""
        self.largest_unit = cache(self._largest_unit)
        """What the units take at most when a prefix of this length is swapped."""

    @property
    def num_outputs(self) -> int:
        """Outputs of one micro-batch: the length of the longest prefix."""
        return self._ends[-1] if self._ends else 0

    @cached_property
    def boundaries(self) -> tuple[int, ...]:
        """Lengths of the prefixes of whole groups, the empty one first."""
        return (0, *self._ends)

    def prefix(self, num_outputs: int) -> SwapPrefix:
        """The prefix of this length."""
        whole, rest = self._split(num_outputs)
        taken = [(group.candidate, len(group.blocks)) for group in self.groups[:whole]]
        if rest:
            taken.append((self.groups[whole].candidate, rest))
        return SwapPrefix(
            num_outputs=num_outputs,
            num_bytes=sum(candidate.num_bytes * number for candidate, number in taken),
            flops=sum(candidate.flops * number for candidate, number in taken),
            seconds=sum((candidate.seconds or 0.0) * number for candidate, number in taken),
        )

    def keys(self, num_outputs: int) -> Mapping[int, frozenset[str]]:
        """The keys of the operators that a prefix swaps, by block."""
        whole, rest = self._split(num_outputs)
        keys: dict[int, set[str]] = {}
        for position, group in enumerate(self.groups[: whole + bool(rest)]):
            for block in group.blocks[: rest if position == whole else None]:
                keys.setdefault(block, set()).add(group.candidate.key)
        return {block: frozenset(names) for block, names in keys.items()}

    def swapped_in_layers(self, num_outputs: int) -> list[int]:
        """For each layer, how many of its candidates a prefix swaps, the first ones."""
        whole, rest = self._split(num_outputs)
        numbers = [0] * len(self.profile.profiles)
        for group in self.groups[:whole]:
            numbers[group.profile] += 1
        by_layer = [numbers[kind] for kind in self.profile.layers]
        for block in self.groups[whole].blocks[:rest] if rest else ():
            by_layer[block - 1] += 1
        return by_layer

    def _unit_bytes(self, num_outputs: int) -> list[int]:
        return self._by_layer(num_outputs, lambda candidate: candidate.num_bytes)

    def _largest_unit(self, num_outputs: int) -> LargestUnit:
        return LargestUnit(
            num_bytes=max(self.unit_bytes(num_outputs)),
            unsaved_bytes=max(self._by_layer(num_outputs, lambda each: each.num_bytes - each.saved_bytes)),
            unheld_bytes=max(self._by_layer(num_outputs, lambda each: each.num_bytes - each.held_bytes)),
        )

    def _by_layer(self, num_outputs: int, bytes_of: Callable[[SwapCandidate], int]) -> list[int]:
        """For each layer, the bytes of its input, and of the swapped outputs what `bytes_of` counts."""
        layers = [self.profile.profiles[kind] for kind in self.profile.layers]
        return [
            layer.input_bytes + sum(map(bytes_of, layer.candidates[:number]))
            for layer, number in zip(layers, self.swapped_in_layers(num_outputs), strict=True)
        ]

    def reaching(self, num_bytes: int) -> int:
        """The shortest prefix that swaps `num_bytes` of one micro-batch; all outputs if there are fewer bytes."""
        low, high = 0, self.num_outputs
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.prefix(middle).num_bytes >= num_bytes else (middle + 1, high)
        return low

    def least(self, cost: Callable[[int], AnyCost]) -> int:
        """The prefix with the least cost, the shortest among equals. A prefix that does not fit has infinite cost."""
        if self.num_outputs <= _SCANNED:  # with few layers, a tied gradient that leaves the GPU makes the time jump
            return min(range(self.num_outputs + 1), key=cost)
        best = min(self.boundaries, key=cost)
        place = self.boundaries.index(best)
        low: int = self.boundaries[max(0, place - 1)]
        high: int = self.boundaries[min(len(self.boundaries) - 1, place + 1)]
        # Coarsely first where there are many layers. Units are spilled whole, so that the time is convex except for
        # one unit, which is next to nothing among this many layers.
        while high - low > _STRIDES:
            stride: int = (high - low) // _STRIDES
            best = min((*range(low, high, stride), high), key=cost)
            low, high = max(low, best - stride), min(high, best + stride)
        return min(range(low, high + 1), key=cost)

    def _split(self, num_outputs: int) -> tuple[int, int]:
        """The number of whole groups in a prefix, and of outputs of the next one."""
        assert 0 <= num_outputs <= self.num_outputs
        whole = bisect_right(self._ends, num_outputs)
        return whole, num_outputs - (self._ends[whole - 1] if whole else 0)


def _ranks(layer: LayerProfile) -> list[float]:
    """What a byte of each candidate saves, at most what the one before it saves.

    So a layer's candidates stay in their order: the saving of each is counted with those before it swapped.
    """
    benefits = [
        (candidate.flops if candidate.seconds is None else candidate.seconds) / max(1, candidate.num_bytes)
        for candidate in layer.candidates
    ]
    return list(accumulate(benefits, min))
