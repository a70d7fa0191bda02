"""The last steps of a run: where their time went, and when the run ends at their pace.

Invariant: the time that is left is that of the whole run, evaluations included, in whichever process it began.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from ratel_cli.training.history import RECENT_STEPS, recent_rate, recent_seconds
from ratel_cli.training.metrics import StepMetrics, StepSums

_MOST_POINTS = 512


class RecentSteps:
    """Steps as they come, with the sums over the last ones. Times are seconds of one clock."""

    def __init__(
        self,
        *,
        num_steps: int,
        step: int,
        predicted_seconds: float,
        now: float,
        earlier: Sequence[StepMetrics] = (),
    ) -> None:
        """`step`: the last one that was done before. `predicted_seconds`: of a step, until one has shown it.

        `earlier`: the last steps that were done before, which count for the speed alone.
        """
        self.num_steps = num_steps
        self.step = step
        """The last step that is done."""
        self.since = now
        """When it was done, or when the run began or resumed."""
        self.last: StepMetrics | None = None
        self.losses = LossCurve()
        self._predicted_seconds = predicted_seconds
        self._recent: deque[StepMetrics] = deque(maxlen=RECENT_STEPS)
        self._of_run = deque(earlier, maxlen=RECENT_STEPS)
        """The last steps of the whole run."""
        self._num_added = 0
        self._seconds_between = 0.0
        """Seconds between steps, in all: evaluations, mostly."""

    def add(self, metrics: StepMetrics, now: float) -> None:
        """Add the step that was done now."""
        if self._num_added == 1:
            self._recent.clear()  # the first step is a warm-up, so it counts only until there is another one
        if self._num_added:
            self._seconds_between += max(0.0, now - self.since - metrics.step_seconds)
        self._num_added += 1
        self._recent.append(metrics)
        self._of_run.append(metrics)
        self.step, self.since, self.last = metrics.step, now, metrics
        self.losses.add(metrics.loss)

    @property
    def step_seconds(self) -> float:
        """The median time of a step; what was predicted before the first one."""
        return recent_seconds(tuple(self._recent)) or self._predicted_seconds

    @property
    def tokens_per_second(self) -> float:
        """The speed of the run; 0 before its first step."""
        return recent_rate(tuple(self._of_run)) or 0.0

    @property
    def sums(self) -> StepSums:
        """Sums over the last steps of this process."""
        return StepSums(self._recent)

    def seconds_left(self, now: float) -> float:
        """Seconds until the last step of the run will be done."""
        between = self._seconds_between / max(1, self._num_added - 1)
        left = self.num_steps - self.step
        current = min(now - self.since, self.step_seconds + between)
        return max(0.0, left * (self.step_seconds + between) - current) if left else 0.0


class LossCurve:
    """The losses of any number of steps in at most 512 points: a point is the mean of as many steps as any other."""

    def __init__(self) -> None:
        self._points: list[float] = []
        self._steps_per_point = 1
        self._begun: list[float] = []
        """Losses for the next point."""

    def add(self, loss: float) -> None:
        """Add the next step's loss. One that is not finite is left out."""
        if not math.isfinite(loss):
            return
        self._begun.append(loss)
        if len(self._begun) < self._steps_per_point:
            return
        self._points.append(sum(self._begun) / len(self._begun))
        self._begun = []
        if len(self._points) == _MOST_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [(first + second) / 2 for first, second in pairs]
            self._steps_per_point *= 2

    def points(self, most: int) -> list[float]:
        """The curve in at most `most` points, each the mean of an equal part of the steps."""
        points = [*self._points, *([sum(self._begun) / len(self._begun)] if self._begun else [])]
        if len(points) <= most:
            return points
        bounds = [round(number * len(points) / most) for number in range(most + 1)]
        parts = (points[start:end] for start, end in pairwise(bounds))
        return [sum(part) / len(part) for part in parts]
