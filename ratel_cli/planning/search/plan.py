"""The plan of a run: what goes where, and what that is predicted to cost. A value, printed and saved. Pure.

Invariant: a plan fits into the limits that it was made for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ratel_cli.hardware.spec import GPU_CONTEXT_BYTES
from ratel_cli.planning.memory.capacity import HostMemory, check_device_memory
from ratel_cli.planning.memory.gpu_memory import activation_bytes
from ratel_cli.planning.profile.placement import Placement, Workload, gradient_bytes
from ratel_cli.planning.search.choose import Choice, curve, weigh
from ratel_cli.planning.search.clipping import SpeculationCosts, speculation_costs
from ratel_cli.planning.search.decisions import Decisions
from ratel_cli.planning.search.evaluation import Evaluation
from ratel_cli.planning.search.prediction import Case, Prediction, SwappedOperator
from ratel_cli.planning.search.problem import Problem
from ratel_cli.planning.search.swap import SwapOrder, SwapPrefix
from ratel_cli.planning.time.traffic import store_bytes
from ratel_cli.planning.time.wear import WearTrade


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Prediction):
    """Everything that training needs to know of the plan, and that the user is shown. Numbers are for one step."""

    decisions: Decisions
    swap: SwapPrefix
    placement: Placement
    memory: HostMemory
    spilled_segments: int
    """Held gradients of this many segments, the first in forward order, lie on NVMe."""
    spilled_bytes: int
    """Bytes of those gradients."""
    speculation: SpeculationCosts | None
    """What it gains and loses to update blocks before it is known whether the step is clipped. None if that is never
    done."""

    @property
    def held_in_memory_bytes(self) -> int | None:
        """The limit on held gradients in memory; None if all of them fit."""
        return self.memory.held_gradients if self.spilled_segments else None

    @property
    def device_allocation_bytes(self) -> int | None:
        """What torch's allocator may take of a GPU's memory; None if there is no limit."""
        limit_bytes = self.decisions.device_limit_bytes
        if limit_bytes is None:
            return None
        return max(0, limit_bytes + self.decisions.device_reserve_bytes - GPU_CONTEXT_BYTES)


def make_plan(problem: Problem, *, trades: bool = True) -> Plan:
    """Choose what stays where and predict what follows. Raises DoesNotFit.

    `trades`: with what the other rules for wear would choose, which takes a search for each.
    """
    spec, workload, profile, decisions = problem.spec, problem.workload, problem.profile, problem.decisions
    assert decisions.holds_gradients or not decisions.overwrites, "what is written in place cannot be taken back"
    choice = weigh(problem)
    problem, chosen = choice.problem, choice.best
    check_device_memory(chosen.memory, decisions.device_limit_bytes)
    spilled_bytes = sum(gradient_bytes(problem.own, chosen.placement.gpu_embedding_rows)[: chosen.spilled_segments])
    own_bytes = store_bytes(problem.own, num_slots=decisions.num_slots)
    number, number_met = workload.num_micro_batches, workload.full_micro_batches
    layers = [profile.profiles[index] for index in profile.layers]
    speculation = speculation_costs(problem, chosen)
    on_gpu_bytes = activation_bytes(profile, chosen.offloaded, chosen.placement.gpu_units)
    inter_block_bytes = number * sum(layer.input_bytes for layer in layers)
    swappable_bytes = inter_block_bytes + number * problem.order.prefix(problem.order.num_outputs).num_bytes
    return Plan(
        cost_model="ratel",
        source=profile.source,
        model_name=spec.name,
        num_parameters=spec.num_parameters,
        num_blocks=len(spec.segments),
        workload=workload,
        decisions=decisions,
        flops_forward=round(number_met * (sum(layer.flops_forward for layer in layers) + profile.flops_head)),
        num_trained=spec.num_trained,
        frozen_flops=round(number_met * (sum(layer.frozen_flops for layer in layers) + profile.frozen_head_flops)),
        flops_recomputed=round(number_met * (sum(layer.flops_recomputed for layer in layers) - chosen.swap.flops)),
        swappable_bytes=swappable_bytes,
        inter_block_bytes=inter_block_bytes,
        swapped=tuple(_swapped_operators(problem.order, chosen.swap, workload)),
        swap=chosen.swap,
        offloaded=chosen.offloaded,
        case=_case(chosen, swappable_bytes),
        placement=chosen.placement,
        memory=chosen.memory,
        spilled_segments=chosen.spilled_segments,
        spilled_bytes=spilled_bytes,
        traffic=chosen.traffic,
        time=chosen.time,
        bottleneck=chosen.time.bottleneck,
        gpu_bytes=chosen.memory.device,
        gpu_activation_bytes=0 if problem.hardware.link is None else on_gpu_bytes,
        host_bytes=chosen.memory.total,
        nvme_bytes=own_bytes + spilled_bytes + chosen.offloaded.written_bytes,
        network=problem.network,
        num_ranks=problem.rank_slice.size,
        curve=tuple(curve(problem, chosen)),
        unclipped_seconds=None if speculation is None else speculation.unclipped_seconds,
        speculation=speculation,
        wear=_wear_trade(problem, choice) if trades else None,
    )


def predicted_again(plan: Plan, problem: Problem) -> Plan:
    """Return the plan with the times that another profile or machine predicts for it."""
    problem = replace(problem, gpu_holds_head=plan.placement.gpu_holds_head)
    number = plan.swap.num_outputs
    evaluation = Evaluation(
        placement=plan.placement,
        swap=problem.order.prefix(number),
        offloaded=plan.offloaded,
        memory=plan.memory,
        spilled_segments=plan.spilled_segments,
        traffic=plan.traffic,
        time=problem.time(plan.placement, plan.traffic, plan.offloaded, num_outputs=number),
    )
    speculation = speculation_costs(problem, evaluation)
    return replace(
        plan,
        time=evaluation.time,
        bottleneck=evaluation.time.bottleneck,
        unclipped_seconds=None if speculation is None else speculation.unclipped_seconds,
        speculation=speculation,
    )


def _wear_trade(problem: Problem, choice: Choice) -> WearTrade | None:
    """What the plan was chosen among; None where nothing but the state is written under any rule."""
    best, sparing, fastest = choice.best, choice.sparing, choice.fastest
    if fastest.traffic.written_bytes == problem.state_written_bytes:
        return None
    return WearTrade(
        policy=problem.decisions.wear,
        state_written_bytes=problem.state_written_bytes,
        seconds=best.time.total,
        written_bytes=best.traffic.written_bytes,
        save_seconds=sparing.time.total,
        save_written_bytes=sparing.traffic.written_bytes,
        ignore_seconds=fastest.time.total,
        ignore_written_bytes=fastest.traffic.written_bytes,
    )


def _case(chosen: Evaluation, swappable_bytes: int) -> Case:
    if not chosen.swap.num_outputs:
        return 1
    return 2 if chosen.offloaded.total_bytes == swappable_bytes else 3


def _swapped_operators(order: SwapOrder, swap: SwapPrefix, workload: Workload) -> Iterator[SwappedOperator]:
    """The operators that the plan swaps, by benefit, as they were chosen."""
    left = swap.num_outputs
    for group in order.groups:
        blocks = min(left, len(group.blocks))
        left -= blocks
        if not blocks:
            return
        number, number_met = blocks * workload.num_micro_batches, blocks * workload.full_micro_batches
        candidate = group.candidate
        yield SwappedOperator(
            operator=candidate.operator,
            blocks=blocks,
            bytes=number * candidate.num_bytes,
            flops=round(number_met * candidate.flops),
            seconds=None if candidate.seconds is None else number_met * candidate.seconds,
            benefit=candidate.flops / max(1, candidate.num_bytes),
        )
