"""Ratel's own cost model as the equations that `planning.papers.strategies` holds other systems' choices against. Pure.

Made by `ratel_forecast` for `ratel plan --compare`. Transfers run as far ahead as in the plan, and what memory
activations leave is for weights and states that stay, as in `planning.choose`: the same for every strategy. Bytes go
to NVMe one by one here, and in whole units in the plan.

A measured time stands as so many FLOPs as the device does in it, since that is what strategies weigh.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from ratel_cli.planning.activations import OffloadedActivations, Units, offload
from ratel_cli.planning.choose import Case
from ratel_cli.planning.costs import overlapped_step
from ratel_cli.planning.model_profile import SwapCandidate
from ratel_cli.planning.papers.prefix import Operator
from ratel_cli.planning.placement import Placement
from ratel_cli.planning.traffic import Traffic, step_traffic

_NOTHING_OFFLOADED = offload([0], num_micro_batches=1, spilled_units=0)
_NO_TRAFFIC = Traffic(
    forward_read_bytes=0,
    forward_written_bytes=0,
    backward_read_bytes=0,
    backward_written_bytes=0,
    update_read_bytes=0,
    update_written_bytes=0,
    first_read_bytes=0,
)


@dataclass(frozen=True, kw_only=True)
class RatelEquations:
    """`planning.papers.prefix.Equations` of one case."""

    case: Case
    placement: Placement
    """With nothing resident."""
    host_room_bytes: int
    """For activations, and then for what stays; and what the GPU keeps."""
    kept_bytes: int = 0
    """Of activations, on the GPU: as much for every strategy, if it leaves as much in memory."""
    spilled_blocks: int = 0
    moves_states: bool = True

    @cached_property
    def operators(self) -> tuple[Operator, ...]:
        """Of all micro-batches."""
        number = self.case.workload.num_micro_batches
        return tuple(
            Operator(
                name=run.candidate.operator,
                blocks=run.blocks,
                num_bytes=number * run.candidate.num_bytes,
                flops=number * self._flops(run.candidate),
            )
            for run in self.case.order.runs
        )

    @cached_property
    def inter_block_bytes(self) -> int:
        """Layers' inputs, of all micro-batches."""
        return self.case.workload.num_micro_batches * sum(self.case.order.unit_bytes(0))

    def seconds(self, *, swapped_bytes: int, spilled_bytes: int, recomputed_flops: int) -> float:
        """Of one step."""
        case, kept_bytes = self.case, min(self.kept_bytes, swapped_bytes - spilled_bytes)
        spilled = (Units(spilled_bytes, 1),)
        offloaded = OffloadedActivations(
            total_bytes=swapped_bytes,
            host_bytes=swapped_bytes - spilled_bytes - kept_bytes,
            window_bytes=0,
            num_units=max(1, swapped_bytes),
            written_units=spilled,
            read_units=spilled,
            largest_unit_bytes=0,
            gpu_bytes=kept_bytes,
        )
        available_bytes = self.host_room_bytes - self.kept_bytes - offloaded.host_bytes
        level = max(0, bisect_right(self._level_bytes, available_bytes) - 1)
        placement, traffic = self._at_level(level)
        return overlapped_step(
            case.spec if self.moves_states else replace(case.spec, blocks=()),
            case.state,
            placement,
            traffic.beside(offloaded),
            case.hardware,
            compute=case.compute,
            offloaded=offloaded,
            not_recomputed_seconds=(self._most_flops - recomputed_flops) / case.hardware.gpu.flops_per_second,
            holds_gradients=case.holds_gradients,
            overlap=case.overlap,
        ).total

    def without_states(self) -> RatelEquations:
        """As if the model's states lay in the device."""
        return replace(self, moves_states=False)

    @cached_property
    def _most_flops(self) -> int:
        """With nothing swapped but inputs."""
        return sum(operator.flops * len(operator.blocks) for operator in self.operators)

    @cached_property
    def _level_bytes(self) -> list[int]:
        """Nothing stays; the first block's weights; the first two's; ...; then states too."""
        state, blocks = self.case.state, self.case.spec.blocks
        weights = [block.num_elements * state.compute for block in blocks]
        states = [block.num_elements * (state.record - state.compute) for block in blocks]
        return list(accumulate((*weights, *states), initial=0))

    def _at_level(self, level: int) -> tuple[Placement, Traffic]:
        if level not in self._levels:
            num_blocks = len(self.case.spec.blocks)
            placement = replace(
                self.placement,
                resident_weights=frozenset(range(min(level, num_blocks))),
                resident_states=frozenset(range(max(0, level - num_blocks))),
            )
            self._levels[level] = placement, self._state_traffic(placement)
        return self._levels[level]

    @cached_property
    def _levels(self) -> dict[int, tuple[Placement, Traffic]]:
        """Those that were asked for."""
        return {}

    def _state_traffic(self, placement: Placement) -> Traffic:
        if not self.moves_states:
            return _NO_TRAFFIC
        return step_traffic(
            self.case.spec,
            self.case.state,
            placement,
            _NOTHING_OFFLOADED,
            holds_gradients=self.case.holds_gradients,
            spilled_blocks=self.spilled_blocks,
            overlap=self.case.overlap,
        )

    def _flops(self, candidate: SwapCandidate) -> int:
        if not self.case.compute.is_measured:
            return candidate.flops
        return round((candidate.seconds or 0.0) * self.case.hardware.gpu.flops_per_second)
