"""Ratel's own cost model as the equations by which other systems' choices are compared (`ratel plan --compare`). Pure.

Every strategy gets the same: transfers run as far ahead as in the plan, and the memory that activations leave holds
resident weights and states, as in planning/search/choose.py. Here bytes go to NVMe one by one; in the plan they go in
whole units.

A measured time counts as the FLOPs that the device does in it, because strategies compare FLOPs.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from ratel_cli.planning.papers.prefix import SwappableOperator
from ratel_cli.planning.profile.activations import NOTHING_OFFLOADED, offload_bytes
from ratel_cli.planning.profile.model_profile import SwapCandidate
from ratel_cli.planning.profile.placement import Placement
from ratel_cli.planning.search.problem import Problem
from ratel_cli.planning.time.costs import overlapped_step
from ratel_cli.planning.time.traffic import Traffic, step_traffic


@dataclass(frozen=True, kw_only=True)
class RatelEquations:
    """The `Equations` (planning/papers/prefix.py) of one problem."""

    problem: Problem
    placement: Placement
    """The placement that is evaluated, with nothing resident."""
    available_bytes: int
    """Memory for activations, of the host and of the GPU together; resident weights and states get what is left."""
    gpu_bytes: int = 0
    """The GPU's part of that: the same for every strategy that leaves as much in memory."""
    spilled_segments: int = 0
    moves_states: bool = True

    @cached_property
    def operators(self) -> tuple[SwappableOperator, ...]:
        """The operators that can be swapped, for all micro-batches."""
        number = self.problem.workload.num_micro_batches
        return tuple(
            SwappableOperator(
                name=group.candidate.operator,
                blocks=group.blocks,
                num_bytes=number * group.candidate.num_bytes,
                flops=number * self._flops(group.candidate),
            )
            for group in self.problem.order.groups
        )

    @cached_property
    def inter_block_bytes(self) -> int:
        """Layers' inputs, of all micro-batches."""
        return self.problem.workload.num_micro_batches * sum(self.problem.order.unit_bytes(0))

    def seconds(self, *, swapped_bytes: int, spilled_bytes: int, recomputed_flops: int) -> float:
        """Predicted seconds of one step."""
        problem, gpu_bytes = self.problem, min(self.gpu_bytes, swapped_bytes - spilled_bytes)
        offloaded = offload_bytes(swapped_bytes, spilled_bytes=spilled_bytes, gpu_bytes=gpu_bytes)
        available_bytes = self.available_bytes - self.gpu_bytes - offloaded.host_bytes
        level = max(0, bisect_right(self._level_bytes, available_bytes) - 1)
        placement, traffic = self._at_level(level)
        no_states = replace(problem.spec, blocks=())
        return overlapped_step(
            problem.computed if self.moves_states else no_states,
            placement,
            traffic.with_offloaded(offloaded),
            problem.hardware,
            compute=problem.compute,
            offloaded=offloaded,
            not_recomputed_seconds=(self._most_flops - recomputed_flops) / problem.hardware.gpu.flops_per_second,
            lookup_rows_bytes=problem.lookup_rows_bytes,
            holds_gradients=problem.decisions.holds_gradients,
            overlap=problem.decisions.overlap,
            part=problem.part if self.moves_states else replace(problem.part, own=no_states),
        ).total

    def without_states(self) -> RatelEquations:
        """These equations as if the model states lay on the device and moved nowhere."""
        return replace(self, moves_states=False)

    @cached_property
    def _most_flops(self) -> int:
        """FLOPs recomputed when nothing but inputs is swapped."""
        return sum(operator.flops * len(operator.blocks) for operator in self.operators)

    @cached_property
    def _level_bytes(self) -> list[int]:
        """Bytes that stay at each level: none; the first segment's weights; the first two's; ...; then states too."""
        segments = self.problem.own.segments
        weights, states = [each.own_bytes for each in segments], [each.state_bytes for each in segments]
        return list(accumulate((*weights, *states), initial=0))

    def _at_level(self, level: int) -> tuple[Placement, Traffic]:
        if level not in self._levels:
            num_segments = len(self.problem.spec.segments)
            placement = replace(
                self.placement,
                resident_weights=frozenset(range(min(level, num_segments))),
                resident_states=frozenset(range(max(0, level - num_segments))),
            )
            self._levels[level] = placement, self._state_traffic(placement)
        return self._levels[level]

    @cached_property
    def _levels(self) -> dict[int, tuple[Placement, Traffic]]:
        """The levels that were evaluated."""
        return {}

    def _state_traffic(self, placement: Placement) -> Traffic:
        if not self.moves_states:
            return Traffic()
        return step_traffic(
            self.problem.own,
            placement,
            NOTHING_OFFLOADED,
            holds_gradients=self.problem.decisions.holds_gradients,
            spilled_segments=self.spilled_segments,
            overlap=self.problem.decisions.overlap,
        )

    def _flops(self, candidate: SwapCandidate) -> int:
        if not self.problem.compute.is_measured:
            return candidate.flops
        return round((candidate.seconds or 0.0) * self.problem.hardware.gpu.flops_per_second)
