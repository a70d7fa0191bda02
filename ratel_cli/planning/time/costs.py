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
3. Updates that overlap with backward begin with the first gradient and end after the last one (`_UpdateEdges`).
4. Only some layers' activations are spilled, and a few buffers cannot carry them from one layer's turn to another's. So
   spilled units overlap with the computing of their own layers only (`_Stages.with_spilled_units`).
5. Both directions of the link share what it moves when both are busy, and offloaded activations book at most 85 % of it
   (planning/time/link.py): a unit is needed at a certain time, and a link that is always busy brings it too late.
6. Of several ranks, nothing computes while they gather the first segment's weights, which are updated last, or before
   anything else; nor while they exchange its gradients.

How a stage fills and drains is left out otherwise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from ratel_cli.hardware.spec import HardwareProfile, Nvme
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.profile.activations import OffloadedActivations, SpilledUnits
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.planning.profile.placement import (
    SPILL_WINDOW_UNITS,
    Overlap,
    Placement,
    Workload,
    gradient_bytes,
    update_stage,
)
from ratel_cli.planning.time.link import (
    UNBOOKED,
    exposed_weight_bytes,
    head_sums,
    host_sums,
    late_bytes,
    link_seconds,
    uploaded_bytes,
)
from ratel_cli.planning.time.network import NO_TRAFFIC, NOTHING, Exchanged, RankPart
from ratel_cli.planning.time.step_time import StageTime, StepTime, weighted_sum
from ratel_cli.planning.time.traffic import Traffic
from ratel_cli.schedule.segments import Segment
from ratel_cli.schedule.uses import Stage

_ADDING_SPEED, _MOST_ADDING = 2.0, 8
"""Adding a gradient moves 10 bytes of main memory, where AdamW moves 26. Torch uses this many threads at most."""


_COPIED, _ADDED = 2, 3
"""Bytes that main memory moves for a byte that is sent or received: it is copied once; and for one of a gradient that
is received: it is added to a sum."""


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


def overlapped_step(
    spec: ModelSpec,
    placement: Placement,
    traffic: Traffic,
    hardware: HardwareProfile,
    *,
    compute: ComputeSeconds,
    offloaded: OffloadedActivations,
    not_recomputed_seconds: float,
    holds_gradients: bool,
    num_micro_batches: int = 1,
    num_head_chunks: int = 1,
    lookup_rows_bytes: int = 0,
    overlap: Overlap = "optimized",
    part: RankPart | None = None,
) -> StepTime:
    """The time of a step in the middle of a run. `traffic` and `offloaded` belong to the same placement.

    `part`: what this one of several ranks has of the model; None: all of it.

    `not_recomputed_seconds` is what the swapped outputs save of `compute.backward`. `lookup_rows_bytes`: rows
    of the head's gradient of a matrix that it borrows, of all micro-batches, that wait for the embedding's.
    `num_head_chunks`: chunks of tokens that the head computes with, of all micro-batches.
    """
    own, network = (spec, NO_TRAFFIC) if part is None else (part.own, part.network)
    is_deferred = placement.update_stage(0, holds_gradients=holds_gradients, overlap=overlap) == "forward"
    updated = _updated(own, placement.deferred, holds_gradients=holds_gradients, overlap=overlap)
    # The head's fp32 gradient of a matrix that it borrows goes to host memory and comes back, with the rows.
    is_away = placement.gpu_holds_head and not placement.gpu_holds_lookup
    lookup_sum_bytes = spec.lent.sum_bytes + lookup_rows_bytes if is_away else 0
    exposed_forward, exposed_backward = exposed_weight_bytes(spec, placement)
    sums = host_sums(spec, placement, num_micro_batches=num_micro_batches)
    of_head = head_sums(spec, placement, num_chunks=num_head_chunks)
    rows_down_bytes = 0 if placement.gpu_holds_head else lookup_rows_bytes
    forward_weights, backward_weights = uploaded_bytes(spec, placement)
    down_gradients = sum(gradient_bytes(spec, placement.gpu_embedding_rows))
    shared_bytes = num_micro_batches * sum(block.compute_bytes * len(block.borrowers) for block in spec.shared_blocks)
    reads_ahead = placement.prefetch_blocks > 0
    # The first gather waits for the update of the segment, if it is deferred.
    is_first_late = is_deferred and network.first.sent_bytes > 0
    first_seconds = _first_update_seconds(own, placement, hardware) if is_first_late else 0.0
    stages = _Stages(hardware, overlap, adamw_threads=placement.adamw_threads, adamw_share=compute.adamw_share)
    forward = stages.with_spilled_units(
        _StageWork(
            compute=compute.forward,
            up_bytes=forward_weights,
            down_bytes=offloaded.linked_bytes,
            down_units_bytes=offloaded.linked_bytes,
            read_bytes=traffic.forward_read_bytes,
            in_files_bytes=traffic.forward_in_files_bytes,
            written_bytes=traffic.forward_written_bytes - offloaded.written_bytes,
            exposed_bytes=exposed_forward,
            exposed_down_bytes=offloaded.exposed.down_bytes,
            updated=updated["forward"],
            runs_ahead=reads_ahead,
            network=network.forward,
            alone=network.first,
            alone_seconds=first_seconds,
        ),
        offloaded.written_units,
        num_parts=offloaded.num_units,
        direction="written",
    )
    backward_seconds = max(0.0, compute.backward - not_recomputed_seconds)
    edges = _NO_EDGES
    if updated["backward"].work:
        edges = _update_edges(
            own,
            placement,
            hardware,
            head_seconds=compute.head,
            backward_seconds=backward_seconds,
            idle_seconds=_idle_nvme_seconds(forward, offloaded),
        )
    backward = stages.with_spilled_units(
        _StageWork(
            compute=backward_seconds,
            up_bytes=backward_weights
            + offloaded.linked_bytes
            + lookup_sum_bytes
            + shared_bytes
            + sums.up_bytes
            + of_head.up_bytes,
            up_units_bytes=offloaded.linked_bytes,
            down_bytes=down_gradients
            + lookup_sum_bytes
            + shared_bytes
            + sums.down_bytes
            + of_head.down_bytes
            + rows_down_bytes,
            exposed_bytes=exposed_backward
            + offloaded.exposed.up_bytes
            + of_head.exposed_bytes
            + late_bytes(sums, hardware, backward_seconds, offloaded, num_micro_batches=num_micro_batches),
            num_added=sums.num_added + of_head.num_added,
            added_bytes=sums.added_bytes + of_head.added_bytes,
            read_bytes=traffic.backward_read_bytes - offloaded.read_bytes,
            in_files_bytes=traffic.backward_in_files_bytes,
            written_bytes=traffic.backward_written_bytes,
            updated=updated["backward"],
            runs_ahead=reads_ahead and (placement.pending_updates > 0 or updated["backward"].work == 0),
            edges=edges,
            network=network.backward,
            alone=network.last,
            exchanged=network.gradients,
        ),
        offloaded.read_units,
        num_parts=_parts_of_backward(spec, offloaded),
        direction="read",
    )
    if overlap != "separate":
        return StepTime(forward=forward, backward=backward)
    update = stages.time(
        _StageWork(
            compute=0.0,
            up_bytes=0,
            down_bytes=0,
            read_bytes=traffic.update_read_bytes,
            written_bytes=traffic.update_written_bytes,
            updated=updated["update"],
            runs_ahead=reads_ahead,
        )
    )
    return StepTime(forward=forward, backward=backward, update=update)


def nvme_seconds(nvme: Nvme, read_bytes: int, written_bytes: int) -> tuple[float, float]:
    """The seconds that NVMe takes to read and to write; it takes their sum for both.

    Bytes that both directions have move at the mixed rate; the rest of either direction moves at its own rate. A drive
    that does one thing at a time has the harmonic mean as its mixed rate, and the sum is the papers'
    read / R + written / W. A drive that does both at full speed has the sum of both rates, and the time is near the
    maximum of both. No direction is taken to be faster next to the other one than alone, whatever was measured:
    otherwise reading less could take longer.
    """
    read_rate, write_rate = nvme.read_bytes_per_second, nvme.write_bytes_per_second
    mixed_rate = min(nvme.mixed_bytes_per_second, 2 * read_rate, 2 * write_rate)
    both_bytes = min(read_bytes, written_bytes)
    return (
        both_bytes / mixed_rate + (read_bytes - both_bytes) / read_rate,
        both_bytes / mixed_rate + (written_bytes - both_bytes) / write_rate,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _UpdateEdges:
    """Where updates begin and end, relative to the backward stage that they overlap with."""

    begin_seconds: float = 0.0
    """Seconds of computing before the first gradient."""
    rest_seconds: float = 0.0
    """Seconds from the last gradient, the embedding's, until the next step can start."""
    drained_bytes: int = 0
    """Bytes whose writes overlap with the next forward; 0 unless the embedding's weights are resident."""
    drained_seconds: float = 0.0
    """Upper bound on the time of these writes: the seconds for which the drive is idle in forward."""


_NO_EDGES = _UpdateEdges()


class _Updated(NamedTuple):
    """Blocks that are updated in a stage."""

    work: float
    """Elements, as many as AdamW updates in the same time."""
    moved_bytes: int
    """What their updates move in main memory."""
    flops: int = 0
    """FLOPs of matrix products, on the device that computes."""
    crossing_bytes: int = 0
    """Bytes that go to a GPU for these products, and as many come back."""

    @classmethod
    def of(cls, segments: Iterable[Segment]) -> _Updated:
        """What the updates of these segments do."""
        found = list(segments)
        return cls(
            sum(each.update_work for each in found),
            sum(each.update_bytes for each in found),
            sum(block.update_flops for each in found for block in each.trained),
            sum(block.crossing_bytes for each in found for block in each.trained),
        )

    def with_others(self, others: _Updated) -> _Updated:
        return _Updated(
            self.work + others.work,
            self.moved_bytes + others.moved_bytes,
            self.flops + others.flops,
            self.crossing_bytes + others.crossing_bytes,
        )


@lru_cache(maxsize=256)
def _updated(
    spec: ModelSpec, indices: frozenset[int], *, holds_gradients: bool, overlap: Overlap
) -> Mapping[Stage, _Updated]:
    """What is updated in each stage. `indices`: of the segments that are deferred."""
    deferred = _Updated.of(each for each in spec.segments if each.index in indices)
    others = _Updated.of(each for each in spec.segments if each.index not in indices)
    updated: dict[Stage, _Updated] = dict.fromkeys(("forward", "backward", "update"), _Updated(0, 0))
    for of_deferred, found in ((True, deferred), (False, others)):
        stage = update_stage(is_deferred=of_deferred, holds_gradients=holds_gradients, overlap=overlap)
        updated[stage] = updated[stage].with_others(found)
    return updated


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageWork:
    """What one stage has to do, spilled activations left out."""

    compute: float
    up_bytes: int
    down_bytes: int
    read_bytes: int
    written_bytes: int
    updated: _Updated
    runs_ahead: bool
    """Whether reads and updates overlap with computing."""
    in_files_bytes: int = 0
    """The part of `read_bytes` that lies in the base model's files."""
    up_units_bytes: int = 0
    """The part of `up_bytes` that is offloaded activations."""
    down_units_bytes: int = 0
    exposed_bytes: int = 0
    """The part of `up_bytes` that goes up while nothing computes."""
    exposed_down_bytes: int = 0
    """The part of `down_bytes` for which computing waits."""
    num_added: int = 0
    """Parameters that are added to sums of gradients in main memory, once for each addition."""
    added_bytes: int = 0
    """Bytes that sums of gradients read and write in main memory."""
    edges: _UpdateEdges = _NO_EDGES
    network: Exchanged = NOTHING
    """What other ranks are sent, and send."""
    alone: Exchanged = NOTHING
    """Exposed part of `network`: nothing computes while it is sent."""
    alone_seconds: float = 0.0
    """Exposed seconds before `alone` is sent."""
    exchanged: Exchanged = NOTHING
    """The part of `network` that is gradients, which are added up."""


class _Stages:
    """The times of stages on one machine."""

    def __init__(
        self, hardware: HardwareProfile, overlap: Overlap, *, adamw_threads: int, adamw_share: float | None
    ) -> None:
        self._hardware = hardware
        self._adamw_threads = adamw_threads
        self._adamw_share = 1 / hardware.host.num_cores if adamw_share is None else adamw_share
        self._is_serial = overlap == "naive"

    def with_spilled_units(
        self,
        work: _StageWork,
        spilled: Sequence[SpilledUnits],
        *,
        num_parts: int,
        direction: Literal["read", "written"],
    ) -> StageTime:
        """The time of a stage of `num_parts` equal parts, some of which read or write one spilled unit each.

        A part takes its share of the stage's time if all parts were like it: the time that the drive has left in one
        part is of no use to another. The sum of these maxima is no less than the maximum of the sums, and as convex.
        The two are equal where nothing is spilled, or everything.
        """
        parts = Counter({0: num_parts - sum(units.number for units in spilled)})
        for units in spilled:
            parts[units.unit_bytes] += units.number
        times: list[tuple[float, StageTime]] = []
        for unit_bytes, number in parts.items():
            if number:
                spilled_bytes = num_parts * unit_bytes
                read_bytes, written_bytes = (spilled_bytes, 0) if direction == "read" else (0, spilled_bytes)
                time = self.time(work, spilled_read_bytes=read_bytes, spilled_written_bytes=written_bytes)
                times.append((number / num_parts, time))
        return weighted_sum(times)

    def time(self, work: _StageWork, *, spilled_read_bytes: int = 0, spilled_written_bytes: int = 0) -> StageTime:
        """The time of a stage that also moves these bytes of spilled activations, which always run ahead.

        Where the CPU computes, the compute thread packs what is written into buffers.
        """
        host, link, edges = self._hardware.host, self._hardware.link, work.edges
        products = work.updated.flops / self._hardware.gpu.flops_per_second
        compute = work.compute + (products if work.compute else 0.0)  # they take turns with the model's own work
        kernels = work.updated.work / (host.adam_parameters_per_second * self._adamw_threads)
        optimizer = kernels + products
        memory_rate = host.memory_bytes_per_second or math.inf
        if link is None:
            up = down = linked = exposed = 0.0
            linked_bytes = 2 * spilled_written_bytes
            shared = kernels * self._adamw_threads * self._adamw_share if compute else 0.0
            compute += shared + spilled_written_bytes / memory_rate
        else:
            up_bytes, down_bytes = (each + work.updated.crossing_bytes for each in (work.up_bytes, work.down_bytes))
            up, down = up_bytes / link.to_gpu_bytes_per_second, down_bytes / link.from_gpu_bytes_per_second
            exposed = work.exposed_bytes / link.to_gpu_bytes_per_second
            exposed += work.exposed_down_bytes / link.from_gpu_bytes_per_second
            linked_bytes = up_bytes + down_bytes + work.added_bytes
            linked = link_seconds(
                link,
                up_bytes=up_bytes + UNBOOKED * work.up_units_bytes,
                down_bytes=down_bytes + UNBOOKED * work.down_units_bytes,
            )
        network = self._network_seconds(work.network)
        alone = self._network_seconds(work.alone) + work.alone_seconds
        network_bytes = _COPIED * sum(work.network) + _ADDED * work.exchanged.received_bytes
        read_bytes, written_bytes = work.read_bytes + spilled_read_bytes, work.written_bytes + spilled_written_bytes
        moved_bytes = read_bytes + written_bytes + linked_bytes + network_bytes + work.updated.moved_bytes
        moved_bytes += 2 * work.in_files_bytes  # they are copied out of their pages
        memory = moved_bytes / memory_rate
        # A file lies on one drive: the others do not help to read it.
        read_bytes, stored_bytes = (
            each + (self._hardware.nvme.num_devices - 1) * work.in_files_bytes for each in (read_bytes, work.read_bytes)
        )
        read, write = self._nvme(read_bytes, written_bytes)
        adding = work.num_added / (_ADDING_SPEED * host.adam_parameters_per_second * min(_MOST_ADDING, host.num_cores))
        # Before the first gather comes an update, and behind the last exchange another one.
        swapped = work.alone_seconds + network + edges.rest_seconds if network else 0.0
        others = max(linked, memory, adding, swapped)
        if work.runs_ahead:
            drained = (read + write) * edges.drained_bytes / max(1, read_bytes + written_bytes)
            updating = self._updating(read + write - min(drained, edges.drained_seconds), optimizer)
            total = max(compute + exposed + alone + edges.rest_seconds, edges.begin_seconds + updating, others)
        else:
            stored = sum(self._nvme(stored_bytes, work.written_bytes))
            in_turn = compute + exposed + alone + max(self._updating(stored, optimizer), others)
            total = max(in_turn, edges.begin_seconds + self._updating(read + write, optimizer), others)
        return StageTime(
            compute=compute,
            up=up,
            down=down,
            nvme_read=read,
            nvme_write=write,
            optimizer=optimizer,
            network=network,
            memory=memory,
            total=total,
        )

    def _nvme(self, read_bytes: int, written_bytes: int) -> tuple[float, float]:
        nvme = self._hardware.nvme
        if self._is_serial:
            return read_bytes / nvme.read_bytes_per_second, written_bytes / nvme.write_bytes_per_second
        return nvme_seconds(nvme, read_bytes, written_bytes)

    def _network_seconds(self, moved: Exchanged) -> float:
        network = self._hardware.network
        return max(moved) / network.bytes_per_second if network is not None else 0.0

    def _updating(self, nvme: float, optimizer: float) -> float:
        return nvme + optimizer if self._is_serial else max(nvme, optimizer)


def _update_edges(
    spec: ModelSpec,
    placement: Placement,
    hardware: HardwareProfile,
    *,
    head_seconds: float,
    backward_seconds: float,
    idle_seconds: float,
) -> _UpdateEdges:
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
    return _UpdateEdges(
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
