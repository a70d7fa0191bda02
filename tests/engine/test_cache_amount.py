"""The amount that the tensor cache finds: by hand."""

from __future__ import annotations

import pytest

from ratel_cli.engine.cache.cache_amount import FoundAmount


def test_what_is_written_while_forward_computes() -> None:
    amount = FoundAmount()
    assert amount.most_bytes is None
    amount.find(0, [], forward_seconds=3.0)
    amount.find(500, [(1.0, 2.0)], forward_seconds=0.0)
    amount.adapt(0, 9.0, forward_seconds=1.0)
    assert amount.most_bytes is None  # not known yet
    assert amount.allows(1 << 60)
    amount.find(500, [(3.0, 4.0), (2.0, 3.5)], forward_seconds=6.0)
    assert amount.most_bytes == 1500  # 250 a second
    amount.find(500, [(0.0, 1.0)], forward_seconds=6.0)
    assert amount.most_bytes == 1500
    assert (amount.allows(1500), amount.allows(1501)) == (True, False)


def test_what_went_first_where_no_drive_says_more() -> None:
    amount = FoundAmount()
    amount.adapt(1000, 0.0, forward_seconds=1.0)
    assert amount.most_bytes == 1000
    amount.adapt(1000, 1.0, forward_seconds=1.0)
    assert amount.most_bytes == 750


@pytest.mark.parametrize(("stalled", "expected"), [(0.0, 1000), (0.03, 1000), (0.031, 750), (5.0, 750)])
def test_less_where_backward_waits(stalled: float, expected: int) -> None:
    amount = FoundAmount()
    amount.find(1000, [(0.0, 1.0)], forward_seconds=1.0)
    amount.adapt(1000, stalled, forward_seconds=1.0)
    assert amount.most_bytes == expected


def test_it_grows_again_up_to_what_was_found() -> None:
    amount = FoundAmount()
    amount.find(1000, [(0.0, 1.0)], forward_seconds=1.0)
    amount.adapt(1000, 1.0, forward_seconds=1.0)
    sizes = []
    for _ in range(160):
        amount.adapt(1000, 0.0, forward_seconds=1.0)
        sizes.append(amount.most_bytes)
    assert sizes[14:17] == [750, 787, 787]
    assert sizes[31] == 826
    assert sizes[-1] == max(size or 0 for size in sizes) == 1000
