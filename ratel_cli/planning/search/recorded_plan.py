"""The figures of a plan: how each follows from it, which key it has in `run/plan.json`, and how the report shows it.

A figure that is read back stands here once, as a field of `RecordedPlan`, or of `PredictedFigures` if `ratel plan
--json` has it, too. What is only written stands in `sections_of` and `plan_json`. A figure that came later needs a
default, as older files lack it.

Invariant: a file of another form is no plan; nothing is guessed from a part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Final, Self, TypeVar, cast

from ratel_cli.planning.profile.placement import Workload
from ratel_cli.planning.search.plan import Plan
from ratel_cli.planning.search.prediction import Prediction, SwappedOperator

FORMAT_VERSION: Final = 1
_RESOURCES: Final = ("compute", "up", "down", "nvme", "optimizer", "memory")
_Value = TypeVar("_Value")


def figure(
    place: str,
    of: Callable[[Prediction], _Value],
    *,
    row: str = "",
    words: Callable[[_Value], str] = str,
    default: object = MISSING,
) -> _Value:
    """A figure with the key `place` in JSON, such as `time.step_seconds`, and its value of a prediction. `row`: its
    name among the report's rows about the plan, if it has one of its own, with `words` for its value."""
    return cast(_Value, field(metadata={"place": place, "of": of, "row": row, "words": words}, default=default))


def _of_plan(place: str, of: Callable[[Plan], _Value]) -> _Value:
    """Like `figure`, of a plan alone."""
    return figure(place, cast(Callable[[Prediction], _Value], of))


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """A point of a plan's curve."""

    swapped_bytes: int
    step_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedFigures:
    """What `plan.json` and `ratel plan --json` have in common, as far as it is read. Numbers are for one step."""

    model_name: str = figure("model.name", lambda made: made.model_name)
    num_parameters: int = figure("model.num_parameters", lambda made: made.num_parameters)
    num_blocks: int = figure("model.num_blocks", lambda made: made.num_blocks)
    workload: Workload = figure("workload", lambda made: made.workload)
    swappable_bytes: int = figure("activations.total_bytes", lambda made: made.swappable_bytes)
    swapped_bytes: int = figure("activations.swapped_bytes", lambda made: made.offloaded.total_bytes)
    swapped_to_nvme_bytes: int = figure("activations.swapped_to_nvme_bytes", lambda made: made.offloaded.written_bytes)
    swapped: tuple[SwappedOperator, ...] = figure("activations.swap_set", lambda made: made.swapped)
    source: str = figure(
        "activations.source",
        lambda made: made.source,
        row="costs",
        words=lambda source: "from a recorded step of this model" if source == "recorded" else "estimated from shapes",
    )
    forward: dict[str, float] = figure("time.forward", lambda made: made.time.forward.to_json())
    backward: dict[str, float] = figure("time.backward", lambda made: made.time.backward.to_json())
    forward_seconds: float = figure("time.forward_seconds", lambda made: made.time.forward.total)
    backward_seconds: float = figure(
        "time.backward_seconds", lambda made: made.time.backward.total + made.time.update.total
    )
    step_seconds: float = figure("time.step_seconds", lambda made: made.time.total)
    unclipped_seconds: float | None = figure("time.unclipped_seconds", lambda made: made.unclipped_seconds)
    case: int = figure("time.case", lambda made: made.case)
    read_bytes: int = figure("traffic.nvme_read_bytes", lambda made: made.traffic.read_bytes)
    written_bytes: int = figure("traffic.nvme_written_bytes", lambda made: made.traffic.written_bytes)
    gpu_bytes: int = figure("memory.gpu_bytes", lambda made: made.gpu_bytes)
    host_bytes: int = figure("memory.host_bytes", lambda made: made.host_bytes)
    nvme_bytes: int = figure("memory.nvme_bytes", lambda made: made.nvme_bytes)
    tokens_per_second: float = figure("throughput.tokens_per_second", lambda made: made.tokens_per_second)
    curve: tuple[CurvePoint, ...] = figure(
        "curve",
        lambda made: tuple(CurvePoint(swapped_bytes=size, step_seconds=seconds) for size, seconds in made.curve),
    )

    @classmethod
    def of(cls, made: Prediction) -> Self:
        """The figures of a prediction; of a plan, if they are a plan's."""
        return cls(**{each.name: each.metadata["of"](made) for each in fields(cls)})

    def section(self, name: str) -> dict[str, object]:
        """The keys of a section of the JSON."""
        values, places = asdict(self), [(each.name, each.metadata["place"].partition(".")) for each in fields(self)]
        return {key: values[figure] for figure, (section, _, key) in places if key and section == name}

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The figures that have rows of their own in the report."""
        shown = [(each.metadata, getattr(self, each.name)) for each in fields(self) if each.metadata["row"]]
        return [(metadata["row"], metadata["words"](value)) for metadata, value in shown if value is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPlan(PredictedFigures):
    """A plan as `run/plan.json` has it, as far as it is read."""

    update: dict[str, float] = _of_plan("time.update", lambda plan: plan.time.update.to_json())
    resident_weights: tuple[int, ...] = _of_plan(
        "placement.resident_weights", lambda plan: tuple(sorted(plan.placement.resident_weights))
    )
    resident_states: tuple[int, ...] = _of_plan(
        "placement.resident_states", lambda plan: tuple(sorted(plan.placement.resident_states))
    )
    host_limit_bytes: int = _of_plan("memory.host_limit_bytes", lambda plan: plan.decisions.host_limit_bytes)
    host: dict[str, int] = _of_plan("memory.host", lambda plan: asdict(plan.memory))

    def __post_init__(self) -> None:
        """Raise ValueError unless each stage has all resources."""
        if any(not stage.keys() >= {*_RESOURCES} for stage in (self.forward, self.backward, self.update)):
            raise ValueError("a resource is missing")

    @property
    def busy_seconds(self) -> dict[str, float]:
        """By resource; `nvme` is both directions."""
        return {name: self.forward[name] + self.backward[name] + self.update[name] for name in _RESOURCES}


def sections_of(figures: PredictedFigures, made: Prediction, *, shortfall_bytes: int) -> dict[str, dict[str, object]]:
    """The sections that `plan.json` and `ratel plan --json` have in common. `shortfall_bytes`: what all tiers together
    are short by."""
    moved, trade = made.network.total, None if made.wear is None else made.wear.to_json()
    only_written: dict[str, dict[str, object]] = {
        "model": {
            "num_trained_parameters": made.num_parameters if made.num_trained is None else made.num_trained,
            "flops_forward": made.flops_forward,
            "flops_backward": made.flops_model - made.flops_forward,
        },
        "activations": {
            "inter_block_bytes": made.inter_block_bytes,
            "kept_on_gpu_bytes": made.offloaded.gpu_bytes,
            "recompute_flops": made.flops_recomputed,
        },
        "time": {"bottleneck": made.bottleneck},
        "traffic": {"network_sent_bytes": moved.sent_bytes, "network_received_bytes": moved.received_bytes},
        "memory": {"fits": not shortfall_bytes, "shortfall_bytes": shortfall_bytes},
        "throughput": {
            "tflops_model": made.tflops_model,
            "tflops_hardware": made.tflops_hardware,
            "unclipped_tokens_per_second": made.unclipped_tokens_per_second,
            "unclipped_tflops_model": made.unclipped_tflops_model,
        },
        "wear": {"tb_written_per_step": made.traffic.written_bytes / 1e12, "trade": trade},
        "workload": asdict(made.workload),
    }
    return {name: {**figures.section(name), **rest} for name, rest in only_written.items()}


def plan_json(plan: Plan) -> dict[str, object]:
    """The content of run/plan.json."""
    figures, placement = RecordedPlan.of(plan), plan.placement
    sections = sections_of(figures, plan, shortfall_bytes=0)
    return {
        "format_version": FORMAT_VERSION,
        **sections,
        "placement": {
            **figures.section("placement"),
            "prefetch_blocks": placement.prefetch_blocks,
            "pending_updates": placement.pending_updates,
            "spilled_units": placement.spilled_units,
            "kept_from": placement.gpu_units_from,
            "kept_weights": sorted(placement.gpu_weights),
            "embedding_rows": placement.gpu_embedding_rows,
            "read_in_place": dict(placement.read_in_place),
            "window_bytes": placement.gpu_window_bytes,
            "forward_units_bytes": placement.gpu_units and placement.gpu_units.forward_bytes,
            "units_ahead_bytes": placement.gpu_units and placement.gpu_units.ahead_bytes,
            "leaving_bytes": placement.gpu_leaving_bytes,
            "holds_sums": placement.gpu_holds_sums,
            "holds_tied": placement.gpu_holds_lookup,
            "holds_head": placement.gpu_holds_head,
            "deferred": sorted(placement.deferred),
            "group_elements": placement.groups.elements,
            "groups_in_flight": placement.groups.in_flight,
        },
        "traffic": {**sections["traffic"], "nvme_first_read_bytes": plan.traffic.first_read_bytes},
        "memory": {**sections["memory"], "spilled_gradient_bytes": plan.spilled_bytes},
        "curve": [asdict(point) for point in figures.curve],
        "cost_model": plan.cost_model,
    }
