"""The predicted time of a step whose parts overlap, by stage and resource. Pure.

The paper's model (Ratel, Eq. 1-5), changed for Ratel's record layout and schedule as docs/planning.md says. Forward,
backward and, with a separate optimizer, the update after it follow each other. Within each stage the slowest resource
decides:

    compute     measured seconds, or FLOPs and the bytes that other operators than products move; in backward twice the
                FLOPs, less gradients of frozen matrices, and what is recomputed
    up, down    weights once for all micro-batches, gradients and offloaded activations, at the link's rates, both
                directions at once, except for what stays on the GPU; nothing where the CPU computes. Of the embedding
                and its gradient, the rows of the step's tokens. Where host memory has the sums of gradients, the
                gradients of every micro-batch, and the sums. Weights that do not fit into the window for the next
                block, and what of a unit does not fit next to the one in use, go up while nothing computes
                (planning/time/link.py)
    nvme        the bytes of planning/time/traffic.py, spilled activations among them
    optimizer   AdamW on the CPU (the paper leaves it out; Fuyou has it as T_o)
    network     what several ranks send each other (planning/time/network.py)
    memory      what all of these move through main memory, about 66 bytes per parameter and step

Six things make this more than a maximum of sums:

1. Where the CPU computes, the optimizer's threads and copies take their share of its time.
2. What does not run ahead does not overlap: without prefetch the weights, and without pending updates the optimizer,
   add to the computing time. Offloaded activations always run ahead.
3. Updates that overlap with backward begin with the first gradient and end after the last one (`UpdateEdges`).
4. Only some layers' activations are spilled, and a few buffers cannot carry them from one layer's turn to another's. So
   spilled units overlap with the computing of their own layers only (`Stages.with_spilled_units`).
5. Both directions of the link share what it moves when both are busy, and offloaded activations book at most 85 % of it
   (planning/time/link.py): a unit is needed at a certain time, and a link that is always busy brings it too late.
6. Of several ranks, nothing computes while they gather the first segment's weights, which are updated last, or before
   anything else; nor while they exchange its gradients.

How a stage fills and drains is left out otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.duties.placed import PlacedStep
from ratel_cli.planning.duties.step import PlannedStep
from ratel_cli.planning.profile.activations import OffloadedActivations
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.planning.profile.placement import SPILL_WINDOW_UNITS, Placement, Workload
from ratel_cli.planning.time.link import late_bytes
from ratel_cli.planning.time.network import NetworkTraffic, network_of
from ratel_cli.planning.time.stages import (
    NO_EDGES,
    Stages,
    StageWork,
    Updated,
    UpdateEdges,
    nvme_seconds,
    updated_in_stages,
)
from ratel_cli.planning.time.step_time import StageTime, StepTime
from ratel_cli.planning.time.traffic import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSeconds:
    """Seconds that the compute device computes in one step."""

    forward: float
    """Embedding and layers."""
    backward: float
    """Head, layers and embedding, with everything recomputed except layers' inputs."""
    head: float
    """The part of `backward` that comes before the first gradient."""
    is_measured: bool
    adamw_share: float | None = None
    """See `ModelProfile`."""


def compute_seconds(
    profile: ModelProfile, workload: Workload, hardware: HardwareProfile, *, head_sum_bytes: int = 0
) -> ComputeSeconds:
    """Measured seconds where the profile has them, else FLOPs divided by the device's rate, and the bytes that other
    operators move divided by that of its memory: a kernel is bound by one or the other.

    `head_sum_bytes`: what adding up the head's gradients reads and writes in a GPU's memory, in one step. A measured
    head includes it.
    """
    layers = [profile.profiles[number] for number in profile.layers]
    if profile.source == "recorded":
        outside, head = profile.embedding_seconds or 0.0, profile.head_seconds or 0.0
        forward = sum(layer.forward_seconds or 0.0 for layer in layers) + outside / 2
        backward = sum((layer.backward_seconds or 0.0) + (layer.recomputed_seconds or 0.0) for layer in layers)
        backward += outside / 2 + head
    else:
        rate = hardware.gpu.flops_per_second
        forward = sum(layer.flops_forward for layer in layers) / rate
        head = (3 * profile.flops_head - profile.frozen_head_flops) / rate
        backward = sum(layer.flops_backward + layer.flops_recomputed for layer in layers) / rate
        memory_rate = _memory_rate(hardware)
        forward += sum(layer.forward_moved_bytes for layer in layers) / memory_rate
        moved_again = sum(layer.forward_moved_bytes for layer in layers if layer.input_bytes) / memory_rate
        head += profile.head_moved_bytes / memory_rate
        backward += moved_again + sum(layer.backward_moved_bytes for layer in layers) / memory_rate + head
    number, adding = workload.full_micro_batches, 0.0
    if profile.source != "recorded" and hardware.gpu.memory_bytes_per_second is not None:
        adding = head_sum_bytes / hardware.gpu.memory_bytes_per_second
    return ComputeSeconds(
        forward=number * forward,
        backward=number * backward + adding,
        head=number * head + adding,
        is_measured=profile.source == "recorded",
        adamw_share=profile.adamw_share,
    )


def _memory_rate(hardware: HardwareProfile) -> float:
    """Bytes per second of the memory that the compute device computes in; infinite if it is not known."""
    rate = hardware.gpu.memory_bytes_per_second
    if rate is None and hardware.link is None:
        rate = hardware.host.memory_bytes_per_second
    return rate or math.inf


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """What decides the time of a step, whatever its placement is."""

    step: PlannedStep
    """A step of the data."""
    hardware: HardwareProfile
    compute: ComputeSeconds

    def time(
        self,
        placement: Placement,
        traffic: Traffic,
        offloaded: OffloadedActivations,
        *,
        not_recomputed_seconds: float = 0.0,
    ) -> StepTime:
        """The time of a step in the middle of a run. `traffic` and `offloaded` belong to the same placement.

        `not_recomputed_seconds` is what the swapped outputs save of `compute.backward`.
        """
        own, compute, overlap = self.step.own, self.compute, self.step.overlap
        placed = PlacedStep(self.step, placement)
        updated = updated_in_stages(own, placement.deferred, holds_gradients=self.step.holds_gradients, overlap=overlap)
        stages = Stages(self.hardware, overlap, adamw_threads=placement.adamw_threads, adamw_share=compute.adamw_share)
        forward = stages.with_spilled_units(
            self._forward(placed, traffic, offloaded, updated["forward"]),
            offloaded.written_units,
            num_parts=offloaded.num_units,
            direction="written",
        )
        backward_seconds = max(0.0, compute.backward - not_recomputed_seconds)
        edges = NO_EDGES
        if updated["backward"].work:
            edges = _update_edges(
                own,
                placement,
                self.hardware,
                head_seconds=compute.head,
                backward_seconds=backward_seconds,
                idle_seconds=_idle_nvme_seconds(forward, offloaded),
            )
        backward = stages.with_spilled_units(
            self._backward(placed, traffic, offloaded, updated["backward"], backward_seconds, edges),
            offloaded.read_units,
            num_parts=_parts_of_backward(self.step.spec, offloaded),
            direction="read",
        )
        if not self.step.is_separate:
            return StepTime(forward=forward, backward=backward)
        update = stages.time(
            StageWork(
                compute=0.0,
                up_bytes=0,
                down_bytes=0,
                read_bytes=traffic.update_read_bytes,
                written_bytes=traffic.update_written_bytes,
                updated=updated["update"],
                runs_ahead=placement.prefetch_blocks > 0,
            )
        )
        return StepTime(forward=forward, backward=backward, update=update)

    @cached_property
    def _network(self) -> NetworkTraffic:
        return network_of(self.step)

    def _forward(
        self, placed: PlacedStep, traffic: Traffic, offloaded: OffloadedActivations, updated: Updated
    ) -> StageWork:
        network, placement = self._network, placed.placement
        # The first gather waits for the update of the segment, if it is deferred.
        is_first_late = placed.stages[0] == "forward" and network.first.sent_bytes > 0
        return StageWork(
            compute=self.compute.forward,
            up_bytes=placed.amounts["up", "forward"],
            down_bytes=offloaded.linked_bytes,
            down_units_bytes=offloaded.linked_bytes,
            read_bytes=traffic.forward_read_bytes,
            in_files_bytes=traffic.forward_in_files_bytes,
            written_bytes=traffic.forward_written_bytes - offloaded.written_bytes,
            exposed_bytes=placed.exposed["up", "forward"],
            exposed_down_bytes=offloaded.exposed.down_bytes,
            updated=updated,
            runs_ahead=placement.prefetch_blocks > 0,
            network=network.forward,
            alone=network.first,
            alone_seconds=_first_update_seconds(self.step.own, placement, self.hardware) if is_first_late else 0.0,
        )

    def _backward(
        self,
        placed: PlacedStep,
        traffic: Traffic,
        offloaded: OffloadedActivations,
        updated: Updated,
        seconds: float,
        edges: UpdateEdges,
    ) -> StageWork:
        """What backward has to do, which computes for `seconds`."""
        network, placement, amounts = self._network, placed.placement, placed.amounts
        late = late_bytes(
            placed.layer_sums.amounts["up", "backward"],
            self.hardware,
            seconds,
            offloaded,
            num_micro_batches=self.step.workload.num_micro_batches,
        )
        waited_bytes = placed.exposed["up", "backward"] + amounts["waited", "backward"]
        return StageWork(
            compute=seconds,
            up_bytes=amounts["up", "backward"] + offloaded.linked_bytes,
            up_units_bytes=offloaded.linked_bytes,
            down_bytes=amounts["down", "backward"],
            exposed_bytes=waited_bytes + offloaded.exposed.up_bytes + late,
            num_added=amounts["added", "backward"],
            added_bytes=amounts["add bytes", "backward"],
            read_bytes=traffic.backward_read_bytes - offloaded.read_bytes,
            in_files_bytes=traffic.backward_in_files_bytes,
            written_bytes=traffic.backward_written_bytes,
            updated=updated,
            runs_ahead=placement.prefetch_blocks > 0 and (placement.pending_updates > 0 or updated.work == 0),
            edges=edges,
            network=network.backward,
            alone=network.last,
            exchanged=network.gradients,
        )


def _update_edges(
    spec: ModelSpec,
    placement: Placement,
    hardware: HardwareProfile,
    *,
    head_seconds: float,
    backward_seconds: float,
    idle_seconds: float,
) -> UpdateEdges:
    """The edges of updates that overlap with backward.

    The optimizer reads the group that it updates next and those that are read ahead of it before the embedding's
    gradient is there, and as many may still be written when everything is updated (engine/optimizer/pipeline.py).
    """
    first = spec.segments[spec.first_trained].trained[0]
    of_group = placement.groups.elements  # of this block or of smaller ones behind it
    ahead = (placement.groups.in_flight + 1) * max(of_group, first.group_elements(of_group))
    stays = first.segment in placement.resident_weights
    beyond = max(0, first.num_elements - ahead)
    read = 0 if first.segment in placement.resident_states else beyond
    moved = first.record.state_bytes(read), first.record.num_bytes(beyond if stays else first.num_elements)
    updated_per_second = placement.adamw_threads * hardware.host.adam_parameters_per_second
    trained = [segment for segment in spec.segments if segment.trained]
    pending = sum(segment.record_bytes for segment in trained[: placement.pending_updates])
    deferred_share = len(placement.deferred) / max(1, spec.num_layers)
    return UpdateEdges(
        begin_seconds=head_seconds + deferred_share * max(0.0, backward_seconds - head_seconds),
        rest_seconds=max(
            sum(nvme_seconds(hardware.nvme, *moved)), beyond * first.rule.relative_time / updated_per_second
        ),
        drained_bytes=min(pending, first.record.num_bytes(ahead)) if stays else 0,
        drained_seconds=idle_seconds,
    )


def _first_update_seconds(own: ModelSpec, placement: Placement, hardware: HardwareProfile) -> float:
    """What the update of the first segment takes before its weights are new."""
    first = own.segments[0]
    read_bytes = first.updated_bytes + (0 if 0 in placement.resident_states else first.state_bytes)
    updated = placement.adamw_threads * hardware.host.adam_parameters_per_second
    return max(read_bytes / hardware.nvme.read_bytes_per_second, first.update_work / updated)


def _idle_nvme_seconds(forward: StageTime, offloaded: OffloadedActivations) -> float:
    """The time in forward in which the drive can finish what the step before left to write.

    Spilled units are written after that, and once their buffers are full, computing waits for both.
    """
    idle = forward.total - forward.nvme
    if sum(units.number for units in offloaded.written_units) <= SPILL_WINDOW_UNITS:
        return idle
    return min(idle, SPILL_WINDOW_UNITS * forward.compute / offloaded.num_units)


def _parts_of_backward(spec: ModelSpec, offloaded: OffloadedActivations) -> int:
    """The length of backward in units: head and embedding, which have no units, take as long as a layer each."""
    num_layers = spec.num_layers
    return offloaded.num_units * (num_layers + 2) // num_layers if num_layers > 0 else offloaded.num_units
