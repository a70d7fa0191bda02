"""Checkmate's choice: what to recompute, so that the fewest FLOPs are, when memory for all the rest is bounded.

Called by `planning.papers.strategies`. Checkmate (Jain et al., 2020) solves a mixed-integer program whose objective is
recomputation alone: transfers cost nothing in it, and memory is a budget. Where every output is either stored or
recomputed from its block's input, as in Ratel+CM of the paper's section V-E, that is a knapsack. Blocks are alike, so
an operator is one integer variable, the number of blocks in which it is stored. Needs scipy, for its solver.

Invariant: the answer is exact, not merely within the solver's default gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from math import gcd

from ratel_cli.planning.papers.prefix import Operator


def store_within(operators: Sequence[Operator], *, available_bytes: int) -> tuple[Operator, ...]:
    """What to store in `available_bytes`, block inputs not counted. Raises ModuleNotFoundError without scipy."""
    worth = [operator for operator in operators if operator.flops]
    if not worth:
        return ()
    optimize = import_module("scipy.optimize")
    # Whole units instead of 1e9 bytes and 1e13 FLOPs keep the solver's tolerances below one unit.
    byte_unit = gcd(*(operator.num_bytes for operator in worth))
    flop_unit = gcd(*(operator.flops for operator in worth))
    most = [len(operator.blocks) for operator in worth]
    room = min(available_bytes, sum(operator.num_bytes * len(operator.blocks) for operator in worth)) // byte_unit
    solved = optimize.milp(
        [-(operator.flops // flop_unit) for operator in worth],
        constraints=([[operator.num_bytes // byte_unit for operator in worth]], [0], [room]),
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
