"""The figures of a step: what is measured, how each figure is called and written, and where it is shown; and sums.

A figure stands here once: a field of `StepMetrics`, which is its key in `run/metrics.jsonl`, and a row of
`STEP_FIGURES`, from which step lines, the panel, `ratel status`, the report, the picture of the model card and the
trackers take it. The place that measures it fills the field.

Invariant: keys and their order are those of the fields. A figure without a row is in the file, and in trackers as
`step/KEY`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from ratel_cli.json_fields import read_as
from ratel_cli.planning.time.step_time import RESOURCES, Resource
from ratel_cli.units import (
    byte_unit,
    format_bytes,
    format_loss,
    format_number,
    format_rate_number,
    format_seconds,
    format_traffic,
    traffic_unit,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """What is known about a step before it is committed. Each field is a key in the file; a new one needs a default, as
    older lines lack it."""

    step: int
    """Counted from 1."""
    loss: float
    """The mean over the step's target tokens."""
    learning_rate: float
    grad_norm: float
    tokens: int
    step_seconds: float
    """Without saves and evaluations. A part of the update may overlap with the next step instead."""
    forward_seconds: float
    backward_seconds: float
    """The rest of the step: head, backward, and stalls."""
    tokens_per_second: float
    tflops_model: float
    """Rate of the model FLOPs: three times the forward, recomputed operations not counted."""
    tflops_hardware: float
    """Rate of the hardware FLOPs: recomputed operations counted."""
    swapped_bytes: int
    """Activations that forward offloaded for backward, inputs of layers included."""
    nvme_read_bytes: int
    nvme_written_bytes: int
    gpu_peak_bytes: int
    num_alloc_retries: int | None = None
    """How often since the command began torch found no GPU memory in one piece and gave its cache back: 0 in a run that
    is planned well. None without a GPU."""
    host_peak_bytes: int
    bottleneck: Resource
    """The resource that was busy for the longest time."""
    busy_seconds: dict[Resource, float]
    """How long each resource was busy. These times overlap."""
    waited_seconds: dict[Resource, float]
    """How long the compute thread stalled, by the resource that it waited for. These times do not overlap."""
    predicted_seconds: float
    """The time of a step, as the plan predicted it."""
    planned_nvme_bytes: int = 0
    """Bytes that the plan has the step read from the drives and write to them; 0 in lines of earlier versions.

    A part of an update may move in the next step, so that only sums over steps are to be compared.
    """
    applied: bool
    """False if the step was skipped because its gradients overflowed."""
    clipped: bool
    """True if the gradients were scaled down to `max_grad_norm`."""
    eval_loss: float | None = None
    """The mean over the target tokens of the held-out samples; None if the step was not evaluated."""
    eval_accuracy: float | None = None
    """The share of the held-out samples that a classifier gave their class; None for other models."""
    slowest_rank: int | None = None
    """The rank that waited for the others least, so that they waited for it; None for one rank alone."""
    slowest_bottleneck: Resource | None = None
    """What was busy for the longest time there, of its own resources."""
    preferences: dict[str, float] | None = None
    """Rewards and more of answers that are compared, by TRL's names: means over the step's micro-batches. None where
    none are."""
    eval_preferences: dict[str, float] | None = None
    """Rewards and more, as in `preferences`, of the held-out samples; None if the step was not evaluated."""

    def preference(self, name: str) -> float:
        """A figure of answers that are compared, such as `rewards/margins`; NaN if there is none."""
        return math.nan if self.preferences is None else self.preferences.get(name, math.nan)

    @property
    def moved_bytes(self) -> dict[Resource, int]:
        """Bytes that were read from the drives and written to them; no other resource has any."""
        return {"nvme read": self.nvme_read_bytes, "nvme write": self.nvme_written_bytes}

    @property
    def shown_eval_loss(self) -> float | None:
        """`eval_loss` where a curve or a table can show it; None if it is not finite, too."""
        return self.eval_loss if self.eval_loss is not None and math.isfinite(self.eval_loss) else None

    def to_json(self) -> dict[str, object]:
        """The content of one line. Values that are not finite are null, as JSON has no NaN. None is left out."""
        values = {key: value for key, value in asdict(self).items() if value is not None}
        return {key: _finite(value) for key, value in values.items()}

    @classmethod
    def from_json(cls, content: object) -> StepMetrics:
        """The step of one line. What was not finite is NaN. Raises ValueError for anything that is no step."""
        step = read_as(cls, _with_nan(content))
        by_resource = step.busy_seconds.keys(), step.waited_seconds.keys()
        if step.step < 1 or not step.step_seconds > 0 or any(each != {*RESOURCES} for each in by_resource):
            raise ValueError("not a step")
        return step


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """How a figure is drawn over the steps: on the report's page, in the terminal, in the picture of the model card."""

    name: str
    unit: str | Callable[[float], tuple[str, int]] = ""
    """Its unit. Of bytes: what finds a unit, and its size, that fits the largest value."""
    note: str = ""
    """What a point is, behind the unit."""
    last: Callable[[float], str] = format_loss
    """Words for the value of the last step."""
    adds_up: bool = False
    """Whether a point is the sum over all steps so far."""
    second: Callable[[StepMetrics], float] | None = None
    """What is drawn with it, as what was predicted."""
    second_name: str = ""
    limit: Literal["RAM", "GPU memory"] | None = None
    """The limit that is drawn with it."""
    marks: Callable[[StepMetrics], bool] | None = None
    """Which steps get a dot."""
    marks_name: str = ""
    """What happened to these steps."""
    from_zero: bool = False
    may_be_log: bool = False
    is_drawn: Callable[[Sequence[StepMetrics]], bool] = lambda steps: True
    """Whether steps, at least one, have it at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of a step, and where it is shown. What is left out shows it nowhere."""

    key: str
    """Its key in `run/metrics.jsonl`; of what follows from other figures, any other name."""
    value: Callable[[StepMetrics], float | None] = lambda step: None
    """None: the step does not have it. What is not finite is no number of a table or a curve."""
    words: Callable[[StepMetrics], str] | None = None
    """Its part of step lines and of the panel; empty for a step that does not have it."""
    rank: int = 9
    """Where a line is too narrow for all parts, those of the lowest ranks are shown."""
    column: str = ""
    """Its name at the head of a column."""
    curve: Curve | None = None
    tracked_as: str | None = None
    """Its name in trackers; of several figures under one key, the folder of their names."""
    in_status: bool = False
    """Whether `ratel status --json` has it, of the last step that has it itself."""
    status_words: Callable[[float], str] | None = None
    """Its words in a column of `ratel status`."""

    @property
    def is_of_evaluations(self) -> bool:
        """Whether only steps that were evaluated have it."""
        return self.key.startswith("eval_")


def _compares(steps: Sequence[StepMetrics]) -> bool:
    return steps[-1].preferences is not None


def _has_gpu(steps: Sequence[StepMetrics]) -> bool:
    return steps[-1].gpu_peak_bytes > 0


STEP_FIGURES = (
    Figure(
        key="rewards/chosen",
        value=lambda step: step.preference("rewards/chosen"),
        curve=Curve(
            name="Rewards",
            unit="of better answers",
            second=lambda step: step.preference("rewards/rejected"),
            second_name="of others",
            is_drawn=_compares,
        ),
    ),
    Figure(
        key="rewards/margins",
        value=lambda step: step.preference("rewards/margins"),
        curve=Curve(name="Reward margin", is_drawn=_compares),
    ),
    Figure(
        key="rewards/accuracies",
        value=lambda step: step.preference("rewards/accuracies"),
        curve=Curve(
            name="Reward accuracy",
            unit="share of pairs",
            from_zero=True,
            is_drawn=lambda steps: any(math.isfinite(each.preference("rewards/accuracies")) for each in steps),
        ),
    ),
    Figure(
        key="loss",
        value=lambda step: step.loss,
        words=lambda step: f"loss {step.loss:.4f}",
        rank=1,
        column="loss",
        tracked_as="train/loss",
        in_status=True,
        status_words=lambda loss: f"{loss:.4f}",
    ),
    Figure(
        key="eval_loss",
        value=lambda step: step.eval_loss,
        column="eval loss",
        tracked_as="eval/loss",
        in_status=True,
    ),
    Figure(key="eval_accuracy", tracked_as="eval/accuracy"),
    Figure(key="eval_preferences", tracked_as="eval"),
    Figure(
        key="learning_rate",
        value=lambda step: step.learning_rate,
        words=lambda step: f"lr {step.learning_rate:.2e}",
        rank=7,
        column="lr",
        curve=Curve(name="Learning rate", last=format_number, from_zero=True),
        tracked_as="train/learning_rate",
    ),
    Figure(
        key="preferences",
        words=lambda step: "" if step.preferences is None else f"margin {step.preference('rewards/margins'):.4f}",
        rank=2,
        tracked_as="train",
    ),
    Figure(
        key="grad_norm",
        value=lambda step: step.grad_norm,
        words=lambda step: f"norm {step.grad_norm:.3f}{' clipped' if step.clipped else ''}",
        rank=5,
        column="norm",
        curve=Curve(
            name="Gradient norm",
            marks=lambda step: step.clipped,
            marks_name="clipped",
            from_zero=True,
            may_be_log=True,
        ),
        tracked_as="train/grad_norm",
    ),
    Figure(
        key="tokens_per_second",
        value=lambda step: step.tokens_per_second,
        words=lambda step: f"{step.tokens_per_second:.0f} tokens/s",
        rank=3,
        column="tokens/s",
        curve=Curve(
            name="Speed",
            unit="tokens/s",
            last=lambda rate: f"last step {format_rate_number(rate)}",
            from_zero=True,
        ),
    ),
    Figure(
        key="step_seconds",
        value=lambda step: step.step_seconds,
        words=lambda step: format_seconds(step.step_seconds),
        rank=6,
        column="seconds",
        curve=Curve(
            name="Step time",
            unit="seconds",
            last=lambda seconds: f"last step {format_seconds(seconds)}",
            second=lambda step: step.predicted_seconds,
            second_name="predicted",
            from_zero=True,
        ),
    ),
    Figure(
        key="host_peak_bytes",
        value=lambda step: step.host_peak_bytes,
        curve=Curve(name="RAM", unit=byte_unit, note="peak so far", last=format_bytes, limit="RAM", from_zero=True),
    ),
    Figure(
        key="gpu_peak_bytes",
        value=lambda step: step.gpu_peak_bytes,
        curve=Curve(
            name="GPU memory",
            unit=byte_unit,
            note="peak so far",
            last=format_bytes,
            limit="GPU memory",
            from_zero=True,
            is_drawn=_has_gpu,
        ),
    ),
    Figure(
        key="tflops_model",
        value=lambda step: step.tflops_model,
        curve=Curve(
            name="Compute",
            unit="TFLOP/s",
            last=lambda tflops: f"{tflops:.3g}",
            second=lambda step: step.tflops_hardware,
            second_name="with recomputation",
            from_zero=True,
            is_drawn=_has_gpu,
        ),
    ),
    Figure(
        key="stalled",
        value=lambda step: 100 * sum(step.waited_seconds.values()) / step.step_seconds,
        column="stalled %",
        curve=Curve(
            name="Stalled",
            unit="% of the step",
            # A transfer counts in the step in which it ends, so one step may look overfull.
            last=lambda percent: f"{min(percent, 100):.0f} %",
            from_zero=True,
            is_drawn=_has_gpu,
        ),
    ),
    Figure(
        key="nvme_written_bytes",
        value=lambda step: step.nvme_written_bytes,
        curve=Curve(
            name="Written",
            unit=traffic_unit,
            note="in all steps",
            last=format_traffic,
            adds_up=True,
            from_zero=True,
        ),
    ),
)
"""What is shown of steps, in the order in which it is shown."""


class StepSums:
    """Sums over some steps, and shares of their time."""

    def __init__(self, steps: Iterable[StepMetrics] = ()) -> None:
        self._start_over()
        for step in steps:
            self.add(step)

    def add(self, metrics: StepMetrics) -> None:
        """Add one step."""
        self.num_steps += 1
        self.seconds += metrics.step_seconds
        self.tokens += metrics.tokens
        self.moved_bytes.update(metrics.moved_bytes)
        if metrics.slowest_rank is not None and metrics.slowest_bottleneck is not None:
            self.slowest[metrics.slowest_rank, metrics.slowest_bottleneck] += 1
        for resource in RESOURCES:
            self.busy_seconds[resource] += metrics.busy_seconds[resource]
            self.waited_seconds[resource] += metrics.waited_seconds[resource]

    def busy(self, resource: Resource) -> float:
        """The share of the time in which a resource was busy."""
        return self._share(self.busy_seconds[resource])

    def stalls(self) -> dict[Resource, float]:
        """The share of the time in which computing stalled, by what it waited for, the largest first."""
        shares = {resource: self._share(seconds) for resource, seconds in self.waited_seconds.items()}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def moved_per_second(self, resource: Resource) -> float:
        """Bytes per second that the steps read from the drives or wrote to them; 0 for other resources."""
        return self.moved_bytes[resource] / self.seconds if self.num_steps else 0.0

    def _share(self, seconds: float) -> float:
        # A transfer counts in the step in which it ends. One that began earlier may make the steps look overfull.
        return min(1.0, seconds / self.seconds) if self.num_steps else 0.0

    def _start_over(self) -> None:
        self.num_steps = 0
        self.seconds = 0.0
        self.tokens = 0
        self.moved_bytes = Counter[Resource]()
        self.busy_seconds: dict[Resource, float] = dict.fromkeys(RESOURCES, 0.0)
        self.waited_seconds: dict[Resource, float] = dict.fromkeys(RESOURCES, 0.0)
        self.slowest = Counter[tuple[int, Resource]]()
        """By rank and its bottleneck, in how many steps it was the slowest."""


class RunTotals(StepSums):
    """Sums over the steps of a run.

    The first step is a warm-up: it loads code, takes memory and reads resident weights. So it counts only if there is
    no other step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_added = 0
        self.all_written_bytes = 0
        """Bytes that all steps wrote to NVMe, the first one included."""

    def add(self, metrics: StepMetrics) -> None:
        """Add one step."""
        self._num_added += 1
        self.all_written_bytes += metrics.moved_bytes["nvme write"]
        if self._num_added == 2:
            self._start_over()
        super().add(metrics)

    @property
    def leaves_out_first(self) -> bool:
        """Whether the sums do not contain the first step."""
        return self._num_added > 1


def _finite(value: object) -> object:
    """The value, also within a mapping, with None for what is not finite."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _with_nan(value: object) -> object:
    """The value with NaN for null, also within a mapping."""
    if isinstance(value, dict):
        return {key: _with_nan(each) for key, each in value.items()}
    return math.nan if value is None else value
