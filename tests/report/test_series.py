"""Numbers fit for a plot: bins lose nothing, axes hold every value, ticks are round."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratel_cli.report.page.series import Scale, binned, scale_of, step_ticks, ticks
from ratel_cli.units import format_number

VALUES = st.floats(min_value=-1e12, max_value=1e12) | st.just(math.nan) | st.just(math.inf)


@given(st.lists(VALUES, max_size=200), st.integers(1, 40))
def test_bins_hold_every_value_once(values: list[float], most: int) -> None:
    bins = binned(range(1, len(values) + 1), values, most=most)
    assert len(bins) <= most and sum(each.num_values for each in bins) == len(values)
    start = 0
    for each in bins:
        own = [value for value in values[start : start + each.num_values] if math.isfinite(value)]
        start += each.num_values
        assert (each.low, each.high) == ((min(own), max(own)) if own else pytest.approx((math.nan,) * 2, nan_ok=True))
        slack = 1e-9 * max(map(abs, own), default=0)
        assert not own or each.low - slack <= each.mean <= each.high + slack


def test_few_values_are_bins_of_their_own() -> None:
    assert [(each.x, each.mean) for each in binned([3, 4, 9], [1.0, 2.0, 5.0], most=3)] == [(3, 1), (4, 2), (9, 5)]
    assert [(each.x, each.mean, each.num_values) for each in binned([1, 2, 3], [1.0, 3.0, 5.0], most=2)] == [
        (1.5, 2.0, 2),
        (3.0, 5.0, 1),
    ]
    assert binned([], [], most=5) == []


@given(st.lists(VALUES, max_size=20), st.booleans(), st.booleans())
def test_a_scale_holds_every_value(values: list[float], from_zero: bool, may_be_log: bool) -> None:
    scale = scale_of(values, from_zero=from_zero, may_be_log=may_be_log)
    assert scale.low < scale.high
    for value in filter(math.isfinite, values):
        assert -1e-6 <= scale.place(value) <= 1 + 1e-6
    marks = ticks(scale)
    assert 1 <= len(marks) <= 12 and marks == sorted(set(marks))
    assert all(-1e-6 <= scale.place(mark) <= 1 + 1e-6 for mark in marks)


def test_round_ticks() -> None:
    assert ticks(scale_of([0.13, 0.87])) == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert ticks(scale_of([3.0, 900.0], may_be_log=True)) == [1, 10, 100, 1000]
    assert not scale_of([3.0, 80.0], may_be_log=True).is_log and not scale_of([0.0, 80.0], may_be_log=True).is_log
    assert scale_of([5.0], from_zero=True).low == 0


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [(1, 1, [1]), (1, 2, [1, 2]), (1, 80, [20, 40, 60, 80]), (101, 4096, [1000, 2000, 3000, 4096])],
)
def test_ticks_of_steps_end_with_the_last(first: int, last: int, expected: list[int]) -> None:
    assert step_ticks(first, last) == expected


@given(st.integers(1, 10**7), st.integers(0, 10**7))
def test_ticks_of_steps_are_steps(first: int, more: int) -> None:
    found = step_ticks(first, first + more)
    assert found[-1] == first + more and found[0] >= first and len(found) <= 14


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (2e-5, "2e-5"), (1.25e-4, "1.25e-4"), (0.25, "0.25"), (1200.0, "1200"), (1.5e6, "1.5M"), (-3.0, "-3")],
)
def test_numbers_of_axes_are_short(value: float, text: str) -> None:
    assert format_number(value) == text


def test_a_logarithmic_place() -> None:
    assert Scale(low=1, high=100, is_log=True).place(10) == pytest.approx(0.5)
