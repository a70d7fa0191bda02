"""Three tiers of tests: what runs in `make test`, what waits for `make check`, and what waits for `make nightly`.

The short tier has what takes little more than a second, and of each promise that takes longer one test. A case marked
`full` runs in the full tier only, one marked `nightly` in the nightly tier only; every other case runs in the short
tier. The functions here make the cases of a test and mark those that the short tier leaves out, so that one list
serves all tiers. A test of Hypothesis runs in the short and the full tier: the short one draws at most 12 examples,
the full one as many as the test asks for.

Products of many axes wait for the night. The full tier has a part of them in which any two values of any two axes meet.

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


def sample(cases: Iterable[object], *, every: int, offset: int = 0, full_every: int = 1) -> list[ParameterSet]:
    """One parameter's values. The short tier runs every `every`th, beginning with number `offset`; the full tier every
    `full_every`th of all."""
    return [
        _case((case,), is_short=number % every == offset % every, is_nightly=number % full_every != 0)
        for number, case in enumerate(cases)
    ]


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
    *axes: Sequence[object], every: int = 1, offset: int = 0, full_every: int = 1, full_pairs: bool = False
) -> list[ParameterSet]:
    """The product of all axes. The short tier runs every `every`th value of the first axis, each once, and rotates
    through the combinations of the others, beginning with number `offset`.

    The full tier runs every `full_every`th case; with `full_pairs` those in which any two values of any two axes meet.
    """
    first, *others = axes
    combinations = list(itertools.product(*others))
    pairs = _pairwise(axes) if full_pairs else None
    cases = [
        (place, number, (value, *combination))
        for place, value in enumerate(first)
        for number, combination in enumerate(combinations)
    ]
    return [
        _case(
            case,
            is_short=place % every == 0 and (place // every + offset) % len(combinations) == number,
            is_nightly=which % full_every != 0 if pairs is None else which not in pairs,
        )
        for which, (place, number, case) in enumerate(cases)
    ]


def pairwise(*axes: Sequence[object]) -> list[ParameterSet]:
    """The product of all axes. The short tier runs a part of it in which any two values of any two axes meet."""
    chosen = _pairwise(axes)
    return [_case(case, is_short=number in chosen) for number, case in enumerate(itertools.product(*axes))]


def _pairwise(axes: Sequence[Sequence[object]]) -> set[int]:
    """Which cases of the product make up a part in which any two values of any two axes meet."""
    pairs = [_pairs(case) for case in itertools.product(*(range(len(axis)) for axis in axes))]
    missing = set().union(*pairs)
    chosen = set()
    while missing:
        best = max(range(len(pairs)), key=lambda number: len(pairs[number] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen


def _pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(case), 2))


def _case(values: tuple[object, ...], *, is_short: bool, is_nightly: bool = False) -> ParameterSet:
    left_out = pytest.mark.nightly if is_nightly else pytest.mark.full
    return pytest.param(*values, marks=() if is_short else left_out)
