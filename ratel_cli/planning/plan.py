"""The frozen decision about a run: what goes where, and what that will cost. Printed, saved, carried out.

`cli.training_run` makes it and prints it before anything is written; training reports against it. Pure.
Invariant: a plan fits; what does not is refused by `make_plan`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.model.spec import ModelSpec
from ratel_cli.planning.capacity import HostMemory, Workload
from ratel_cli.planning.choose import Activations, Case, choose
from ratel_cli.planning.costs import StageTime, StepTime, forward_flops
from ratel_cli.planning.placement import Overlap, Placement
from ratel_cli.planning.traffic import StateBytes, Traffic, gradient_bytes, store_bytes

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What the user's configuration and the limits leave to carry out."""

    holds_gradients: bool
    """No update before the last gradient: the norm may have to be clipped, or the store is written in place."""
    num_slots: int
    host_limit_bytes: int
    activations: Activations = "auto"
    overlap: Overlap = "optimized"

    @property
    def in_place(self) -> bool:
        """What is written cannot be taken back, so nothing is written before the step is decided."""
        return self.num_slots == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that training needs to know of the plan, and all that the user is told."""

    model_name: str
    num_parameters: int
    num_blocks: int
    workload: Workload
    decisions: Decisions
    flops_forward: int
    flops_recomputed: int
    """What backward runs again, every operator of the layers whose activations are not kept."""
    placement: Placement
    memory: HostMemory
    spilled_blocks: int
    """Held gradients of this many blocks (the first in forward order) lie on NVMe."""
    spilled_bytes: int
    nvme_bytes: int
    """The store, and the spilled gradients."""
    traffic: Traffic
    time: StepTime

    @property
    def held_in_memory_bytes(self) -> int | None:
        """The limit on held gradients in memory; None when all of them fit."""
        return self.memory.held_gradients if self.spilled_blocks else None

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
                "inter_block_bytes": self.memory.block_inputs,
                "swapped_bytes": self.memory.block_inputs,
                "swapped_to_nvme_bytes": 0,
                "kept_bytes": placement.activation_bytes,
                "recompute_flops": self.flops_recomputed,
            },
            "placement": {
                "prefetch_blocks": placement.prefetch_blocks,
                "pending_updates": placement.pending_updates,
                "resident_weights": sorted(placement.resident_weights),
                "resident_states": sorted(placement.resident_states),
                "activation_bytes": placement.activation_bytes,
                "deferred": sorted(placement.deferred),
            },
            "time": {
                "forward": _stage_json(time.forward),
                "backward": _stage_json(time.backward),
                "update": _stage_json(time.update),
                "forward_seconds": time.forward.total,
                "backward_seconds": time.backward.total + time.update.total,
                "step_seconds": time.total,
                "bottleneck": time.bottleneck,
            },
            "traffic": {
                "nvme_read_bytes": traffic.read_bytes,
                "nvme_written_bytes": traffic.written_bytes,
                "nvme_first_read_bytes": traffic.first_read_bytes,
            },
            "memory": {
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
        }


def make_plan(
    spec: ModelSpec,
    state: StateBytes,
    workload: Workload,
    decisions: Decisions,
    hardware: HardwareProfile,
    *,
    process_bytes: int,
) -> Plan:
    """Decide what stays where and predict the rest. Raises DoesNotFit."""
    assert decisions.holds_gradients or not decisions.in_place, "what is written in place cannot be taken back"
    choice = choose(
        Case(
            spec=spec,
            state=state,
            workload=workload,
            hardware=hardware,
            holds_gradients=decisions.holds_gradients,
            overlap=decisions.overlap,
            activations=decisions.activations,
            process_bytes=process_bytes,
            limit_bytes=decisions.host_limit_bytes,
        )
    )
    spilled_bytes = gradient_bytes(spec, state, num_blocks=choice.spilled_blocks)
    return Plan(
        model_name=spec.name,
        num_parameters=spec.num_parameters,
        num_blocks=len(spec.blocks),
        workload=workload,
        decisions=decisions,
        flops_forward=forward_flops(spec, workload),
        flops_recomputed=choice.prediction.flops_recomputed,
        placement=choice.placement,
        memory=choice.memory,
        spilled_blocks=choice.spilled_blocks,
        spilled_bytes=spilled_bytes,
        nvme_bytes=store_bytes(spec, state, num_slots=decisions.num_slots) + spilled_bytes,
        traffic=choice.prediction.traffic,
        time=choice.prediction.time,
    )


def _stage_json(stage: StageTime) -> dict[str, float]:
    return {"compute": stage.compute, "nvme": stage.nvme, "optimizer": stage.optimizer}
