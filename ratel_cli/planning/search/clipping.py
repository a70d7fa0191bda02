"""What clipping costs, and what it is worth to update blocks before it is known whether a step is clipped. Pure.

A step that may be clipped holds its gradients until the norm of all of them is known: all updates overlap with the next
forward. To speculate is to update each block as its gradient arrives (engine/optimizer/speculation.py). A step that is
then not clipped takes the time of a run without clipping. A clipped one has written the blocks that it updated in vain,
and writes them again: that may take longer than its backward has time for, and it wears the drives.

Invariant: gains and losses are those of the same placement.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Final

from ratel_cli.planning.search.evaluation import Evaluation
from ratel_cli.planning.search.problem import Problem
from ratel_cli.planning.time.wear import TIME_PER_WEAR, WearPolicy

_TIME_PER_WEAR: Final[dict[WearPolicy, float]] = {"save": inf, "balanced": TIME_PER_WEAR, "ignore": 0.0}
_GAIN_OF_SPECULATION = 0.01
"""The share of a step's time that is worth speculating for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationCosts:
    """What speculating gains and loses in one step, predicted."""

    deferred_seconds: float
    """A step all of whose updates are deferred."""
    unclipped_seconds: float
    """A step that speculates and is not clipped."""
    vain_seconds: float
    """What a clipped step loses if all its blocks were updated in vain."""
    vain_wear: float
    """Bytes that it then writes in vain, as a share of those of a step."""
    time_per_wear: float
    """The share of time that must be gained for a share of bytes that is written in vain."""

    def is_worthwhile(self, *, num_unclipped: int, vain_shares: float) -> bool:
        """True if speculating would have paid in steps of which `num_unclipped` were not clipped.

        `vain_shares` is the sum over the clipped ones of the share of their updates that would have been in vain.
        """
        if not vain_shares:
            return True
        gained_seconds = num_unclipped * (self.deferred_seconds - self.unclipped_seconds)
        needed = self.time_per_wear * self.vain_wear * self.deferred_seconds
        return gained_seconds >= vain_shares * (self.vain_seconds + needed)


COUNTED_ALIKE: Final = SpeculationCosts(
    deferred_seconds=1.0, unclipped_seconds=0.0, vain_seconds=1.0, vain_wear=1.0, time_per_wear=0.0
)
"""Without a prediction: a wrong guess costs one wasted update, a right one saves one."""


def speculation_costs(problem: Problem, chosen: Evaluation) -> SpeculationCosts | None:
    """The costs for a placement. None if speculating gains less than 1 % of an unclipped step, or if the engine never
    does it while it holds gradients (engine/optimizer/update.py)."""
    decisions, placement = problem.decisions, chosen.placement
    is_possible = decisions.holds_gradients and not decisions.overwrites and decisions.overlap != "separate"
    if not is_possible or chosen.spilled_segments:
        return None
    eager = replace(problem, decisions=replace(decisions, holds_gradients=False))
    offloaded, num_outputs = chosen.offloaded, chosen.swap.num_outputs
    traffic = eager.traffic(placement, offloaded)
    unclipped = eager.time(placement, traffic, offloaded, num_outputs=num_outputs)
    if unclipped.total >= (1 - _GAIN_OF_SPECULATION) * chosen.time.total:
        return None
    # What was resident of a block that was updated in vain is read again.
    bare = replace(placement, resident_weights=frozenset(), resident_states=frozenset())
    redone = problem.time(bare, problem.traffic(bare, offloaded), offloaded, num_outputs=num_outputs)
    return SpeculationCosts(
        deferred_seconds=chosen.time.total,
        unclipped_seconds=unclipped.total,
        vain_seconds=max(0.0, unclipped.backward.total - chosen.time.backward.total)
        + max(0.0, redone.forward.total - chosen.time.forward.total),
        time_per_wear=_TIME_PER_WEAR[decisions.wear],
        vain_wear=problem.own.record_bytes / max(1, chosen.traffic.written_bytes),
    )
