"""The curves of a run as a picture: the loss, and below it what else is known of each step.

matplotlib is an extra, so it is imported inside the functions. Invariant: the same steps give the same bytes, under
the same version of matplotlib; the user's own settings of matplotlib have no influence.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING

from ratel_cli.report.page.series import binned, step_ticks
from ratel_cli.report.page.step_curves import StepCurve, evaluations, step_curves
from ratel_cli.training.history import finite_mean
from ratel_cli.training.metrics import StepMetrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_POINTS = 800
"""More steps than this are drawn as their means: a picture has no more columns."""
_LEAST_SPAN = 0.2
"""What an axis shows at least, as a share of its values."""
_SMOOTHED_SHARE = 40
"""The smooth line is a mean over this part of all steps."""
_INCHES, _DOTS_PER_INCH = (8.0, 6.6), 120
_COLUMNS = 3
_TICKS = 12
"""What the axis of the steps has at most, where it is as wide as the picture."""
_INK, _LOSS, _EVAL, _QUIET = "#333333", "#1f5fa8", "#c2410c", "#9db8d6"
_STYLE: dict[str, object] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.edgecolor": "#bbbbbb",
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
}


def can_draw_curves() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw_curves(steps: Sequence[StepMetrics], *, name: str) -> bytes:
    """The curves of some steps in their order, as a PNG file. `name`: of the run.

    Raises ImportError if matplotlib is not installed, and whatever it raises.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it reports about its font cache
    matplotlib = import_module("matplotlib")
    figure_class = import_module("matplotlib.figure").Figure
    canvas_class = import_module("matplotlib.backends.backend_agg").FigureCanvasAgg
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_STYLE}):
        figure = figure_class(figsize=_INCHES, dpi=_DOTS_PER_INCH, layout="constrained", facecolor="white")
        curves = step_curves(steps)
        num_rows = -(-len(curves) // _COLUMNS)
        figure.supxlabel("step", fontsize=9, color=_INK)
        grid = figure.add_gridspec(1 + num_rows, _COLUMNS, height_ratios=(2, *[1] * num_rows))
        _draw_loss(figure.add_subplot(grid[0, :]), steps, name)
        for number, curve in enumerate(curves):
            _draw_curve(figure.add_subplot(grid[1 + number // _COLUMNS, number % _COLUMNS]), steps, curve)
        file = BytesIO()
        canvas_class(figure).print_png(file)
    return file.getvalue()


def _draw_loss(axes: Axes, steps: Sequence[StepMetrics], name: str) -> None:
    places, losses = _points(steps, [step.loss for step in steps])
    width = len(places) // _SMOOTHED_SHARE
    if width > 1:
        axes.plot(places, losses, color=_QUIET, linewidth=0.8, label="training")
        axes.plot(places, _smoothed(losses, width), color=_LOSS, label="training, smoothed")
    else:
        axes.plot(places, losses, color=_LOSS, label="training")
    evaluated = evaluations(steps)
    if evaluated:
        axes.plot(*zip(*evaluated, strict=True), color=_EVAL, marker="o", markersize=4, label="evaluation")
    axes.set_title(f"{name}: loss", parse_math=False)
    axes.margins(x=0.01)
    axes.set_xticks(step_ticks(steps[0].step, steps[-1].step, most=_TICKS))
    if evaluated or width > 1:
        axes.legend(loc="upper right")


def _draw_curve(axes: Axes, steps: Sequence[StepMetrics], curve: StepCurve) -> None:
    if curve.second:
        axes.plot(*_points(steps, curve.second), color=_EVAL, linewidth=1.1, label=curve.shape.second_name)
    axes.plot(*_points(steps, curve.values), color=_LOSS, linewidth=1.1)
    axes.set_title(curve.caption)
    axes.margins(x=0.01)
    axes.set_xticks(step_ticks(steps[0].step, steps[-1].step, most=_TICKS // _COLUMNS))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")  # an exponent above the axis would move the title
    _widen(axes)
    if curve.second:
        axes.legend(loc="best", fontsize=7)


def _widen(axes: Axes) -> None:
    """Show at least a fifth of the values' size, so that what hardly changes looks so."""
    low, high = axes.get_ylim()
    more = (_LEAST_SPAN * max(abs(low), abs(high)) - (high - low)) / 2
    if more > 0:
        axes.set_ylim(max(0.0, low - more) if low >= 0 else low - more, high + more)


def _points(steps: Sequence[StepMetrics], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """The points of a line: steps, and values, NaN for a gap."""
    bins = binned([step.step for step in steps], values, most=_MAX_POINTS)
    return [each.x for each in bins], [each.mean for each in bins]


def _smoothed(values: Sequence[float], width: int) -> list[float]:
    """The mean of each value and those around it, `width` to each side. NaN: none of them is finite."""
    around = (values[max(0, place - width) : place + width + 1] for place in range(len(values)))
    return [math.nan if (mean := finite_mean(each)) is None else mean for each in around]
