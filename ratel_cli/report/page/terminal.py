"""The report in a terminal: the curves of the page, as characters.

The plotting library is imported inside the function that draws: 0.15 s.

Invariant: no line is longer than the terminal is wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from math import isfinite

from ratel_cli.report.page.run_report import (
    LEAST_SHARE,
    RunReport,
    busy_shares,
    key_figures,
    state_notes,
    state_words,
)
from ratel_cli.report.page.series import binned, scale_of, step_ticks, ticks
from ratel_cli.report.page.step_curves import evaluations, step_curves
from ratel_cli.report.words.plan import RESOURCE_NAMES, aligned, share_words
from ratel_cli.training.metrics import StepMetrics
from ratel_cli.units import format_number

_ROWS = 14
_WIDEST = 110
_NARROWEST = 40


def report_lines(report: RunReport, *, width: int) -> list[str]:
    """All lines of the report, at most `width` columns wide."""
    width = max(_NARROWEST, min(width, _WIDEST))
    lines = [report.name, state_words(report), *(f"note: {note}" for note in state_notes(report)), ""]
    figures = [(each.name, each.value, each.context) for each in key_figures(report)]
    lines += aligned(figures) if figures else []
    steps = report.steps
    if steps:
        numbers, evaluated = [each.step for each in steps], evaluations(steps)
        name = "loss; X: evaluation" if evaluated else "loss"
        lines += _plot(name, numbers, [each.loss for each in steps], width, dots=evaluated)
        for curve in step_curves(steps):
            name = f"{curve.caption}; +: {curve.shape.second_name}" if curve.second else curve.caption
            second = list(zip(numbers, curve.second, strict=False))
            lines += _plot(name, numbers, curve.values, width, dots=second, marker="+")
        lines += _shares(report.typical_steps, width)
    return [line[:width].rstrip() for line in lines]


def _plot(
    name: str,
    steps: Sequence[int],
    values: Sequence[float],
    width: int,
    *,
    dots: Sequence[tuple[int, float]],
    marker: str = "X",
) -> list[str]:
    """The lines of one plot over the steps, none without two points. `dots` are further values of some steps."""
    bins = [each for each in binned(steps, values, most=2 * width) if isfinite(each.mean)]
    if len(bins) < 2:
        return []
    figure = import_module("plotext").figure
    figure.clear()
    figure.plot_size(width, _ROWS)
    curve = figure.signal([each.x for each in bins], [each.mean for each in bins], marker="braille")
    curve.lines()
    figure.draw(curve)
    # As many as there are columns for, each the mean of as many steps.
    further = [
        each
        for each in binned([step for step, _ in dots], [value for _, value in dots], most=width // 2)
        if isfinite(each.mean)
    ]
    if further:
        figure.draw(figure.signal([each.x for each in further], [each.mean for each in further], marker=marker))
    scale = scale_of([each.mean for each in (*bins, *further)])
    levels = ticks(scale, most=5)
    numbers = step_ticks(steps[0], steps[-1], most=max(2, width // 14))
    figure.ruler("x").lim(steps[0], steps[-1])
    figure.ruler("y").lim(scale.low, scale.high)
    figure.ruler("x").ticks(numbers, list(map(str, numbers)))
    figure.ruler("y").ticks(levels, [f"{format_number(level):>7}" for level in levels])
    size = bins[0].num_values
    text: str = figure.build().string(colorless=True)
    mean = f", mean of {size} steps" if size > 1 else ""
    return ["", f"{name}, by step{mean}", *(line.rstrip() for line in text.splitlines() if line.strip())]


def _shares(steps: Sequence[StepMetrics], width: int) -> list[str]:
    """A bar for each resource: the share of the time that it was busy, and in words how much it stalled the steps."""
    rows = busy_shares(steps)
    longest = max((len(RESOURCE_NAMES[resource]) for resource, _, _ in rows), default=0)
    bar_width = max(10, min(40, width - longest - 28))
    lines = ["", "busy, as a share of the steps; resources overlap"]
    for resource, busy, stalled in rows:
        filled = round(min(busy, 1.0) * bar_width)
        words = f"{share_words(busy):>5}" + (f", stalled {share_words(stalled)}" if stalled > LEAST_SHARE else "")
        lines.append(f"{RESOURCE_NAMES[resource]:<{longest}}  {'#' * filled}{'.' * (bar_width - filled)} {words}")
    return lines
