"""The charts of the report: curves over the steps, shares of resources, the plan's curve.

Invariant: a chart says in its caption what its axes are in, and, where a point stands for several steps, how many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from math import isfinite

from ratel_cli.report.page.charts import HALF, NARROW, WIDE, Drawn, ShareRow, chart, dots, lines_of, rule, share_rows
from ratel_cli.report.page.run_report import LEAST_SHARE, RunReport, busy_shares, number, share_words
from ratel_cli.report.page.series import Scale, binned, decimal, scale_of
from ratel_cli.report.words.plan import RESOURCE_NAMES, percent
from ratel_cli.report.words.recorded_plan import RecordedPlan
from ratel_cli.training.metrics import StepMetrics
from ratel_cli.units import TRAFFIC_UNITS, byte_unit, format_bytes, format_rate_number, format_seconds, format_traffic

_MOST_WIDE, _MOST_HALF, _MOST_NARROW = 280, 120, 90
_LOSS_HEIGHT, _HEIGHT = 250, 150
Value = Callable[[StepMetrics], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curve:
    """One small chart over the steps."""

    name: str
    unit: str
    value: Value
    last: str
    """The figure in the caption."""
    second: Value | None = None
    second_name: str = ""
    limit: float | None = None
    limit_name: str = ""
    marks: Callable[[StepMetrics], bool] | None = None
    """Steps that get a dot."""
    marks_name: str = ""
    from_zero: bool = False
    may_be_log: bool = False


def loss_figure(report: RunReport) -> str:
    """Loss and evaluation loss over the steps, as wide as the page."""
    steps = report.steps
    evaluated = [(float(each.step), each.shown_eval_loss) for each in steps if each.shown_eval_loss is not None]
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

    caption = _caption("Loss", "mean over the step's loss tokens", number(steps[-1].loss), keys)
    mean = _mean_note(len(steps))
    note = f"{mean} The shade goes from their lowest to their highest." if mean else ""
    return _full_figure(
        caption, drawn(WIDE, _MOST_WIDE), drawn(NARROW, _MOST_NARROW), note=note, steps=_steps_scale(steps)
    )


def step_figures(report: RunReport) -> list[str]:
    """Small charts over the steps: rate, norm, speed, time, memory, bytes written."""
    steps, plan = report.steps, report.plan
    limit = 0 if plan is None else plan.host_limit_bytes
    unit, size = byte_unit(max(limit, *(each.host_peak_bytes for each in steps)))
    written = list(accumulate(each.nvme_written_bytes for each in steps))
    written_unit, written_size = next((each for each in TRAFFIC_UNITS if written[-1] >= each[1]), TRAFFIC_UNITS[-1])
    sums = dict(zip((each.step for each in steps), written, strict=True))
    last, num_clipped = steps[-1], sum(each.clipped for each in steps)
    clipped = f"{percent(num_clipped / len(steps))} of steps clipped" if num_clipped else "no step clipped"
    are_marked = 0 < num_clipped <= len(steps) // 4 and len(steps) <= _MOST_HALF
    curves = [
        _Curve(
            name="Learning rate",
            unit="",
            value=lambda each: each.learning_rate,
            last=decimal(last.learning_rate),
            from_zero=True,
        ),
        _Curve(
            name="Gradient norm",
            unit="" if are_marked else clipped,
            value=lambda each: each.grad_norm,
            last=number(last.grad_norm),
            marks=(lambda each: each.clipped) if are_marked else None,
            marks_name=clipped,
            from_zero=True,
            may_be_log=True,
        ),
        _Curve(
            name="Speed",
            unit="tokens/s",
            value=lambda each: each.tokens_per_second,
            last=f"last step {format_rate_number(last.tokens_per_second)}",
            from_zero=True,
        ),
        _Curve(
            name="Step time",
            unit="seconds",
            value=lambda each: each.step_seconds,
            last=f"last step {format_seconds(last.step_seconds)}",
            second=lambda each: each.predicted_seconds,
            second_name="predicted",
            from_zero=True,
        ),
        _Curve(
            name="RAM",
            unit=f"{unit}, peak so far",
            value=lambda each: each.host_peak_bytes / size,
            last=format_bytes(last.host_peak_bytes),
            limit=None if plan is None else plan.host_limit_bytes / size,
            limit_name="limit",
            from_zero=True,
        ),
        _Curve(
            name="Written",
            unit=f"{written_unit}, in all steps",
            value=lambda each: sums[each.step] / written_size,
            last=format_traffic(written[-1]),
            from_zero=True,
        ),
    ]
    if last.gpu_peak_bytes:
        curves[5:5] = _gpu_curves(report)
    curves[:0] = _preference_curves(steps)
    return [_half_figure(curve, steps) for curve in curves]


def _preference_curves(steps: Sequence[StepMetrics]) -> list[_Curve]:
    """What is known of answers that are compared; none if none are."""
    last = steps[-1]
    if last.preferences is None:
        return []
    curves = [
        _Curve(
            name="Rewards",
            unit="of better answers",
            value=lambda each: each.preference("rewards/chosen"),
            last=number(last.preference("rewards/chosen")),
            second=lambda each: each.preference("rewards/rejected"),
            second_name="of others",
        ),
        _Curve(
            name="Reward margin",
            unit="",
            value=lambda each: each.preference("rewards/margins"),
            last=number(last.preference("rewards/margins")),
        ),
    ]
    if any(isfinite(each.preference("rewards/accuracies")) for each in steps):
        curves.append(
            _Curve(
                name="Reward accuracy",
                unit="share of pairs",
                value=lambda each: each.preference("rewards/accuracies"),
                last=number(last.preference("rewards/accuracies")),
                from_zero=True,
            )
        )
    return curves


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
    points = [(num_bytes / size, seconds) for num_bytes, seconds in plan.curve]
    on_curve = min(plan.curve, key=lambda point: abs(point[0] - plan.swapped_bytes))[1]
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


def _gpu_curves(report: RunReport) -> list[_Curve]:
    """The curves of a run on a GPU: its memory, what it computes, and how long it waits."""
    last, limit = report.steps[-1], report.gpu_limit_bytes
    unit, size = byte_unit(max(limit or 0, *(each.gpu_peak_bytes for each in report.steps)))
    return [
        _Curve(
            name="GPU memory",
            unit=f"{unit}, peak so far",
            value=lambda each: each.gpu_peak_bytes / size,
            last=format_bytes(last.gpu_peak_bytes),
            limit=None if limit is None else limit / size,
            limit_name="limit",
            from_zero=True,
        ),
        _Curve(
            name="Compute",
            unit="TFLOP/s",
            value=lambda each: each.tflops_model,
            last=f"{last.tflops_model:.3g}",
            second=lambda each: each.tflops_hardware,
            second_name="with recomputation",
            from_zero=True,
        ),
        _Curve(
            name="Stalled",
            unit="% of the step",
            value=lambda each: 100 * sum(each.waited_seconds.values()) / each.step_seconds,
            last=share_words(sum(last.waited_seconds.values()) / last.step_seconds),
            from_zero=True,
        ),
    ]


def _half_figure(curve: _Curve, steps: Sequence[StepMetrics]) -> str:
    numbers, values = [each.step for each in steps], [curve.value(each) for each in steps]
    x = _steps_scale(steps)
    bins = binned(numbers, values, most=_MOST_HALF)
    drawn, shown, keys = lines_of(bins), list(values), []
    if curve.marks is not None:
        drawn.append(dots([(each.step, curve.value(each)) for each in steps if curve.marks(each)], kind="dot second"))
        keys.append(_key("second", curve.marks_name))
    if curve.second is not None:
        seconds = [curve.second(each) for each in steps]
        if any(map(isfinite, seconds)):
            points = tuple((each.x, each.mean) for each in binned(numbers, seconds, most=_MOST_HALF))
            drawn.insert(0, Drawn(kind="line second", points=points))
            shown += seconds
            keys += [_key("second", curve.second_name)]
    if curve.limit is not None:
        drawn.append(rule(curve.limit, (x.low, x.high), label=curve.limit_name))
        shown.append(1.12 * curve.limit)  # with space for the label
    scale = scale_of(shown, from_zero=curve.from_zero, may_be_log=curve.may_be_log)
    svg = chart(drawn, x=x, y=scale, width=HALF, height=_HEIGHT, title=f"{curve.name} by step")
    unit = ", ".join(filter(None, (curve.unit, "log scale" if scale.is_log else "")))
    caption = _caption(curve.name, unit, curve.last, keys)
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
