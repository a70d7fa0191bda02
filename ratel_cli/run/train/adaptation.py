"""Compares the steps of a run with what was predicted for them, and plans again from what they show.

    refine   the first three typical steps, with the recorded one, give each block the median of its times; the profile
             is saved, so that the next run begins with it
    plan     when three typical steps in a row depart from the prediction by more than 15 %, in the same direction,
             there is a new plan from what they show of computing, drives and link. It is followed if it is predicted to
             be 3 % faster; otherwise the plan stays, with what is predicted for it now. One line says so

A step is typical if its update begins and ends as that of a step in the middle of a run, and if it follows one that was
clipped as it is. After each time, twice as many typical steps as before must pass until the next one.

Invariant: plans change what a step takes and never its bits; they change ever more seldom.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from ratel_cli.engine.measure.telemetry import Span
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.planning.search.plan import Plan, make_plan, predicted_again
from ratel_cli.planning.time.refined import SeenStep
from ratel_cli.run.train.planner import Planner

NUM_STEPS: Final = 3
_DEPARTURE = 0.15
_LEAST_SECONDS = 0.25
"""A departure of less than this is not worth a plan, whatever share of a step it is."""
_GAIN_OF_NEW_PLAN = 0.03
_FIRST_WAIT = 8
"""Typical steps after the first new plan until there may be another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """A new plan, or the same one predicted anew."""

    plan: Plan
    profile: ModelProfile
    is_changed: bool
    """Whether the steps that come are placed otherwise."""
    seconds: float
    """The median of the steps that departed."""
    predicted_seconds: float
    """What had been predicted for them."""


class Adaptation:
    """Follows the steps of a run under a plan from a recorded profile."""

    def __init__(self, planner: Planner, plan: Plan, profile: ModelProfile) -> None:
        self.plan = plan
        """The plan that is followed."""
        self.profile = profile
        """The profile that it was made from, or what the first steps made of it."""
        self._planner = planner
        self._is_refined = False
        self._departed: deque[SeenStep] = deque(maxlen=NUM_STEPS)
        """The last typical steps, as long as they depart in one direction."""
        self._first: list[SeenStep] = []
        self._wait, self._num_waited = _FIRST_WAIT, _FIRST_WAIT

    def refine(self, seconds: float, spans: Sequence[Span]) -> bool:
        """Take note of a typical step. True once: when the profile has become that of the first steps."""
        if self._is_refined:
            return False
        self._first.append(self._planner.seen(seconds, spans, self.profile))
        if len(self._first) < NUM_STEPS:
            return False
        _, self.profile = self._planner.refined(self.profile, self.plan, self._first)
        self._is_refined = True
        return True

    def adapt(
        self, seconds: float, spans: Sequence[Span], *, predicted_seconds: float, clipped: bool
    ) -> Adapted | None:
        """Take note of a typical step; the new plan if there is one. The caller must follow it."""
        departure = seconds - predicted_seconds
        self._num_waited += 1
        if abs(departure) < max(_LEAST_SECONDS, _DEPARTURE * predicted_seconds):
            self._departed.clear()
            return None
        if self._departed and (self._departed[-1].seconds > predicted_seconds) != (departure > 0):
            self._departed.clear()
        self._departed.append(self._planner.seen(seconds, spans, self.profile))
        if len(self._departed) < NUM_STEPS or self._num_waited < self._wait:
            return None
        steps = list(self._departed)
        self._departed.clear()
        self._num_waited, self._wait = 0, 2 * self._wait
        self._planner, self.profile = self._planner.refined(self.profile, self.plan, steps)
        now = predicted_again(self.plan, self._planner.problem(self.profile, self.plan.decisions))
        best = make_plan(self._planner.problem(self.profile, self.plan.decisions))
        is_changed = _seconds(best, clipped) < (1 - _GAIN_OF_NEW_PLAN) * _seconds(now, clipped)
        self.plan = best if is_changed else now
        return Adapted(
            plan=self.plan,
            profile=self.profile,
            is_changed=is_changed,
            seconds=median(step.seconds for step in steps),
            predicted_seconds=predicted_seconds,
        )


def _seconds(plan: Plan, clipped: bool) -> float:
    return plan.time.total if clipped or plan.unclipped_seconds is None else plan.unclipped_seconds
