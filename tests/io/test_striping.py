"""Striping: logical bytes and bytes of the files correspond one to one, whatever the sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratel_cli.io.striped_files import native_stripes
from ratel_cli.io.striping import MAX_WEIGHT, StripeMap, shares_for

WEIGHTS = st.lists(st.integers(1, 8), min_size=1, max_size=4).map(tuple)
STRIPES = st.builds(StripeMap, shares=WEIGHTS, stripe_bytes=st.integers(1, 9), header_bytes=st.integers(0, 3))


def place_of(stripes: StripeMap, address: int) -> tuple[int, int]:
    """The oracle: the place of one byte. Gives stripes one at a time to the file that is furthest behind its share."""
    weights, filled = stripes.shares, [0] * len(stripes.shares)
    for num_dealt in range(1, address // stripes.stripe_bytes + 2):
        behind = [num_dealt * weight - sum(weights) * count for weight, count in zip(weights, filled, strict=True)]
        file_index = behind.index(max(behind))
        filled[file_index] += 1
    file_stripe = filled[file_index] - 1
    return file_index, stripes.header_bytes + file_stripe * stripes.stripe_bytes + address % stripes.stripe_bytes


def places_of(stripes: StripeMap, address: int, num_bytes: int) -> list[tuple[int, int]]:
    ranges = native_stripes(stripes).ranges(address, num_bytes)
    return [(file_index, offset + i) for file_index, offset, length in ranges for i in range(length)]


@given(STRIPES, st.integers(0, 60), st.integers(0, 60))
def test_ranges_cover_each_byte_in_order(stripes: StripeMap, offset: int, num_bytes: int) -> None:
    assert places_of(stripes, offset, num_bytes) == [
        place_of(stripes, address) for address in range(offset, offset + num_bytes)
    ]


@given(STRIPES, st.integers(0, 80))
def test_file_sizes_hold_exactly_the_bytes(stripes: StripeMap, logical_bytes: int) -> None:
    places = places_of(stripes, 0, logical_bytes)
    assert len(set(places)) == logical_bytes
    expected = [
        max([offset + 1 for file_index, offset in places if file_index == index], default=stripes.header_bytes)
        for index in range(len(stripes.shares))
    ]
    assert stripes.file_bytes(logical_bytes) == tuple(expected)


@pytest.mark.parametrize("num_bytes", [1, 4096, 3 * 4096 + 1])
def test_one_file_is_not_cut(num_bytes: int) -> None:
    stripes = StripeMap(shares=(1,), stripe_bytes=4096, header_bytes=8192)
    assert native_stripes(stripes).ranges(5, num_bytes) == [(0, 8197, num_bytes)]


def test_no_bytes_have_no_ranges() -> None:
    for weights in ((1,), (1, 1, 1)):
        stripes = StripeMap(shares=weights, stripe_bytes=4096, header_bytes=8192)
        assert native_stripes(stripes).ranges(4096, 0) == []


def test_a_large_transfer_uses_every_file() -> None:
    assert dealt((1, 1, 1), 6) == [0, 1, 2, 0, 1, 2]


@given(st.integers(2, 5), st.integers(1, 8), st.integers(0, 99))
def test_files_with_equal_weights_take_turns(num_files: int, weight: int, stripe: int) -> None:
    stripes = StripeMap(shares=(weight,) * num_files, stripe_bytes=4096, header_bytes=8192)
    row, file_index = divmod(stripe, num_files)
    assert native_stripes(stripes).ranges(stripe * 4096 + 5, 7) == [(file_index, 8192 + row * 4096 + 5, 7)]


@pytest.mark.parametrize(
    ("weights", "files"),
    [((2, 1), [0, 1, 0]), ((1, 3), [1, 0, 1, 1]), ((5, 1, 1), [0, 0, 1, 0, 2, 0, 0]), ((2, 2), [0, 1, 0, 1])],
)
def test_a_cycle_is_spread_evenly_and_repeats(weights: tuple[int, ...], files: list[int]) -> None:
    assert dealt(weights, 3 * len(files)) == 3 * files


@given(WEIGHTS, st.integers(1, 5))
def test_whole_cycles_give_each_file_its_share(weights: tuple[int, ...], num_cycles: int) -> None:
    stripes = StripeMap(shares=weights, stripe_bytes=4096, header_bytes=8192)
    sizes = stripes.file_bytes(num_cycles * sum(weights) * 4096)
    assert sizes == tuple(8192 + num_cycles * weight * 4096 for weight in weights)


@pytest.mark.parametrize(
    ("rates", "weights"),
    [
        ([3e9], (1,)),
        ([1e9, 1e9, 1e9], (1, 1, 1)),
        ([1e9, 1.1e9, 1.05e9], (1, 1, 1)),
        ([1e9, 2e9], (1, 2)),
        ([2.01e9, 1e9], (2, 1)),
        ([3e9, 2e9, 3e9], (3, 2, 3)),
        ([7e9, 3.5e9, 1.75e9], (4, 2, 1)),
        ([1e9, 8e9], (1, 8)),
        ([1e9, 100e9], (1, 8)),
    ],
)
def test_weights_follow_the_rates(rates: list[float], weights: tuple[int, ...]) -> None:
    assert shares_for(rates) == weights


@given(st.lists(st.floats(1e8, 8e8), min_size=1, max_size=12))
def test_weights_are_small_and_never_slower_than_equal_ones(rates: list[float]) -> None:
    weights = shares_for(rates)
    assert all(1 <= weight <= MAX_WEIGHT for weight in weights)
    together = sum(weights) * min(rate / weight for rate, weight in zip(rates, weights, strict=True))
    assert together >= 0.99 * len(rates) * min(rates)


def dealt(weights: tuple[int, ...], num_stripes: int) -> list[int]:
    stripes = native_stripes(StripeMap(shares=weights, stripe_bytes=4096, header_bytes=0))
    return [stripes.ranges(stripe * 4096, 4096)[0][0] for stripe in range(num_stripes)]
