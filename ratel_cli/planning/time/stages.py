"""The time of one stage of a step: what it has to do, on one machine. Pure.

The slowest resource decides. What several stages of `planning/time/costs.py` have in common is here: the drives that
read and write at once, the link, main memory, the optimizer's threads, the network, and spilled activations, which
overlap with the computing of their own layers only.
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
from ratel_cli.planning.profile.activations import SpilledUnits
from ratel_cli.planning.profile.placement import Overlap, update_stage
from ratel_cli.planning.time.link import UNBOOKED, link_seconds
from ratel_cli.planning.time.network import NOTHING, Exchanged
from ratel_cli.planning.time.step_time import StageTime, weighted_sum
from ratel_cli.schedule.segments import Segment
from ratel_cli.schedule.uses import Stage

_ADDING_SPEED, _MOST_ADDING = 2.0, 8
"""Adding a gradient moves 10 bytes of main memory, where AdamW moves 26. Torch uses this many threads at most."""


_COPIED, _ADDED = 2, 3
"""Bytes that main memory moves for a byte that is sent or received: it is copied once; and for one of a gradient that
is received: it is added to a sum."""


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
class UpdateEdges:
    """Where updates begin and end, relative to the backward stage that they overlap with."""

    begin_seconds: float = 0.0
    """Seconds of computing before the first gradient."""
    rest_seconds: float = 0.0
    """Seconds from the last gradient, the embedding's, until the next step can start."""
    drained_bytes: int = 0
    """Bytes whose writes overlap with the next forward; 0 unless the embedding's weights are resident."""
    drained_seconds: float = 0.0
    """Upper bound on the time of these writes: the seconds for which the drive is idle in forward."""


NO_EDGES = UpdateEdges()


class Updated(NamedTuple):
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
    def of(cls, segments: Iterable[Segment]) -> Updated:
        """What the updates of these segments do."""
        found = list(segments)
        return cls(
            sum(each.update_work for each in found),
            sum(each.update_bytes for each in found),
            sum(block.update_flops for each in found for block in each.trained),
            sum(block.crossing_bytes for each in found for block in each.trained),
        )

    def with_others(self, others: Updated) -> Updated:
        return Updated(
            self.work + others.work,
            self.moved_bytes + others.moved_bytes,
            self.flops + others.flops,
            self.crossing_bytes + others.crossing_bytes,
        )


@lru_cache(maxsize=256)
def updated_in_stages(
    spec: ModelSpec, indices: frozenset[int], *, holds_gradients: bool, overlap: Overlap
) -> Mapping[Stage, Updated]:
    """What is updated in each stage. `indices`: of the segments that are deferred."""
    deferred = Updated.of(each for each in spec.segments if each.index in indices)
    others = Updated.of(each for each in spec.segments if each.index not in indices)
    updated: dict[Stage, Updated] = dict.fromkeys(("forward", "backward", "update"), Updated(0, 0))
    for of_deferred, found in ((True, deferred), (False, others)):
        stage = update_stage(is_deferred=of_deferred, holds_gradients=holds_gradients, overlap=overlap)
        updated[stage] = updated[stage].with_others(found)
    return updated


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """What one stage has to do, spilled activations left out."""

    compute: float
    up_bytes: int
    down_bytes: int
    read_bytes: int
    written_bytes: int
    updated: Updated
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
    edges: UpdateEdges = NO_EDGES
    network: Exchanged = NOTHING
    """What other ranks are sent, and send."""
    alone: Exchanged = NOTHING
    """Exposed part of `network`: nothing computes while it is sent."""
    alone_seconds: float = 0.0
    """Exposed seconds before `alone` is sent."""
    exchanged: Exchanged = NOTHING
    """The part of `network` that is gradients, which are added up."""


class Stages:
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
        work: StageWork,
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

    def time(self, work: StageWork, *, spilled_read_bytes: int = 0, spilled_written_bytes: int = 0) -> StageTime:
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
