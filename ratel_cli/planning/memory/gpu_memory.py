"""GPU memory: what a step takes at its peak, and what the rest is used for. Pure.

A step is followed use by use of the schedule, phase by phase (planning/memory/gpu_uses.py).

Where a layer's sums are is for the caller to decide: all of them stay on the GPU during the layer's backward, or host
memory has them, and with the last micro-batch one comes to the GPU while another one leaves
(engine/optimizer/host_sums.py). So it is with the sums of the head's gradients over chunks of tokens, which are large
where the vocabulary is: if host memory has them, a chunk's gradient leaves before the next one is made, and the rounded
sum comes back once, for its norm.

Forward has the unit that it makes, and the one before, which is being downloaded. Backward has the unit in use, of
which what autograd saves counts as such, and the next one. Where that is too much, the plan says what units may take
(`UnitsOnGpu`): forward waits for downloads before it makes more, and of the next unit a part goes up in backward at
moments at which backward has begun to take less, or when the unit in use is done.

Memory that is left over serves five purposes, in this order. The window takes as much of the next block as fits: what
it does not take is uploaded while nothing computes. The head's gradient of a matrix that it borrows stays until that of
the embedding is there, unless units save more time in its memory: with many micro-batches it is large. More gradients
of a layer may be on their way at once, so that computing does not wait for the link. Units, then weights, of the last
layers stay from forward to backward: a byte of a unit saves the link one byte down and one up, a byte of weights saves
one up. All of it counts as if it were there all the time.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from ratel_cli.hardware.spec import GPU_CONTEXT_BYTES
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.duties.step import PlannedStep
from ratel_cli.planning.memory.gpu_uses import GpuStep, OfPhases, StaysOnGpu, Uses
from ratel_cli.planning.profile.activations import LargestUnit, OffloadedActivations, lookup_sum_bytes
from ratel_cli.planning.profile.gpu_gradients import least_leaving_bytes
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.planning.profile.placement import (
    LEAST_UNITS,
    Placement,
    UnitsOnGpu,
    Workload,
    looked_up,
    most_rows,
)
from ratel_cli.schedule.uses import step_uses
from ratel_cli.units import MIB

_WORKSPACE_BYTES = 256 * MIB
"""cuBLAS takes 32 MiB for each of its handles; forward, backward and products with a bias have their own."""

_RESIDENT_SHARE = 0.9
"""The share of the memory left over that is used. What stays for long between what comes and goes leaves gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuResident:
    """What stays on the GPU from forward to backward: parts of a `Placement`."""

    units_from: int
    """The first unit that stays, in forward order; the number of all units if none stays."""
    weights: frozenset[int]
    """Layers whose compute weights stay."""
    window_bytes: int
    """Memory for weights of the next segment while one computes."""
    holds_sums: bool
    """Whether the sums of a layer's gradients stay during its backward; true where there are none."""
    leaving_bytes: int
    """Memory for gradients until their downloads have ended."""
    holds_lookup: bool
    """Whether the head's gradient of a matrix that it borrows stays until the embedding's is there."""
    units: UnitsOnGpu | None
    """What units may take on their way; None: two of them."""


class GpuMemory:
    """The memory that the steps of one model and workload take on a GPU."""

    def __init__(self, spec: ModelSpec, workload: Workload, profile: ModelProfile) -> None:
        """`profile` is that of one micro-batch of `workload`."""
        self._spec = spec
        self._workload = workload
        self._profile = profile
        self._layers_leaving_bytes = max(map(least_leaving_bytes, spec.layers))
        segments = {*spec.segments, looked_up(spec, most_rows(spec, workload))}
        self._windows = sorted({cut for segment in segments for cut in segment.cuts})
        """Bytes of all windows that differ: none, some or all parameters of a segment."""
        self._known_uses: dict[StaysOnGpu, Uses] = {}
        # Asked for by the optimizer thread, whatever else is there.
        self._updates_bytes = max(block.gpu_working_bytes for block in spec.blocks)
        self._lookup_bytes = lookup_sum_bytes(spec, workload)

    def needed_bytes(
        self,
        largest: LargestUnit,
        *,
        holds_sums: bool = False,
        holds_head: bool = True,
        window_bytes: int = 0,
        units: UnitsOnGpu | None = None,
    ) -> int:
        """The most that a step takes. `holds_sums`: the sums of a layer's gradients are on the GPU; `holds_head`: those
        of the head's. `window_bytes`: what weights of the next block may take while one computes. `units`: what units
        may take on their way; None: two of them.
        """
        phases = self.phases(largest, StaysOnGpu(holds_sums, holds_head, window_bytes), units)
        return GPU_CONTEXT_BYTES + _WORKSPACE_BYTES + max(phases)

    def phases(self, largest: LargestUnit, stays: StaysOnGpu, units: UnitsOnGpu | None) -> OfPhases[int]:
        """The most that each phase takes, besides CUDA's context and its libraries' workspace."""
        found = self._uses(stays).phases(largest, units)
        return OfPhases(*(self._updates_bytes + taken for taken in found))

    def takes_no_more_than(
        self, other: GpuMemory, largest_units: Sequence[LargestUnit], *, holds_head: Sequence[bool]
    ) -> bool:
        """True if a step takes at most what one of `other` takes, with every window and with each of these units.

        Only their heads differ. `holds_head`: what `needed_bytes` may be asked about.
        """
        keys = itertools.starmap(StaysOnGpu, itertools.product((False, True), holds_head, self._windows))
        return all(
            self._uses(key).peak_bytes(largest, LEAST_UNITS) <= other._uses(key).peak_bytes(largest, LEAST_UNITS)
            for key in keys
            for largest in largest_units
        )

    def choices(
        self, unit_bytes: Sequence[int], largest: LargestUnit, *, limit_bytes: int, holds_head: bool = True
    ) -> list[GpuResident]:
        """What can stay on the GPU in `limit_bytes`: with the sums of a layer's gradients, if they fit, and without;
        each of these with the windows of `_windows_for`; and if that holds the gradient of a borrowed matrix, without
        it, as units may need its memory more. `unit_bytes` is for each layer. `holds_head` as in `needed_bytes`."""
        needed_bytes = self.needed_bytes(largest, holds_sums=True, holds_head=holds_head, units=LEAST_UNITS)
        sums = [True] if needed_bytes <= limit_bytes else []
        sums += [False] if not sums or self._workload.num_micro_batches > 1 else []
        found = []
        for holds_sums in sums:
            stays = StaysOnGpu(holds_sums, holds_head, 0)
            for window_bytes, is_whole in self._windows_for(stays, largest, limit_bytes):
                resident = partial(
                    self._resident,
                    unit_bytes,
                    largest,
                    stays._replace(window_bytes=window_bytes),
                    limit_bytes=limit_bytes,
                    is_whole=is_whole,
                )
                found.append(resident(may_hold_lookup=True))
                if found[-1].holds_lookup:
                    found.append(resident(may_hold_lookup=False))
        return found

    def _windows_for(self, stays: StaysOnGpu, largest: LargestUnit, limit_bytes: int) -> list[tuple[int, bool]]:
        """Windows for weights that are worth trying, and whether two whole units are to be next to them.

        The largest that fits with two units. If that is not all of a block, or if there is none, the largest that fits
        with the least that units can take. And if two units never fit, none at all, so that units take most.
        """

        def largest_window(units: UnitsOnGpu | None) -> int | None:
            peaks = ((each, self._uses(stays._replace(window_bytes=each))) for each in reversed(self._windows))
            free_bytes = limit_bytes - GPU_CONTEXT_BYTES - _WORKSPACE_BYTES
            return next((each for each, uses in peaks if uses.peak_bytes(largest, units) <= free_bytes), None)

        whole = largest_window(None)
        if whole == self._windows[-1]:
            return [(whole, True)]
        least = largest_window(LEAST_UNITS)
        if least is None:  # nothing fits; the shortfall is that of a step without a window
            return [(0, True)]
        if whole is not None:
            return [(whole, True), (least, False)]
        return [(least, False), (0, False)] if least else [(0, False)]

    def _resident(
        self,
        unit_bytes: Sequence[int],
        largest: LargestUnit,
        stays: StaysOnGpu,
        *,
        limit_bytes: int,
        may_hold_lookup: bool,
        is_whole: bool,
    ) -> GpuResident:
        """What is best left on the GPU in the memory that `limit_bytes` leaves; `unit_bytes` is for each layer.

        `is_whole`: there is memory for two whole units. The first unit never stays: the gradients that the step before
        downloads last are held until the first unit is downloaded (engine/device/gpu.py).
        """
        uses = self._uses(stays)
        free_bytes = limit_bytes - GPU_CONTEXT_BYTES - _WORKSPACE_BYTES
        units = None if is_whole else uses.units(largest, free_bytes)
        taken_bytes = uses.peak_bytes(largest, units)
        available_bytes = int(_RESIDENT_SHARE * max(0, free_bytes - taken_bytes))
        holds_lookup = may_hold_lookup and stays.head and 0 < self._lookup_bytes <= available_bytes
        available_bytes -= self._lookup_bytes if holds_lookup else 0
        least_bytes = self._layers_leaving_bytes
        layer_bytes = max(layer.gradient_bytes for layer in self._spec.layers)
        more_bytes = min(available_bytes, max(0, layer_bytes - least_bytes))
        available_bytes -= more_bytes
        num_micro_batches = self._workload.num_micro_batches
        units_from = num_micro_batches * len(unit_bytes)
        num_skipped = num_micro_batches * max(0, self._spec.first_trained - 1)  # no units: backward does not come
        for size in reversed(unit_bytes[num_skipped // num_micro_batches :]):
            fitting = min(num_micro_batches, available_bytes // size)
            units_from -= fitting
            available_bytes -= fitting * size
            if fitting < num_micro_batches:
                break
        weights = []
        for layer in reversed(self._spec.layers):
            available_bytes -= layer.compute_bytes
            if available_bytes < 0:
                break
            weights.append(layer.index)
        return GpuResident(
            units_from=max(1 + num_skipped, units_from),
            weights=frozenset(weights),
            window_bytes=stays.window_bytes,
            holds_sums=stays.sums,
            leaving_bytes=least_bytes + more_bytes,
            holds_lookup=holds_lookup,
            units=units,
        )

    def resident_bytes(self, placement: Placement) -> int:
        """What stays that `needed_bytes` never counts: weights, gradients that wait for others or are on their way."""
        weight_bytes = weight_bytes_of(self._spec, placement.gpu_weights)
        waiting = self._lookup_bytes if placement.gpu_holds_lookup else 0
        return weight_bytes + waiting + max(0, placement.gpu_leaving_bytes - self._layers_leaving_bytes)

    def _uses(self, key: StaysOnGpu) -> Uses:
        if key not in self._known_uses:
            self._known_uses[key] = Uses(self._on_gpu, key)
        return self._known_uses[key]

    @cached_property
    def _on_gpu(self) -> GpuStep:
        step = PlannedStep(spec=self._spec, own=self._spec, workload=self._workload, on_gpu=True, holds_gradients=False)
        return GpuStep(step, self._profile, self._differing_positions)

    @cached_property
    def _differing_positions(self) -> tuple[int, ...]:
        """Positions of the schedule without those of uses that take what an earlier one takes: between layers
        that are alike, with the same costs, all uses do."""
        kinds: dict[object, int] = {}
        kind_of = {}
        for segment in self._spec.segments:
            shapes = tuple((parameter.start, parameter.computed_shape) for parameter in segment.parameters)
            is_layer = self._spec.is_layer(segment)
            own = self._profile.layers[segment.index - 1] if is_layer else segment.name
            kind = (is_layer, own, segment.block_kinds, shapes, len(segment.begun), len(segment.unfinished))
            kind_of[segment.index] = kinds.setdefault(kind, len(kinds))
        schedule = step_uses(self._spec.segments)
        first: dict[object, int] = {}
        for position, use in enumerate(schedule):
            around = tuple(kind_of[each.segment.index] for each in schedule[max(0, position - 1) : position + 2])
            first.setdefault((use.stage, min(position, 2), around), position)
        return tuple(first.values())


def activation_bytes(profile: ModelProfile, offloaded: OffloadedActivations, units: UnitsOnGpu | None) -> int:
    """What layers' activations take of a GPU's memory at their peak, which is in backward: the units that stay, a layer
    with its unit, and the next unit on its way. `units` as in `GpuMemory.needed_bytes`."""
    largest = offloaded.largest_unit
    layers = [profile.profiles[kind] for kind in set(profile.layers)]
    in_use_bytes = max(
        max(
            layer.backward_bytes + layer.input_bytes,
            min(layer.replay_bytes + largest.num_bytes, layer.replay_held_bytes + largest.unsaved_bytes),
        )
        for layer in layers
    )
    ahead_bytes = largest.num_bytes if units is None else min(largest.num_bytes, units.ahead_bytes)
    return offloaded.gpu_bytes + in_use_bytes + ahead_bytes


def weight_bytes_of(spec: ModelSpec, segments: Collection[int]) -> int:
    """The compute weights of these segments."""
    return sum(spec.segments[index].compute_bytes for index in segments)
