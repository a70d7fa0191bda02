"""Two tiers of tests: what runs in `make test`, and what waits for `make check`.

A case that is marked `full` runs in the full tier only; every other case runs in the short tier. The functions here
make the cases of a test and mark those that the short tier leaves out, so that one list serves both tiers.
A test of Hypothesis runs in both: the short tier draws at most 12 examples, the full tier as many as the test asks for.

Invariant: every function returns all cases of the product, in its order; only the marks differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet
from hypothesis import HealthCheck, settings

Case = TypeVar("Case")
_SHORT_EXAMPLES = 12
_FULL_EXAMPLES = 100


def register_profiles() -> None:
    """Name Hypothesis's profiles, `short` and `full`. `pytest --hypothesis-profile full` chooses the other one."""
    for name, number in (("short", _SHORT_EXAMPLES), ("full", _FULL_EXAMPLES)):
        settings.register_profile(
            name,
            max_examples=number,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        )
    settings.load_profile("short")


def examples(number: int) -> settings:
    """How many examples a test of Hypothesis draws in the full tier; the short tier draws at most 12."""
    is_full = settings.get_current_profile_name() == "full"
    return settings(max_examples=number if is_full else min(number, _SHORT_EXAMPLES))


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


def rotating(*axes: Sequence[object], every: int = 1, offset: int = 0) -> list[ParameterSet]:
    """The product of all axes. The short tier runs every `every`th value of the first axis, each once, and rotates
    through the combinations of the others, beginning with number `offset`."""
    first, *others = axes
    combinations = list(itertools.product(*others))
    return [
        _case(
            (value, *combination),
            is_short=place % every == 0 and (place // every + offset) % len(combinations) == number,
        )
        for place, value in enumerate(first)
        for number, combination in enumerate(combinations)
    ]


def pairwise(*axes: Sequence[object]) -> list[ParameterSet]:
    """The product of all axes. The short tier runs a part of it in which any two values of any two axes meet."""
    product = list(itertools.product(*(range(len(axis)) for axis in axes)))
    missing = set().union(*(_pairs(case) for case in product))
    chosen = set()
    while missing:
        best = max(product, key=lambda case: len(_pairs(case) & missing))
        chosen.add(best)
        missing -= _pairs(best)
    return [
        _case(tuple(axis[place] for axis, place in zip(axes, case, strict=True)), is_short=case in chosen)
        for case in product
    ]


def _pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(case), 2))


def _case(values: tuple[object, ...], *, is_short: bool) -> ParameterSet:
    return pytest.param(*values, marks=() if is_short else pytest.mark.full)
