"""The plan of a run: what goes where, and what that is predicted to cost. A value, printed and saved. Pure.

Invariant: a plan fits into the limits that it was made for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from ratel_cli.errors import DoesNotFit
from ratel_cli.hardware.spec import GPU_CONTEXT_BYTES, HardwareProfile
from ratel_cli.model.spec import ModelSpec
from ratel_cli.planning.activations import OffloadedActivations
from ratel_cli.planning.capacity import HostMemory, check_device_memory
from ratel_cli.planning.choose import choose, curve
from ratel_cli.planning.model_profile import ModelProfile, Source
from ratel_cli.planning.papers.prefix import Case
from ratel_cli.planning.placement import ActivationPolicy, Overlap, Placement, StateBytes, Workload
from ratel_cli.planning.problem import Evaluation, Problem
from ratel_cli.planning.step_time import StepTime
from ratel_cli.planning.swap import SwapOrder, SwapPrefix
from ratel_cli.planning.traffic import Traffic, gradient_bytes, store_bytes

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What the user's config and limits decide before the plan is made."""

    holds_gradients: bool
    """No block is updated before the last gradient is there: the norm may have to be clipped, or the store is written
    in place."""
    num_slots: int
    """Generations that the store has space for."""
    host_limit_bytes: int
    """Host memory that the run may take, the process included."""
    activations: ActivationPolicy = "auto"
    overlap: Overlap = "optimized"
    device_limit_bytes: int | None = None
    """Memory of the compute device that the run may take; for a CPU, a budget for what computes. None is no limit."""

    @property
    def in_place(self) -> bool:
        """Whether the only generation is overwritten, so that nothing is written before the step is decided."""
        return self.num_slots == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedOperator:
    """One operator's output, swapped in one or more layers. A row of `swap_set` in plan.json."""

    operator: str
    blocks: int
    """Number of layers in which it is swapped."""
    bytes: int
    """Bytes of all of them and of all micro-batches."""
    flops: int
    """FLOPs that need not be recomputed."""
    seconds: float | None
    """Measured seconds of recomputation that are saved; None if not measured."""
    benefit: float
    """FLOPs per byte (Eq. 6)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that training needs to know of the plan, and that the user is shown. Numbers are for one step."""

    model_name: str
    num_parameters: int
    num_blocks: int
    workload: Workload
    decisions: Decisions
    profile_source: Source
    """Whether operators' costs were recorded, or estimated from shapes."""
    flops_forward: int
    flops_recomputed: int
    """FLOPs that backward runs again."""
    swappable_bytes: int
    """Layers' inputs and all outputs that could be swapped."""
    swapped: tuple[SwappedOperator, ...]
    """The greatest benefit first."""
    swap: SwapPrefix
    offloaded: OffloadedActivations
    inter_block_bytes: int
    """Layers' inputs, which are always offloaded."""
    curve: tuple[tuple[int, float], ...]
    """Bytes offloaded, and the step's seconds then."""
    placement: Placement
    memory: HostMemory
    spilled_blocks: int
    """Held gradients of this many blocks, the first in forward order, lie on NVMe."""
    spilled_bytes: int
    """Bytes of those gradients."""
    nvme_bytes: int
    """The store, the spilled gradients and the spilled activations."""
    traffic: Traffic
    time: StepTime

    @property
    def held_in_memory_bytes(self) -> int | None:
        """The limit on held gradients in memory; None if all of them fit."""
        return self.memory.held_gradients if self.spilled_blocks else None

    @property
    def device_allocation_bytes(self) -> int | None:
        """What the limit on a GPU's memory leaves to torch's allocator; None if there is no limit."""
        limit_bytes = self.decisions.device_limit_bytes
        return None if limit_bytes is None else max(0, limit_bytes - GPU_CONTEXT_BYTES)

    @property
    def case(self) -> Case:
        """The paper's case (section IV-D): 1 swaps nothing but inputs, 2 swaps everything, 3 something in between."""
        if not self.swap.num_outputs:
            return 1
        return 2 if self.offloaded.total_bytes == self.swappable_bytes else 3

    def to_json(self) -> dict[str, object]:
        """The content of run/plan.json."""
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
                "forward": time.forward.to_json(),
                "backward": time.backward.to_json(),
                "update": time.update.to_json(),
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
    """Choose what stays where and predict what follows. Raises DoesNotFit.

    `process_bytes` is what the process takes before training.
    """
    assert decisions.holds_gradients or not decisions.in_place, "what is written in place cannot be taken back"
    problem = Problem(
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
    chosen = _choose(problem)
    spilled_bytes = gradient_bytes(spec, state, num_blocks=chosen.spilled_blocks)
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
        flops_recomputed=number * (sum(layer.flops_recomputed for layer in layers) - chosen.swap.flops),
        swappable_bytes=inter_block_bytes + number * problem.order.prefix(problem.order.num_outputs).num_bytes,
        swapped=tuple(_swapped_operators(problem.order, chosen.swap, number)),
        swap=chosen.swap,
        offloaded=chosen.offloaded,
        inter_block_bytes=inter_block_bytes,
        curve=tuple(curve(problem, chosen)),
        placement=chosen.placement,
        memory=chosen.memory,
        spilled_blocks=chosen.spilled_blocks,
        spilled_bytes=spilled_bytes,
        nvme_bytes=store_bytes(spec, state, num_slots=decisions.num_slots)
        + spilled_bytes
        + chosen.offloaded.written_bytes,
        traffic=chosen.traffic,
        time=chosen.time,
    )


def _choose(problem: Problem) -> Evaluation:
    """The best placement, or, if what it swaps does not fit into the GPU, the best that swaps nothing but inputs."""
    chosen = choose(problem)
    try:
        check_device_memory(chosen.memory, problem.device_limit_bytes)
    except DoesNotFit:
        if problem.hardware.link is None or problem.activations != "auto":
            raise
        chosen = choose(replace(problem, activations="recompute"))
        check_device_memory(chosen.memory, problem.device_limit_bytes)
    return chosen


def _swapped_operators(order: SwapOrder, swap: SwapPrefix, num_micro_batches: int) -> Iterator[SwappedOperator]:
    """By benefit, as they were chosen."""
    left = swap.num_outputs
    for group in order.groups:
        blocks = min(left, len(group.blocks))
        left -= blocks
        if not blocks:
            return
        number, candidate = blocks * num_micro_batches, group.candidate
        yield SwappedOperator(
            operator=candidate.operator,
            blocks=blocks,
            bytes=number * candidate.num_bytes,
            flops=number * candidate.flops,
            seconds=None if candidate.seconds is None else number * candidate.seconds,
            benefit=candidate.flops / max(1, candidate.num_bytes),
        )
