"""What is drawn over the steps, on the page, in the terminal and in the picture of the model card.

Invariant: each curve has one value for each step, and all of them follow from the steps alone. The loss, which is drawn
larger than the others, is not among the curves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite, nan

from ratel_cli.report.words.plan import percent
from ratel_cli.training.metrics import STEP_FIGURES, Curve, Figure, StepMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCurve:
    """A figure over some steps, as it is drawn."""

    shape: Curve
    unit: str
    """The unit, and what a point is."""
    values: Sequence[float]
    """In this unit, as are the next two."""
    second: Sequence[float] = ()
    """What is drawn with it; empty if nothing of it is finite."""
    limit: float | None = None
    marks: Sequence[bool] = ()
    """For each step, whether it gets a dot; empty if none may."""
    marks_words: str = ""
    """How many steps those are."""
    last: str
    """The value of the last step, in words."""

    @property
    def caption(self) -> str:
        """The name, the unit and all else that is said above the curve."""
        return ", ".join(filter(None, (self.shape.name, self.unit, self.marks_words)))


def evaluations(steps: Sequence[StepMetrics]) -> list[tuple[int, float]]:
    """The steps whose evaluation has a loss that can be shown, and that loss."""
    return [(each.step, each.shown_eval_loss) for each in steps if each.shown_eval_loss is not None]


def step_curves(steps: Sequence[StepMetrics], limits: Mapping[str, int | None] | None = None) -> list[StepCurve]:
    """The curves of some steps, at least one, in their order. `limits`: by what a `Curve.limit` names."""
    drawn = [(each, each.curve) for each in STEP_FIGURES if each.curve is not None and each.curve.is_drawn(steps)]
    return [_drawn(figure, shape, steps, limits or {}) for figure, shape in drawn]


def _drawn(figure: Figure, shape: Curve, steps: Sequence[StepMetrics], limits: Mapping[str, int | None]) -> StepCurve:
    values = [nan if (value := figure.value(each)) is None else value for each in steps]
    if shape.adds_up:
        values = list(accumulate(values))
    limit = None if shape.limit is None else limits.get(shape.limit)
    unit, size = (shape.unit, 1) if isinstance(shape.unit, str) else shape.unit(max(limit or 0, *values))
    second = [] if shape.second is None else [shape.second(each) for each in steps]
    marks = [] if shape.marks is None else [shape.marks(each) for each in steps]
    how_many = f"{percent(sum(marks) / len(marks))} of steps" if any(marks) else "no step"
    return StepCurve(
        shape=shape,
        unit=", ".join(filter(None, (unit, shape.note))),
        values=[value / size for value in values],
        second=second if any(map(isfinite, second)) else (),
        limit=None if limit is None else limit / size,
        marks=marks,
        marks_words=f"{how_many} {shape.marks_name}" if marks else "",
        last=shape.last(values[-1]),
    )
