"""Of which step the snapshot of several ranks is."""

from __future__ import annotations

import pytest

from ratel_cli.run.train.open import newest_snapshot


@pytest.mark.parametrize(
    ("known", "step"),
    [
        ([(8, 6)], 8),
        ([(4, 8)], 4),  # the run went back
        ([(8, 6), (8, None)], 8),
        ([(8, 6), (6, None)], 6),
        ([(6, 4), (8, 6), (6, None)], 6),
        ([(4, 8), (4, 8)], 4),
        ([(4, 8), (8, None)], 8),
        ([(8, 6), (4, 2)], None),
    ],
)
def test_it_is_one_that_all_have(known: list[tuple[int, int | None]], step: int | None) -> None:
    assert newest_snapshot(known) == step
