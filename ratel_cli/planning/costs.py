"""Predicted time of a step whose parts overlap, by stage and resource. Used by `planning.choose`. Pure.

The paper's model (Eq. 1-5), mended as in papers.md section 2, for Ratel's layout and schedule. Forward, backward
and, with a separate optimizer, the update after it follow each other; within each, the slowest resource
decides:

    compute     forward FLOPs, or measured seconds (Eq. 2, 5); backward twice that and what is recomputed
    up, down    weights once for all micro-batches, what was offloaded, gradients, at the link's rates, both ways
                at once (Eq. 2, 5), but for what the GPU keeps; nothing where the CPU computes
    nvme        bytes of `planning.traffic`, spilled activations among them (Eq. 2-5)
    optimizer   AdamW on the CPU (Fuyou's T_o; the paper leaves it out)
    memory      what all of these move through main memory (about 66 bytes per parameter and step)

Where the CPU computes, the optimizer's thread and copies take a core's share of its time. What does not run ahead
does not overlap either: without prefetch the weights, without pending updates the optimizer, stand in computing's
way; what was offloaded never does. Backward's updates begin with the first gradient and end after the last
(`_Edges`). Only some layers' activations are spilled, and a few buffers do not carry them from the turn of one layer
to another's: beneath forward and backward they are a matter of those layers alone (`_Stages.spilling`). How a stage
fills and drains is left out otherwise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from ratel_cli.hardware.spec import HardwareProfile, Nvme
from ratel_cli.model.spec import ModelSpec
from ratel_cli.planning.activations import OffloadedActivations, Units
from ratel_cli.planning.gpu_memory import weight_bytes_of
from ratel_cli.planning.model_profile import ModelProfile
from ratel_cli.planning.placement import SPILL_WINDOW_UNITS, Overlap, Placement, Stage, StateBytes, Workload
from ratel_cli.planning.traffic import Traffic
from ratel_cli.sizes import GROUP_ELEMENTS

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
    head: float
    """Of that, what comes before the first gradient."""
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
        forward, head = sum(layer.flops_forward for layer in layers) / rate, 3 * profile.flops_head / rate
        backward = 2 * forward + sum(layer.flops_recomputed for layer in layers) / rate + head
    number = workload.num_micro_batches
    return ComputeSeconds(
        forward=number * forward,
        backward=number * backward,
        head=number * head,
        is_measured=profile.source == "recorded",
    )


def overlapped_step(
    spec: ModelSpec,
    state: StateBytes,
    placement: Placement,
    traffic: Traffic,
    hardware: HardwareProfile,
    *,
    compute: ComputeSeconds,
    offloaded: OffloadedActivations,
    not_recomputed_seconds: float,
    holds_gradients: bool,
    overlap: Overlap = "optimized",
) -> StepTime:
    """The time of a step among others. `traffic` and `offloaded` are those of the same placement."""
    updated: dict[Stage, int] = {"forward": 0, "backward": 0, "update": 0}
    for block in spec.blocks:
        stage = placement.update_stage(block.index, holds_gradients=holds_gradients, overlap=overlap)
        updated[stage] += block.num_elements
    elements = sum(block.num_elements for block in spec.blocks)
    weight_bytes, gradient_bytes = elements * state.compute, elements * state.gradient
    kept_bytes = weight_bytes_of(spec, state, placement.gpu_weights)
    reads_ahead = placement.prefetch_blocks > 0
    stages = _Stages(hardware, overlap, adamw_threads=placement.adamw_threads)
    forward = stages.spilling(
        _Work(
            compute=compute.forward,
            up_bytes=weight_bytes,
            down_bytes=offloaded.linked_bytes,
            read_bytes=traffic.forward_read_bytes,
            written_bytes=traffic.forward_written_bytes - offloaded.written_bytes,
            num_updated=updated["forward"],
            runs_ahead=reads_ahead,
        ),
        offloaded.written_units,
        num_parts=offloaded.num_units,
        direction="written",
    )
    backward_seconds = max(0.0, compute.backward - not_recomputed_seconds)
    edges = _NO_EDGES
    if updated["backward"]:
        edges = _edges(
            spec,
            state,
            placement,
            hardware.nvme,
            head_seconds=compute.head,
            backward_seconds=backward_seconds,
            spare_seconds=_spare_seconds(forward, offloaded),
        )
    backward = stages.spilling(
        _Work(
            compute=backward_seconds,
            up_bytes=weight_bytes - kept_bytes + offloaded.linked_bytes,
            down_bytes=gradient_bytes,
            read_bytes=traffic.backward_read_bytes - offloaded.read_bytes,
            written_bytes=traffic.backward_written_bytes,
            num_updated=updated["backward"],
            runs_ahead=reads_ahead and (placement.pending_updates > 0 or updated["backward"] == 0),
            edges=edges,
        ),
        offloaded.read_units,
        num_parts=_parts_of_backward(spec, offloaded),
        direction="read",
    )
    update = stages.time(
        _Work(
            compute=0.0,
            up_bytes=0,
            down_bytes=0,
            read_bytes=traffic.update_read_bytes,
            written_bytes=traffic.update_written_bytes,
            num_updated=updated["update"],
            runs_ahead=reads_ahead,
        )
    )
    return StepTime(forward=forward, backward=backward, update=update)


def _spare_seconds(forward: StageTime, offloaded: OffloadedActivations) -> float:
    """Of the drive, for what the step before has left to write.

    Spilled units are written behind that, and once their buffers are full, computing waits for both.
    """
    spare = forward.total - forward.nvme
    if sum(units.number for units in offloaded.written_units) <= SPILL_WINDOW_UNITS:
        return spare
    return min(spare, SPILL_WINDOW_UNITS * forward.compute / offloaded.num_units)


def _parts_of_backward(spec: ModelSpec, offloaded: OffloadedActivations) -> int:
    """In units: head and embedding, which have none, take as long as a layer each."""
    num_layers = len(spec.blocks) - 2
    return offloaded.num_units * (num_layers + 2) // num_layers if num_layers > 0 else offloaded.num_units


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edges:
    """How updates lie to the stage that they are beneath: they begin later, and end later."""

    begin: float = 0.0
    """Seconds of computing before the first gradient."""
    rest: float = 0.0
    """Seconds after the last gradient, the embedding's, before the next step can begin with it."""
    drained_bytes: int = 0
    """What may be written beneath the next forward instead, if the embedding stays in memory."""
    drained_seconds: float = 0.0
    """And how long, at most: forward has so much to spare."""


_NO_EDGES = _Edges()


def _edges(
    spec: ModelSpec,
    state: StateBytes,
    placement: Placement,
    nvme: Nvme,
    *,
    head_seconds: float,
    backward_seconds: float,
    spare_seconds: float,
) -> _Edges:
    """Of backward, when blocks are updated beneath it.

    The optimizer has buffers for three groups (engine/optimizer/pipeline.py): two of the embedding's may be read before
    its gradient is there, and two be written when all is updated.
    """
    first, ahead = spec.blocks[0], 2 * GROUP_ELEMENTS
    stays = first.index in placement.resident_weights
    beyond = max(0, first.num_elements - ahead)
    read = 0 if first.index in placement.resident_states else beyond
    pending = sum(block.num_elements for block in spec.blocks[: placement.pending_updates])
    deferred_share = len(placement.deferred) / max(1, len(spec.blocks) - 2)
    return _Edges(
        begin=head_seconds + deferred_share * max(0.0, backward_seconds - head_seconds),
        rest=sum(
            nvme_seconds(
                nvme,
                read * (state.record - state.compute),
                (beyond if stays else first.num_elements) * state.record,
            )
        ),
        drained_bytes=min(pending, ahead) * state.record if stays else 0,
        drained_seconds=spare_seconds,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What one stage has to do, but for spilled activations."""

    compute: float
    up_bytes: int
    down_bytes: int
    read_bytes: int
    written_bytes: int
    num_updated: int
    runs_ahead: bool
    edges: _Edges = _NO_EDGES


class _Stages:
    """One machine's times."""

    def __init__(self, hardware: HardwareProfile, overlap: Overlap, *, adamw_threads: int) -> None:
        self._hardware = hardware
        self._adamw_threads = adamw_threads
        self._is_serial = overlap == "naive"

    def spilling(
        self, work: _Work, spilled: Sequence[Units], *, num_parts: int, direction: Literal["read", "written"]
    ) -> StageTime:
        """The time of a stage of equal parts, some of which read or write a spilled unit each.

        A part takes its share of what the stage would if all parts were like it, since what the drive could still do
        beside one is of no use to another. The sum of so many maxima is no less than the maximum of the sums, and as
        convex; where nothing is spilled, or everything, they are the same.
        """
        parts = Counter({0: num_parts - sum(units.number for units in spilled)})
        for units in spilled:
            parts[units.unit_bytes] += units.number
        times: list[tuple[float, StageTime]] = []
        for unit_bytes, number in parts.items():
            if number:
                aside_bytes = num_parts * unit_bytes
                read_bytes, written_bytes = (aside_bytes, 0) if direction == "read" else (0, aside_bytes)
                time = self.time(work, aside_read_bytes=read_bytes, aside_written_bytes=written_bytes)
                times.append((number / num_parts, time))
        return StageTime(
            **{each.name: sum(share * getattr(time, each.name) for share, time in times) for each in fields(StageTime)}
        )

    def time(self, work: _Work, *, aside_read_bytes: int = 0, aside_written_bytes: int = 0) -> StageTime:
        """With so many bytes of spilled activations besides, which run ahead in any case.

        Those written are packed into buffers by the compute thread, where the CPU computes.
        """
        host, link, edges = self._hardware.host, self._hardware.link, work.edges
        compute, num_updated = work.compute, work.num_updated
        optimizer = num_updated / (host.adam_parameters_per_second * self._adamw_threads)
        memory_rate = host.memory_bytes_per_second or math.inf
        if link is None:
            up = down = 0.0
            linked_bytes = 2 * aside_written_bytes
            shared = optimizer * self._adamw_threads / host.num_cores if compute else 0.0
            compute += shared + aside_written_bytes / memory_rate
        else:
            up, down = work.up_bytes / link.to_gpu_bytes_per_second, work.down_bytes / link.from_gpu_bytes_per_second
            linked_bytes = work.up_bytes + work.down_bytes
        read_bytes, written_bytes = work.read_bytes + aside_read_bytes, work.written_bytes + aside_written_bytes
        moved_bytes = read_bytes + written_bytes + linked_bytes + _ADAMW_MEMORY_BYTES * num_updated
        memory = moved_bytes / memory_rate
        read, write = self._nvme(read_bytes, written_bytes)
        others = max(up, down, memory)
        if work.runs_ahead:
            drained = (read + write) * edges.drained_bytes / max(1, read_bytes + written_bytes)
            updating = self._updating(read + write - min(drained, edges.drained_seconds), optimizer)
            total = max(compute + edges.rest, edges.begin + updating, others)
        else:
            stored = sum(self._nvme(work.read_bytes, work.written_bytes))
            in_turn = compute + max(self._updating(stored, optimizer), others)
            total = max(in_turn, edges.begin + self._updating(read + write, optimizer), others)
        return StageTime(
            compute=compute,
            up=up,
            down=down,
            nvme_read=read,
            nvme_write=write,
            optimizer=optimizer,
            memory=memory,
            total=total,
        )

    def _nvme(self, read_bytes: int, written_bytes: int) -> tuple[float, float]:
        nvme = self._hardware.nvme
        if self._is_serial:
            return read_bytes / nvme.read_bytes_per_second, written_bytes / nvme.write_bytes_per_second
        return nvme_seconds(nvme, read_bytes, written_bytes)

    def _updating(self, nvme: float, optimizer: float) -> float:
        return nvme + optimizer if self._is_serial else max(nvme, optimizer)


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
