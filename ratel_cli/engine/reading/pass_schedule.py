"""The order of forwards and backwards of a step, as a pipeline's schedule gives it (SSDTrain, section III-A). Pure.

A hint: it says which backward comes next, so that what it needs can be read before it begins. Where the order turns out
to be another one, backward takes longer, and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from ratel_cli.errors import BadInput

PassUnit = tuple[Literal["forward", "backward"], int]
"""One forward or one backward, and the number of its micro-batch."""


class PassSchedule:
    """The units of one step, again and again, and the one that runs now."""

    def __init__(self, units: Sequence[PassUnit]) -> None:
        """Raises BadInput unless each number has one forward and then one backward."""
        self._units = check_schedule(units)
        self._position = -1

    def begin_forward(self) -> int:
        """The number of the forward that begins: the next one of the schedule."""
        self._position = self._next(lambda unit: unit[0] == "forward")
        return self._units[self._position][1]

    def begin_backward(self, number: int) -> None:
        """The backward of a forward begins, or continues."""
        unit: PassUnit = ("backward", number)
        if self._units[self._position] != unit:
            self._position = self._next(lambda each: each == unit)

    @property
    def next_backward(self) -> int | None:
        """The number of the backward that is the next unit; None if a forward is, or if the step has ended."""
        after = self._units[self._position + 1 :]
        return after[0][1] if after and after[0][0] == "backward" else None

    def _next(self, holds: Callable[[PassUnit], bool]) -> int:
        """The first unit after this one, in this step or the next, for which `holds` is true; there is one."""
        number = len(self._units)
        places = ((self._position + step) % number for step in range(1, number + 1))
        return next(place for place in places if holds(self._units[place]))


def check_schedule(units: Sequence[PassUnit]) -> tuple[PassUnit, ...]:
    """The units, if each number has one forward and then one backward. Raises BadInput."""
    found = tuple((kind, number) for kind, number in units)
    forwards = [number for kind, number in found if kind == "forward"]
    backwards = [number for kind, number in found if kind == "backward"]
    is_known = len(forwards) + len(backwards) == len(found)
    is_once = len(set(forwards)) == len(forwards) and sorted(forwards) == sorted(backwards)
    is_first = is_once and all(found.index(("forward", each)) < found.index(("backward", each)) for each in forwards)
    if not found or not is_known or not is_first:
        raise BadInput(
            "schedule: each micro-batch needs one ('forward', number) and, after it, one ('backward', number)",
            "such as [('forward', 0), ('forward', 1), ('backward', 0), ('backward', 1)]",
        )
    return found
