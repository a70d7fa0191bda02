"""Three tiers of tests: what runs in `make test`, what waits for `make check`, and what waits for `make nightly`.

The short tier has what takes little more than a second, and of each promise that takes longer one test. The full tier
has what takes longer, once; and of products of many axes each value, or any two values of any two axes. All other
cases wait for the night, and so do the many examples of Hypothesis: by day it draws at most 12.

A case marked `full` runs in the full tier only, one marked `nightly` in the nightly tier only; every other case runs in
the short tier. The functions here make the cases of a test and mark those that the short tier leaves out, so that one
list serves all tiers; `thinned` leaves to the full tier some of what they give to the short one. If a test is marked as
well, the later of both tiers has the case.

Invariant: every function returns all cases of the product, in its order; only the marks differ.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet
from hypothesis import HealthCheck, settings

Case = TypeVar("Case")
_SHORT_EXAMPLES = 12
_NIGHTLY_EXAMPLES = 100


def register_profiles() -> None:
    """Name Hypothesis's profiles, `short` and `nightly`. `pytest --hypothesis-profile nightly` chooses the second."""
    for name, number in (("short", _SHORT_EXAMPLES), ("nightly", _NIGHTLY_EXAMPLES)):
        settings.register_profile(
            name,
            max_examples=number,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        )
    settings.load_profile("short")


def examples(number: int) -> settings:
    """How many examples a test of Hypothesis draws in the nightly tier; the others draw at most 12."""
    is_nightly = settings.get_current_profile_name() == "nightly"
    return settings(max_examples=number if is_nightly else min(number, _SHORT_EXAMPLES))


def sample(cases: Iterable[object], *, every: int, offset: int = 0) -> list[ParameterSet]:
    """One parameter's values. The short tier runs every `every`th, beginning with number `offset`."""
    return [_case((case,), is_short=number % every == offset % every) for number, case in enumerate(cases)]


def sample_kinds(cases: Sequence[Case], *, kind: Callable[[Case], str], every: int) -> list[ParameterSet]:
    """One parameter's values. The short tier runs one of each kind, and of the larger kinds every `every`th."""
    places: dict[str, list[int]] = {}
    for place, case in enumerate(cases):
        places.setdefault(kind(case), []).append(place)
    chosen = set()
    for number, of_kind in enumerate(places.values()):
        chosen.update(of_kind[number % min(every, len(of_kind)) :: every])  # not of each kind the first one
    return [_case((case,), is_short=place in chosen) for place, case in enumerate(cases)]


def rotating(
    *axes: Sequence[object], every: int = 1, offset: int = 0, full_pairs: bool = False, full_rotation: bool = False
) -> list[ParameterSet]:
    """The product of all axes. The short tier runs every `every`th value of the first axis, each once, and rotates
    through the combinations of the others, beginning with number `offset`.

    With `full_pairs` the full tier runs cases in which any two values of any two axes meet; with `full_rotation`, where
    that would be nearly all of them, as few as have every value of every axis.
    """
    first, *others = axes
    combinations = list(itertools.product(*others))
    chosen = _pairwise(axes) if full_pairs else _values(axes) if full_rotation else set()
    cases = [
        (place, number, (value, *combination))
        for place, value in enumerate(first)
        for number, combination in enumerate(combinations)
    ]
    return [
        _case(
            case,
            is_short=place % every == 0 and (place // every + offset) % len(combinations) == number,
            is_full=which in chosen,
        )
        for which, (place, number, case) in enumerate(cases)
    ]


def thinned(cases: Iterable[object], *, every: int, offset: int = 0, full_every: int = 1) -> list[ParameterSet]:
    """The same cases: those of another function here, or one parameter's values. Of those that the short tier would
    run, it runs every `every`th, beginning with number `offset`. Of the others, the full tier runs every
    `full_every`th."""
    numbers, left_out, result = itertools.count(), itertools.count(), []
    for case in cases:
        given = case if isinstance(case, ParameterSet) else pytest.param(case)
        if not given.marks and next(numbers) % every != offset % every:
            tier = pytest.mark.nightly if next(left_out) % full_every else pytest.mark.full
            given = pytest.param(*given.values, marks=tier, id=given.id)
        result.append(given)
    return result


def pairwise(*axes: Sequence[object]) -> list[ParameterSet]:
    """The product of all axes. The short tier runs a part of it in which any two values of any two axes meet."""
    chosen = _pairwise(axes)
    return [_case(case, is_short=number in chosen) for number, case in enumerate(itertools.product(*axes))]


def _pairwise(axes: Sequence[Sequence[object]]) -> set[int]:
    """Which cases of the product make up a part in which any two values of any two axes meet."""
    pairs = [_pairs(case) for case in itertools.product(*(range(len(axis)) for axis in axes))]
    missing = set().union(*pairs)
    chosen = set()
    # A case never gets better: if it still has what it had, none before it in the queue and none behind it has more.
    queue = [(-len(of_case), number) for number, of_case in enumerate(pairs)]
    while missing:
        known, number = heapq.heappop(queue)
        gain = len(pairs[number] & missing)
        if gain == -known:
            chosen.add(number)
            missing -= pairs[number]
        else:
            heapq.heappush(queue, (-gain, number))
    return chosen


def _values(axes: Sequence[Sequence[object]]) -> set[int]:
    """Which cases of the product have every value of every axis. From the first axis's first value to its last, the
    others go from their last one to their first, and around again one further on."""
    chosen = set()
    for number in range(max(map(len, axes))):
        which = 0
        for place, axis in enumerate(axes):
            value = (number + place * (number // len(axis))) % len(axis)
            which = which * len(axis) + (len(axis) - 1 - value if place else value)
        chosen.add(which)
    return chosen


def _pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(case), 2))


def _case(values: tuple[object, ...], *, is_short: bool, is_full: bool = False) -> ParameterSet:
    left_out = pytest.mark.full if is_full else pytest.mark.nightly
    return pytest.param(*values, marks=() if is_short else left_out)
