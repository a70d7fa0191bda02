"""How full steps are expected to be by the lengths of some rows."""

from __future__ import annotations

import itertools

import pytest

from ratel_cli.run.inputs.filling import expected_filling


@pytest.mark.parametrize("size", [1, 2, 3])
def test_it_is_the_mean_over_all_micro_batches(size: int) -> None:
    lengths = [3, 9, 4, 4, 20]
    rows = list(itertools.product([min(each, 10) for each in lengths], repeat=size))
    filling = expected_filling(lengths, micro_batch_size=size, sequence_len=10)
    assert filling.micro_batches == 1
    assert filling.computed == pytest.approx(sum(map(max, rows)) / len(rows) / 10)
    assert filling.tokens == pytest.approx(sum(map(sum, rows)) / size / len(rows) / 10)


def test_one_length_is_all_there_is() -> None:
    full = expected_filling([10], micro_batch_size=4, sequence_len=10)
    assert (full.computed, full.tokens) == (1.0, 1.0)
