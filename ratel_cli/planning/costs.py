"""Predicted time of a step whose parts overlap, by stage and resource. Used by `planning.choose`. Pure.

The paper's model (Eq. 1-5), mended as in papers.md section 2 and for a CPU: no link terms; the optimizer's
own time. Forward, backward and, with a separate optimizer, the update after it follow each other; within
each, the slowest resource decides. What does not run ahead does not overlap either: without prefetch the
weights, without pending updates the optimizer, stand in computing's way.

Left out: that computing, AdamW and copies share the cores and main memory (66 bytes per parameter and
step), and how a stage fills and drains. So the prediction is a lower bound, closest where one resource is
far slower than the others.

FLOPs follow papers.md section 2: `24 b s h^2` per layer generalises to two per matrix element and token,
and attention adds `4 b s^2 h`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ratel_cli.hardware.spec import HardwareProfile, Nvme
from ratel_cli.model.spec import BlockSpec, ModelSpec
from ratel_cli.planning.activations import all_activation_bytes, kept_activation_bytes
from ratel_cli.planning.capacity import Workload
from ratel_cli.planning.placement import Overlap, Placement, Stage
from ratel_cli.planning.traffic import StateBytes, Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds of one stage by resource, and of the stage as a whole."""

    compute: float
    nvme_read: float
    nvme_write: float
    """While both directions run, each is charged half of the time: together they are what NVMe takes."""
    optimizer: float
    total: float

    @property
    def nvme(self) -> float:
        return self.nvme_read + self.nvme_write


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step."""

    forward: StageTime
    """From the embedding to the last layer, with deferred updates beneath it."""
    backward: StageTime
    """Head and backward, with the other updates beneath them."""
    update: StageTime
    """After backward; nothing unless the optimizer is separate."""

    @property
    def total(self) -> float:
        return self.forward.total + self.backward.total + self.update.total

    @property
    def bottleneck(self) -> str:
        """The resource that is busy longest, in the words of the step line; of NVMe, the direction that takes more."""
        stages = (self.forward, self.backward, self.update)
        read, write = sum(stage.nvme_read for stage in stages), sum(stage.nvme_write for stage in stages)
        by_name = {
            "compute": sum(stage.compute for stage in stages),
            "nvme read" if read >= write else "nvme write": read + write,
            "optimizer": sum(stage.optimizer for stage in stages),
        }
        return max(by_name, key=lambda name: by_name[name])


def forward_flops(spec: ModelSpec, workload: Workload) -> int:
    """Floating point operations of the forward pass of a full step."""
    return layer_flops(spec, workload) + _head_flops(spec, workload)


def layer_flops(spec: ModelSpec, workload: Workload) -> int:
    """The layers' part: what backward recomputes at most. The head's is done once (papers.md section 2, fault 4).

    Every matrix counts for every token: too much for a mixture of experts, whose share of active ones no
    shape tells. Attention is counted over the whole row, masked or not, as the papers do.
    """
    matrices = sum(_matrix_elements(block) for block in spec.blocks[1:-1])
    attention = 4 * spec.num_layers * workload.sequence_len * spec.hidden_size
    return workload.tokens * (2 * matrices + attention)


def recomputed_flops(spec: ModelSpec, state: StateBytes, workload: Workload, placement: Placement) -> int:
    """What backward runs again: the share of layers whose activations are not kept."""
    all_bytes = all_activation_bytes(spec, state, tokens=workload.tokens)
    kept_bytes = kept_activation_bytes(spec, state, placement, tokens=workload.tokens)
    return layer_flops(spec, workload) * (all_bytes - kept_bytes) // max(1, all_bytes)


def overlapped_step(
    spec: ModelSpec,
    workload: Workload,
    placement: Placement,
    traffic: Traffic,
    hardware: HardwareProfile,
    *,
    flops_recomputed: int,
    holds_gradients: bool,
    overlap: Overlap = "optimized",
) -> StepTime:
    """The time of a step among others. `traffic` and `flops_recomputed` are those of the same placement."""
    layers, head = layer_flops(spec, workload), _head_flops(spec, workload)
    updated: dict[Stage, int] = {"forward": 0, "backward": 0, "update": 0}
    for block in spec.blocks:
        stage = placement.update_stage(block.index, holds_gradients=holds_gradients, overlap=overlap)
        updated[stage] += block.num_parameters

    def time(flops: int, read_bytes: int, written_bytes: int, num_updated: int, *, runs_ahead: bool) -> StageTime:
        compute = flops / hardware.gpu.flops_per_second
        optimizer = num_updated / hardware.host.adam_parameters_per_second
        if overlap == "naive":
            read = read_bytes / hardware.nvme.read_bytes_per_second
            write = written_bytes / hardware.nvme.write_bytes_per_second
            beside = read + optimizer + write
        else:
            read, write = nvme_seconds(hardware.nvme, read_bytes, written_bytes)
            beside = max(read + write, optimizer)
        return StageTime(
            compute=compute,
            nvme_read=read,
            nvme_write=write,
            optimizer=optimizer,
            total=max(compute, beside) if runs_ahead else compute + beside,
        )

    reads_ahead = placement.prefetch_blocks > 0
    return StepTime(
        forward=time(
            layers,
            traffic.forward_read_bytes,
            traffic.forward_written_bytes,
            updated["forward"],
            runs_ahead=reads_ahead,
        ),
        backward=time(
            2 * layers + 3 * head + flops_recomputed,
            traffic.backward_read_bytes,
            traffic.backward_written_bytes,
            updated["backward"],
            runs_ahead=reads_ahead and (placement.pending_updates > 0 or updated["backward"] == 0),
        ),
        update=time(
            0, traffic.update_read_bytes, traffic.update_written_bytes, updated["update"], runs_ahead=reads_ahead
        ),
    )


def nvme_seconds(nvme: Nvme, read_bytes: int, written_bytes: int) -> tuple[float, float]:
    """What reading and writing take together, as the two parts of the sum.

    As much as there is of both moves at the mixed rate, what is left of either at that direction's own.
    A drive that does one thing at a time has the harmonic mean as its mixed rate, and the sum is the papers'
    read / R + written / W; a drive that does both at full speed has the sum, and time is nearer the maximum.
    No direction is faster beside the other than alone, whatever was measured: else reading less could take
    longer.
    """
    read_rate, write_rate = nvme.read_bytes_per_second, nvme.write_bytes_per_second
    mixed_rate = min(nvme.mixed_bytes_per_second, 2 * read_rate, 2 * write_rate)
    both_bytes = min(read_bytes, written_bytes)
    return (
        both_bytes / mixed_rate + (read_bytes - both_bytes) / read_rate,
        both_bytes / mixed_rate + (written_bytes - both_bytes) / write_rate,
    )


def _head_flops(spec: ModelSpec, workload: Workload) -> int:
    matrices = _matrix_elements(spec.blocks[-1])
    if spec.tied:
        matrices += spec.vocab_size * spec.hidden_size
    return 2 * workload.tokens * matrices


def _matrix_elements(block: BlockSpec) -> int:
    return sum(math.prod(parameter.shape) for parameter in block.parameters if len(parameter.shape) > 1)
