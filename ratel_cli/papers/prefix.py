"""The papers' search for the swap set. Pure.

Block inputs are always in the set. The other operators are sorted by benefit, and the step is predicted for every
prefix of that order. Any cost model that gives `Equations` can be searched.

The Ratel paper's Algorithm 1 stops at the first prefix that is slower. It also compares the size of the set with that
of the block inputs where it means the inputs themselves, and can return less than them. Here the inputs are in the set
before the search begins, every prefix is tried, and the least is taken.

Invariant: `Search.points` has one point more than there are elements (an element is one operator in one block), in
the order of bytes swapped. The time over it is convex if the equations are (Theorems 1 to 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ratel_cli.planning.search.prediction import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappableOperator:
    """An operator whose outputs may be offloaded in forward and fetched in backward, instead of running again."""

    name: str
    blocks: tuple[int, ...]
    """The blocks that have it; in a swap set, the blocks in which it is swapped."""
    num_bytes: int
    """Bytes of its output in one block; more than 0."""
    flops: int
    """FLOPs to run it again in one block."""

    @property
    def benefit(self) -> float:
        """Eq. 6: FLOPs saved per byte swapped."""
        return self.flops / self.num_bytes


class Equations(Protocol):
    """A cost model of one model on one machine."""

    @property
    def operators(self) -> Sequence[SwappableOperator]:
        """All operators, in forward order; the block inputs are not among them."""

    @property
    def inter_block_bytes(self) -> int:
        """Bytes of the block inputs, which are always swapped."""

    @property
    def available_bytes(self) -> int:
        """Main memory for activations; the rest of them is spilled to NVMe."""

    def seconds(self, *, swapped_bytes: int, spilled_bytes: int, recomputed_flops: int) -> float:
        """Predicted seconds of one step."""

    def without_states(self) -> Equations:
        """This cost model as if the model states lay on the GPU and moved nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A swap set by its size, and the step that follows from it."""

    swapped_bytes: int
    """Block inputs included."""
    spilled_bytes: int
    recomputed_flops: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Every prefix, and the least."""

    operators: tuple[SwappableOperator, ...]
    """The greatest benefit first."""
    points: tuple[Point, ...]
    """After 0, 1, 2, ... elements."""

    def least(self, *, limit_bytes: int | None = None) -> int:
        """How many elements to swap, the fewest among equals; at most `limit_bytes`, or the block inputs alone."""
        allowed = [
            count
            for count, point in enumerate(self.points)
            if not count or limit_bytes is None or point.swapped_bytes <= limit_bytes
        ]
        return min(allowed, key=lambda count: self.points[count].seconds)

    def swapped(self, count: int) -> tuple[SwappableOperator, ...]:
        """The first `count` elements, as operators with the blocks in which they are swapped."""
        taken = []
        for operator in self.operators:
            blocks = operator.blocks[:count]
            count -= len(blocks)
            if blocks:
                taken.append(replace(operator, blocks=blocks))
        return tuple(taken)

    @property
    def case(self) -> Case:
        """The case of the least prefix. Outputs that cost no FLOPs never help, so that case 2 recomputes nothing."""
        count = self.least()
        if not count:
            return 1
        return 3 if self.points[count].recomputed_flops else 2


def search(equations: Equations, *, available_bytes: int | None = None) -> Search:
    """Evaluate every prefix, with `available_bytes` of main memory if given, else with the equations' own."""
    operators = tuple(sorted(equations.operators, key=lambda operator: -operator.benefit))
    if available_bytes is None:
        available_bytes = equations.available_bytes
    swapped_bytes = equations.inter_block_bytes
    recomputed_flops = sum(operator.flops * len(operator.blocks) for operator in operators)
    points = [evaluate(equations, swapped_bytes, recomputed_flops, available_bytes=available_bytes)]
    for operator in operators:
        for _ in operator.blocks:
            swapped_bytes += operator.num_bytes
            recomputed_flops -= operator.flops
            points.append(evaluate(equations, swapped_bytes, recomputed_flops, available_bytes=available_bytes))
    return Search(operators=operators, points=tuple(points))


def evaluate(equations: Equations, swapped_bytes: int, recomputed_flops: int, *, available_bytes: int) -> Point:
    """One swap set. Main memory takes `available_bytes` of it, NVMe the rest: Eq. 3, printed without the maximum."""
    spilled_bytes = max(0, swapped_bytes - available_bytes)
    return Point(
        swapped_bytes=swapped_bytes,
        spilled_bytes=spilled_bytes,
        recomputed_flops=recomputed_flops,
        seconds=equations.seconds(
            swapped_bytes=swapped_bytes, spilled_bytes=spilled_bytes, recomputed_flops=recomputed_flops
        ),
    )
