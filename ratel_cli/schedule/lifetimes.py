"""When a pass over the uses needs bytes, and when their memory is free again. Pure.

The engine issues, shares and releases by these lifetimes; the planner folds them. Each of them is moved once, so their
sum is bytes, and their largest overlap is memory, whatever threads and drives do in between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.schedule.segments import Segment
from ratel_cli.schedule.uses import Use


class _Numbered(Protocol):
    @property
    def index(self) -> int: ...


_Thing = TypeVar("_Thing", bound=_Numbered)


@dataclass(frozen=True, slots=True)
class Lifetime(Generic[_Thing]):
    """How long something stays in a memory, in positions of uses."""

    of: _Thing
    issued: int
    """When this use opens, it may begin to come; negative if that is before the first use."""
    first: int
    """The first use that needs it."""
    last: int
    """The last use that needs it. When that has closed, its memory is free."""


def weight_lifetimes(uses: Sequence[Use], *, ahead: int) -> list[Lifetime[BlockSpec]]:
    """Weights in host memory, each block's for itself, in the order in which they are read.

    They are issued `ahead` uses before the first one that binds them, and stay for another one that is issued while
    they are there. So a step reads the last layer once for both of its uses, if reads run ahead by two segments.
    """
    return _lifetimes(
        [use.segment.bound for use in uses], ahead=ahead, stays=lambda _, number_between: number_between <= ahead
    )


def upload_lifetimes(uses: Sequence[Use], *, staying: Collection[int]) -> list[Lifetime[Segment]]:
    """Weights on a GPU, in the order in which they go up: those of segments in `staying` once, those of others for each
    use. What fits into the window goes up one use ahead."""
    return _lifetimes([[use.segment] for use in uses], ahead=1, stays=lambda segment, _: segment.index in staying)


def partial_sum_lifetimes(uses: Sequence[Use]) -> list[Lifetime[BlockSpec]]:
    """Gradients of shared blocks, of which every micro-batch has its own: from the first segment of backward that binds
    the block to the last one."""
    bound = [use.segment.bound if use.stage == "backward" else () for use in uses]
    shared = [[block for block in blocks if block.has_partial_sums] for blocks in bound]
    return _lifetimes(shared, ahead=0, stays=lambda *_: True)


def overlap(taken: Iterable[tuple[int, int, int]], number: int) -> list[int]:
    """Bytes at each of `number` positions; `taken`: of each lifetime its bytes, and the first and the last position
    at which it takes them. A part outside the positions does not count."""
    changes = [0] * number
    for num_bytes, first, last in taken:
        if first <= last and last >= 0 and first < number:
            changes[max(0, first)] += num_bytes
            if last + 1 < number:
                changes[last + 1] -= num_bytes
    return list(accumulate(changes))


def _lifetimes(
    needed: Sequence[Iterable[_Thing]], *, ahead: int, stays: Callable[[_Thing, int], bool]
) -> list[Lifetime[_Thing]]:
    """`needed`: what each use needs. `stays` says if something is to stay for another use; it gets the thing, and the
    number of positions from its last use to that one."""
    first: dict[int, int] = {}
    """By what has been needed: a place in `found`, that of its newest lifetime."""
    found: list[Lifetime[_Thing]] = []
    for position, things in enumerate(needed):
        for thing in things:
            before = found[first[thing.index]] if thing.index in first else None
            if before is not None and stays(thing, position - before.last):
                found[first[thing.index]] = Lifetime(thing, before.issued, before.first, position)
            else:
                first[thing.index] = len(found)
                found.append(Lifetime(thing, position - ahead, position, position))
    return found
