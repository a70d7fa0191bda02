"""The short tier leaves out what it says it does, and the full tier has every case."""

from __future__ import annotations

import itertools

from _pytest.mark import ParameterSet

from tests.tiers import pairwise, rotating, sample, sample_kinds, thinned


def short(cases: list[ParameterSet]) -> list[tuple[object, ...]]:
    return [tuple(case.values) for case in cases if not case.marks]


def every(cases: list[ParameterSet]) -> list[tuple[object, ...]]:
    return [tuple(case.values) for case in cases]


def test_a_sample_is_every_seventh_case() -> None:
    cases = sample(range(20), every=7, offset=9)
    assert every(cases) == [(number,) for number in range(20)]
    assert short(cases) == [(2,), (9,), (16,)]


def test_a_sample_of_kinds_has_one_of_each() -> None:
    words = [*(f"a{number}" for number in range(7)), "b0", "c0", "c1"]
    cases = sample_kinds(words, kind=lambda word: word[0], every=3)
    assert every(cases) == [(word,) for word in words]
    assert short(cases) == [("a0",), ("a3",), ("a6",), ("b0",), ("c0",)]


def test_rotating_has_each_first_value_once_and_meets_every_combination() -> None:
    axes = range(9), "ab", (None, 0.5)
    cases = rotating(*axes, offset=1)
    assert every(cases) == list(itertools.product(*axes))
    assert [first for first, *_ in short(cases)] == list(range(9))
    assert {tuple(rest) for _, *rest in short(cases)} == set(itertools.product(*axes[1:]))
    assert short(cases)[0] == (0, "a", 0.5)
    assert short(rotating(range(7), "ab", every=3)) == [(0, "a"), (3, "b"), (6, "a")]


def test_the_full_tier_rotates_through_what_the_short_one_leaves_out() -> None:
    cases = rotating(range(9), "ab", every=3, full_rotation=True)
    full = [tuple(case.values) for case in cases if [mark.name for mark in case.marks] == ["full"]]
    assert {first for first, _ in (*short(cases), *full)} == set(range(9))
    assert len(full) <= 9 and {second for _, second in full} == {"a", "b"}
    cases = rotating(range(4), "abcd", full_rotation=True)
    full = [tuple(case.values) for case in cases if [mark.name for mark in case.marks] == ["full"]]
    assert short(cases) == list(enumerate("abcd")) and full == list(enumerate("dcba"))
    axes = range(3), "abcde", (None, 0.5), (False, True)
    full = [case for case in rotating(*axes, full_rotation=True) if [mark.name for mark in case.marks] != ["nightly"]]
    assert [{case.values[place] for case in full} for place in range(4)] == [set(axis) for axis in axes]
    assert len(full) <= 8


def test_what_is_thinned_out_waits_for_the_full_tier() -> None:
    given = rotating(range(6), "ab")
    cases = thinned(given, every=3, offset=1)
    assert every(cases) == every(given)
    assert short(cases) == [short(given)[1], short(given)[4]]
    waiting = [tuple(case.values) for case in cases if [mark.name for mark in case.marks] == ["full"]]
    left_out = [case for case in short(given) if case not in short(cases)]
    assert waiting == left_out
    cases = thinned(given, every=3, offset=1, full_every=2)
    assert every(cases) == every(given) and short(cases) == [short(given)[1], short(given)[4]]
    waiting = [tuple(case.values) for case in cases if [mark.name for mark in case.marks] == ["full"]]
    assert waiting == left_out[::2]


def test_pairwise_has_every_pair_in_few_cases() -> None:
    axes = range(7), "ab", (None, 0.5)
    cases = pairwise(*axes)
    assert every(cases) == list(itertools.product(*axes))
    chosen = short(cases)
    assert len(chosen) <= 15
    for one, other in itertools.combinations(range(3), 2):
        assert {(case[one], case[other]) for case in chosen} == set(itertools.product(axes[one], axes[other]))
