"""The order of forwards and backwards: which backward comes next, in any schedule that a pipeline has."""

from __future__ import annotations

import pytest

from ratel_cli.engine.reading.pass_schedule import PassSchedule, PassUnit
from ratel_cli.errors import BadInput

INTERLEAVED: list[PassUnit] = [
    ("forward", 0), ("forward", 1), ("forward", 2), ("backward", 0), ("forward", 3), ("backward", 1),
    ("backward", 2), ("backward", 3),
]  # fmt: skip
"""One forward, one backward, as a pipeline's first stage of three has it."""


@pytest.mark.parametrize(
    "units",
    [
        INTERLEAVED,
        [("forward", 7), ("backward", 7)],
        [("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)],
        [("forward", 1), ("backward", 1), ("forward", 0), ("backward", 0)],
    ],
)
def test_it_follows_steps_that_repeat(units: list[PassUnit]) -> None:
    schedule = PassSchedule(units)
    for _ in range(3):
        for position, (kind, number) in enumerate(units):
            if kind == "forward":
                assert schedule.begin_forward() == number
            else:
                schedule.begin_backward(number)
                schedule.begin_backward(number)  # as often as backward asks for a tensor
            following = units[position + 1] if position + 1 < len(units) else ("forward", -1)
            assert schedule.next_backward == (following[1] if following[0] == "backward" else None)


def test_another_order_is_followed_as_well_as_may_be() -> None:
    schedule = PassSchedule(INTERLEAVED)
    schedule.begin_forward()
    schedule.begin_backward(0)
    assert schedule.next_backward is None  # the forward of 3
    assert schedule.begin_forward() == 3
    assert schedule.next_backward == 1


@pytest.mark.parametrize(
    "units",
    [
        [],
        [("forward", 0)],
        [("backward", 0), ("forward", 0)],
        [("forward", 0), ("backward", 0), ("backward", 0)],
        [("forward", 0), ("forward", 0), ("backward", 0), ("backward", 0)],
        [("forward", 0), ("backward", 1)],
        [("forward", 0), ("sideways", 0), ("backward", 0)],
    ],
)
def test_what_is_no_schedule(units: list[PassUnit]) -> None:
    with pytest.raises(BadInput, match="each micro-batch needs one"):
        PassSchedule(units)
