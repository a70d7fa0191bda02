"""The search for the placement with the least cost: predicted time, and the price of what is written. Pure.

    1. depth       how far transfers run ahead of computing, with held gradients in memory rather than on NVMe. The
                   depth with the least cost is taken; gradients that do not fit next to it are spilled, and layers'
                   inputs too if that is not enough.
    2. residency   weights stay in memory from the first block upwards (a byte saves two of traffic), then states (a
                   byte saves one). Each block more is one level.
    3. swapping    for each level, the prefix of all candidates with the least cost (planning/search/swap.py) among
                   those whose units a GPU has memory for: first in the memory that the GPU has left over
                   (planning/memory/gpu_memory.py), then in what the level leaves, the rest on NVMe.
    4. deferral    where gradients are not held anyway, updates move to the next forward while that gains, from the
                   last block downwards (the last blocks can wait longest): 2 bytes of memory (G16) take 22 bytes of
                   traffic from the stage that is short of it. Then 2 and 3 once more.

All of this with the sums of the head's gradients on a GPU, and, if more fits then, with these sums in host memory.

What a cost is, `storage.wear` decides (planning/time/wear.py). It is convex over levels as over prefixes, except for
single steps. Of levels within half a percent of the best, the highest is taken: it moves the fewest bytes. It must not
write more, unless time alone counts. Deferral has to gain 2 % in the end. Where gradients are spilled, nothing else
stays.

Invariants: the choice fits, into a GPU too if anything does. At its depth and deferral, no prefix and no level that
fits is predicted to cost less by more than these allowances. What is rejected fits in no way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from math import ceil, inf

from ratel_cli.errors import DoesNotFit
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.profile.activations import NOTHING_OFFLOADED
from ratel_cli.planning.profile.placement import GroupShape, Placement
from ratel_cli.planning.search.evaluation import Evaluation, SpilledPrefix
from ratel_cli.planning.search.problem import Problem
from ratel_cli.planning.time.traffic import Traffic
from ratel_cli.planning.time.wear import BYTES_FIRST, NO_CHOICE, TIME_ALONE, Cost, Objective, balanced
from ratel_cli.schedule.slices import GATHERED_AHEAD
from ratel_cli.sizes import GROUP_ELEMENTS

_DEPTHS = ((2, 2), (1, 1), (0, 0))
"""Blocks whose weights are read ahead, and blocks whose updates may be pending. One block each is enough where all
are alike; a second one evens out embedding and head."""
_MOST_PENDING = 4
"""Blocks whose updates may be pending where a GPU computes: it does not wait for a burst of the optimizer at the end of
backward (two blocks cost 13B about a second of each step, by a reading of the code)."""
_GAIN_OF_DEFERRAL = 0.02
"""The share of a step's time that deferral must save."""
_AS_GOOD = 1.005
_MOST_GROUP_ELEMENTS = 1 << 24
_GROUPS_SHARE = 1 / 16
"""Share of host memory: the most that the groups' buffers may take where they are larger than the smallest, and the
most that pending blocks may take where there are more than two."""
_SCANNED = 16
"""Up to this many levels are tried one by one."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The best placement by the rule of `storage.wear`, and what its extremes would choose, once that is asked for.

    Raises DoesNotFit if nothing fits.
    """

    problem: Problem
    """The problem that was solved: the one that was given, or that with the head's sums in host memory."""

    @cached_property
    def best(self) -> Evaluation:
        """The best by the user's rule."""
        problem = self.problem
        match problem.decisions.wear:
            case "ignore":
                return self.fastest
            case "save":
                return self.sparing
            case "balanced" if self.sparing is self.fastest:
                return self.fastest
        objective = balanced(
            least_written_seconds=self.sparing.time.total, unfrozen_state_bytes=problem.unfrozen_state_bytes
        )
        found = self.sparing, self.fastest, _least_cost(problem, objective)
        return min(found, key=lambda each: _cost(problem, objective, each))

    @cached_property
    def sparing(self) -> Evaluation:
        """The best with `save`."""
        problem = self.problem
        if problem.decisions.wear != "save" and self._quickest.traffic.written_bytes == problem.state_written_bytes:
            return self._quickest  # the best by every rule
        return _least_cost(problem, BYTES_FIRST)

    @cached_property
    def fastest(self) -> Evaluation:
        """The best with `ignore`: the sparing one if that takes no more time, within what counts as equal."""
        return self.sparing if self.sparing.time.total <= self._quickest.time.total else self._quickest

    @cached_property
    def _quickest(self) -> Evaluation:
        return _least_cost(self.problem, TIME_ALONE)


@lru_cache(maxsize=32)
def weigh(problem: Problem) -> Choice:
    """The best placement by the user's rule for wear. Raises DoesNotFit.

    The search for a step's split and for the head's chunks asks for what the plan itself asks for again.
    """
    other = problem.without_head_on_gpu
    if other is None or not problem.fits_device(0):
        return _weighed(problem.in_least_gpu_memory)
    choices = [_weighed(problem)]
    with suppress(DoesNotFit):  # it takes more host memory
        choices.append(_weighed(other))
    objective = objective_among(problem, choices)
    return min(choices, key=lambda each: _cost(problem, objective, each.best))


def objective_among(problem: Problem, choices: Sequence[Choice]) -> Objective:
    """What decides between choices for one problem that differ in what a GPU holds."""
    match problem.decisions.wear:
        case "ignore":
            return TIME_ALONE
        case "save":
            return BYTES_FIRST
        case "balanced":
            least_written_seconds = min(each.sparing.time.total for each in choices)
            unfrozen_bytes = problem.unfrozen_state_bytes
            return balanced(least_written_seconds=least_written_seconds, unfrozen_state_bytes=unfrozen_bytes)


def _weighed(problem: Problem) -> Choice:
    """`weigh` with the head's sums where the problem has them."""
    choice = Choice(problem=problem)
    _ = choice.best  # what does not fit is raised here
    return choice


def curve(problem: Problem, chosen: Evaluation) -> list[tuple[int, float]]:
    """Bytes offloaded in a step and its seconds, over the prefixes of whole groups, all else as chosen."""
    available_bytes = problem.decisions.host_limit_bytes - chosen.memory.total + chosen.memory.activations
    points = []
    prefixes = {*filter(problem.fits_device, problem.order.boundaries), chosen.swap.num_outputs}
    for num_outputs in sorted(prefixes):
        spilled = problem.spill_into(available_bytes, num_outputs=num_outputs)
        if spilled is not None:
            traffic = problem.traffic(chosen.placement, spilled.offloaded, spilled_segments=chosen.spilled_segments)
            seconds = problem.time(chosen.placement, traffic, spilled.offloaded, num_outputs=num_outputs).total
            points.append((spilled.offloaded.total_bytes, seconds))
    return points


def adamw_threads(spec: ModelSpec, hardware: HardwareProfile) -> int:
    """Number of AdamW threads: enough to keep up with the drives, at most one per core.

    Where a GPU computes, the cores have little else to do, and states in host memory wait for no drive: then enough to
    keep up with main memory, too, at most one for every second core, and that many if its rate was not measured. What
    the last two blocks take is exposed: 0.5 s of a step of 13 s with one thread (H200, 16 cores, 2026-11).
    """
    nvme, host = hardware.nvme, hardware.host
    if not spec.trained_elements:  # of one of several ranks, where an adapter is small
        return 1
    # For one element: the states that are read and the record that is written; and what main memory moves.
    stored = sum(block.state_bytes + block.record_bytes for block in spec.blocks) / spec.trained_elements
    moved = spec.update_bytes / spec.trained_elements
    rate = host.adam_parameters_per_second * spec.trained_elements / spec.update_work
    needed = nvme.mixed_bytes_per_second / stored / rate
    most = host.num_cores
    if hardware.link is not None:
        memory = (host.memory_bytes_per_second or inf) / moved / rate
        needed, most = max(needed, memory), max(1, most // 2)
    return max(1, ceil(min(most, needed)))


def shape_for(num_drives: int) -> GroupShape:
    """The optimizer's groups where memory does not matter: each drive has several requests at any time.

    Two groups are in flight each way: with one, a drive is idle from its end to the next one's begin (0.80 of the
    drive's rate, scripts/bench/optimizer.py). A group of 2 Mi parameters is at most ten requests each way, so with
    several drives groups are larger, up to 16 Mi.
    """
    elements = min(_MOST_GROUP_ELEMENTS, GROUP_ELEMENTS << (num_drives - 1).bit_length())
    return GroupShape(elements=elements, in_flight=2)


def group_shape(problem: Problem) -> GroupShape:
    """`shape_for` the drives, or the largest below it whose buffers take at most a sixteenth of host memory."""
    shape = shape_for(problem.hardware.nvme.num_devices)
    most_bytes = problem.decisions.host_limit_bytes * _GROUPS_SHARE
    while shape != GroupShape():
        if shape.buffer_bytes(problem.own.blocks) <= most_bytes:
            return shape
        smaller = replace(shape, elements=max(GROUP_ELEMENTS, shape.elements // 2))
        # A matrix that is updated as a whole does not get smaller: then fewer are in flight instead.
        takes_less = smaller.buffer_bytes(problem.own.blocks) < shape.buffer_bytes(problem.own.blocks)
        shape = smaller if takes_less else replace(shape, in_flight=GroupShape().in_flight)
        if not takes_less and shape.buffer_bytes(problem.own.blocks) > most_bytes:
            return GroupShape()
    return shape


def _least_cost(problem: Problem, objective: Objective) -> Evaluation:
    """The placement with the least cost. Raises DoesNotFit."""
    start, decisions = _choose_depth(problem, objective), problem.decisions
    plain = _best_level(problem, start, objective)
    if decisions.holds_gradients or decisions.overlap == "separate" or not start.placement.prefetch_blocks:
        return plain
    # What deferral gains depends on what is resident: nothing, all that would be without it, or only the weights of
    # that, since resident states take the memory that deferral needs.
    weights_only = problem.attempt(replace(plain.placement, resident_states=frozenset()), plain.swap.num_outputs)
    begins = (start, plain, *([weights_only] if weights_only else ()))
    deferrals = {_defer(problem, each, objective).placement.deferred for each in begins} - {frozenset()}
    best = plain
    for deferred in sorted(deferrals, key=len):
        begun = problem.attempt(replace(start.placement, deferred=deferred), start.swap.num_outputs)
        if begun is not None:
            found = _best_level(problem, begun, objective)
            best = min(best, found, key=lambda each: _cost(problem, objective, each))
    gains = _cost(problem, objective, best).is_within(1 - _GAIN_OF_DEFERRAL, _cost(problem, objective, plain))
    return best if gains else plain


def _choose_depth(problem: Problem, objective: Objective) -> Evaluation:
    """The best depth, with the prefix that the user asks for, else the empty one; among equals the least traffic."""
    evaluations: list[Evaluation] = []
    failure: DoesNotFit | None = None
    shapes = list(dict.fromkeys((group_shape(problem), GroupShape())))
    for prefetch_blocks, pending_updates in _depths(problem):
        for groups in shapes:  # smaller ones only where the larger do not fit: the predicted time does not know them
            placement = Placement(
                prefetch_blocks=prefetch_blocks,
                pending_updates=0 if problem.decisions.overlap == "separate" else pending_updates,
                adamw_threads=adamw_threads(problem.own, problem.hardware),
                groups=groups,
            )
            try:
                evaluations.append(problem.evaluate_in_least_memory(placement, problem.wanted_outputs or 0))
                break
            except DoesNotFit as does_not_fit:
                failure = does_not_fit
    if not evaluations:
        assert failure is not None
        raise failure
    return min(
        evaluations,
        key=lambda each: (_cost(problem, objective, each), each.traffic.read_bytes + each.traffic.written_bytes),
    )


def _depths(problem: Problem) -> list[tuple[int, int]]:
    """Depths to try, the best of equals first: with a GPU and memory for it, more updates may be pending. How far
    several ranks gather ahead is fixed."""
    pending_bytes = _MOST_PENDING * max(each.compute_bytes + each.gradient_bytes for each in problem.computed.segments)
    if problem.hardware.link is None or pending_bytes > problem.decisions.host_limit_bytes * _GROUPS_SHARE:
        depths = list(_DEPTHS)
    else:
        depths = [(2, _MOST_PENDING), *_DEPTHS]
    is_fixed = problem.rank_slice.size > 1
    return [(GATHERED_AHEAD if is_fixed else ahead, pending_updates) for ahead, pending_updates in depths]


def _defer(problem: Problem, chosen: Evaluation, objective: Objective) -> Evaluation:
    """Defer the updates of more segments while that gains.

    A segment has to gain its share, by trained parameters, of the 2 % that deferral must gain.
    """
    segments = problem.spec.segments
    while len(chosen.placement.deferred) < len(segments):
        segment = segments[-1 - len(chosen.placement.deferred)]
        placement = replace(chosen.placement, deferred=chosen.placement.deferred | {segment.index})
        more = problem.attempt(placement, chosen.swap.num_outputs)
        share = segment.trained_elements / problem.spec.trained_elements
        if more is None:
            return chosen
        before, after = (_cost(problem, objective, each) for each in (chosen, more))
        if after.gain_over(before) < _GAIN_OF_DEFERRAL * share * before.seconds:
            return chosen
        chosen = more
    return chosen


def _best_level(problem: Problem, start: Evaluation, objective: Objective) -> Evaluation:
    """The best residency, with the best prefix for it."""
    if start.spilled_segments:
        return _best_with_spilled_gradients(problem, start, objective)
    num_segments = len(problem.spec.segments)
    # Of several ranks none keeps weights: those of other ranks' slices are old after each step.
    num_weights = num_segments if problem.rank_slice.size == 1 else 0

    def placed(level: int) -> Placement:
        return replace(
            start.placement,
            resident_weights=frozenset(range(min(level, num_weights))),
            resident_states=frozenset(range(max(0, level - num_weights))),
        )

    @cache
    def at(level: int) -> Evaluation | None:
        return _best_swap(problem, placed(level), objective)

    def fits(level: int) -> bool:
        available_bytes = _bytes_for_units(problem, placed(level))
        return (
            available_bytes is not None and problem.spill_into(available_bytes, num_outputs=least_outputs) is not None
        )

    def cost(level: int) -> Cost:
        return _cost(problem, objective, at(level))

    def is_as_good(level: int) -> bool:
        found = at(level)
        assert found is not None and best is not None
        writes_more = objective.counts_bytes and found.traffic.written_bytes > best.traffic.written_bytes
        return not writes_more and cost(level).is_within(_AS_GOOD, _cost(problem, objective, best))

    least_outputs = problem.wanted_outputs or 0
    highest = _last(fits, 0, num_weights + num_segments)
    lowest = _least(cost, 0, highest)
    best = at(lowest)
    chosen = at(_last(is_as_good, lowest, highest))
    assert chosen is not None
    return chosen


def _best_with_spilled_gradients(problem: Problem, start: Evaluation, objective: Objective) -> Evaluation:
    """The best prefix where gradients are spilled: nothing is resident, and what is swapped goes to NVMe too."""
    if problem.wanted_outputs is not None:
        return start

    placement, tried = start.placement, problem.tried_without_residents
    assert not placement.resident_weights and not placement.resident_states

    def at(num_outputs: int) -> Evaluation | None:
        key = placement.prefetch_blocks, placement.pending_updates, placement.deferred, num_outputs
        if key not in tried:
            tried[key] = problem.attempt(placement, num_outputs)
        return tried[key]

    def cost(num_outputs: int) -> Cost:
        return _cost(problem, objective, at(num_outputs)) if problem.fits_device(num_outputs) else NO_CHOICE

    best = at(problem.order.least(cost))
    assert best is not None
    return best


def _bytes_for_units(problem: Problem, placement: Placement) -> int | None:
    """The memory that `placement` leaves for units; None if that of its gradients is not there."""
    try:
        without, spilled_segments = problem.fit(placement, NOTHING_OFFLOADED)
    except DoesNotFit:
        return None
    return None if spilled_segments else problem.decisions.host_limit_bytes - without.total


def _best_swap(problem: Problem, placement: Placement, objective: Objective) -> Evaluation | None:
    """The prefix with the least cost in the memory that `placement` leaves; None if not even inputs fit."""
    available_bytes = _bytes_for_units(problem, placement)
    if available_bytes is None:
        return None
    traffic = problem.traffic(placement, NOTHING_OFFLOADED)

    @cache
    def spilled(num_outputs: int) -> SpilledPrefix | None:
        return problem.spill_into(available_bytes, num_outputs=num_outputs)

    def tried(num_outputs: int) -> tuple[float, Traffic] | None:
        found = spilled(num_outputs)
        if found is None or not problem.fits_device(num_outputs):
            return None
        with_units = traffic.with_offloaded(problem.moved(found.offloaded))
        return problem.time(placement, with_units, found.offloaded, num_outputs=num_outputs).total, with_units

    key = (
        *(placement.prefetch_blocks, placement.pending_updates, placement.groups, placement.deferred),
        *(placement.resident_weights, placement.resident_states, placement.spilled_units),
    )
    known = problem.tried_with_residents.setdefault(key, {})

    def cost(num_outputs: int) -> Cost:
        if num_outputs not in known:
            known[num_outputs] = tried(num_outputs)
        found = known[num_outputs]
        if found is None:
            return NO_CHOICE
        return objective.cost(found[0], found[1].written_bytes - problem.state_written_bytes)

    wanted = problem.wanted_outputs
    num_outputs = problem.order.least(cost) if wanted is None else wanted
    found = spilled(num_outputs)
    if found is None:
        return None
    return problem.evaluate(replace(placement, spilled_units=found.spilled_units), num_outputs=num_outputs)


def _cost(problem: Problem, objective: Objective, evaluation: Evaluation | None) -> Cost:
    """The cost of a placement; infinite for one that does not fit."""
    if evaluation is None:
        return NO_CHOICE
    return objective.cost(evaluation.time.total, evaluation.traffic.written_bytes - problem.state_written_bytes)


def _last(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The greatest number from `low` to `high` for which `holds` is true, if it is true up to some number only.

    `holds(low)` is taken as true.
    """
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _least(value: Callable[[int], Cost], low: int, high: int) -> int:
    """Where a function is least that is convex except for single steps; the last few numbers are all tried."""
    while high - low > _SCANNED:
        left = low + (high - low) // 3
        right = high - (high - low) // 3
        low, high = (low, right) if value(left) <= value(right) else (left, high)
    return min(range(low, high + 1), key=value)
