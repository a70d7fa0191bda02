"""When a step speculates that nothing will be clipped, and when it knows that something will be."""

from __future__ import annotations

import math
import random

import pytest
import torch

from ratel_cli.engine.optimizer.gradients import clip_coefficient, one_part, total_norm
from ratel_cli.engine.optimizer.speculation import Speculation
from ratel_cli.planning.search.clipping import COUNTED_ALIKE, SpeculationCosts


def steps(speculation: Speculation, *norms_of_blocks: list[float]) -> None:
    """Each list has the norms of one step's blocks, of 10 elements each."""
    for norms in norms_of_blocks:
        speculation.begin()
        for norm in norms:
            speculation.add(norm**2, 10)
        speculation.end(is_clipped=math.hypot(*norms) > 1.0)


NONE, EARLY, LATE = [0.1] * 10, [5.0] + [0.1] * 9, [0.1] * 9 + [5.0]


def test_clipping_is_certain_once_the_limit_is_passed() -> None:
    speculation = Speculation(5.0, COUNTED_ALIKE, num_elements=30)
    speculation.add(9.0, 10)
    assert not speculation.is_clipping_certain
    speculation.add(15.9, 10)
    assert not speculation.is_clipping_certain
    speculation.add(0.2, 10)
    assert speculation.is_clipping_certain
    speculation.begin()
    assert not speculation.is_clipping_certain


@pytest.mark.parametrize("square", [math.nan, -0.0, 0.0])
def test_what_is_no_number_makes_nothing_certain(square: float) -> None:
    speculation = Speculation(1.0, COUNTED_ALIKE, num_elements=10)
    speculation.add(square, 10)
    assert not speculation.is_clipping_certain


def test_what_is_certain_is_what_the_decision_finds() -> None:
    choice = random.Random(1)
    num_certain = 0
    for _ in range(2000):
        values = torch.randn(choice.randint(1, 400), generator=torch.Generator().manual_seed(choice.randint(0, 10**6)))
        norms = {str(number): float(part.norm()) for number, part in enumerate(values.split(37))}
        limit = float(values.norm()) * (1 + choice.choice([-1e-2, -1e-3, -1e-6, 0, 1e-6, 1e-3]))
        speculation = Speculation(limit, COUNTED_ALIKE, num_elements=len(values))
        for norm in norms.values():
            speculation.add(norm**2, 37)
        clip = clip_coefficient(total_norm(one_part(norms), list(norms)), limit)
        assert clip < 1 or not speculation.is_clipping_certain
        num_certain += speculation.is_clipping_certain
    assert num_certain > 200


def test_the_first_step_speculates() -> None:
    assert Speculation(1.0, COUNTED_ALIKE, num_elements=100).is_worthwhile


def test_steps_that_are_never_clipped_speculate() -> None:
    speculation = Speculation(1.0, COUNTED_ALIKE, num_elements=100)
    for _ in range(20):
        steps(speculation, NONE)
        assert speculation.is_worthwhile


def test_steps_that_are_clipped_late_do_not_speculate_until_half_are_not_clipped() -> None:
    speculation = Speculation(1.0, COUNTED_ALIKE, num_elements=100)
    steps(speculation, LATE)
    assert not speculation.is_worthwhile
    steps(speculation, *[LATE] * 20)
    assert not speculation.is_worthwhile
    steps(speculation, *[NONE] * 3)
    assert not speculation.is_worthwhile
    steps(speculation, NONE)
    assert speculation.is_worthwhile


def test_a_clipped_step_that_is_noticed_early_costs_little() -> None:
    """Of ten blocks one is lost in a clipped step, so one unclipped step pays for eight of them."""
    speculation = Speculation(1.0, COUNTED_ALIKE, num_elements=100)
    steps(speculation, NONE, *[EARLY] * 7)
    assert speculation.is_worthwhile
    steps(speculation, EARLY)
    assert not speculation.is_worthwhile


@pytest.mark.parametrize(
    ("vain_seconds", "time_per_wear", "num_unclipped"),
    [(0.0, 0.0, 0), (0.0, 0.5, 3), (0.4, 0.0, 3), (0.4, 0.5, 4), (4.0, 0.0, 7), (0.0, math.inf, 8)],
)
def test_what_is_lost_counts_by_its_time_and_its_wear(
    vain_seconds: float, time_per_wear: float, num_unclipped: int
) -> None:
    """After steps that were clipped late, so many unclipped ones are needed until speculating pays again."""
    costs = SpeculationCosts(
        deferred_seconds=3.0,
        unclipped_seconds=2.0,
        vain_seconds=vain_seconds,
        vain_wear=0.25,
        time_per_wear=time_per_wear,
    )
    speculation = Speculation(1.0, costs, num_elements=100)
    steps(speculation, *[LATE] * 8)
    number = 0
    while not speculation.is_worthwhile:
        steps(speculation, NONE)
        number += 1
    assert number == num_unclipped
