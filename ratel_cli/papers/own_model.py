"""A config's model under Ratel's own cost model, as the papers' questions see it. Pure.

Every strategy of `ratel plan --compare` gets the same: transfers run as far ahead as in the plan, and the memory that
activations leave holds resident weights and states, as in planning/search/choose.py. Here bytes go to NVMe one by one;
in the plan they go in whole units.

A measured time counts as the FLOPs that the device does in it, because strategies compare FLOPs.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from ratel_cli.errors import DoesNotFit
from ratel_cli.hardware.spec import GPU_CONTEXT_BYTES
from ratel_cli.papers.memferry_costs import weight_uses
from ratel_cli.papers.memferry_forecast import DirectForecast, direct_forecast
from ratel_cli.papers.prefix import SwappableOperator
from ratel_cli.papers.ratel import Depth
from ratel_cli.papers.rivals import InMemoryModel
from ratel_cli.planning.duties.placed import PlacedStep
from ratel_cli.planning.forecast.forecast import Setting
from ratel_cli.planning.forecast.ratel_forecast import RatelForecaster, host_limit_bytes
from ratel_cli.planning.memory.capacity import check_device_memory, notes_bytes
from ratel_cli.planning.memory.gpu_memory import activation_bytes
from ratel_cli.planning.profile.activations import (
    NOTHING_OFFLOADED,
    head_chunk_tokens,
    logits_bytes,
    offload_bytes,
)
from ratel_cli.planning.profile.model_profile import SwapCandidate
from ratel_cli.planning.profile.placement import LEAST_UNITS, ActivationPolicy, Placement
from ratel_cli.planning.search.problem import Problem
from ratel_cli.planning.time.costs import StepCosts
from ratel_cli.planning.time.traffic import Traffic, traffic_of
from ratel_cli.schedule.segments import Segment
from ratel_cli.sizes import PAGE_BYTES
from ratel_cli.units import align_up


@dataclass(frozen=True, slots=True)
class OwnModel:
    """A config's model on one rank. All is computed from its forecasts' problems."""

    forecaster: RatelForecaster

    def with_activations(self, activations: ActivationPolicy) -> RatelForecaster:
        """Return the forecaster with this choice of what is swapped in place of the config's."""
        return replace(self.forecaster, decisions=replace(self.forecaster.decisions, activations=activations))

    def equations(self, setting: Setting) -> RatelEquations:
        """Equations whose transfers run as far ahead as planned.

        Memory that the plan gives to resident weights and states is available to activations.
        """
        setting = self.forecaster.chunked(setting)
        plan = self.forecaster.plan(setting)
        problem = self.forecaster.problem(setting, limit_bytes=plan.decisions.host_limit_bytes)
        problem = replace(problem, gpu_holds_head=plan.placement.gpu_holds_head)
        bare = replace(
            plan.placement,
            resident_weights=frozenset(),
            resident_states=frozenset(),
            spilled_units=_spillable_units(problem),
            gpu_units_from=None,
        )
        activation_bytes = problem.offload(0, spilled_units=bare.spilled_units).memory_bytes
        try:
            unused_bytes = problem.decisions.host_limit_bytes - problem.evaluate(bare).memory.total
        except DoesNotFit as failure:  # the plan fits because the last layer's activations are on the GPU
            unused_bytes = -failure.shortfall_bytes
        return RatelEquations(
            problem=problem,
            placement=bare,
            available_bytes=unused_bytes + activation_bytes + plan.offloaded.gpu_bytes,
            gpu_bytes=plan.offloaded.gpu_bytes,
            spilled_segments=plan.spilled_segments,
        )

    def in_memory(self, setting: Setting) -> InMemoryModel:
        """The model as this config would train it: its dtypes, and what is frozen. The limits are those of a plan.

        The head computes as fast as in the plan, and takes as little GPU memory as it can.
        """
        setting = self.forecaster.chunked(setting)
        problem = self.forecaster.problem(setting, limit_bytes=0)
        spec, profile, workload = problem.spec, problem.profile, problem.workload
        layers = [profile.profiles[kind] for kind in profile.layers]
        logits = logits_bytes(spec, head_chunk_tokens(spec, replace(workload, chunk_tokens=None)))
        head_bytes = max(profile.norm_held_bytes + logits, profile.norm_bytes)
        computing_bytes = max(activation_bytes(profile, problem.offload(0), LEAST_UNITS), head_bytes)
        return InMemoryModel(
            uses=weight_uses(spec, profile, workload, setting.share, is_paper=False),
            hardware=setting.share,
            num_micro_batches=workload.num_micro_batches,
            num_trained=spec.trained_elements,
            weight_bytes=sum(segment.own_bytes for segment in spec.segments),
            updated_bytes=sum(segment.updated_bytes for segment in spec.segments),
            gradient_bytes=sum(segment.gradient_bytes for segment in spec.segments),
            largest_gradient_bytes=max(segment.gradient_bytes for segment in spec.segments),
            activation_bytes=sum(each.input_bytes for each in layers[:-1]) + computing_bytes,
            recomputed_flops=workload.num_micro_batches * sum(each.flops_recomputed for each in layers),
            gpu_bytes=max(0, (self.forecaster.device_limit_bytes(setting) or 0) - GPU_CONTEXT_BYTES),
            host_bytes=max(0, host_limit_bytes(setting) - problem.process_bytes),
        )

    def direct(self, setting: Setting) -> DirectForecast | None:
        """What reading weights in place would give; None where the CPU computes."""
        setting = self.forecaster.chunked(setting)
        problem = self.forecaster.problem(setting, limit_bytes=0)
        return direct_forecast(problem.spec, problem.profile, problem.workload, setting.share, is_paper=False)

    def deepest(self, setting: Setting) -> Depth | None:
        """The most layers like the last one that fit; None if not even one does. Everything that can be lies on NVMe,
        so NVMe bounds them, and memory for what a step notes of each."""
        decisions, spec = self.forecaster.decisions, self.forecaster.spec

        def stored_bytes(segment: Segment) -> int:
            holds = decisions.holds_gradients or decisions.overlap == "separate"
            frozen_bytes = segment.compute_bytes - segment.updated_bytes
            records_bytes = decisions.num_slots * segment.record_bytes + frozen_bytes
            return records_bytes + (segment.gradient_bytes if holds else 0)

        problem, layer = self.forecaster.problem(setting, limit_bytes=0), spec.layers[-1]
        unit_bytes = align_up(problem.profile.profiles[-1].input_bytes, PAGE_BYTES)
        outside_bytes = stored_bytes(spec.embedding) + stored_bytes(spec.head)
        available_bytes = setting.share.nvme.free_bytes - outside_bytes
        most_layers = available_bytes // (stored_bytes(layer) + problem.workload.num_micro_batches * unit_bytes)
        choices = range(1, most_layers + 1)
        num_layers = bisect_right(choices, 0, key=lambda depth: 0 if self._has_memory(setting, depth) else 1)
        if num_layers < 1:
            return None
        parameters = spec.num_parameters + (num_layers - spec.num_layers) * layer.num_parameters
        return Depth(num_layers=num_layers, num_parameters=parameters)

    def _has_memory(self, setting: Setting, num_layers: int) -> bool:
        """Whether the placement that takes the least memory fits with this many layers. Apart from what a step notes of
        each it takes the same for every depth."""
        spec, device_limit_bytes = self.forecaster.spec, self.forecaster.device_limit_bytes(setting)
        layer_bytes = notes_bytes(spec.layers[-1:], setting.workload, num_layers=1)
        limit_bytes = host_limit_bytes(setting) - (num_layers - spec.num_layers) * layer_bytes
        problem = self.forecaster.problem(setting, limit_bytes=limit_bytes, device_limit_bytes=device_limit_bytes)
        problem = problem.in_least_gpu_memory
        try:
            memory = problem.evaluate(Placement(spilled_units=_spillable_units(problem))).memory
            check_device_memory(memory, device_limit_bytes)
        except DoesNotFit:
            return False
        return True


def _spillable_units(problem: Problem) -> int:
    """The units of all layers but the last."""
    return (problem.spec.num_layers - 1) * problem.workload.num_micro_batches


@dataclass(frozen=True, kw_only=True)
class RatelEquations:
    """The `Equations` (`prefix.py`) of one problem."""

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
        return self._costs.time(
            placement,
            traffic.with_offloaded(offloaded),
            offloaded,
            not_recomputed_seconds=(self._most_flops - recomputed_flops) / problem.hardware.gpu.flops_per_second,
        ).total

    @cached_property
    def _costs(self) -> StepCosts:
        step = self.problem.step_of_data
        workload = replace(step.workload, micro_batch_size=step.workload.tokens // step.workload.sequence_len)
        step = replace(step, workload=replace(workload, num_micro_batches=1))
        if not self.moves_states:
            no_states = replace(self.problem.spec, blocks=())
            step = replace(step, spec=no_states, own=no_states)
        return replace(self.problem.costs, step=step)

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
        placed = PlacedStep(self.problem.step_of_data, placement)
        return traffic_of(placed, NOTHING_OFFLOADED, spilled_segments=self.spilled_segments)

    def _flops(self, candidate: SwapCandidate) -> int:
        if not self.problem.compute.is_measured:
            return candidate.flops
        return round((candidate.seconds or 0.0) * self.problem.hardware.gpu.flops_per_second)
