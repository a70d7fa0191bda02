"""What other systems would do with the same model and machine: the rows of `ratel plan --compare`. Pure.

All that `compare` gives train with model states on NVMe and the optimizer on the CPU, under the same equations as
Ratel's choice (section V-E of the paper). They differ in which activations they swap, and where to:

    ratel      the least of all prefixes by benefit
    static     ZeRO-Infinity: the block inputs to main memory, all else is recomputed
    host-only  Ratel+CpuAct: as ratel, but to main memory alone
    capuchin   host-only, and chosen as if model states moved nowhere
    checkmate  to main memory, as much as it holds, by a mixed-integer program
    fuyou      chosen as if everything that is swapped went to NVMe
    g10        everything to NVMe, nothing is recomputed

Checkmate (Jain et al., 2020) solves a program whose objective is recomputation alone: transfers cost nothing in it, and
memory is a budget. Where every output is either stored or recomputed from its block's input, as in Ratel+CM of the
paper, that is a knapsack. Blocks are alike, so each operator is one integer variable: the number of blocks in which it
is stored. The solver is scipy's. Its answer is exact, not merely within the solver's default gap.

What `compare_in_memory` gives keep all model states in host memory and have schedules of their own. They swap nothing:
a micro-batch's layer inputs stay on the GPU, and all else is recomputed. What differs is where weights and gradients
are:

    zero-offload   the weights stay on the GPU. A gradient leaves as it is made, for each micro-batch, and backward ends
                   when all are down. AdamW follows, and new weights go up while it runs (Ren et al., 2021; MemFerry,
                   sections II-B and III-A). The one-step delayed update, which computes with old weights, is off
    memferry       the weights stay in host memory. They are uploaded or read in place as `memferry_search.py` plans it.
                   Gradients stay on the GPU until they are down, once a step, and that overlaps backward and AdamW
                   (MemFerry, sections III-B, IV-A to IV-C)

With F and B of `memferry.py` (with weights on the GPU nothing is uploaded there), D gradients on the link, N
micro-batches, U AdamW and V the link for new weights, in seconds:

    zero-offload   F + max(B, N D) + max(U, V)
    memferry       F + max(B + U, D)

AdamW has all cores, but no more than main memory moves: states both ways, gradients, and new weights. It counts under
either cost model, since nothing hides it here. What it would take to clip gradients is left out.

Invariants: ratel is never slower than any other with states on NVMe; what keeps the model in memory may be faster where
the model fits. Against strategies that choose a prefix, that follows from the search. A prefix is the best of all sets
only if the last element may be split (the paper's footnote 5). Whole elements may pack better, so the others' sets are
candidates for ratel too. One that does not fit says what is short. A faster link, main memory or AdamW never makes one
that is in memory slower, as far as MemFerry's plan is the best: with more than `EXACT_LAYERS` parameters, that is known
to 1 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from math import gcd
from typing import Literal

from ratel_cli.commands import install_extras
from ratel_cli.hardware.spec import HardwareProfile, Link
from ratel_cli.papers.memferry import timeline
from ratel_cli.papers.memferry_costs import WeightUse, kept_weight_bytes
from ratel_cli.papers.memferry_search import plan_direct
from ratel_cli.papers.prefix import Equations, Point, Search, SwappableOperator, evaluate, search
from ratel_cli.units import format_bytes

Strategy = Literal["ratel", "static", "host-only", "capuchin", "checkmate", "fuyou", "g10", "zero-offload", "memferry"]
_HOST_STRATEGIES: tuple[Strategy, ...] = ("static", "host-only", "capuchin", "checkmate")
_FLASH_NEURON_BYTES = 16
"""Per parameter: FlashNeuron keeps all states on the GPU, in mixed precision."""
MASTER_STATE_BYTES = 12
"""Per parameter: the fp32 master weight and both moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The step that follows from a strategy."""

    strategy: Strategy
    why_not: str | None = None
    """Why the strategy is not feasible; None if it is. `point` is then that of the block inputs alone, spilled
    nevertheless; or that of a step that never ends, if the model is to be in memory."""
    point: Point


def compare(equations: Equations) -> tuple[Outcome, ...]:
    """The outcome of every strategy with states on NVMe: ratel first, then the others."""
    found = search(equations)
    rivals = (*_host_rivals(equations, found), *_nvme_rivals(equations, found))
    ours = (_prefix("ratel", found, found.least()), *(rival for rival in rivals if rival.why_not is None))
    best = min(ours, key=lambda outcome: outcome.point.seconds)
    return (replace(best, strategy="ratel"), *rivals)


def store_within(operators: Sequence[SwappableOperator], *, available_bytes: int) -> tuple[SwappableOperator, ...]:
    """Checkmate's choice: what to store in `available_bytes` so that the fewest FLOPs are recomputed.

    Block inputs are not counted. Raises ModuleNotFoundError without scipy.
    """
    worth = [operator for operator in operators if operator.flops]
    if not worth:
        return ()
    optimize = import_module("scipy.optimize")
    # Whole units instead of 1e9 bytes and 1e13 FLOPs keep the solver's tolerances below one unit.
    byte_unit = gcd(*(operator.num_bytes for operator in worth))
    flop_unit = gcd(*(operator.flops for operator in worth))
    most = [len(operator.blocks) for operator in worth]
    budget = min(available_bytes, sum(operator.num_bytes * len(operator.blocks) for operator in worth)) // byte_unit
    solved = optimize.milp(
        [-(operator.flops // flop_unit) for operator in worth],
        constraints=([[operator.num_bytes // byte_unit for operator in worth]], [0], [budget]),
        bounds=([0] * len(worth), most),
        integrality=[1] * len(worth),
        options={"mip_rel_gap": 0.0},
    )
    assert solved.success, solved.message
    counts = [round(count) for count in solved.x]
    stored = [
        replace(operator, blocks=operator.blocks[:count])
        for operator, count in zip(worth, counts, strict=True)
        if count
    ]
    assert sum(operator.num_bytes * len(operator.blocks) for operator in stored) <= available_bytes
    return tuple(stored)


def flash_neuron_parameters(gpu_memory_bytes: int) -> int:
    """The parameters of the largest model that FlashNeuron can train: it keeps 16 bytes per parameter on the GPU."""
    return gpu_memory_bytes // _FLASH_NEURON_BYTES


def _host_rivals(equations: Equations, found: Search) -> Iterator[Outcome]:
    """Strategies whose activations never go to NVMe."""
    available_bytes = equations.available_bytes
    missing_bytes = equations.inter_block_bytes - available_bytes
    if missing_bytes > 0:
        why_not = f"the layers' inputs do not fit into RAM (short by {format_bytes(missing_bytes)})"
        yield from (Outcome(strategy=each, why_not=why_not, point=found.points[0]) for each in _HOST_STRATEGIES)
        return
    yield _prefix("static", found, 0)
    yield _prefix("host-only", found, found.least(limit_bytes=available_bytes))
    yield _prefix("capuchin", found, search(equations.without_states()).least(limit_bytes=available_bytes))
    try:
        stored = store_within(equations.operators, available_bytes=-missing_bytes)
    except ModuleNotFoundError:
        why_not = f"its solver needs scipy: {install_extras('compare')}"
        yield Outcome(strategy="checkmate", why_not=why_not, point=found.points[0])
    else:
        yield Outcome(strategy="checkmate", point=_point_of(equations, found, stored))


def _nvme_rivals(equations: Equations, found: Search) -> Iterator[Outcome]:
    """Strategies that swap to NVMe, which always fits."""
    yield _prefix("fuyou", found, search(equations, available_bytes=0).least())
    everything = found.points[-1]
    point = evaluate(equations, everything.swapped_bytes, everything.recomputed_flops, available_bytes=0)
    yield Outcome(strategy="g10", point=point)


def _prefix(strategy: Strategy, found: Search, count: int) -> Outcome:
    return Outcome(strategy=strategy, point=found.points[count])


def _point_of(equations: Equations, found: Search, swapped: Sequence[SwappableOperator]) -> Point:
    """The point of any set of operators, swapped in addition to the block inputs."""
    inputs_alone = found.points[0]
    num_bytes = sum(operator.num_bytes * len(operator.blocks) for operator in swapped)
    flops = sum(operator.flops * len(operator.blocks) for operator in swapped)
    return evaluate(
        equations,
        inputs_alone.swapped_bytes + num_bytes,
        inputs_alone.recomputed_flops - flops,
        available_bytes=equations.available_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class InMemoryModel:
    """One model in one step on one machine, as the schedules of what keeps it in memory see it."""

    uses: Sequence[WeightUse]
    """All parameters in the order of forward, with what backward recomputes; none where the CPU computes."""
    hardware: HardwareProfile
    num_micro_batches: int
    num_trained: int
    """Parameters that AdamW updates."""
    weight_bytes: int
    """Compute weights of the model [P16]."""
    updated_bytes: int
    """The part of them that a step changes."""
    gradient_bytes: int
    """[G16]"""
    largest_gradient_bytes: int
    """The most that the gradients of one layer, or of embedding or head, take."""
    activation_bytes: int
    """On the GPU: the layers' inputs of a micro-batch, and the activations of the layer that computes."""
    recomputed_flops: int
    """FLOPs that a step recomputes."""
    gpu_bytes: int
    """GPU memory that there is for all of this."""
    host_bytes: int
    """Host memory."""

    @property
    def state_bytes(self) -> int:
        """[P32 and OS32]"""
        return MASTER_STATE_BYTES * self.num_trained

    @property
    def update_seconds(self) -> float:
        """AdamW on the CPU."""
        host = self.hardware.host
        moved_bytes = 2 * self.state_bytes + self.gradient_bytes + self.updated_bytes
        return max(
            self.num_trained / (host.adam_parameters_per_second * host.num_cores),
            moved_bytes / (host.memory_bytes_per_second or math.inf),
        )


def compare_in_memory(model: InMemoryModel) -> tuple[Outcome, ...]:
    """The outcome of each system that keeps the model in memory. Both have memory for all gradients in the host."""
    host_bytes = model.state_bytes + model.gradient_bytes
    return (
        _in_memory("zero-offload", model, host_bytes, _zero_offload),
        _in_memory("memferry", model, host_bytes + model.weight_bytes, _memferry),
    )


def _in_memory(
    strategy: Strategy,
    model: InMemoryModel,
    host_bytes: int,
    step_of: Callable[[InMemoryModel, Link], tuple[int, float]],
) -> Outcome:
    """The outcome of a system whose step takes so much host memory, and the GPU memory and seconds of `step_of`."""
    seconds, why_not = math.inf, None
    if model.hardware.link is None:
        why_not = "there is no GPU"
    elif host_bytes > model.host_bytes:
        why_not = f"the model does not fit into RAM (short by {format_bytes(host_bytes - model.host_bytes)})"
    else:
        gpu_bytes, step_seconds = step_of(model, model.hardware.link)
        if gpu_bytes > model.gpu_bytes:
            why_not = f"the model does not fit into GPU memory (short by {format_bytes(gpu_bytes - model.gpu_bytes)})"
        else:
            seconds = step_seconds
    # Nothing is swapped: not even the layers' inputs leave the GPU.
    point = Point(swapped_bytes=0, spilled_bytes=0, recomputed_flops=model.recomputed_flops, seconds=seconds)
    return Outcome(strategy=strategy, why_not=why_not, point=point)


def _zero_offload(model: InMemoryModel, link: Link) -> tuple[int, float]:
    """The GPU memory and the seconds of a step with weights that stay on the GPU, and gradients that leave it."""
    gpu_bytes = model.activation_bytes + model.weight_bytes + model.largest_gradient_bytes
    time = timeline([replace(use.layer, upload=0.0) for use in model.uses], ["GFGB" for _ in model.uses])
    down = model.num_micro_batches * (model.gradient_bytes / link.from_gpu_bytes_per_second)
    update = max(model.update_seconds, model.updated_bytes / link.to_gpu_bytes_per_second)
    return gpu_bytes, time.forward + max(time.backward, down) + update


def _memferry(model: InMemoryModel, link: Link) -> tuple[int, float]:
    """The GPU memory and the seconds of a step with weights in host memory, and gradients that stay until they are
    down."""
    plan = plan_direct([use.layer for use in model.uses])
    gpu_bytes = model.activation_bytes + kept_weight_bytes(model.uses, plan.modes) + model.gradient_bytes
    down = model.gradient_bytes / link.from_gpu_bytes_per_second
    return gpu_bytes, plan.time.forward + max(plan.time.backward + model.update_seconds, down)
