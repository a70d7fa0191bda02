"""Searches over whole numbers for functions of a known form: as few evaluations as that allows. Pure.

`planning.choose` looks for levels with them; prefixes have a search that knows their runs (planning/swap.py).
"""

from __future__ import annotations

from collections.abc import Callable

_TRIED = 16
"""Numbers around the best one that are all tried."""


def last(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The greatest number from `low` to `high` for which it holds, if it holds up to some number and not beyond.

    `low` is taken on trust.
    """
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def least(value: Callable[[int], float], low: int, high: int) -> int:
    """Where a function is least that is convex but for single steps: the last few are all tried."""
    while high - low > _TRIED:
        left = low + (high - low) // 3
        right = high - (high - low) // 3
        low, high = (low, right) if value(left) <= value(right) else (left, high)
    return min(range(low, high + 1), key=value)
