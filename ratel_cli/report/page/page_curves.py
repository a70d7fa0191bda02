"""The charts of the report: curves over the steps, shares of resources, the plan's curve.

Invariant: a chart says in its caption what its axes are in, and, where a point stands for several steps, how many.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ratel_cli.planning.search.recorded_plan import RecordedPlan
from ratel_cli.report.page.charts import HALF, NARROW, WIDE, Drawn, ShareRow, chart, dots, lines_of, rule, share_rows
from ratel_cli.report.page.run_report import LEAST_SHARE, RunReport, busy_shares
from ratel_cli.report.page.series import Scale, binned, scale_of
from ratel_cli.report.page.step_curves import StepCurve, evaluations, step_curves
from ratel_cli.report.words.plan import RESOURCE_NAMES, share_words
from ratel_cli.training.metrics import StepMetrics
from ratel_cli.units import byte_unit, format_bytes, format_loss, format_seconds

_MOST_WIDE, _MOST_HALF, _MOST_NARROW = 280, 120, 90
_LOSS_HEIGHT, _HEIGHT = 250, 150


def loss_figure(report: RunReport) -> str:
    """Loss and evaluation loss over the steps, as wide as the page."""
    steps = report.steps
    evaluated = evaluations(steps)
    scale = scale_of([each.loss for each in steps] + [loss for _, loss in evaluated])
    keys = [_key("line", "training"), *([_key("second", "evaluation")] if evaluated else [])]

    def drawn(width: int, most: int) -> str:
        bins = binned([each.step for each in steps], [each.loss for each in steps], most=most)
        shapes = lines_of(bins)
        if evaluated:
            shapes += [Drawn(kind="line second", points=tuple(evaluated)), dots(evaluated, kind="dot second")]
        return chart(
            shapes,
            x=_steps_scale(steps),
            y=scale,
            width=width,
            height=_LOSS_HEIGHT,
            title="loss by step",
        )

    caption = _caption("Loss", "mean over the step's loss tokens", format_loss(steps[-1].loss), keys)
    mean = _mean_note(len(steps))
    note = f"{mean} The shade goes from their lowest to their highest." if mean else ""
    return _full_figure(
        caption, drawn(WIDE, _MOST_WIDE), drawn(NARROW, _MOST_NARROW), note=note, steps=_steps_scale(steps)
    )


def step_figures(report: RunReport) -> list[str]:
    """Small charts over the steps: rate, norm, speed, time, memory, bytes written."""
    limits = {
        "RAM": None if report.plan is None else report.plan.host_limit_bytes,
        "GPU memory": report.gpu_limit_bytes,
    }
    return [_half_figure(curve, report.steps) for curve in step_curves(report.steps, limits)]


def resource_figure(report: RunReport) -> str:
    """A row for each resource: the share of each step that it was busy, and that it stalled the step."""
    steps = report.steps
    numbers = [each.step for each in steps]
    shares = busy_shares(report.typical_steps)

    def drawn(width: int, most: int) -> str:
        rows = []
        for resource, busy, stalled in shares:
            busy_steps = [each.busy_seconds[resource] / each.step_seconds for each in steps]
            stalled_steps = [each.waited_seconds[resource] / each.step_seconds for each in steps]
            rows.append(
                ShareRow(
                    name=RESOURCE_NAMES[resource],
                    busy=tuple((each.x, min(each.mean, 1.0)) for each in binned(numbers, busy_steps, most=most)),
                    stalled=tuple((each.x, min(each.mean, 1.0)) for each in binned(numbers, stalled_steps, most=most)),
                    words=(
                        f"{share_words(busy)}{' busy' if width > NARROW else ''}",
                        f"{share_words(stalled)}{' stalled' if width > NARROW else ''}"
                        if stalled > LEAST_SHARE
                        else "",
                    ),
                )
            )
        return share_rows(rows, x=_steps_scale(steps), width=width, title="shares of each step by resource")

    keys = [_key("busy", "busy"), _key("stalled", "stalled")]
    caption = _caption("Resources", "share of each step, 0 to 100 %; they overlap", "", keys)
    note = _mean_note(len(steps))
    return _full_figure(
        caption, drawn(WIDE, _MOST_WIDE), drawn(NARROW, _MOST_NARROW), note=note, steps=_steps_scale(steps)
    )


def plan_figure(plan: RecordedPlan) -> str:
    """The plan's curve: predicted step time against bytes offloaded, with the plan's own point. Empty without one."""
    if len(plan.curve) < 2:
        return ""
    unit, size = byte_unit(plan.swappable_bytes)
    points = [(each.swapped_bytes / size, each.step_seconds) for each in plan.curve]
    on_curve = min(plan.curve, key=lambda point: abs(point.swapped_bytes - plan.swapped_bytes)).step_seconds
    chosen = (plan.swapped_bytes / size, on_curve)
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    scale = scale_of([seconds for _, seconds in (*points, chosen)])

    def drawn(width: int) -> str:
        return chart(
            [Drawn(kind="line", points=tuple(points)), dots([chosen], kind="dot second big")],
            x=Scale(low=low, high=high if high > low else low + 1),
            y=scale,
            width=width,
            height=_LOSS_HEIGHT - 40,
            title="predicted seconds per step against bytes offloaded",
            are_steps=False,
        )

    keys = [_key("second", "as planned")]
    last = f"{format_seconds(on_curve)} at {format_bytes(plan.swapped_bytes)}"
    note = ""
    if abs(on_curve - plan.step_seconds) > 0.01 * plan.step_seconds:
        note = (
            f"From when the plan was made. The steps that followed: now {format_seconds(plan.step_seconds)} predicted."
        )
    caption = _caption("Predicted step time", f"seconds, by {unit} offloaded", last, keys)
    return _full_figure(caption, drawn(WIDE), drawn(NARROW), note=note)


def _half_figure(curve: StepCurve, steps: Sequence[StepMetrics]) -> str:
    shape, numbers, x = curve.shape, [each.step for each in steps], _steps_scale(steps)
    drawn, shown, keys = lines_of(binned(numbers, curve.values, most=_MOST_HALF)), list(curve.values), []
    are_marked = 0 < sum(curve.marks) <= len(steps) // 4 and len(steps) <= _MOST_HALF
    if are_marked:
        marked = zip(numbers, curve.values, curve.marks, strict=True)
        drawn.append(dots([(number, value) for number, value, is_marked in marked if is_marked], kind="dot second"))
        keys.append(_key("second", curve.marks_words))
    if curve.second:
        points = tuple((each.x, each.mean) for each in binned(numbers, curve.second, most=_MOST_HALF))
        drawn.insert(0, Drawn(kind="line second", points=points))
        shown += curve.second
        keys.append(_key("second", shape.second_name))
    if curve.limit is not None:
        drawn.append(rule(curve.limit, (x.low, x.high), label="limit"))
        shown.append(1.12 * curve.limit)  # with space for the label
    scale = scale_of(shown, from_zero=shape.from_zero, may_be_log=shape.may_be_log)
    svg = chart(drawn, x=x, y=scale, width=HALF, height=_HEIGHT, title=f"{shape.name} by step")
    words = (curve.unit, "" if are_marked else curve.marks_words, "log scale" if scale.is_log else "")
    caption = _caption(shape.name, ", ".join(filter(None, words)), curve.last, keys)
    return f'<figure class="half steps" data-low="{x.low}" data-high="{x.high}">{caption}{svg}</figure>'


def _full_figure(caption: str, wide: str, narrow: str, *, note: str = "", steps: Scale | None = None) -> str:
    """A figure as wide as the page; `steps` is the scale of its axis, if that has steps."""
    span = "" if steps is None else f' data-low="{steps.low}" data-high="{steps.high}"'
    foot = f'<p class="note">{escape(note)}</p>' if note else ""
    both = f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'
    return f'<figure class="full"{span}>{caption}{both}{foot}</figure>'


def _caption(name: str, unit: str, last: str, keys: Sequence[str] = ()) -> str:
    return (
        f'<figcaption><b>{escape(name)}</b><span class="unit">{escape(unit)}</span>{"".join(keys)}'
        f'<span class="last">{escape(last)}</span></figcaption>'
    )


def _key(kind: str, name: str) -> str:
    return f'<span class="key"><i class="{kind}"></i>{escape(name)}</span>'


def _mean_note(count: int) -> str:
    size = -(-count // _MOST_WIDE)
    return f"Each point is the mean of {size} steps." if size > 1 else ""


def _steps_scale(steps: Sequence[StepMetrics]) -> Scale:
    """One step has half a step to its left and right."""
    first, last = steps[0].step, steps[-1].step
    return Scale(low=first, high=last) if last > first else Scale(low=first - 0.5, high=first + 0.5)
