"""What a report of one run is made from, as a value; and the figures that the page and the terminal both show.

Invariant: every figure follows from the files of the run; what is not known is None, or a note says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from math import inf, isfinite
from statistics import median

from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.planning.search.recorded_plan import RecordedPlan
from ratel_cli.planning.time.step_time import RESOURCES, Resource
from ratel_cli.report.words.plan import RESOURCE_NAMES, percent, share_words
from ratel_cli.report.words.status import RunStatus
from ratel_cli.training.facts import RunFacts
from ratel_cli.training.history import RECENT_STEPS, History, recent_rate
from ratel_cli.training.metrics import StepMetrics, StepSums
from ratel_cli.units import (
    counted,
    format_bytes,
    format_count,
    format_loss,
    format_seconds,
    format_token_rate,
    format_traffic,
    format_wait,
)

LEAST_SHARE = 0.005
"""Stalls below this share of a step are not named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """One run, as its files show it."""

    name: str
    status: RunStatus
    history: History
    plan: RecordedPlan | None
    hardware: HardwareProfile | None
    facts: RunFacts | None
    changed_keys: str
    """The keys of the config that are not at their defaults, as YAML."""
    config_text: str
    """The whole config, as YAML."""
    gpu_limit_bytes: int | None
    endurance_tb: float | None
    """What the drives are rated for."""
    max_tb_written: float | None
    notes: tuple[str, ...]
    """What cannot be read or is not there."""
    made: datetime
    version: str
    """Version of Ratel that made the report."""

    @property
    def steps(self) -> tuple[StepMetrics, ...]:
        """The recorded steps."""
        return self.history.steps

    @property
    def typical_steps(self) -> tuple[StepMetrics, ...]:
        """The steps without the first of the run, which is a warm-up, unless it is the only one."""
        return tuple(each for each in self.steps if each.step > 1) or self.steps

    @property
    def written_bytes(self) -> int:
        """Bytes that all recorded steps wrote to the drives."""
        return sum(each.moved_bytes["nvme write"] for each in self.steps)

    @property
    def planned_steps(self) -> tuple[StepMetrics, ...]:
        """The steps that are held against the plan: the last ones that were predicted alike, without a warm-up.

        A plan may predict a step that is clipped otherwise than one that is not. Then they are those of the commoner
        kind.
        """
        predicted: dict[bool, float] = {}
        chosen: list[StepMetrics] = []
        for each in reversed(self.typical_steps):
            seconds = each.predicted_seconds if isfinite(each.predicted_seconds) else inf  # NaN is unlike itself
            if predicted.setdefault(each.clipped, seconds) != seconds:
                break
            chosen.append(each)
        if len(set(predicted.values())) > 1:
            is_clipped = 2 * sum(each.clipped for each in chosen) >= len(chosen)
            chosen = [each for each in chosen if each.clipped == is_clipped]
        return tuple(reversed(chosen))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFigure:
    """A key figure."""

    name: str
    value: str
    context: str = ""
    """What it is to be compared with."""


def state_words(report: RunReport) -> str:
    """One sentence about how far the run has come."""
    status = report.status
    of = "" if status.num_steps is None else f" of {status.num_steps}"
    done = f"step {status.step}{of}"
    if status.state == "running":
        if status.num_steps is not None and status.step >= status.num_steps:
            return f"Running: {done} is done; the model is being exported."
        left = f", about {format_wait(status.seconds_left)} left" if status.seconds_left else ""
        return f"Running: {done}{left}."
    when = f"after {done}" if status.step else "before its first step"
    words = {
        "finished": f"Finished: {done}; the model is exported.",
        "stopped": f"Stopped {when}. The same command resumes it.",
        "killed": f"Its process was killed {when}. The same command resumes it.",
        "in use": f"Stopped {when}; another command has the store open.",
        "not begun": "Not begun.",
        "no store": f"Ended {when}, and its store {'was deleted' if status.store_deleted else 'is not there'}.",
    }
    found = words.get(status.state, "Its config cannot be read.")
    if status.ended_early:
        found += " It ended early, since its evaluations did not get better."
    if status.best_step is not None:
        found += f" The best step is {status.best_step}."
    return f"{found} Its store was deleted." if status.store_deleted and status.state != "no store" else found


def key_figures(report: RunReport) -> list[KeyFigure]:
    """The figures at the top; none without steps."""
    steps = report.steps
    if not steps:
        return []
    typical, planned, last, status = report.typical_steps, report.planned_steps, steps[-1], report.status
    recent = typical[-RECENT_STEPS:]
    seconds, predicted = median(each.step_seconds for each in planned), planned[-1].predicted_seconds
    of = "" if status.num_steps is None else f"of {status.num_steps}"
    figures = [
        KeyFigure(name="steps", value=str(last.step), context=of),
        KeyFigure(
            name="loss", value=format_loss(last.loss), context=f"step {steps[0].step}: {format_loss(steps[0].loss)}"
        ),
    ]
    if last.preferences is not None:
        margin, accuracy = last.preference("rewards/margins"), last.preference("rewards/accuracies")
        context = f"{percent(accuracy)} of pairs right" if isfinite(accuracy) else f"step {last.step}"
        figures.append(KeyFigure(name="reward margin", value=format_loss(margin), context=context))
    evaluated = [each for each in steps if each.eval_loss is not None]
    if evaluated:
        best = min(evaluated, key=lambda each: inf if each.shown_eval_loss is None else each.shown_eval_loss)
        value = format_loss(evaluated[-1].eval_loss)
        figures.append(
            KeyFigure(name="eval loss", value=value, context=f"best {format_loss(best.eval_loss)}, step {best.step}")
        )
        accuracies = [(each.eval_accuracy, each.step) for each in evaluated if each.eval_accuracy is not None]
        if accuracies:
            share, step = max(accuracies, key=lambda each: each[0])
            context = f"best {percent(share)}, step {step}"
            figures.append(KeyFigure(name="accuracy", value=percent(accuracies[-1][0]), context=context))
    figures += [
        KeyFigure(
            name="speed",
            value=format_token_rate(recent_rate(steps) or 0.0),
            context=f"last {counted(len(recent), 'step')}; "
            f"{median(each.tflops_model for each in recent):.3g} TFLOP/s of the model",
        ),
        KeyFigure(
            name="step time",
            value=format_seconds(seconds),
            context=f"median of {planned_words(planned)}"
            + (f"; predicted {format_seconds(predicted)}" if isfinite(predicted) and predicted > 0 else ""),
        ),
        _stall_figure(typical),
        KeyFigure(
            name="trained",
            value=format_seconds(sum(each.step_seconds for each in steps)),
            context=f"{format_count(sum(each.tokens for each in steps))} tokens",
        ),
        _memory_figure(report),
        _written_figure(report),
    ]
    return figures


def planned_words(planned: Sequence[StepMetrics]) -> str:
    """Which steps are held against the plan."""
    first, last = planned[0].step, planned[-1].step
    return f"steps {first} to {last}" if last > first else f"step {first}"


def busy_shares(steps: Sequence[StepMetrics]) -> list[tuple[Resource, float, float]]:
    """The shares of the time for which each resource was busy, and stalled the steps; without idle resources."""
    sums = StepSums(steps)
    stalls = sums.stalls()
    shares = [(resource, sums.busy(resource), stalls[resource]) for resource in RESOURCES]
    return [(resource, busy, stalled) for resource, busy, stalled in shares if busy > 0 or stalled > 0]


def state_notes(report: RunReport) -> list[str]:
    """Everything that a reader of the report must know about its sources."""
    notes = list(report.notes)
    if not report.steps:
        notes.append("No step is recorded yet, so there are no curves.")
    if report.history.is_cut_short:
        notes.append("The last line of run/metrics.jsonl is only half written; the report ends with the step before.")
    if report.history.num_unreadable:
        lines = counted(report.history.num_unreadable, "line")
        notes.append(f"{lines} of run/metrics.jsonl cannot be read; the steps there are missing here.")
    skipped = sum(not each.applied for each in report.steps)
    if skipped:
        notes.append(f"{counted(skipped, 'step')} had gradients that overflowed and changed no weight.")
    return notes


def _stall_figure(steps: Sequence[StepMetrics]) -> KeyFigure:
    shares = busy_shares(steps)
    stalled = sum(share for _, _, share in shares)
    cause, _, most = max(shares, key=lambda each: each[2], default=("compute", 0.0, 0.0))
    context = f"mostly on {RESOURCE_NAMES[cause]}; all steps" if most > LEAST_SHARE else "of all steps"
    return KeyFigure(name="stalled", value=share_words(stalled), context=context)


def _memory_figure(report: RunReport) -> KeyFigure:
    peak = max(each.host_peak_bytes for each in report.steps)
    limit = "" if report.plan is None else f"limit {format_bytes(report.plan.host_limit_bytes)}"
    return KeyFigure(name="RAM at the peak", value=format_bytes(peak), context=limit)


def _written_figure(report: RunReport) -> KeyFigure:
    written = report.written_bytes
    context = f"{format_traffic(written / len(report.steps))} per step"
    if report.endurance_tb:
        context = f"{percent(written / 1e12 / report.endurance_tb)} of rated endurance"
    return KeyFigure(name="written by steps", value=format_traffic(written), context=context)
