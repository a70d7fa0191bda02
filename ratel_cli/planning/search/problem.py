"""One planning problem: a model, its costs, a step, a machine and its limits; and what follows from a placement. Pure.

`planning/search/choose.py` searches; everything that it compares comes from here. "Swapping a prefix" means to offload
the first outputs of the problem's order (planning/search/swap.py).

Invariant: what is computed here depends on the problem and the placement alone, whatever was asked before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ratel_cli.errors import DoesNotFit
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.duties.placed import PlacedStep
from ratel_cli.planning.duties.step import PlannedStep
from ratel_cli.planning.memory.capacity import HostMemory, StepMemory
from ratel_cli.planning.memory.gpu_memory import GpuMemory, GpuResident
from ratel_cli.planning.profile.activations import (
    NOT_EXPOSED,
    ExposedUnits,
    OffloadedActivations,
    fewest_spilled_units,
    offload,
)
from ratel_cli.planning.profile.analytic import head_sum_bytes
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.planning.profile.placement import (
    LEAST_UNITS,
    AccessMode,
    Placement,
    UnitsOnGpu,
    Workload,
    most_rows,
)
from ratel_cli.planning.search.decisions import Decisions
from ratel_cli.planning.search.evaluation import Evaluation, SpilledPrefix
from ratel_cli.planning.search.swap import SwapOrder, SwapPrefix
from ratel_cli.planning.time.costs import ComputeSeconds, StepCosts, compute_seconds
from ratel_cli.planning.time.link import exposed_units
from ratel_cli.planning.time.network import NetworkTraffic, computed_by_rank, network_of
from ratel_cli.planning.time.step_time import StepTime
from ratel_cli.planning.time.traffic import Traffic, state_written_bytes, traffic_of, unfrozen_state_bytes
from ratel_cli.store.layout import WHOLE, RankSlice

_LEAST_ROW_BYTES = 512
"""Smallest row that is read in place. An H200 reads rows of 4 KiB at 50 GB/s where it copies at 55; short ones were not
measured."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything that a plan depends on."""

    spec: ModelSpec
    workload: Workload
    profile: ModelProfile
    hardware: HardwareProfile
    decisions: Decisions
    process_bytes: int
    """What the process takes before training."""
    gpu_holds_head: bool = True
    """Whether a GPU has the sums of the head's gradients. All of a search is about one of both: host memory depends on
    it."""
    rank_slice: RankSlice = WHOLE
    """What this rank stores and updates of the model. `hardware` and `process_bytes` are its share of the machine."""

    @cached_property
    def computed(self) -> ModelSpec:
        """The model as this rank computes with it."""
        return computed_by_rank(self.spec, self.rank_slice)

    @cached_property
    def own(self) -> ModelSpec:
        """What this rank stores and updates of it."""
        return self.spec.sliced(self.rank_slice)

    @cached_property
    def network(self) -> NetworkTraffic:
        """What this rank sends and receives in a step."""
        return network_of(self.step_of_data)

    @cached_property
    def step_of_data(self) -> PlannedStep:
        """A step of the data, which time and traffic follow from; memory is that of a full one."""
        return PlannedStep(
            spec=self.computed,
            own=self.own,
            num_ranks=self.rank_slice.size,
            workload=self.workload.mean,
            on_gpu=self._gpu is not None,
            holds_gradients=self.decisions.holds_gradients,
            overlap=self.decisions.overlap,
        )

    @cached_property
    def order(self) -> SwapOrder:
        """The outputs that can be swapped, by benefit."""
        return SwapOrder(self.profile)

    @cached_property
    def state_written_bytes(self) -> int:
        """What every step writes to NVMe; all else that it writes is excess."""
        return state_written_bytes(self.own)

    @cached_property
    def unfrozen_state_bytes(self) -> int:
        """What every step would write to NVMe if no parameter were frozen: what excess is measured by."""
        return unfrozen_state_bytes(self.own)

    @cached_property
    def tried_without_residents(self) -> dict[tuple[int, int, frozenset[int], int], Evaluation | None]:
        """What was tried where nothing stays in memory, by depth, deferred blocks and prefix: the searches for time and
        for wear ask for the same."""
        return {}

    @cached_property
    def tried_with_residents(self) -> dict[object, dict[int, tuple[float, Traffic] | None]]:
        """What was tried where something stays in memory: by prefix the seconds and the traffic; None for one that does
        not fit."""
        return {}

    @cached_property
    def _known_offloads(self) -> dict[tuple[int, int], OffloadedActivations]:
        """What `offload` has answered: a search asks for the same at every level."""
        return {}

    @cached_property
    def compute(self) -> ComputeSeconds:
        """Computing of a step that swaps nothing but layers' inputs."""
        adding_bytes = head_sum_bytes(self.computed, self.workload.mean)
        return compute_seconds(self.profile, self.workload, self.hardware, head_sum_bytes=adding_bytes)

    @cached_property
    def wanted_outputs(self) -> int | None:
        """The length of the prefix that the user's choice of `activations` asks for; None leaves it to the plan."""
        match self.decisions.activations:
            case "auto":
                return None
            case "recompute" | "static":
                return 0
            case "keep" | "swap_all":
                return self.order.num_outputs
            case fraction:
                return self.order.reaching(int(fraction * self.order.prefix(self.order.num_outputs).num_bytes))

    def fits_device(self, num_outputs: int) -> bool:
        """True if the units of a prefix fit into the GPU's limit. Where a prefix does, all shorter ones do."""
        limit_bytes = self.decisions.device_limit_bytes
        if self._gpu is None or limit_bytes is None:
            return True
        largest = self.order.largest_unit(num_outputs)
        return self._gpu.needed_bytes(largest, holds_head=self.gpu_holds_head, units=LEAST_UNITS) <= limit_bytes

    @cached_property
    def without_head_on_gpu(self) -> Problem | None:
        """The problem with the sums of the head's gradients in host memory; None if the GPU is not short of memory, or
        if that does not help."""
        gpu = self._gpu
        if gpu is None or self.decisions.device_limit_bytes is None or not self.gpu_holds_head:
            return None
        without = replace(self, gpu_holds_head=False)

        def helps(num_outputs: int) -> bool:
            largest = self.order.largest_unit(num_outputs)
            with_bytes, without_bytes = (
                gpu.needed_bytes(largest, holds_head=holds, units=LEAST_UNITS) for holds in (True, False)
            )
            return without_bytes < with_bytes and without.fits_device(num_outputs)

        short = filter(self._is_short_of_gpu_memory, self.order.boundaries)
        return without if any(map(helps, short)) else None

    def _is_short_of_gpu_memory(self, num_outputs: int) -> bool:
        """Whether a prefix does not fit into the GPU, or only without two whole units and a block's weights ahead."""
        resident = self._gpu_resident(num_outputs) if self.fits_device(num_outputs) else None
        window_bytes = max(segment.compute_bytes for segment in self.computed.segments)
        return resident is None or resident.units is not None or resident.window_bytes < window_bytes

    @property
    def in_least_gpu_memory(self) -> Problem:
        """This problem, or, if nothing fits into the GPU then, the one with the sums of the head in host memory."""
        return self if self.fits_device(0) else self.without_head_on_gpu or self

    def takes_no_more_of_gpu_than(self, other: Problem) -> bool:
        """True if a step takes at most the other's memory of a GPU, whatever its plan decides."""
        if self._gpu is None or other._gpu is None or self.decisions.device_limit_bytes is None:
            return True
        is_in_doubt = self.without_head_on_gpu is not None or other.without_head_on_gpu is not None
        return self._gpu.takes_no_more_than(
            other._gpu,
            [self.order.largest_unit(each) for each in self.order.boundaries],
            holds_head=(True, False) if is_in_doubt else (self.gpu_holds_head,),
        )

    def evaluate(self, placement: Placement, *, num_outputs: int = 0) -> Evaluation:
        """What follows from a placement when a prefix is swapped. Raises DoesNotFit."""
        placement = self._with_gpu_resident(placement, num_outputs)
        offloaded = self.offload(num_outputs, spilled_units=placement.spilled_units)
        memory, spilled_segments = self.fit(placement, offloaded)
        swap = self.order.prefix(num_outputs)
        traffic = self.traffic(placement, offloaded, spilled_segments=spilled_segments)
        return Evaluation(
            placement=replace(placement, swapped=self.order.keys(num_outputs)),
            swap=swap,
            offloaded=offloaded,
            memory=memory,
            spilled_segments=spilled_segments,
            traffic=traffic,
            time=self._time(placement, traffic, swap, offloaded),
        )

    def evaluate_in_least_memory(self, placement: Placement, num_outputs: int) -> Evaluation:
        """Like `evaluate`, but what does not fit in memory goes to NVMe. Raises DoesNotFit.

        Held gradients go first, then as few units as possible.
        """
        placement = replace(placement, spilled_units=0)
        try:
            return self.evaluate(placement, num_outputs=num_outputs)
        except DoesNotFit as failure:
            if self.decisions.activations == "keep":
                raise
            shortfall_bytes = failure.shortfall_bytes
        offloaded = self.offload(num_outputs)
        spilled_units = self._fewest_spilled(num_outputs, offloaded.host_bytes - shortfall_bytes, offloaded)
        return self.evaluate(replace(placement, spilled_units=spilled_units), num_outputs=num_outputs)

    def attempt(self, placement: Placement, num_outputs: int) -> Evaluation | None:
        """`evaluate_in_least_memory`, or None if the placement does not fit."""
        try:
            return self.evaluate_in_least_memory(placement, num_outputs)
        except DoesNotFit:
            return None

    def fit(self, placement: Placement, offloaded: OffloadedActivations) -> tuple[HostMemory, int]:
        """Host memory, and how many blocks' held gradients go to NVMe. Raises DoesNotFit."""
        return self._step_memory.fit(placement, offloaded, limit_bytes=self.decisions.host_limit_bytes)

    def traffic(self, placement: Placement, offloaded: OffloadedActivations, *, spilled_segments: int = 0) -> Traffic:
        """NVMe bytes of a step."""
        placed = PlacedStep(self.step_of_data, placement)
        return traffic_of(placed, self.moved(offloaded), spilled_segments=spilled_segments)

    def moved(self, offloaded: OffloadedActivations) -> OffloadedActivations:
        """What a step of the data moves where a full one offloads this."""
        filling = self.workload.filling
        return offloaded if filling is None else offloaded.moved(filling.computed)

    def time(
        self, placement: Placement, traffic: Traffic, offloaded: OffloadedActivations, *, num_outputs: int
    ) -> StepTime:
        """The predicted time of a step that swaps a prefix; `traffic` and `offloaded` belong to it."""
        placement = self._with_gpu_resident(placement, num_outputs)
        return self._time(placement, traffic, self.order.prefix(num_outputs), offloaded)

    def spill_into(self, available_bytes: int, *, num_outputs: int) -> SpilledPrefix | None:
        """A prefix in `available_bytes` of host memory; None if it does not fit whatever is spilled."""
        spilled_units, offloaded = 0, self.offload(num_outputs)
        if self.decisions.activations != "keep":
            spilled_units = self._fewest_spilled(num_outputs, available_bytes, offloaded)
            offloaded = self.offload(num_outputs, spilled_units=spilled_units)
        if offloaded.memory_bytes > available_bytes:
            return None
        return SpilledPrefix(spilled_units=spilled_units, offloaded=offloaded)

    def offload(self, num_outputs: int, *, spilled_units: int = 0) -> OffloadedActivations:
        """What a step offloads when a prefix is swapped and its first `spilled_units` units go to NVMe."""
        key = num_outputs, spilled_units
        if key not in self._known_offloads:
            resident = self._gpu_resident(num_outputs)
            self._known_offloads[key] = self._offload(num_outputs, resident, spilled_units=spilled_units)
        return self._known_offloads[key]

    def _offload(
        self, num_outputs: int, resident: GpuResident | None, *, spilled_units: int = 0
    ) -> OffloadedActivations:
        units_from = None if resident is None else max(spilled_units, resident.units_from)
        return offload(
            self.order.unit_bytes(num_outputs),
            num_micro_batches=self.workload.num_micro_batches,
            spilled_units=spilled_units,
            largest_unit=self.order.largest_unit(num_outputs),
            gpu_units_from=units_from,
            exposed=self._exposed_units(num_outputs, None if resident is None else resident.units, units_from),
        )

    def _exposed_units(self, num_outputs: int, units: UnitsOnGpu | None, units_from: int | None) -> ExposedUnits:
        """What of a step's units, of which those from `units_from` on stay on the GPU, moves while nothing computes."""
        if units is None or units_from is None:
            return NOT_EXPOSED
        return exposed_units(
            self.order.swapped_in_layers(num_outputs),
            self.profile,
            units,
            self.hardware,
            num_micro_batches=self.workload.num_micro_batches,
            units_from=units_from,
        )

    def _fewest_spilled(self, num_outputs: int, available_bytes: int, unspilled: OffloadedActivations) -> int:
        """Units that must go to NVMe for the others to fit into `available_bytes` of host memory, if they can."""
        resident = self._gpu_resident(num_outputs)
        return fewest_spilled_units(
            self.order.unit_bytes(num_outputs),
            num_micro_batches=self.workload.num_micro_batches,
            available_bytes=available_bytes + unspilled.gpu_bytes,
            most_units=None if resident is None else resident.units_from,
        )

    def _with_gpu_resident(self, placement: Placement, num_outputs: int) -> Placement:
        """The placement with what stays on the GPU when a prefix is swapped."""
        if self._gpu is None:
            return placement
        resident = self._gpu_resident(num_outputs)
        return self._on_a_large_gpu(placement) if resident is None else self._with_resident(placement, resident)

    def _on_a_large_gpu(self, placement: Placement) -> Placement:
        """The placement where nothing limits the GPU's memory: nothing waits for it, and nothing stays there."""
        window_bytes = max(segment.compute_bytes for segment in self.computed.segments)
        return replace(
            placement,
            gpu_embedding_rows=self._gpu_embedding_rows,
            read_in_place=self._read_in_place,
            gpu_window_bytes=window_bytes,
            gpu_holds_sums=True,
        )

    def _with_resident(self, placement: Placement, resident: GpuResident) -> Placement:
        return replace(
            placement,
            gpu_units_from=max(placement.spilled_units, resident.units_from),
            gpu_weights=resident.weights,
            gpu_leaving_bytes=resident.leaving_bytes,
            gpu_embedding_rows=self._gpu_embedding_rows,
            read_in_place=self._read_in_place,
            gpu_window_bytes=resident.window_bytes,
            gpu_holds_sums=resident.holds_sums,
            gpu_holds_lookup=resident.holds_lookup,
            gpu_holds_head=self.gpu_holds_head,
            gpu_units=resident.units,
        )

    def _gpu_resident(self, num_outputs: int) -> GpuResident | None:
        """What stays on the GPU when a prefix is swapped; None where the GPU has no memory to spare for that."""
        gpu, limit_bytes = self._gpu, self.decisions.device_limit_bytes
        if gpu is None or limit_bytes is None:
            return None
        if num_outputs not in self._gpu_residents:
            unit_bytes, largest = self.order.unit_bytes(num_outputs), self.order.largest_unit(num_outputs)
            choices = gpu.choices(unit_bytes, largest, limit_bytes=limit_bytes, holds_head=self.gpu_holds_head)
            self._gpu_residents[num_outputs] = min(choices, key=lambda each: self._gpu_seconds(each, num_outputs))
        return self._gpu_residents[num_outputs]

    def _gpu_seconds(self, resident: GpuResident, num_outputs: int) -> float:
        """The time of a step whose drives are never waited for: what decides between choices for the GPU's memory."""
        placement = self._with_resident(Placement(prefetch_blocks=1, pending_updates=1), resident)
        offloaded = self._offload(num_outputs, resident)
        return self._time(placement, Traffic(), self.order.prefix(num_outputs), offloaded).total

    @cached_property
    def _gpu_residents(self) -> dict[int, GpuResident]:
        """What stays on the GPU, by the prefixes that were asked for."""
        return {}

    @cached_property
    def _gpu_always_holds_sums(self) -> bool:
        """Whether the GPU holds the sums of a layer's gradients, whatever is swapped."""
        residents = map(self._gpu_resident, filter(self.fits_device, self.order.boundaries))
        return all(resident is None or resident.holds_sums for resident in residents)

    def _time(
        self, placement: Placement, traffic: Traffic, swap: SwapPrefix, offloaded: OffloadedActivations
    ) -> StepTime:
        saved = swap.seconds if self.compute.is_measured else swap.flops / self.hardware.gpu.flops_per_second
        return self.costs.time(
            placement,
            traffic,
            self.moved(offloaded),
            not_recomputed_seconds=self.workload.full_micro_batches * saved,
        )

    @cached_property
    def costs(self) -> StepCosts:
        """What decides the time of a step, whatever its placement is."""
        return StepCosts(step=self.step_of_data, hardware=self.hardware, compute=self.compute)

    @cached_property
    def _gpu_embedding_rows(self) -> int | None:
        return most_rows(self.computed, self.workload)

    @cached_property
    def _read_in_place(self) -> Mapping[str, AccessMode]:
        """The matrix whose rows are looked up: reading them in place takes the link as long as uploading them, and the
        host need not collect them before. Nothing else gains at training sizes (docs/planning.md)."""
        block = self.computed.lookup_block
        if block is None or self._gpu_embedding_rows is None:
            return {}
        row_bytes = block.dtype_bytes * self.computed.embedding_width
        return {block.parameters[0].name: "DHA"} if row_bytes >= _LEAST_ROW_BYTES else {}

    @cached_property
    def _gpu(self) -> GpuMemory | None:
        """What the GPU's memory is computed with; None where the CPU computes."""
        return None if self.hardware.link is None else GpuMemory(self.computed, self.workload, self.profile)

    @cached_property
    def _step_memory(self) -> StepMemory:
        step = replace(self.step_of_data, workload=self.workload, has_sums=not self._gpu_always_holds_sums)
        return StepMemory(step, process_bytes=self.process_bytes, gpu=self._gpu)
