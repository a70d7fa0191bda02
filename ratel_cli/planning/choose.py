"""The rule that turns spare host memory into a placement. Used by `planning.plan`. Pure.

Memory is given out in one order, whose next taker depends on what was given before and never on how much is
left; the first one for whom there is no room ends it. Best first:

    1. depth        of transfers ahead of computing, and held gradients in memory rather than on NVMe: the
                    depth with the least predicted time, the gradients that do not fit beside it being
                    spilled. Spilling costs 4 bytes a parameter, no overlap a sum in place of a maximum, so
                    gradients are given up before all depth is, and depth 2 for depth 1 before gradients
    2. deferral     of updates to the next forward where gradients are not held anyway, from the last block
                    downwards (those can wait longest), while the prediction falls: 2 bytes of memory (G16)
                    take 22 bytes of traffic from the stage that is short of it
    3. weights      from the first block upwards, since that is what the next step needs first: a byte of
                    memory saves two of traffic
    4. activations  a layer at a time while computing is the bottleneck (they need the weights of 3), else
       states       from the first block upwards: a byte saves one; then whichever of the two is left

Deferral has to gain 2 % in the end; otherwise everything is given out without it.

Invariants: what is chosen fits; with the same depth, and deferral in both cases or in neither, more memory
never means more traffic or a longer prediction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ratel_cli.errors import DoesNotFit
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.model.spec import ModelSpec
from ratel_cli.planning.activations import all_activation_bytes
from ratel_cli.planning.capacity import HostMemory, Workload, host_memory
from ratel_cli.planning.costs import StepTime, overlapped_step, recomputed_flops
from ratel_cli.planning.placement import Overlap, Placement
from ratel_cli.planning.traffic import StateBytes, Traffic, step_traffic

Activations = Literal["auto", "keep", "recompute"]
"""What becomes of activations between forward and backward: kept where there is room; all kept; none kept."""

_DEPTHS = ((2, 2), (1, 1), (0, 0))
"""Blocks whose weights are read ahead, and blocks whose updates may be pending. One block each is enough where all
are alike; a second one evens out embedding and head."""
_LEAST_GAIN = 0.02
"""Of a step's time: what deferral must save to be worth it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All that the choice depends on."""

    spec: ModelSpec
    state: StateBytes
    workload: Workload
    hardware: HardwareProfile
    holds_gradients: bool
    overlap: Overlap
    activations: Activations
    process_bytes: int
    limit_bytes: int

    @property
    def activation_bytes(self) -> int:
        """Of all layers and micro-batches."""
        return all_activation_bytes(self.spec, self.state, tokens=self.workload.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a step with some placement moves and takes."""

    traffic: Traffic
    flops_recomputed: int
    time: StepTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A placement that fits, and all that follows from it."""

    placement: Placement
    memory: HostMemory
    spilled_blocks: int
    """Held gradients of this many blocks (the first in forward order) lie on NVMe."""
    prediction: Prediction


def choose(case: Case) -> Choice:
    """Follow the rule. Raises DoesNotFit."""
    start = _choose_depth(case)
    plain = _give_out(case, start, defers=False)
    if case.holds_gradients or case.overlap == "separate" or not start.placement.prefetch_blocks:
        return plain
    deferring = _give_out(case, start, defers=True)
    is_worth_it = _seconds(deferring) < (1 - _LEAST_GAIN) * _seconds(plain)
    return deferring if is_worth_it else plain


def evaluate(case: Case, placement: Placement) -> Choice:
    """What follows from `placement`, with as many held gradients in memory as fit. Raises DoesNotFit."""
    memory, spilled_blocks = host_memory(
        case.spec,
        case.state,
        case.workload,
        placement,
        holds_gradients=case.holds_gradients,
        process_bytes=case.process_bytes,
        limit_bytes=case.limit_bytes,
        overlap=case.overlap,
    )
    return Choice(
        placement=placement,
        memory=memory,
        spilled_blocks=spilled_blocks,
        prediction=predict(case, placement, spilled_blocks=spilled_blocks),
    )


def predict(case: Case, placement: Placement, *, spilled_blocks: int = 0) -> Prediction:
    """Traffic and time, whether it fits or not."""
    traffic = step_traffic(
        case.spec,
        case.state,
        placement,
        holds_gradients=case.holds_gradients,
        spilled_blocks=spilled_blocks,
        overlap=case.overlap,
    )
    flops_recomputed = recomputed_flops(case.spec, case.state, case.workload, placement)
    time = overlapped_step(
        case.spec,
        case.workload,
        placement,
        traffic,
        case.hardware,
        flops_recomputed=flops_recomputed,
        holds_gradients=case.holds_gradients,
        overlap=case.overlap,
    )
    return Prediction(traffic=traffic, flops_recomputed=flops_recomputed, time=time)


def _choose_depth(case: Case) -> Choice:
    """Nothing but depth, held gradients and what the user insists on.

    Among equals the least traffic, then the deepest. To keep all activations takes the layers' weights too.
    """
    keeps_all = case.activations == "keep"
    choices: list[Choice] = []
    refusal: DoesNotFit | None = None
    for prefetch_blocks, pending_updates in _DEPTHS:
        placement = Placement(
            prefetch_blocks=prefetch_blocks,
            pending_updates=0 if case.overlap == "separate" else pending_updates,
            resident_weights=frozenset(range(len(case.spec.blocks) - 1)) if keeps_all else frozenset(),
            activation_bytes=case.activation_bytes if keeps_all else 0,
        )
        try:
            choices.append(evaluate(case, placement))
        except DoesNotFit as does_not_fit:
            refusal = does_not_fit
    if not choices:
        assert refusal is not None
        raise refusal
    return min(choices, key=lambda choice: (_seconds(choice), _moved_bytes(choice)))


def _give_out(case: Case, choice: Choice, *, defers: bool) -> Choice:
    """Give memory to one taker after the other until one does not fit or none is left."""
    while not choice.spilled_blocks:
        placement = _deferring_one_more(case, choice) if defers else None
        placement = placement or _keeping_one_more(case, choice)
        if placement is None:
            return choice
        try:
            larger = evaluate(case, placement)
        except DoesNotFit:
            return choice
        if larger.spilled_blocks:
            return choice
        choice = larger
    return choice


def _deferring_one_more(case: Case, choice: Choice) -> Placement | None:
    """Or None when that gains nothing; 2 % is held against each block by its share of the parameters."""
    blocks, deferred = case.spec.blocks, choice.placement.deferred
    if len(deferred) == len(blocks):
        return None
    block = blocks[-1 - len(deferred)]
    placement = replace(choice.placement, deferred=deferred | {block.index})
    gained_seconds = _seconds(choice) - predict(case, placement).time.total
    share = block.num_parameters / case.spec.num_parameters
    return placement if gained_seconds >= _LEAST_GAIN * share * _seconds(choice) else None


def _keeping_one_more(case: Case, choice: Choice) -> Placement | None:
    """Keep one more block's weights, states or activations in memory; None when all that may be kept is."""
    placement, num_blocks = choice.placement, len(case.spec.blocks)
    if len(placement.resident_weights) < num_blocks:
        return replace(placement, resident_weights=frozenset(range(len(placement.resident_weights) + 1)))
    num_states = len(placement.resident_states)
    if choice.prediction.time.bottleneck == "compute" or num_states == num_blocks:
        more_bytes = _more_activation_bytes(case, choice)
        if more_bytes:
            return replace(placement, activation_bytes=placement.activation_bytes + more_bytes)
    if num_states < num_blocks:
        return replace(placement, resident_states=frozenset(range(num_states + 1)))
    return None


def _more_activation_bytes(case: Case, choice: Choice) -> int:
    """One layer's, or what room is left; nothing when there is room for all that there are."""
    all_bytes = case.activation_bytes
    one_layer_bytes = -(-all_bytes // max(1, case.spec.num_layers))
    missing_bytes = all_bytes - choice.placement.activation_bytes
    if case.activations != "auto" or not missing_bytes:
        return 0
    room_bytes = case.limit_bytes - choice.memory.total
    return min(one_layer_bytes, missing_bytes, room_bytes)


def _seconds(choice: Choice) -> float:
    return choice.prediction.time.total


def _moved_bytes(choice: Choice) -> int:
    return choice.prediction.traffic.read_bytes + choice.prediction.traffic.written_bytes
