"""The frozen decision about a run: what goes where, and what that will cost. Printed, saved, carried out.

`run.finetune` makes it and prints it before anything is written; training reports against it. Pure.
Invariant: a plan fits; what does not is refused by `make_plan`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Literal

from ratel_cli.errors import DoesNotFit
from ratel_cli.hardware.spec import GPU_CONTEXT_BYTES, HardwareProfile
from ratel_cli.model.spec import ModelSpec
from ratel_cli.planning.activations import OffloadedActivations
from ratel_cli.planning.capacity import HostMemory, check_device_memory
from ratel_cli.planning.choose import Case, Choice, choose, curve
from ratel_cli.planning.costs import StageTime, StepTime
from ratel_cli.planning.model_profile import ModelProfile, Source
from ratel_cli.planning.placement import ActivationPolicy, Overlap, Placement, StateBytes, Workload
from ratel_cli.planning.swap import Order, Swap
from ratel_cli.planning.traffic import Traffic, gradient_bytes, store_bytes

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What the user's configuration and the limits leave to carry out."""

    holds_gradients: bool
    """No update before the last gradient: the norm may have to be clipped, or the store is written in place."""
    num_slots: int
    host_limit_bytes: int
    activations: ActivationPolicy = "auto"
    overlap: Overlap = "optimized"
    device_limit_bytes: int | None = None
    """Memory of the compute device that the run may take: of a CPU, a budget for what computes."""

    @property
    def in_place(self) -> bool:
        """What is written cannot be taken back, so nothing is written before the step is decided."""
        return self.num_slots == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedOperator:
    """One operator's output, swapped in one or more layers."""

    operator: str
    blocks: int
    """In so many layers."""
    bytes: int
    """Of all of them and all micro-batches."""
    flops: int
    """What they save."""
    seconds: float | None
    benefit: float
    """FLOPs per byte (Eq. 6)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that training needs to know of the plan, and all that the user is told."""

    model_name: str
    num_parameters: int
    num_blocks: int
    workload: Workload
    decisions: Decisions
    profile_source: Source
    """Whether operators' costs were recorded, or estimated from shapes."""
    flops_forward: int
    flops_recomputed: int
    """What backward runs again."""
    swappable_bytes: int
    """Layers' inputs and all outputs that could be swapped, of all micro-batches."""
    swapped: tuple[SwappedOperator, ...]
    swap: Swap
    offloaded: OffloadedActivations
    inter_block_bytes: int
    curve: tuple[tuple[int, float], ...]
    """Bytes offloaded, and the step's seconds then."""
    placement: Placement
    memory: HostMemory
    spilled_blocks: int
    """Held gradients of this many blocks (the first in forward order) lie on NVMe."""
    spilled_bytes: int
    nvme_bytes: int
    """The store, the spilled gradients and the spilled activations."""
    traffic: Traffic
    time: StepTime

    @property
    def held_in_memory_bytes(self) -> int | None:
        """The limit on held gradients in memory; None when all of them fit."""
        return self.memory.held_gradients if self.spilled_blocks else None

    @property
    def device_allocation_bytes(self) -> int | None:
        """What of the limit on a GPU's memory is left to allocate."""
        limit_bytes = self.decisions.device_limit_bytes
        return None if limit_bytes is None else max(0, limit_bytes - GPU_CONTEXT_BYTES)

    @property
    def case(self) -> Literal[1, 2, 3]:
        """Of the paper (section IV-D): 1 swap nothing but inputs, 2 all there is, 3 something in between."""
        if not self.swap.num_outputs:
            return 1
        return 2 if self.offloaded.total_bytes == self.swappable_bytes else 3

    def to_json(self) -> dict[str, object]:
        """The keys of `plan --json` that are known so far, and memory in detail."""
        time, traffic, placement, tokens = self.time, self.traffic, self.placement, self.workload.tokens
        flops_model = 3 * self.flops_forward
        return {
            "format_version": FORMAT_VERSION,
            "model": {
                "name": self.model_name,
                "num_parameters": self.num_parameters,
                "num_blocks": self.num_blocks,
                "flops_forward": self.flops_forward,
            },
            "workload": asdict(self.workload),
            "activations": {
                "total_bytes": self.swappable_bytes,
                "inter_block_bytes": self.inter_block_bytes,
                "swapped_bytes": self.offloaded.total_bytes,
                "swapped_to_nvme_bytes": self.offloaded.written_bytes,
                "kept_on_gpu_bytes": self.offloaded.gpu_bytes,
                "swap_set": [asdict(operator) for operator in self.swapped],
                "recompute_flops": self.flops_recomputed,
                "source": self.profile_source,
            },
            "placement": {
                "prefetch_blocks": placement.prefetch_blocks,
                "pending_updates": placement.pending_updates,
                "resident_weights": sorted(placement.resident_weights),
                "resident_states": sorted(placement.resident_states),
                "spilled_units": placement.spilled_units,
                "kept_from": placement.gpu_units_from,
                "kept_weights": sorted(placement.gpu_weights),
                "deferred": sorted(placement.deferred),
            },
            "time": {
                "forward": _stage_json(time.forward),
                "backward": _stage_json(time.backward),
                "update": _stage_json(time.update),
                "forward_seconds": time.forward.total,
                "backward_seconds": time.backward.total + time.update.total,
                "case": self.case,
                "step_seconds": time.total,
                "bottleneck": time.bottleneck,
            },
            "traffic": {
                "nvme_read_bytes": traffic.read_bytes,
                "nvme_written_bytes": traffic.written_bytes,
                "nvme_first_read_bytes": traffic.first_read_bytes,
            },
            "memory": {
                "gpu_bytes": self.memory.device,
                "host_bytes": self.memory.total,
                "nvme_bytes": self.nvme_bytes,
                "fits": True,
                "shortfall_bytes": 0,
                "host_limit_bytes": self.decisions.host_limit_bytes,
                "host": asdict(self.memory),
                "spilled_gradient_bytes": self.spilled_bytes,
            },
            "throughput": {
                "tokens_per_second": tokens / time.total,
                "tflops_model": flops_model / time.total / 1e12,
                "tflops_hardware": (flops_model + self.flops_recomputed) / time.total / 1e12,
            },
            "wear": {"tb_written_per_step": traffic.written_bytes / 1e12},
            "curve": [{"swapped_bytes": num_bytes, "step_seconds": seconds} for num_bytes, seconds in self.curve],
            "cost_model": "ratel",
        }


def make_plan(
    spec: ModelSpec,
    profile: ModelProfile,
    state: StateBytes,
    workload: Workload,
    decisions: Decisions,
    hardware: HardwareProfile,
    *,
    process_bytes: int,
) -> Plan:
    """Decide what stays where and predict the rest. Raises DoesNotFit."""
    assert decisions.holds_gradients or not decisions.in_place, "what is written in place cannot be taken back"
    case = Case(
        spec=spec,
        state=state,
        workload=workload,
        profile=profile,
        hardware=hardware,
        holds_gradients=decisions.holds_gradients,
        overlap=decisions.overlap,
        activations=decisions.activations,
        process_bytes=process_bytes,
        limit_bytes=decisions.host_limit_bytes,
        device_limit_bytes=decisions.device_limit_bytes,
    )
    choice = _choose(case)
    spilled_bytes = gradient_bytes(spec, state, num_blocks=choice.spilled_blocks)
    number, layers = workload.num_micro_batches, [profile.profiles[index] for index in profile.layers]
    inter_block_bytes = number * sum(layer.input_bytes for layer in layers)
    return Plan(
        model_name=spec.name,
        num_parameters=spec.num_parameters,
        num_blocks=len(spec.blocks),
        workload=workload,
        decisions=decisions,
        profile_source=profile.source,
        flops_forward=number * (sum(layer.flops_forward for layer in layers) + profile.flops_head),
        flops_recomputed=number * (sum(layer.flops_recomputed for layer in layers) - choice.swap.flops),
        swappable_bytes=inter_block_bytes + number * case.order.at(case.order.num_outputs).num_bytes,
        swapped=tuple(_swapped_operators(case.order, choice.swap, number)),
        swap=choice.swap,
        offloaded=choice.offloaded,
        inter_block_bytes=inter_block_bytes,
        curve=tuple(curve(case, choice)),
        placement=choice.placement,
        memory=choice.memory,
        spilled_blocks=choice.spilled_blocks,
        spilled_bytes=spilled_bytes,
        nvme_bytes=store_bytes(spec, state, num_slots=decisions.num_slots)
        + spilled_bytes
        + choice.offloaded.written_bytes,
        traffic=choice.traffic,
        time=choice.time,
    )


def _choose(case: Case) -> Choice:
    """The best choice, or, if a GPU has no room for what that swaps, the best that swaps nothing but inputs."""
    choice = choose(case)
    try:
        check_device_memory(choice.memory, case.device_limit_bytes)
    except DoesNotFit:
        if case.hardware.link is None or case.activations != "auto":
            raise
        choice = choose(replace(case, activations="recompute"))
        check_device_memory(choice.memory, case.device_limit_bytes)
    return choice


def _swapped_operators(order: Order, swap: Swap, num_micro_batches: int) -> Iterator[SwappedOperator]:
    """By benefit, as they were chosen."""
    left = swap.num_outputs
    for run in order.runs:
        blocks = min(left, len(run.blocks))
        left -= blocks
        if not blocks:
            return
        number, candidate = blocks * num_micro_batches, run.candidate
        yield SwappedOperator(
            operator=candidate.operator,
            blocks=blocks,
            bytes=number * candidate.num_bytes,
            flops=number * candidate.flops,
            seconds=None if candidate.seconds is None else number * candidate.seconds,
            benefit=candidate.flops / max(1, candidate.num_bytes),
        )


def _stage_json(stage: StageTime) -> dict[str, float]:
    return {
        "compute": stage.compute,
        "up": stage.up,
        "down": stage.down,
        "nvme": stage.nvme,
        "optimizer": stage.optimizer,
        "memory": stage.memory,
    }
