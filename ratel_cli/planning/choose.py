"""The search for the placement with the least predicted time. Pure.

    1. depth       how far transfers run ahead of computing, with held gradients in memory rather than on NVMe. The
                   depth with the least time is taken; gradients that do not fit next to it are spilled, and layers'
                   inputs too if that is not enough.
    2. residency   weights stay in memory from the first block upwards (a byte saves two of traffic), then states (a
                   byte saves one). Each block more is one level.
    3. swapping    for each level, the prefix of all candidates with the least time (planning/swap.py) among those
                   whose units a GPU has memory for: first in the memory that the GPU has left over
                   (planning/gpu_memory.py), then in what the level leaves, the rest on NVMe.
    4. deferral    where gradients are not held anyway, updates move to the next forward while that gains, from the
                   last block downwards (the last blocks can wait longest): 2 bytes of memory (G16) take 22 bytes of
                   traffic from the stage that is short of it. Then 2 and 3 once more.

The time is convex over levels as over prefixes, except for single steps. Of levels within half a percent of the best,
the highest is taken: it moves the fewest bytes. Deferral has to gain 2 % in the end. Where gradients are spilled,
nothing else stays.

Invariants: the choice fits, into a GPU too if anything does. At its depth and deferral, no prefix and no level that
fits is predicted to be faster by more than these allowances. What is rejected fits in no way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import ceil, inf

from ratel_cli.errors import DoesNotFit
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.planning.activations import NOTHING_OFFLOADED
from ratel_cli.planning.placement import Placement
from ratel_cli.planning.problem import Evaluation, Problem, SpilledPrefix

_DEPTHS = ((2, 2), (1, 1), (0, 0))
"""Blocks whose weights are read ahead, and blocks whose updates may be pending. One block each is enough where all
are alike; a second one evens out embedding and head."""
_LEAST_GAIN = 0.02
"""The share of a step's time that deferral must save."""
_AS_GOOD = 1.005
_STATE_BYTES_MOVED = 22
"""Per parameter: optimizer states read, the record written."""
_SCANNED = 16
"""Up to this many levels are tried one by one."""


def choose(problem: Problem) -> Evaluation:
    """The best placement. Raises DoesNotFit."""
    start, decisions = _choose_depth(problem), problem.decisions
    plain = _best_level(problem, start)
    if decisions.holds_gradients or decisions.overlap == "separate" or not start.placement.prefetch_blocks:
        return plain
    # What deferral gains depends on what is resident: nothing, all that would be without it, or only the weights of
    # that, since resident states take the memory that deferral needs.
    weights_only = problem.attempt(replace(plain.placement, resident_states=frozenset()), plain.swap.num_outputs)
    begins = (start, plain, *([weights_only] if weights_only else ()))
    deferrals = {_defer(problem, each).placement.deferred for each in begins} - {frozenset()}
    best = plain
    for deferred in sorted(deferrals, key=len):
        begun = problem.attempt(replace(start.placement, deferred=deferred), start.swap.num_outputs)
        if begun is not None:
            best = min(best, _best_level(problem, begun), key=_seconds)
    return best if best.time.total < (1 - _LEAST_GAIN) * plain.time.total else plain


def curve(problem: Problem, chosen: Evaluation) -> list[tuple[int, float]]:
    """Bytes offloaded in a step and its seconds, over the prefixes of whole groups, all else as chosen."""
    available_bytes = problem.decisions.host_limit_bytes - chosen.memory.total + chosen.memory.activations
    points = []
    prefixes = {*filter(problem.fits_device, problem.order.boundaries), chosen.swap.num_outputs}
    for num_outputs in sorted(prefixes):
        spilled = problem.spill_into(available_bytes, num_outputs=num_outputs)
        if spilled is not None:
            traffic = problem.traffic(chosen.placement, spilled.offloaded, spilled_blocks=chosen.spilled_blocks)
            seconds = problem.seconds(chosen.placement, traffic, spilled.offloaded, num_outputs=num_outputs)
            points.append((spilled.offloaded.total_bytes, seconds))
    return points


def adamw_threads(hardware: HardwareProfile) -> int:
    """Number of AdamW threads: enough to keep up with the drives, at most one per core."""
    nvme, host = hardware.nvme, hardware.host
    needed = nvme.mixed_bytes_per_second / _STATE_BYTES_MOVED / host.adam_parameters_per_second
    return max(1, min(host.num_cores, ceil(needed)))


def _choose_depth(problem: Problem) -> Evaluation:
    """The best depth, with the prefix that the user asks for, else the empty one; among equals the least traffic."""
    evaluations: list[Evaluation] = []
    failure: DoesNotFit | None = None
    for prefetch_blocks, pending_updates in _DEPTHS:
        placement = Placement(
            prefetch_blocks=prefetch_blocks,
            pending_updates=0 if problem.decisions.overlap == "separate" else pending_updates,
            adamw_threads=adamw_threads(problem.hardware),
        )
        try:
            evaluations.append(problem.evaluate_in_least_memory(placement, problem.wanted_outputs or 0))
        except DoesNotFit as does_not_fit:
            failure = does_not_fit
    if not evaluations:
        assert failure is not None
        raise failure
    return min(evaluations, key=lambda each: (each.time.total, each.traffic.read_bytes + each.traffic.written_bytes))


def _defer(problem: Problem, chosen: Evaluation) -> Evaluation:
    """Defer the updates of more blocks while that gains.

    A block has to gain its share, by parameters, of the 2 % that deferral must gain.
    """
    blocks = problem.spec.blocks
    while len(chosen.placement.deferred) < len(blocks):
        block = blocks[-1 - len(chosen.placement.deferred)]
        placement = replace(chosen.placement, deferred=chosen.placement.deferred | {block.index})
        more = problem.attempt(placement, chosen.swap.num_outputs)
        share = block.num_parameters / problem.spec.num_parameters
        if more is None or chosen.time.total - more.time.total < _LEAST_GAIN * share * chosen.time.total:
            return chosen
        chosen = more
    return chosen


def _best_level(problem: Problem, start: Evaluation) -> Evaluation:
    """The best residency, with the best prefix for it."""
    if start.spilled_blocks:
        return _best_with_spilled_gradients(problem, start)
    num_blocks = len(problem.spec.blocks)

    @cache
    def at(level: int) -> Evaluation | None:
        placement = replace(
            start.placement,
            resident_weights=frozenset(range(min(level, num_blocks))),
            resident_states=frozenset(range(max(0, level - num_blocks))),
        )
        return _best_swap(problem, placement)

    def seconds(level: int) -> float:
        return _seconds(at(level))

    highest = _last(lambda level: at(level) is not None, 0, 2 * num_blocks)
    best = _least(seconds, 0, highest)
    chosen = at(_last(lambda level: seconds(level) <= _AS_GOOD * seconds(best), best, highest))
    assert chosen is not None
    return chosen


def _best_with_spilled_gradients(problem: Problem, start: Evaluation) -> Evaluation:
    """The best prefix where gradients are spilled: nothing is resident, and what is swapped goes to NVMe too."""
    if problem.wanted_outputs is not None:
        return start

    @cache
    def at(num_outputs: int) -> Evaluation | None:
        return problem.attempt(start.placement, num_outputs)

    def seconds(num_outputs: int) -> float:
        return _seconds(at(num_outputs)) if problem.fits_device(num_outputs) else inf

    best = at(problem.order.least(seconds))
    assert best is not None
    return best


def _best_swap(problem: Problem, placement: Placement) -> Evaluation | None:
    """The prefix with the least time in the memory that `placement` leaves; None if not even inputs fit."""
    try:
        without, spilled_blocks = problem.fit(placement, NOTHING_OFFLOADED)
    except DoesNotFit:
        return None
    if spilled_blocks:
        return None
    available_bytes = problem.decisions.host_limit_bytes - without.total
    traffic = problem.traffic(placement, NOTHING_OFFLOADED)

    @cache
    def spilled(num_outputs: int) -> SpilledPrefix | None:
        return problem.spill_into(available_bytes, num_outputs=num_outputs)

    def seconds(num_outputs: int) -> float:
        found = spilled(num_outputs)
        if found is None or not problem.fits_device(num_outputs):
            return inf
        offloaded = found.offloaded
        return problem.seconds(placement, traffic.with_offloaded(offloaded), offloaded, num_outputs=num_outputs)

    wanted = problem.wanted_outputs
    num_outputs = problem.order.least(seconds) if wanted is None else wanted
    found = spilled(num_outputs)
    if found is None:
        return None
    return problem.evaluate(replace(placement, spilled_units=found.spilled_units), num_outputs=num_outputs)


def _seconds(evaluation: Evaluation | None) -> float:
    return inf if evaluation is None else evaluation.time.total


def _last(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The greatest number from `low` to `high` for which `holds` is true, if it is true up to some number only.

    `holds(low)` is taken as true.
    """
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _least(value: Callable[[int], float], low: int, high: int) -> int:
    """Where a function is least that is convex except for single steps; the last few numbers are all tried."""
    while high - low > _SCANNED:
        left = low + (high - low) // 3
        right = high - (high - low) // 3
        low, high = (low, right) if value(left) <= value(right) else (left, high)
    return min(range(low, high + 1), key=value)
