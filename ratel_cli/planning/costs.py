"""Predicted time of a step whose parts overlap, by stage and resource. Used by `planning.choose`. Pure.

The paper's model (Eq. 1-5), mended as in papers.md section 2, for Ratel's layout and schedule. Forward, backward
and, with a separate optimizer, the update after it follow each other; within each, the slowest resource
decides:

    compute     forward FLOPs, or measured seconds (Eq. 2, 5); backward twice that and what is recomputed
    up, down    weights once for all micro-batches, what was put aside, gradients, at the link's rates, both ways
                at once (Eq. 2, 5); nothing where the CPU computes
    nvme        bytes of `planning.traffic`, spilled activations among them (Eq. 2-5)
    optimizer   AdamW on the CPU (Fuyou's T_o; the paper leaves it out)
    memory      what all of these move through main memory (about 66 bytes per parameter and step)

Where the CPU computes, the optimizer's thread and copies take a core's share of its time. What does not run ahead
does not overlap either: without prefetch the weights, without pending updates the optimizer, stand in computing's
way. Left out: how a stage fills and drains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ratel_cli.hardware.spec import HardwareProfile, Nvme
from ratel_cli.model.spec import BlockSpec, ModelSpec
from ratel_cli.planning.activations import Aside
from ratel_cli.planning.model_profile import ModelProfile
from ratel_cli.planning.placement import Overlap, Placement, Stage
from ratel_cli.planning.traffic import Traffic
from ratel_cli.planning.workload import StateBytes, Workload

Bottleneck = Literal["compute", "up", "down", "nvme read", "nvme write", "optimizer", "memory"]
_ADAMW_MEMORY_BYTES = 26
"""Per parameter: gradient and states read, states written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSeconds:
    """What a step computes, as time on the compute device."""

    forward: float
    """Embedding and layers."""
    backward: float
    """Head, layers and embedding, with everything but layers' inputs recomputed."""
    is_measured: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds of one stage by resource, and of the stage as a whole."""

    compute: float
    up: float
    down: float
    nvme_read: float
    nvme_write: float
    """While both directions run, each is charged half of the time: together they are what NVMe takes."""
    optimizer: float
    memory: float
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
    def bottleneck(self) -> Bottleneck:
        """The resource that is busy longest, in the words of the step line; of NVMe, the direction that takes more."""
        stages = (self.forward, self.backward, self.update)
        read, write = sum(stage.nvme_read for stage in stages), sum(stage.nvme_write for stage in stages)
        by_name: dict[Bottleneck, float] = {
            "compute": sum(stage.compute for stage in stages),
            "up": sum(stage.up for stage in stages),
            "down": sum(stage.down for stage in stages),
            "nvme read" if read >= write else "nvme write": read + write,
            "optimizer": sum(stage.optimizer for stage in stages),
            "memory": sum(stage.memory for stage in stages),
        }
        return max(by_name, key=lambda name: by_name[name])


def head_flops(spec: ModelSpec, *, tokens: int) -> int:
    """Of the head in forward. It is never recomputed (papers.md section 2, fault 4)."""
    matrices = _matrix_elements(spec.blocks[-1])
    if spec.tied:
        matrices += spec.vocab_size * spec.hidden_size
    return 2 * tokens * matrices


def compute_seconds(profile: ModelProfile, workload: Workload, hardware: HardwareProfile) -> ComputeSeconds:
    """From measured times where the profile has them, else from FLOPs and the device's rate."""
    layers = [profile.profiles[number] for number in profile.layers]
    if profile.source == "recorded":
        outside, head = profile.embedding_seconds or 0.0, profile.head_seconds or 0.0
        forward = sum(layer.forward_seconds or 0.0 for layer in layers) + outside / 2
        backward = sum((layer.backward_seconds or 0.0) + (layer.recomputed_seconds or 0.0) for layer in layers)
        backward += outside / 2 + head
    else:
        rate = hardware.gpu.flops_per_second
        forward = sum(layer.flops_forward for layer in layers) / rate
        backward = 2 * forward + (sum(layer.flops_recomputed for layer in layers) + 3 * profile.flops_head) / rate
    number = workload.num_micro_batches
    return ComputeSeconds(
        forward=number * forward, backward=number * backward, is_measured=profile.source == "recorded"
    )


def overlapped_step(
    spec: ModelSpec,
    state: StateBytes,
    placement: Placement,
    traffic: Traffic,
    hardware: HardwareProfile,
    *,
    compute: ComputeSeconds,
    aside: Aside,
    not_recomputed_seconds: float,
    holds_gradients: bool,
    overlap: Overlap = "optimized",
) -> StepTime:
    """The time of a step among others. `traffic` and `aside` are those of the same placement."""
    updated: dict[Stage, int] = {"forward": 0, "backward": 0, "update": 0}
    for block in spec.blocks:
        stage = placement.update_stage(block.index, holds_gradients=holds_gradients, overlap=overlap)
        updated[stage] += block.num_elements
    elements = sum(block.num_elements for block in spec.blocks)
    weight_bytes, gradient_bytes = elements * state.compute, elements * state.gradient
    reads_ahead = placement.prefetch_blocks > 0
    stages = _Stages(hardware, overlap, adamw_threads=placement.adamw_threads)
    return StepTime(
        forward=stages.time(
            compute=compute.forward,
            up_bytes=weight_bytes,
            down_bytes=aside.total_bytes,
            copied_bytes=aside.written_bytes,
            read_bytes=traffic.forward_read_bytes,
            written_bytes=traffic.forward_written_bytes,
            num_updated=updated["forward"],
            runs_ahead=reads_ahead,
        ),
        backward=stages.time(
            compute=max(0.0, compute.backward - not_recomputed_seconds),
            up_bytes=weight_bytes + aside.total_bytes,
            down_bytes=gradient_bytes,
            copied_bytes=0,
            read_bytes=traffic.backward_read_bytes,
            written_bytes=traffic.backward_written_bytes,
            num_updated=updated["backward"],
            runs_ahead=reads_ahead and (placement.pending_updates > 0 or updated["backward"] == 0),
        ),
        update=stages.time(
            compute=0.0,
            up_bytes=0,
            down_bytes=0,
            copied_bytes=0,
            read_bytes=traffic.update_read_bytes,
            written_bytes=traffic.update_written_bytes,
            num_updated=updated["update"],
            runs_ahead=reads_ahead,
        ),
    )


class _Stages:
    """One machine's times."""

    def __init__(self, hardware: HardwareProfile, overlap: Overlap, *, adamw_threads: int) -> None:
        self._hardware = hardware
        self._adamw_threads = adamw_threads
        self._is_serial = overlap == "naive"

    def time(
        self,
        *,
        compute: float,
        up_bytes: int,
        down_bytes: int,
        copied_bytes: int,
        read_bytes: int,
        written_bytes: int,
        num_updated: int,
        runs_ahead: bool,
    ) -> StageTime:
        """`copied_bytes` are packed into buffers by the compute thread, where the CPU computes."""
        host, nvme, link = self._hardware.host, self._hardware.nvme, self._hardware.link
        optimizer = num_updated / (host.adam_parameters_per_second * self._adamw_threads)
        memory_rate = host.memory_bytes_per_second or math.inf
        if link is None:
            up = down = 0.0
            linked_bytes = 2 * copied_bytes
            shared = optimizer * self._adamw_threads / host.num_cores if compute else 0.0
            compute += shared + copied_bytes / memory_rate
        else:
            up, down = up_bytes / link.to_gpu_bytes_per_second, down_bytes / link.from_gpu_bytes_per_second
            linked_bytes = up_bytes + down_bytes
        moved_bytes = read_bytes + written_bytes + linked_bytes + _ADAMW_MEMORY_BYTES * num_updated
        memory = moved_bytes / memory_rate
        if self._is_serial:
            read, write = read_bytes / nvme.read_bytes_per_second, written_bytes / nvme.write_bytes_per_second
            beside = max(read + optimizer + write, up, down, memory)
        else:
            read, write = nvme_seconds(nvme, read_bytes, written_bytes)
            beside = max(read + write, optimizer, up, down, memory)
        return StageTime(
            compute=compute,
            up=up,
            down=down,
            nvme_read=read,
            nvme_write=write,
            optimizer=optimizer,
            memory=memory,
            total=max(compute, beside) if runs_ahead else compute + beside,
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


def _matrix_elements(block: BlockSpec) -> int:
    return sum(math.prod(parameter.shape) for parameter in block.parameters if len(parameter.shape) > 1)
