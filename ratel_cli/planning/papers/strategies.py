"""What other systems would swap, under the same equations as ours (section V-E of the paper). Pure.

Called for `ratel plan --compare`. All train with model states on NVMe and the optimizer on the CPU; they differ in
which activations they swap, and where to:

    ratel      the least of all prefixes by benefit
    static     ZeRO-Infinity: the block inputs to main memory, all else is recomputed
    host-only  Ratel+CpuAct: as ours, but to main memory alone
    capuchin   host-only, and chosen as if model states moved nowhere
    checkmate  to main memory, as much as it holds, by a mixed-integer program (planning/papers/checkmate.py)
    fuyou      chosen as if all that is swapped went to NVMe
    g10        everything to NVMe, nothing is recomputed

Invariant: ours is never slower than any other. Against those that choose a prefix that follows
from the search. A prefix is the best of all sets only if the last element may be split (the paper's footnote 5);
whole elements may pack better, so that the others' sets are candidates too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ratel_cli.planning.papers.checkmate import store_within
from ratel_cli.planning.papers.prefix import Equations, Operator, Point, Search, evaluate, search
from ratel_cli.units import format_bytes

Strategy = Literal["ratel", "static", "host-only", "capuchin", "checkmate", "fuyou", "g10"]
_HOST_STRATEGIES: tuple[Strategy, ...] = ("static", "host-only", "capuchin", "checkmate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a strategy swaps, and the step that follows."""

    strategy: Strategy
    why_not: str | None
    """None if it is feasible; if not, `point` is that of the block inputs alone, spilled all the same."""
    point: Point
    swapped: tuple[Operator, ...]
    """Besides the block inputs."""


def compare(equations: Equations) -> tuple[Outcome, ...]:
    """Ours first, then the others."""
    found = search(equations)
    rivals = (*_host_rivals(equations, found), *_nvme_rivals(equations, found))
    ours = (_prefix("ratel", found, found.least()), *(rival for rival in rivals if rival.why_not is None))
    best = min(ours, key=lambda outcome: outcome.point.seconds)
    return (replace(best, strategy="ratel"), *rivals)


def _host_rivals(equations: Equations, found: Search) -> Iterator[Outcome]:
    """Those whose activations never touch NVMe."""
    available_bytes = equations.host_room_bytes
    missing_bytes = equations.inter_block_bytes - available_bytes
    if missing_bytes > 0:
        why_not = f"main memory is {format_bytes(missing_bytes)} short of the block inputs"
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
    """Those that swap to NVMe, and always can."""
    yield _prefix("fuyou", found, search(equations, host_room_bytes=0).least())
    everything = found.points[-1]
    point = evaluate(equations, everything.swapped_bytes, everything.recomputed_flops, host_room_bytes=0)
    yield Outcome(strategy="g10", why_not=None, point=point, swapped=found.operators)


def _prefix(strategy: Strategy, found: Search, count: int) -> Outcome:
    return Outcome(strategy=strategy, why_not=None, point=found.points[count], swapped=found.swapped(count))


def _of_set(strategy: Strategy, equations: Equations, found: Search, swapped: tuple[Operator, ...]) -> Outcome:
    inputs_alone = found.points[0]
    num_bytes = sum(operator.num_bytes * len(operator.blocks) for operator in swapped)
    flops = sum(operator.flops * len(operator.blocks) for operator in swapped)
    point = evaluate(
        equations,
        inputs_alone.swapped_bytes + num_bytes,
        inputs_alone.recomputed_flops - flops,
        host_room_bytes=equations.host_room_bytes,
    )
    return Outcome(strategy=strategy, why_not=None, point=point, swapped=swapped)


def _failed(strategy: Strategy, why_not: str, found: Search) -> Outcome:
    return Outcome(strategy=strategy, why_not=why_not, point=found.points[0], swapped=())
