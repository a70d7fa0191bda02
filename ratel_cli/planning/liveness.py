"""Which operators of a layer are recomputed in backward. Pure. (Ratel section IV-D decides per operator.)

The replay decides with this function what to run, and the profile counts with it what a swapped output saves. So a plan
counts what will happen.

Storages are numbers: each operator reads some and writes some. From the last operator to the first, one is alive if
something alive, or autograd, needs what it wrote.

Invariant: everything that is needed was run or fetched. The values of everything else may be anything.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass


class Decision(enum.Enum):
    """What the replay does with one operator."""

    EXEC = enum.auto()
    """Run it again."""
    SWAP = enum.auto()
    """Return its offloaded output."""
    DEAD = enum.auto()
    """Skip it: return an empty tensor of that shape. A layer's last matrix product and residual add are dead."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What decides whether one operator must run again."""

    reads: tuple[int, ...]
    """Storages that it reads."""
    writes: tuple[int, ...]
    """Storages that it writes."""
    is_needed: bool
    """Its result decides what runs, or is saved where no hook sees it, so it must run again."""
    can_be_skipped: bool
    """A replay may answer without running it: it is no view, no mutation, and not needed."""


def decide(operators: Sequence[Recorded], saved: Collection[int], swapped: Collection[int] = ()) -> list[Decision]:
    """A decision for each operator. `saved` are storages that autograd needs, `swapped` are positions of operators."""
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
