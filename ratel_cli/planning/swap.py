"""Which operators' outputs to swap: the prefixes of all candidates, by benefit. Used by `planning.choose`. Pure.

Ratel section IV-D, Eq. 6-8 and Algorithm 1, as mended in papers.md section 2: layers' inputs are always offloaded;
what else there is is sorted by what a byte saves (measured seconds, else FLOPs), and for a prefix of that order the
step is predicted. The time is convex over prefixes, so the least is next to the least of those prefixes that
take whole runs: one candidate in all layers that are alike. Within a run the last layers come first, which are
never spilled.

Invariant: `Order.at(k + 1)` swaps what `Order.at(k)` does and one output more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ratel_cli.planning.model_profile import LayerProfile, ModelProfile, SwapCandidate

_SCANNED = 32
"""So many prefixes are tried one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One candidate in all layers of a profile."""

    candidate: SwapCandidate
    profile: int
    blocks: tuple[int, ...]
    """Of those layers, the last first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """A prefix. Numbers are of one micro-batch."""

    num_outputs: int
    num_bytes: int
    """Without layers' inputs."""
    flops: int
    """What need not be recomputed."""
    seconds: float
    """The same, where it was measured; else 0."""


class Order:
    """All candidates of a model, in the order in which they are swapped."""

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile
        runs = []
        for number, layer in enumerate(profile.profiles):
            blocks = tuple(i + 1 for i in reversed(range(len(profile.layers))) if profile.layers[i] == number)
            runs += [
                (rank, number, Run(candidate=candidate, profile=number, blocks=blocks))
                for rank, candidate in zip(_ranks(layer), layer.candidates, strict=True)
                if blocks
            ]
        self.runs = tuple(run for _, _, run in sorted(runs, key=lambda item: (-item[0], item[1])))
        self._ends = list(accumulate(len(run.blocks) for run in self.runs))

    @property
    def num_outputs(self) -> int:
        """Of one micro-batch: the length of the longest prefix."""
        return self._ends[-1] if self._ends else 0

    @cached_property
    def boundaries(self) -> tuple[int, ...]:
        """Prefixes of whole runs, the empty one first."""
        return (0, *self._ends)

    def at(self, num_outputs: int) -> Swap:
        """The prefix of so many outputs."""
        whole, rest = self._split(num_outputs)
        taken = [(run.candidate, len(run.blocks)) for run in self.runs[:whole]]
        if rest:
            taken.append((self.runs[whole].candidate, rest))
        return Swap(
            num_outputs=num_outputs,
            num_bytes=sum(candidate.num_bytes * number for candidate, number in taken),
            flops=sum(candidate.flops * number for candidate, number in taken),
            seconds=sum((candidate.seconds or 0.0) * number for candidate, number in taken),
        )

    def keys(self, num_outputs: int) -> Mapping[int, frozenset[str]]:
        """The operators that a prefix swaps, by block."""
        whole, rest = self._split(num_outputs)
        keys: dict[int, set[str]] = {}
        for position, run in enumerate(self.runs[: whole + bool(rest)]):
            for block in run.blocks[: rest if position == whole else None]:
                keys.setdefault(block, set()).add(run.candidate.key)
        return {block: frozenset(names) for block, names in keys.items()}

    def unit_bytes(self, num_outputs: int) -> list[int]:
        """For each layer, what one unit takes, its input included."""
        whole, rest = self._split(num_outputs)
        sizes = [layer.input_bytes for layer in self.profile.profiles]
        for run in self.runs[:whole]:
            sizes[run.profile] += run.candidate.num_bytes
        by_layer = [sizes[number] for number in self.profile.layers]
        for block in self.runs[whole].blocks[:rest] if rest else ():
            by_layer[block - 1] += self.runs[whole].candidate.num_bytes
        return by_layer

    def reaching(self, num_bytes: int) -> int:
        """The shortest prefix that swaps so many bytes of one micro-batch; all of them if there are fewer."""
        low, high = 0, self.num_outputs
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.at(middle).num_bytes >= num_bytes else (middle + 1, high)
        return low

    def least(self, seconds: Callable[[int], float]) -> int:
        """The prefix with the least time, the shortest among equals. Times are infinite where there is no room."""
        best = min(self.boundaries, key=seconds)
        place = self.boundaries.index(best)
        low = self.boundaries[max(0, place - 1)]
        high = self.boundaries[min(len(self.boundaries) - 1, place + 1)]
        # Coarsely first where there are many layers. Units are spilled whole, so that the time is convex but for
        # one unit: of so many layers, next to nothing.
        while high - low > _SCANNED:
            stride = (high - low) // 8
            best = min((*range(low, high, stride), high), key=seconds)
            low, high = max(low, best - stride), min(high, best + stride)
        return min(range(low, high + 1), key=seconds)

    def _split(self, num_outputs: int) -> tuple[int, int]:
        """Whole runs, and outputs of the next one."""
        assert 0 <= num_outputs <= self.num_outputs
        whole = bisect_right(self._ends, num_outputs)
        return whole, num_outputs - (self._ends[whole - 1] if whole else 0)


def _ranks(layer: LayerProfile) -> list[float]:
    """What a byte of each candidate saves, never more than one before it: a layer's candidates stay in their order."""
    benefits = [
        (candidate.flops if candidate.seconds is None else candidate.seconds) / max(1, candidate.num_bytes)
        for candidate in layer.candidates
    ]
    return list(accumulate(benefits, min))
