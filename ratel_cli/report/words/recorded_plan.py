"""The plan of a run, read back from `run/plan.json` for the report.

Invariant: a file of another form is no plan; nothing is guessed from a part of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ratel_cli.json_fields import JsonFields, read_as
from ratel_cli.planning.search.prediction import SwappedOperator

_STAGES = ("forward", "backward", "update")
_RESOURCES = ("compute", "up", "down", "nvme", "optimizer", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPlan:
    """What the report shows of a plan. Numbers are for one step."""

    model_name: str
    num_parameters: int
    num_blocks: int
    micro_batch_size: int
    num_micro_batches: int
    sequence_len: int
    source: str
    """`recorded` or `analytic`: where the operators' costs come from."""
    swapped: tuple[SwappedOperator, ...]
    swappable_bytes: int
    swapped_bytes: int
    swapped_to_nvme_bytes: int
    case: int
    busy_seconds: dict[str, float]
    """By resource; `nvme` is both directions."""
    forward_seconds: float
    backward_seconds: float
    step_seconds: float
    unclipped_seconds: float | None
    read_bytes: int
    written_bytes: int
    num_resident_weights: int
    num_resident_states: int
    gpu_bytes: int
    host_bytes: int
    nvme_bytes: int
    host_limit_bytes: int
    host_parts: tuple[tuple[str, int], ...]
    """Host memory by purpose, without the total."""
    tokens_per_second: float
    curve: tuple[tuple[int, float], ...]
    """Bytes offloaded, and the step's seconds then."""


def read_plan(path: Path) -> RecordedPlan | None:
    """The plan in the file; None if there is none, or it cannot be read."""
    try:
        return _plan(JsonFields(json.loads(path.read_bytes())))
    except (OSError, ValueError, RecursionError):
        return None


def _plan(content: JsonFields) -> RecordedPlan:
    model, workload, activations = (content.fields(key) for key in ("model", "workload", "activations"))
    placement, time, traffic, memory = (content.fields(key) for key in ("placement", "time", "traffic", "memory"))
    host, stages = memory.fields("host"), [time.fields(stage) for stage in _STAGES]
    return RecordedPlan(
        model_name=model.text("name"),
        num_parameters=model.integer("num_parameters"),
        num_blocks=model.integer("num_blocks"),
        micro_batch_size=workload.integer("micro_batch_size"),
        num_micro_batches=workload.integer("num_micro_batches"),
        sequence_len=workload.integer("sequence_len"),
        source=activations.text("source"),
        swapped=tuple(read_as(SwappedOperator, row) for row in activations.items("swap_set")),
        swappable_bytes=activations.integer("total_bytes"),
        swapped_bytes=activations.integer("swapped_bytes"),
        swapped_to_nvme_bytes=activations.integer("swapped_to_nvme_bytes"),
        case=time.integer("case"),
        busy_seconds={name: sum(stage.number(name) for stage in stages) for name in _RESOURCES},
        forward_seconds=time.number("forward_seconds"),
        backward_seconds=time.number("backward_seconds"),
        step_seconds=time.number("step_seconds"),
        unclipped_seconds=time.optional_number("unclipped_seconds"),
        read_bytes=traffic.integer("nvme_read_bytes"),
        written_bytes=traffic.integer("nvme_written_bytes"),
        num_resident_weights=len(placement.items("resident_weights")),
        num_resident_states=len(placement.items("resident_states")),
        gpu_bytes=memory.integer("gpu_bytes"),
        host_bytes=memory.integer("host_bytes"),
        nvme_bytes=memory.integer("nvme_bytes"),
        host_limit_bytes=memory.integer("host_limit_bytes"),
        host_parts=tuple((name, host.integer(name)) for name in host.names() if name != "total"),
        tokens_per_second=content.fields("throughput").number("tokens_per_second"),
        curve=tuple(
            (row.integer("swapped_bytes"), row.number("step_seconds"))
            for row in map(JsonFields, content.items("curve"))
        ),
    )
