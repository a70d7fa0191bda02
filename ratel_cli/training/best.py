"""The best step of a run by its evaluations, and when they end the run.

The meaning is that of transformers (5.23): `EarlyStoppingCallback` and `Trainer._determine_best_metric`.

Invariant: all of it follows from the evaluations in their order, so a run that resumes knows what it knew before.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from ratel_cli.training.metrics import StepMetrics

MetricName = Literal["loss", "accuracy", "rewards/accuracies", "rewards/margins"]
"""What evaluations give: a field `eval_...` of a step's metrics, or a figure of answers that are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRule:
    """How evaluations are compared, and what follows."""

    metric: MetricName = "loss"
    is_greater_better: bool = False
    patience: int | None = None
    """The run ends after this many evaluations in a row without an improvement; None: it does not."""
    threshold: float = 0.0
    """An improvement must be greater than this."""
    saves_best: bool = False
    """Whether the best step is saved until a better one is."""

    def value_of(self, step: StepMetrics) -> float | None:
        """The step's metric; None if it was not evaluated."""
        match self.metric:
            case "loss":
                return step.eval_loss
            case "accuracy":
                return step.eval_accuracy
            case figure:
                return None if step.eval_preferences is None else step.eval_preferences.get(figure)

    def is_better(self, value: float, other: float) -> bool:
        """Whether one value is better than another one; NaN is not."""
        return value > other if self.is_greater_better else value < other

    def best_so_far(self, steps: Iterable[StepMetrics]) -> BestSoFar:
        """What the evaluations among these steps, in their order, lead to."""
        found = BestSoFar()
        for step in steps:
            value = self.value_of(step)
            if value is not None:
                found = found.after(self, step.step, value)
        return found

    def best_among(self, steps: Iterable[StepMetrics], saved: Collection[int]) -> BestSoFar:
        """The best of the steps that are saved. It is the result of a run that saves the best one: a better one may be
        lost, as after `ratel restore`."""
        return self.best_so_far(step for step in steps if step.step in saved)


@dataclass(frozen=True, slots=True, kw_only=True)
class BestSoFar:
    """The best evaluation, and how many there were since one improved on it."""

    step: int | None = None
    value: float | None = None
    """Value of the best step; None before the first evaluation. It is infinite after one that was not finite."""
    num_without_gain: int = 0

    def after(self, rule: BestRule, step: int, value: float) -> BestSoFar:
        """After one more evaluation. The threshold counts for the patience alone: any better step is the best one."""
        worst = -math.inf if rule.is_greater_better else math.inf
        best = worst if self.value is None else self.value
        gains = self.value is None or (rule.is_better(value, best) and abs(value - best) > rule.threshold)
        num_without_gain = 0 if gains else self.num_without_gain + 1
        if rule.is_better(value, best):
            return BestSoFar(step=step, value=value, num_without_gain=num_without_gain)
        return BestSoFar(step=self.step, value=best, num_without_gain=num_without_gain)

    def ends(self, rule: BestRule) -> bool:
        """Whether the run ends here."""
        return rule.patience is not None and self.num_without_gain >= rule.patience
