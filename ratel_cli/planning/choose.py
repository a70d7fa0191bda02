"""Searches for the placement with the least predicted time. Used by `planning.plan`. Pure.

    1. depth       of transfers ahead of computing, and held gradients in memory rather than on NVMe: the
                   depth with the least predicted time, the gradients that do not fit beside it being
                   spilled; inputs of layers too, if even that is not enough
    2. residency   of weights from the first block upwards (a byte of memory saves two of traffic), then of states
                   (a byte saves one): a level for each block more
    3. swapping    for each level, the prefix of all candidates with the least time (planning/swap.py), in the memory
                   that a GPU has left over (planning/gpu_memory.py), then in what the level leaves, the rest on NVMe
    4. deferral    of updates to the next forward where gradients are not held anyway, from the last block
                   downwards (those can wait longest), while the prediction falls: 2 bytes of memory (G16)
                   take 22 bytes of traffic from the stage that is short of it; then 2 and 3 once more

With levels as with prefixes the time is convex, but for single steps. Of levels as good as the best one, within
half a percent, the highest is taken: it moves the fewest bytes. Deferral has to gain 2 % in the end. Where gradients
are spilled nothing else stays.

Invariants: what is chosen fits; at its depth and deferral no prefix and no level that fits is predicted to be faster,
by more than these allowances; what is refused fits in no way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import ceil, inf

from ratel_cli.errors import DoesNotFit
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.model.spec import ModelSpec
from ratel_cli.planning.activations import OffloadedActivations, fewest_spilled_units, offload
from ratel_cli.planning.capacity import HostMemory, host_memory
from ratel_cli.planning.costs import ComputeSeconds, StepTime, compute_seconds, overlapped_step
from ratel_cli.planning.gpu_memory import GpuResident, keep
from ratel_cli.planning.model_profile import ModelProfile
from ratel_cli.planning.placement import ActivationPolicy, Overlap, Placement, StateBytes, Workload
from ratel_cli.planning.search import last, least
from ratel_cli.planning.swap import Order, Swap
from ratel_cli.planning.traffic import Traffic, step_traffic

_NOTHING_OFFLOADED = offload([0], num_micro_batches=1, spilled_units=0)
_DEPTHS = ((2, 2), (1, 1), (0, 0))
"""Blocks whose weights are read ahead, and blocks whose updates may be pending. One block each is enough where all
are alike; a second one evens out embedding and head."""
_LEAST_GAIN = 0.02
"""Of a step's time: what deferral must save to be worth it."""
_AS_GOOD = 1.005
_STATE_BYTES_MOVED = 22
"""Per parameter: optimizer states read, the record written."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """All that the choice depends on."""

    spec: ModelSpec
    state: StateBytes
    workload: Workload
    profile: ModelProfile
    hardware: HardwareProfile
    holds_gradients: bool
    overlap: Overlap
    activations: ActivationPolicy
    process_bytes: int
    limit_bytes: int
    device_limit_bytes: int | None = None
    """Of a GPU's memory, to keep things in; that they fit otherwise is for the caller to see."""

    @cached_property
    def order(self) -> Order:
        """What there is to swap."""
        return Order(self.profile)

    @cached_property
    def compute(self) -> ComputeSeconds:
        """With nothing swapped but inputs."""
        return compute_seconds(self.profile, self.workload, self.hardware)

    @cached_property
    def kept(self) -> Callable[[int], GpuResident | None]:
        """What the GPU keeps when that prefix is swapped. None where there is no memory of its own to keep it in."""
        limit_bytes = None if self.hardware.link is None else self.device_limit_bytes

        @cache
        def kept(num_outputs: int) -> GpuResident | None:
            if limit_bytes is None:
                return None
            unit_bytes = self.order.unit_bytes(num_outputs)
            return keep(self.spec, self.state, self.workload, unit_bytes, limit_bytes=limit_bytes)

        return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A placement that fits, and all that follows from it."""

    placement: Placement
    swap: Swap
    offloaded: OffloadedActivations
    memory: HostMemory
    spilled_blocks: int
    """Held gradients of this many blocks (the first in forward order) lie on NVMe."""
    traffic: Traffic
    time: StepTime


def choose(case: Case) -> Choice:
    """The best placement. Raises DoesNotFit."""
    start = _choose_depth(case)
    plain = _best_level(case, start)
    if case.holds_gradients or case.overlap == "separate" or not start.placement.prefetch_blocks:
        return plain
    # What deferral gains depends on what is resident: with nothing, or with all that would be without it.
    deferrals = {_deferring(case, choice).placement.deferred for choice in (start, plain)} - {frozenset()}
    best = plain
    for deferred in sorted(deferrals, key=len):
        begun = _attempt(case, replace(start.placement, deferred=deferred), start.swap.num_outputs)
        if begun is not None:
            best = min(best, _best_level(case, begun), key=_seconds)
    return best if best.time.total < (1 - _LEAST_GAIN) * plain.time.total else plain


def evaluate(case: Case, placement: Placement, *, num_outputs: int = 0) -> Choice:
    """What follows from a placement when that prefix is swapped. Raises DoesNotFit."""
    placement = _keeping(case, placement, num_outputs)
    offloaded = _aside(case, num_outputs, spilled_units=placement.spilled_units)
    memory, spilled_blocks = _memory(case, placement, offloaded)
    swap = case.order.at(num_outputs)
    traffic = _traffic(case, placement, offloaded, spilled_blocks=spilled_blocks)
    return Choice(
        placement=replace(placement, swapped=case.order.keys(num_outputs)),
        swap=swap,
        offloaded=offloaded,
        memory=memory,
        spilled_blocks=spilled_blocks,
        traffic=traffic,
        time=_time(case, placement, traffic, swap, offloaded),
    )


def curve(case: Case, choice: Choice) -> list[tuple[int, float]]:
    """Bytes swapped in a step, and its seconds, over the prefixes of whole runs, all else as chosen."""
    available_bytes = case.limit_bytes - choice.memory.total + choice.memory.activations
    prefixes = sorted({*case.order.boundaries, choice.swap.num_outputs})
    points = []
    for num_outputs in prefixes:
        fitting = _fitting(case, num_outputs, available_bytes)
        if fitting is not None:
            _, offloaded = fitting
            placement = _keeping(case, choice.placement, num_outputs)
            traffic = _traffic(case, placement, offloaded, spilled_blocks=choice.spilled_blocks)
            time = _time(case, placement, traffic, case.order.at(num_outputs), offloaded)
            points.append((offloaded.total_bytes, time.total))
    return points


def adamw_threads(hardware: HardwareProfile) -> int:
    """As many as it takes to update parameters as fast as the drives bring their states, and no more than cores."""
    nvme, host = hardware.nvme, hardware.host
    needed = nvme.mixed_bytes_per_second / _STATE_BYTES_MOVED / host.adam_parameters_per_second
    return max(1, min(host.num_cores, ceil(needed)))


def _choose_depth(case: Case) -> Choice:
    """Depth with nothing but inputs swapped, or what the user insists on. Among equals the least traffic."""
    choices: list[Choice] = []
    refusal: DoesNotFit | None = None
    for prefetch_blocks, pending_updates in _DEPTHS:
        placement = Placement(
            prefetch_blocks=prefetch_blocks,
            pending_updates=0 if case.overlap == "separate" else pending_updates,
            adamw_threads=adamw_threads(case.hardware),
        )
        try:
            choices.append(_with_fewest_spilled(case, placement, _wanted(case) or 0))
        except DoesNotFit as does_not_fit:
            refusal = does_not_fit
    if not choices:
        assert refusal is not None
        raise refusal
    return min(choices, key=lambda choice: (choice.time.total, _moved_bytes(choice)))


def _with_fewest_spilled(case: Case, placement: Placement, num_outputs: int) -> Choice:
    """A prefix with as many units in memory as fit, gradients going to NVMe before them. Raises DoesNotFit."""
    placement = replace(placement, spilled_units=0)
    try:
        return evaluate(case, placement, num_outputs=num_outputs)
    except DoesNotFit as refusal:
        if case.activations == "keep":
            raise
        shortfall_bytes = refusal.shortfall_bytes
    offloaded = _aside(case, num_outputs)
    spilled_units = _fewest_spilled(case, num_outputs, offloaded.host_bytes - shortfall_bytes, offloaded)
    return evaluate(case, replace(placement, spilled_units=spilled_units), num_outputs=num_outputs)


def _deferring(case: Case, choice: Choice) -> Choice:
    """Defer one block's update more while that gains; 2 % is held against each by its share of the parameters."""
    blocks = case.spec.blocks
    while len(choice.placement.deferred) < len(blocks):
        block = blocks[-1 - len(choice.placement.deferred)]
        placement = replace(choice.placement, deferred=choice.placement.deferred | {block.index})
        larger = _attempt(case, placement, choice.swap.num_outputs)
        share = block.num_parameters / case.spec.num_parameters
        if larger is None or choice.time.total - larger.time.total < _LEAST_GAIN * share * choice.time.total:
            return choice
        choice = larger
    return choice


def _best_level(case: Case, start: Choice) -> Choice:
    """Residency and swapping together."""
    if start.spilled_blocks:
        return _best_without_room(case, start)
    num_blocks = len(case.spec.blocks)

    @cache
    def at(level: int) -> Choice | None:
        placement = replace(
            start.placement,
            resident_weights=frozenset(range(min(level, num_blocks))),
            resident_states=frozenset(range(max(0, level - num_blocks))),
        )
        return _best_swap(case, placement)

    def seconds(level: int) -> float:
        return _seconds(at(level))

    highest = last(lambda level: at(level) is not None, 0, 2 * num_blocks)
    best = least(seconds, 0, highest)
    choice = at(last(lambda level: seconds(level) <= _AS_GOOD * seconds(best), best, highest))
    assert choice is not None
    return choice


def _best_without_room(case: Case, start: Choice) -> Choice:
    """Where memory is so short that gradients are spilled, nothing stays. What is swapped goes to NVMe too."""
    if _wanted(case) is not None:
        return start

    @cache
    def at(num_outputs: int) -> Choice | None:
        return _attempt(case, start.placement, num_outputs)

    best = at(case.order.least(lambda num_outputs: _seconds(at(num_outputs))))
    assert best is not None
    return best


def _best_swap(case: Case, placement: Placement) -> Choice | None:
    """The prefix with the least time in the memory that `placement` leaves; None if not even inputs fit."""
    try:
        without, spilled_blocks = _memory(case, placement, _NOTHING_OFFLOADED)
    except DoesNotFit:
        return None
    if spilled_blocks:
        return None
    available_bytes = case.limit_bytes - without.total
    traffic = _traffic(case, placement, _NOTHING_OFFLOADED)

    @cache
    def fitting(num_outputs: int) -> tuple[int, OffloadedActivations] | None:
        return _fitting(case, num_outputs, available_bytes)

    def seconds(num_outputs: int) -> float:
        found = fitting(num_outputs)
        if found is None:
            return inf
        _, offloaded = found
        swap, kept = case.order.at(num_outputs), _keeping(case, placement, num_outputs)
        return _time(case, kept, traffic.beside(offloaded), swap, offloaded).total

    wanted = _wanted(case)
    num_outputs = case.order.least(seconds) if wanted is None else wanted
    found = fitting(num_outputs)
    if found is None:
        return None
    return evaluate(case, replace(placement, spilled_units=found[0]), num_outputs=num_outputs)


def _wanted(case: Case) -> int | None:
    """The prefix that the user insists on."""
    order = case.order
    match case.activations:
        case "auto":
            return None
        case "recompute" | "static":
            return 0
        case "keep" | "swap_all":
            return order.num_outputs
        case fraction:
            return order.reaching(int(fraction * order.at(order.num_outputs).num_bytes))


def _fitting(case: Case, num_outputs: int, available_bytes: int) -> tuple[int, OffloadedActivations] | None:
    """How many units of a prefix must be spilled, and what that means; None if there is no room for the rest."""
    spilled_units, offloaded = 0, _aside(case, num_outputs)
    if case.activations != "keep":
        spilled_units = _fewest_spilled(case, num_outputs, available_bytes, offloaded)
        offloaded = _aside(case, num_outputs, spilled_units=spilled_units)
    return (spilled_units, offloaded) if offloaded.memory_bytes <= available_bytes else None


def _fewest_spilled(case: Case, num_outputs: int, available_bytes: int, unspilled: OffloadedActivations) -> int:
    """Units that must go to NVMe for the others to fit into so much host memory, if they can."""
    kept, number = case.kept(num_outputs), case.workload.num_micro_batches
    spilled_units = fewest_spilled_units(
        case.order.unit_bytes(num_outputs),
        num_micro_batches=number,
        available_bytes=available_bytes + unspilled.gpu_bytes,
    )
    return spilled_units if kept is None else min(spilled_units, kept.units_from)


def _aside(case: Case, num_outputs: int, *, spilled_units: int = 0) -> OffloadedActivations:
    kept = case.kept(num_outputs)
    return offload(
        case.order.unit_bytes(num_outputs),
        num_micro_batches=case.workload.num_micro_batches,
        spilled_units=spilled_units,
        gpu_units_from=None if kept is None else max(spilled_units, kept.units_from),
    )


def _keeping(case: Case, placement: Placement, num_outputs: int) -> Placement:
    """With what the GPU keeps if that prefix is swapped."""
    kept = case.kept(num_outputs)
    if kept is None:
        return placement
    return replace(placement, gpu_units_from=max(placement.spilled_units, kept.units_from), gpu_weights=kept.weights)


def _attempt(case: Case, placement: Placement, num_outputs: int) -> Choice | None:
    try:
        return _with_fewest_spilled(case, placement, num_outputs)
    except DoesNotFit:
        return None


def _seconds(choice: Choice | None) -> float:
    return inf if choice is None else choice.time.total


def _memory(case: Case, placement: Placement, offloaded: OffloadedActivations) -> tuple[HostMemory, int]:
    return host_memory(
        case.spec,
        case.state,
        case.workload,
        placement,
        offloaded,
        holds_gradients=case.holds_gradients,
        process_bytes=case.process_bytes,
        limit_bytes=case.limit_bytes,
        overlap=case.overlap,
        on_gpu=case.hardware.link is not None,
    )


def _traffic(case: Case, placement: Placement, offloaded: OffloadedActivations, *, spilled_blocks: int = 0) -> Traffic:
    return step_traffic(
        case.spec,
        case.state,
        placement,
        offloaded,
        holds_gradients=case.holds_gradients,
        spilled_blocks=spilled_blocks,
        overlap=case.overlap,
    )


def _time(case: Case, placement: Placement, traffic: Traffic, swap: Swap, offloaded: OffloadedActivations) -> StepTime:
    saved = swap.seconds if case.compute.is_measured else swap.flops / case.hardware.gpu.flops_per_second
    return overlapped_step(
        case.spec,
        case.state,
        placement,
        traffic,
        case.hardware,
        compute=case.compute,
        offloaded=offloaded,
        not_recomputed_seconds=case.workload.num_micro_batches * saved,
        holds_gradients=case.holds_gradients,
        overlap=case.overlap,
    )


def _moved_bytes(choice: Choice) -> int:
    return choice.traffic.read_bytes + choice.traffic.written_bytes
