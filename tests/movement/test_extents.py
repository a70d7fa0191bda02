"""Striping: every logical byte has one place, every place one byte, whatever the sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratel_cli.movement.extents import FileRange, StripeMap

STRIPES = st.builds(StripeMap, st.integers(1, 4), st.integers(1, 9), st.integers(0, 3))


def place_of(stripes: StripeMap, address: int) -> tuple[int, int]:
    """The oracle: one byte, by counting stripes one at a time."""
    filled = [0] * stripes.num_files
    file_index = 0
    while address >= stripes.stripe_bytes:
        filled[file_index] += stripes.stripe_bytes
        address -= stripes.stripe_bytes
        file_index = (file_index + 1) % stripes.num_files
    return file_index, stripes.header_bytes + filled[file_index] + address


def expand(ranges: tuple[FileRange, ...]) -> list[tuple[int, int]]:
    return [(part.file_index, part.offset + i) for part in ranges for i in range(part.num_bytes)]


@given(STRIPES, st.integers(0, 60), st.integers(0, 60))
def test_pieces_cover_each_byte_in_order(stripes: StripeMap, offset: int, num_bytes: int) -> None:
    assert expand(stripes.pieces(offset, num_bytes)) == [
        place_of(stripes, address) for address in range(offset, offset + num_bytes)
    ]


@given(STRIPES, st.integers(0, 80))
def test_file_sizes_hold_exactly_the_bytes(stripes: StripeMap, logical_bytes: int) -> None:
    places = expand(stripes.pieces(0, logical_bytes))
    assert len(set(places)) == logical_bytes
    expected = [
        max([offset + 1 for file_index, offset in places if file_index == index], default=stripes.header_bytes)
        for index in range(stripes.num_files)
    ]
    assert stripes.file_bytes(logical_bytes) == tuple(expected)


@pytest.mark.parametrize("num_bytes", [1, 4096, 3 * 4096 + 1])
def test_one_file_is_not_cut(num_bytes: int) -> None:
    stripes = StripeMap(1, 4096, 8192)
    assert stripes.pieces(5, num_bytes) == (FileRange(file_index=0, offset=8197, num_bytes=num_bytes),)


def test_nothing_is_nowhere() -> None:
    assert StripeMap(3, 4096, 8192).pieces(4096, 0) == ()


def test_a_large_transfer_uses_every_file() -> None:
    ranges = StripeMap(3, 4096, 0).pieces(0, 6 * 4096)
    assert [part.file_index for part in ranges] == [0, 1, 2, 0, 1, 2]
