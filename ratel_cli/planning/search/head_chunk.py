"""The size of the head's chunks: how many tokens' logits exist at once where a GPU computes. Pure.

Each chunk makes gradients of the whole head and adds them up in fp32, so fewer chunks are faster. They take about three
times their logits of the GPU's memory. Whether that makes anything else slower, a plan for each size shows. No plan is
made for a size if a larger one takes no more memory.

Invariant: no size is predicted to be better than the one found, apart from the allowances of each plan's own search
(planning/search/choose.py). Of sizes that are as good, it is the largest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ratel_cli.errors import DoesNotFit
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.memory.capacity import check_device_memory
from ratel_cli.planning.profile.activations import head_chunk_tokens, tokens_per_chunk
from ratel_cli.planning.profile.placement import Workload
from ratel_cli.planning.search.choose import Choice, objective_among, weigh
from ratel_cli.planning.search.problem import Problem
from ratel_cli.planning.time.wear import Cost
from ratel_cli.sizes import LOGITS_CHUNK_BYTES

CHUNK_BYTES: Final = tuple(LOGITS_CHUNK_BYTES << doublings for doublings in range(5))
"""fp32 logits of a chunk: 64 MiB to 1 GiB. Runs on a CPU have the smallest, since larger ones gain nothing there."""


def with_chunk(spec: ModelSpec, workload: Workload, chunk_bytes: int) -> Workload:
    """The workload with chunks of this many bytes of fp32 logits."""
    return replace(workload, chunk_tokens=tokens_per_chunk(spec.vocab_size, chunk_bytes))


def best_chunk(problem: Problem) -> int:
    """Bytes of fp32 logits: the best of `CHUNK_BYTES` by the user's rule for wear, whatever chunk `problem` has.

    Where none fits, the one that is short of the least memory.
    """
    if problem.hardware.link is None:
        return LOGITS_CHUNK_BYTES
    sized = _in_doubt(problem)
    if len(sized) == 1:
        return next(iter(sized))
    tried = {size: _weighed(each) for size, each in sized.items()}
    choices = {size: found for size, found in tried.items() if isinstance(found, Choice)}
    shortfalls = {size: found for size, found in tried.items() if isinstance(found, int)}
    if not choices:
        return min(shortfalls, key=lambda size: (shortfalls[size], -size))
    objective = objective_among(problem, list(choices.values()))

    def cost(size: int) -> Cost:
        best = choices[size].best
        return objective.cost(best.time.total, best.traffic.written_bytes - problem.state_written_bytes)

    return min(choices, key=lambda size: (cost(size), -size))


def _in_doubt(problem: Problem) -> dict[int, Problem]:
    """The problem with each size that may be the best, by size: all that differ, unless a larger one takes no more of
    the GPU's memory."""
    differing = {}
    for size in reversed(CHUNK_BYTES):  # of sizes with the same chunks, the smallest is the last
        workload = with_chunk(problem.spec, problem.workload, size)
        differing[head_chunk_tokens(problem.spec, workload)] = size, replace(problem, workload=workload)
    in_doubt: dict[int, Problem] = {}
    for size, sized in differing.values():
        if not any(larger.takes_no_more_of_gpu_than(sized) for larger in in_doubt.values()):
            in_doubt[size] = sized
    return in_doubt


def _weighed(problem: Problem) -> Choice | int:
    """The best placements, or the bytes of memory that a step is short of."""
    try:
        choice = weigh(problem)
        check_device_memory(choice.best.memory, problem.decisions.device_limit_bytes)
    except DoesNotFit as failure:
        return failure.shortfall_bytes
    return choice
