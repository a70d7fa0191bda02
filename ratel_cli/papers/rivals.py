"""What other systems would swap, under the same equations as Ratel's choice (section V-E of the paper). Pure.

All that `compare` gives train with model states on NVMe and the optimizer on the CPU. They differ in which activations
they swap, and where to:

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

Invariant: ratel is never slower than any other of these. What keeps the model in memory (`in_memory.py`) has a
schedule of its own, and may be faster where the model fits. Against strategies that choose a prefix, the invariant
follows from the search. A prefix is the best of all sets only if the last element may be split (the paper's footnote
5). Whole elements may pack better, so the others' sets are candidates for ratel too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from math import gcd
from typing import Literal

from ratel_cli.papers.prefix import Equations, Point, Search, SwappableOperator, evaluate, search
from ratel_cli.units import format_bytes

Strategy = Literal["ratel", "static", "host-only", "capuchin", "checkmate", "fuyou", "g10", "zero-offload", "memferry"]
"""What `ratel plan --compare` has rows of; `in_memory.py` has the last two."""
_HOST_STRATEGIES: tuple[Strategy, ...] = ("static", "host-only", "capuchin", "checkmate")
_FLASH_NEURON_BYTES = 16
"""Per parameter: FlashNeuron keeps all states on the GPU, in mixed precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a strategy swaps, and the step that follows."""

    strategy: Strategy
    why_not: str | None
    """Why the strategy is not feasible; None if it is. `point` is then that of the block inputs alone, spilled
    nevertheless; or that of a step that never ends, if the model is to be in memory."""
    point: Point
    swapped: tuple[SwappableOperator, ...]
    """What it swaps in addition to the block inputs. What keeps the model in memory swaps nothing, nor the inputs."""


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
        for strategy in _HOST_STRATEGIES:
            yield _failed(strategy, why_not, found)
        return
    yield _prefix("static", found, 0)
    yield _prefix("host-only", found, found.least(limit_bytes=available_bytes))
    yield _prefix("capuchin", found, search(equations.without_states()).least(limit_bytes=available_bytes))
    try:
        stored = store_within(equations.operators, available_bytes=-missing_bytes)
    except ModuleNotFoundError:
        yield _failed("checkmate", "its solver needs scipy: pip install scipy", found)
    else:
        yield _of_set("checkmate", equations, found, stored)


def _nvme_rivals(equations: Equations, found: Search) -> Iterator[Outcome]:
    """Strategies that swap to NVMe, which always fits."""
    yield _prefix("fuyou", found, search(equations, available_bytes=0).least())
    everything = found.points[-1]
    point = evaluate(equations, everything.swapped_bytes, everything.recomputed_flops, available_bytes=0)
    yield Outcome(strategy="g10", why_not=None, point=point, swapped=found.operators)


def _prefix(strategy: Strategy, found: Search, count: int) -> Outcome:
    return Outcome(strategy=strategy, why_not=None, point=found.points[count], swapped=found.swapped(count))


def _of_set(strategy: Strategy, equations: Equations, found: Search, swapped: tuple[SwappableOperator, ...]) -> Outcome:
    inputs_alone = found.points[0]
    num_bytes = sum(operator.num_bytes * len(operator.blocks) for operator in swapped)
    flops = sum(operator.flops * len(operator.blocks) for operator in swapped)
    point = evaluate(
        equations,
        inputs_alone.swapped_bytes + num_bytes,
        inputs_alone.recomputed_flops - flops,
        available_bytes=equations.available_bytes,
    )
    return Outcome(strategy=strategy, why_not=None, point=point, swapped=swapped)


def _failed(strategy: Strategy, why_not: str, found: Search) -> Outcome:
    return Outcome(strategy=strategy, why_not=why_not, point=found.points[0], swapped=())
