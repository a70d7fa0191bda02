"""What is folded of the ledger's rows is what counting them one by one gives."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from ratel_cli.planning.duties.placed import PlacedStep
from ratel_cli.schedule.ledger import Holding, Work, amounts, at, by_position, end_of, overlap_of, place_of
from tests.planning.draws import draw


def test_rows_that_go_into_the_next_step_are_counted_from_its_beginning() -> None:
    choice = random.Random(5)
    for cycle in (1, 2, 7):
        spans = [(first := choice.randrange(2 * cycle), first + choice.randrange(cycle)) for _ in range(50)]
        rows = [Holding("host", "weights", 0, 3, at(first), end_of(last)) for first, last in spans]
        counted = [0] * cycle
        for first, last in spans:
            for position in range(first, last + 1):
                counted[position % cycle] += 3
        assert by_position(rows, cycle)["weights"] == counted


def test_bytes_overlap_at_every_moment_of_both_ends() -> None:
    choice = random.Random(6)
    rows = [
        Holding(
            "gpu", "sums", 0, choice.randrange(9), begins := choice.randrange(99), begins + choice.randrange(-1, 40)
        )
        for _ in range(60)
    ]
    moments = sorted(choice.sample(range(140), 50))
    counted = [sum(row.num_bytes for row in rows if row.begins <= moment <= row.ends) for moment in moments]
    assert overlap_of(rows, moments) == counted


def test_work_adds_up_by_what_it_uses_and_when() -> None:
    rows = [
        Work("up", "weights", 1, 5, "forward"),
        Work("up", "sums", 2, 7, "forward", 3, is_exposed=True),
        Work("up", "sums", 2, 1, "backward"),
    ]
    assert amounts(rows) == {("up", "forward"): 26, ("up", "backward"): 1}
    assert amounts(rows, is_exposed=True) == {("up", "forward"): 21}


@pytest.mark.parametrize("seed", range(40))
def test_a_drawn_step_has_what_its_plan_says(seed: int) -> None:
    """Of a model of any kind, under a placement of which nobody says that it is good."""
    drawn = draw(seed)
    placed = PlacedStep(drawn.problem.step_of_data, drawn.placement)
    memory, spilled_segments = drawn.problem.fit(drawn.placement, drawn.offloaded)
    assert spilled_segments == 0, "there is memory for everything"
    traffic = drawn.problem.traffic(drawn.placement, drawn.offloaded)
    read = sum(amount for (what, _), amount in placed.amounts.items() if what == "read")
    written = sum(amount for (what, _), amount in placed.amounts.items() if what == "write")
    assert traffic.read_bytes == read + drawn.offloaded.read_bytes
    assert traffic.written_bytes == written + drawn.offloaded.written_bytes
    held: dict[int, int] = defaultdict(int)
    for row in placed.waiting(placed.stages):
        if row.purpose == "held":
            for position in range(place_of(row.begins)[0], place_of(row.ends)[0] + 1):
                held[position % placed.step.cycle] += row.num_bytes
    assert max(held.values(), default=0) <= memory.held_gradients
