"""What of a block's forward pass must be done again in backward, operator by operator.

`engine.replay.tape` decides with it what to run, `planning.recorded` what a swapped output saves: one function, so
that the plan counts what will happen. (Ratel section IV-D swaps or recomputes per operator.) Pure.

Storages are numbers: an operator reads some and writes some. Backwards from what autograd saved, an
operator is alive if something alive needs what it wrote.

Invariant: what is needed was run, or swapped; the values of everything else may be anything.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from typing import Protocol


class Decision(enum.Enum):
    """What the replay does with one operator."""

    EXEC = enum.auto()
    """Run it again."""
    SWAP = enum.auto()
    """Return what it returned: it was offloaded."""
    DEAD = enum.auto()
    """Return anything of that shape: the last matrix product and residual add of every layer, for a start."""


class Recorded(Protocol):
    """One operator as it ran."""

    @property
    def reads(self) -> tuple[int, ...]: ...
    @property
    def writes(self) -> tuple[int, ...]: ...
    @property
    def is_needed(self) -> bool:
        """Its result steers what runs, or is kept where no hook sees it."""
        ...

    @property
    def can_be_skipped(self) -> bool:
        """Not a view and not a mutation."""
        ...


def decide(operators: Sequence[Recorded], saved: Collection[int], swapped: Collection[int] = ()) -> list[Decision]:
    """For every operator, from the last to the first. `saved` are storages, `swapped` positions."""
    needed = set(saved)
    decisions = []
    for position in range(len(operators) - 1, -1, -1):
        operator = operators[position]
        is_alive = operator.is_needed or not needed.isdisjoint(operator.writes)
        if is_alive and operator.can_be_skipped and position in swapped:
            decisions.append(Decision.SWAP)
            continue
        if is_alive:
            needed.update(operator.reads)
        decisions.append(Decision.EXEC if is_alive or not operator.can_be_skipped else Decision.DEAD)
    decisions.reverse()
    return decisions
