"""The search among the splits of a step, by itself and on small models."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given

from ratel_cli.planning.profile.placement import Workload
from ratel_cli.planning.search.split import SplitRate, best_split, divisors, splits
from tests.planning.shapes import SEEDS
from tests.tiers import examples


def step_of(rows: int) -> Workload:
    return Workload(micro_batch_size=rows, num_micro_batches=1, sequence_len=8)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 16, 17, 36, 60, 97, 1024])
def test_divisors(number: int) -> None:
    assert divisors(number) == [each for each in range(1, number + 1) if number % each == 0]


def test_all_splits_whatever_the_present_one_is() -> None:
    workload = Workload(micro_batch_size=3, num_micro_batches=4, sequence_len=8)
    found = [(each.micro_batch_size, each.num_micro_batches) for each in splits(workload)]
    assert found == [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]
    assert {each.tokens for each in splits(workload)} == {96}


@examples(60)
@given(seed=SEEDS)
def test_no_split_is_faster_by_more_than_a_percent(seed: int) -> None:
    """Rates by chance; of those as fast, the largest micro-batch; if none fits, the least shortfall."""
    choice = random.Random(seed)
    rows = choice.choice([1, 2, 7, 12, 24, 36])
    rates = {
        size: (choice.choice([100.0, 99.5, 98.0, 50.0]), choice.choice([0, 0, choice.randint(1, 99)]))
        for size in range(1, rows + 1)
        if rows % size == 0
    }

    def rate(workload: Workload) -> SplitRate:
        speed, shortfall_bytes = rates[workload.micro_batch_size]
        return SplitRate(workload=workload, tokens_per_second=speed, shortfall_bytes=shortfall_bytes)

    found = best_split(step_of(rows), rate)
    assert found == rate(found.workload)
    fitting = {size: speed for size, (speed, short) in rates.items() if not short}
    if not fitting:
        assert found.shortfall_bytes == min(short for _, short in rates.values())
        return
    fastest = max(fitting.values())
    assert found.fits
    assert found.tokens_per_second >= 0.99 * fastest
    assert found.workload.micro_batch_size == max(size for size, speed in fitting.items() if speed >= 0.99 * fastest)


def test_a_single_row_has_one_split() -> None:
    one = SplitRate(workload=step_of(1), tokens_per_second=0.0, shortfall_bytes=5)
    assert best_split(step_of(1), lambda workload: replace(one, workload=workload)) == one
