"""The most that each phase of a step takes of a GPU's memory: the ledger's rows, overlapped, next to units. Pure.

A use takes the weights of its segment and a window for those of the next (engine/reading/weights.py), the activations
of a layer, and units (engine/cache/activations.py). Backward adds the gradient of one parameter at a time, fp32 sums of
a segment's gradients if there are several micro-batches, and gradients that are still being downloaded
(engine/optimizer/gradients.py). `planning/duties/` has the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

from ratel_cli.planning.duties import activations, embedding, gradients, head, weights
from ratel_cli.planning.duties.activations import backward_bytes
from ratel_cli.planning.duties.gradients import made_bytes
from ratel_cli.planning.duties.step import PlannedStep
from ratel_cli.planning.profile.activations import LargestUnit
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.planning.profile.placement import AfterGradient, UnitsOnGpu
from ratel_cli.schedule.ledger import REPLAY, Holding, at, overlap_of, place_of


class StaysOnGpu(NamedTuple):
    """What is on the GPU next to what every step has there."""

    sums: bool
    """The sums of a layer's gradients over micro-batches."""
    head: bool
    """The sums of the head's gradients over chunks."""
    window_bytes: int
    """Weights of the next block."""


_Of = TypeVar("_Of")


class OfPhases(NamedTuple, Generic[_Of]):
    """Something of each phase of a step."""

    forward: _Of
    head: _Of
    replay: _Of
    """Recomputing in backward."""
    backward: _Of
    """Backward itself, with what autograd has saved and not used yet."""


class GpuStep:
    """The rows of a step on a GPU, overlapped at the uses that differ."""

    def __init__(self, step: PlannedStep, profile: ModelProfile, positions: Sequence[int]) -> None:
        """`positions`: of the uses that are looked at; the others take no more."""
        self.step = step
        self.profile = profile
        self._positions = frozenset(positions)
        self._known: dict[object, list[int]] = {}

    def peaks(self, stays: StaysOnGpu, *, keeps_swapped: bool) -> OfPhases[int]:
        """The most that each phase takes, besides units. `keeps_swapped` as in `activations.layers_on_gpu`."""
        profile = self.profile
        taken = [
            self._overlapped(activations.passing_on_gpu),
            self._overlapped(weights.on_gpu),
            self._overlapped(weights.ahead_on_gpu, stays.window_bytes),
            self._overlapped(gradients.leaving, stays.sums, stays.head),
            self._overlapped(activations.layers_on_gpu, profile, keeps_swapped),
            self._overlapped(embedding.on_gpu, stays.head),
            self._overlapped(head.on_gpu, profile, stays.head),
        ]
        total = [*map(sum, zip(*taken, strict=True))]
        return OfPhases(*(max((total[number] for number in numbers), default=0) for numbers in self._phases))

    def _overlapped(self, duty: Callable[..., Iterator[Holding]], *values: object) -> list[int]:
        key = duty, values
        if key not in self._known:
            self._known[key] = overlap_of(duty(self.step, *values), self._moments)
        return self._known[key]

    @cached_property
    def _moments(self) -> list[int]:
        """The moments at which a row begins, whatever stays, within the uses looked at; and the first of each use."""
        found = {at(position) for position in self._positions}
        rows = [*activations.layers_on_gpu(self.step, self.profile, keeps_swapped=False)]
        for holds_head in (False, True):
            rows += [*embedding.on_gpu(self.step, holds_head), *head.on_gpu(self.step, self.profile, holds_head)]
        found.update(row.begins for row in rows if place_of(row.begins)[0] in self._positions)
        return sorted(found)

    @cached_property
    def _phases(self) -> OfPhases[list[int]]:
        """The places in `_moments` of each phase."""
        found = OfPhases[list[int]]([], [], [], [])
        for number, (position, phase) in enumerate(map(place_of, self._moments)):
            if position < self.step.head:
                found.forward.append(number)
            elif position == self.step.head:
                found.head.append(number)
            else:
                (found.replay if phase == REPLAY else found.backward).append(number)
        return found


class Uses:
    """What a step takes with what stays on the GPU, and what that leaves for units."""

    def __init__(self, on_gpu: GpuStep, stays: StaysOnGpu) -> None:
        self._step = on_gpu.step
        self._profile = on_gpu.profile
        self._working = on_gpu.peaks(stays, keeps_swapped=False)
        self._kept = on_gpu.peaks(stays, keeps_swapped=True)

    def peak_bytes(self, largest: LargestUnit, units: UnitsOnGpu | None) -> int:
        """The most that a use takes, units included. `units` as in `GpuMemory.needed_bytes`."""
        return max(self.phases(largest, units))

    def phases(self, largest: LargestUnit, units: UnitsOnGpu | None) -> OfPhases[int]:
        """The most that each phase takes, units included."""
        ahead_bytes = largest.num_bytes if units is None else min(largest.num_bytes, units.ahead_bytes)
        return OfPhases(
            forward=self._forward_bytes(largest, units),
            head=self._working.head + largest.num_bytes,  # the last unit, which is being downloaded
            replay=self._replay_bytes(largest) + ahead_bytes,
            backward=self._working.backward + self._input_bytes + ahead_bytes,
        )

    def units(self, largest: LargestUnit, most_bytes: int) -> UnitsOnGpu:
        """Return the memory for as much of units as fits into `most_bytes`."""
        unit_bytes = largest.num_bytes
        forward_bytes = 2 * unit_bytes
        if self._forward_bytes(largest, None) > most_bytes:
            forward_bytes = max(unit_bytes, most_bytes - self._working.forward)
        in_use_bytes = max(self._working.backward + self._input_bytes, self._replay_bytes(largest))
        ahead_bytes = max(0, min(unit_bytes, most_bytes - in_use_bytes))
        moments: dict[int, tuple[AfterGradient, ...]] = {}
        for number, layer in zip(self._profile.layers, self._step.spec.layers, strict=True):
            if number not in moments:
                costs = self._profile.profiles[number]
                gradient_bytes = made_bytes(layer, is_summed=self._step.is_summed)
                peak_bytes = backward_bytes(costs, gradient_bytes)
                moments[number] = tuple(
                    AfterGradient(rest.after, ahead_bytes + peak_bytes - rest.num_bytes - gradient_bytes)
                    for rest in costs.rests
                    if peak_bytes > rest.num_bytes + gradient_bytes
                )
        return UnitsOnGpu(
            forward_bytes=forward_bytes,
            ahead_bytes=ahead_bytes,
            moments={index: moments[kind] for index, kind in enumerate(self._profile.layers, start=1)},
        )

    def _forward_bytes(self, largest: LargestUnit, units: UnitsOnGpu | None) -> int:
        """The most that forward takes with the unit that it makes and the one before."""
        working_bytes, held_bytes = self._working.forward, self._kept.forward
        whole_bytes = largest.num_bytes + min(working_bytes + largest.num_bytes, held_bytes + largest.unheld_bytes)
        return (
            whole_bytes
            if units is None
            else min(whole_bytes, working_bytes + max(largest.num_bytes, units.forward_bytes))
        )

    def _replay_bytes(self, largest: LargestUnit) -> int:
        """The most that recomputing takes with the unit in use. It has all of that from the beginning, and when it is
        done nothing but the layer's input and what autograd saves."""
        return min(self._working.replay + largest.num_bytes, self._kept.replay + largest.unsaved_bytes)

    @property
    def _input_bytes(self) -> int:
        return max((self._profile.profiles[kind].input_bytes for kind in set(self._profile.layers)), default=0)
