"""Which tensors of a unit go up first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ratel_cli.planning.profile.placement import tensors_ahead


@pytest.mark.parametrize(
    ("most_bytes", "taken", "wanted"),
    [
        (0, (), []),
        (2, (), []),
        (3, (), [0]),
        (4, (), [0]),
        (9, (), [2]),
        (12, (), [2, 0]),
        (15, (), [2, 1]),
        (18, (), [2, 1, 0]),
        (1 << 40, (), [2, 1, 0]),
        (15, (2, 0), []),
        (18, (2, 0), [1]),
        (1, (2,), []),
    ],
)
def test_the_largest_tensors_that_fit_go_up_first(most_bytes: int, taken: Sequence[int], wanted: list[int]) -> None:
    assert tensors_ahead([3, 6, 9], most_bytes, taken=taken) == wanted


def test_tensors_of_one_size_go_up_in_their_order() -> None:
    assert tensors_ahead([2, 2, 2], 4) == [0, 1]
