"""The profile of a model from what the engine recorded in one step (`engine.replay.recording`). Pure.

Layers whose units ran the same operators with outputs of the same sizes share a profile; its times are medians over
them. What swapping an output saves follows from liveness (planning/profile/liveness.py): its own operator need not run
again, nor any operator that only it needed. Candidates are chosen one by one, each time the one that saves most per
byte.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.profile.activations import input_bytes
from ratel_cli.planning.profile.analytic import head_flops
from ratel_cli.planning.profile.liveness import Decision, Liveness, Recorded, decide
from ratel_cli.planning.profile.model_profile import LayerProfile, ModelProfile, SwapCandidate
from ratel_cli.planning.profile.placement import Workload

RECORDED_MICRO_BATCHES = 4
"""Micro-batches of each layer that are recorded: more would not change the medians much, and what is recorded takes
memory until the step has ended."""
_LEAST_SHARE = 0.002
"""The share of a layer's recomputation that a candidate must save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRecord(Recorded):
    """One operator of one unit, as it ran."""

    name: str
    """The name that people read, such as `mlp.up_proj mm`."""
    key: str
    """The name that the engine uses, such as `aten.mm.default#5`."""
    flops: int
    seconds: float
    num_bytes: int
    """Bytes of its outputs; 0 where they cannot be swapped."""
    saved_bytes: int
    """The part of `num_bytes` that autograd would have saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRecord:
    """The forward of one layer and one micro-batch."""

    operators: tuple[OperatorRecord, ...]
    """All operators, in the order in which they ran."""
    saved: frozenset[int]
    """Storages that autograd would have saved, and those that custom autograd functions get."""
    saved_bytes: int
    """Bytes of those that are neither weights nor the layer's inputs."""
    replay_bytes: int
    """The most that this forward takes if what autograd saves stays."""
    replay_held_bytes: int
    """The most that this forward takes with all that autograd saves there from the beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSeconds:
    """Computing of one block, of all micro-batches that are counted together."""

    forward: float
    backward: float
    """Recomputation included."""


def recorded_profile(
    units: Mapping[tuple[int, int], UnitRecord],
    seconds: Mapping[int, BlockSeconds],
    spec: ModelSpec,
    workload: Workload,
    *,
    num_micro_batches: int,
    estimate: ModelProfile,
) -> ModelProfile:
    """The profile of a model from one step.

    `units` are by block and micro-batch, and hold the same micro-batches of each layer, not necessarily all. `seconds`
    are by block, of `num_micro_batches` together. `estimate` is the profile before the step. It gives what no operator
    of forward shows: gradients of activations; and of layers that backward does not reach, which have no units, all but
    the seconds.
    """
    head, tokens = spec.head.index, workload.micro_batch_tokens
    by_block: dict[int, list[UnitRecord]] = {}
    for (block, _), unit in units.items():
        by_block.setdefault(block, []).append(unit)
    alike: dict[object, list[int]] = {}
    for block, records in sorted(by_block.items()):
        signature = tuple((operator.key, operator.num_bytes) for operator in records[0].operators)
        alike.setdefault((spec.passes_on(spec.segments[block]), signature), []).append(block)
    profiles = [
        _layer_profile(
            _typical([unit for block in blocks for unit in by_block[block]]),
            forward_seconds=median(seconds[block].forward for block in blocks) / num_micro_batches,
            backward_seconds=median(seconds[block].backward for block in blocks) / num_micro_batches,
            input_bytes=input_bytes(spec, tokens=tokens),
            estimate=estimate.profiles[estimate.layers[blocks[0] - 1]],
        )
        for blocks in alike.values()
    ]
    number_of = {block: number for number, blocks in enumerate(alike.values()) for block in blocks}
    forward_only: dict[int, list[int]] = {}
    for block in (block for block in range(1, head) if block not in by_block):
        forward_only.setdefault(estimate.layers[block - 1], []).append(block)
    for number, blocks in forward_only.items():
        number_of.update(dict.fromkeys(blocks, len(profiles)))
        forward_seconds = median(seconds[block].forward for block in blocks) / num_micro_batches
        profiles.append(replace(estimate.profiles[number].forward_only(), forward_seconds=forward_seconds))
    outside = {block: (seconds[block].forward + seconds[block].backward) / num_micro_batches for block in (0, head)}
    return ModelProfile(
        source="recorded",
        profiles=tuple(profiles),
        layers=tuple(number_of[block] for block in range(1, head)),
        micro_batch_tokens=tokens,
        sequence_len=workload.sequence_len,
        flops_head=head_flops(spec, tokens=tokens),
        frozen_head_flops=estimate.frozen_head_flops,
        norm_held_bytes=estimate.norm_held_bytes,
        norm_bytes=estimate.norm_bytes,
        embedding_seconds=outside[0],
        head_seconds=outside[head],
    )


def _typical(alike: Sequence[UnitRecord]) -> UnitRecord:
    """The first unit, with the median times of all units that ran the same number of operators."""
    first = alike[0]
    same = [unit for unit in alike if len(unit.operators) == len(first.operators)]
    operators = tuple(
        replace(operator, seconds=median(unit.operators[position].seconds for unit in same))
        for position, operator in enumerate(first.operators)
    )
    return replace(first, operators=operators)


def _layer_profile(
    unit: UnitRecord, *, forward_seconds: float, backward_seconds: float, input_bytes: int, estimate: LayerProfile
) -> LayerProfile:
    decisions = decide(unit.operators, unit.saved)
    again = [each for each, decision in zip(unit.operators, decisions, strict=True) if decision is Decision.EXEC]
    seconds_again = sum(operator.seconds for operator in again)
    more_saved_bytes = unit.saved_bytes - (estimate.saved_bytes - estimate.input_bytes)
    flops = sum(operator.flops for operator in unit.operators)
    flops_share = flops / max(1, estimate.flops_forward)
    return LayerProfile(
        input_bytes=input_bytes,
        saved_bytes=input_bytes + unit.saved_bytes,
        forward_bytes=estimate.forward_bytes,
        forward_held_bytes=estimate.forward_held_bytes,
        backward_bytes=estimate.backward_bytes + more_saved_bytes,
        making_bytes=estimate.making_bytes + more_saved_bytes,
        replay_bytes=unit.replay_bytes,
        replay_held_bytes=unit.replay_held_bytes,
        flops_forward=flops,
        flops_recomputed=sum(operator.flops for operator in again),
        candidates=tuple(_candidates(unit, least_seconds=_LEAST_SHARE * seconds_again)),
        rests=tuple(
            replace(rest, num_bytes=rest.num_bytes + max(0, more_saved_bytes), flops=int(rest.flops * flops_share))
            for rest in estimate.rests
        ),
        frozen_flops=int(estimate.frozen_flops * flops_share),
        forward_seconds=forward_seconds,
        recomputed_seconds=seconds_again,
        # An operator may take longer in forward, where its pages are new, than when it is run again.
        backward_seconds=max(0.0, backward_seconds - seconds_again),
    )


def _candidates(unit: UnitRecord, *, least_seconds: float) -> list[SwapCandidate]:
    """The outputs that save more than `least_seconds`, chosen greedily.

    The heap holds what each output saved when it was last evaluated. Swapping others seldom makes that larger: only
    where two outputs need something that is not available. So the first output that still saves more than the heap's
    next one is taken.
    """
    operators, liveness = unit.operators, Liveness(unit.operators, unit.saved)
    candidates = []

    def saved_by(position: int) -> _Saving:
        freed = [position, *liveness.freed_by(position)] if liveness.is_run(position) else []
        return _Saving(
            output=operators[position],
            # Those that cannot be skipped run all the same.
            not_run=[operators[each] for each in freed if liveness.is_run(each) and operators[each].can_be_skipped],
            not_offloaded=[operators[each] for each in freed if not liveness.is_run(each)],
        )

    heap = [
        (-saved_by(position).seconds / operator.num_bytes, position)
        for position, operator in enumerate(operators)
        if operator.num_bytes and operator.can_be_skipped
    ]
    heapq.heapify(heap)
    while heap:
        _, position = heapq.heappop(heap)
        saving = saved_by(position)
        if saving.seconds <= least_seconds:
            continue
        candidate = saving.candidate()
        benefit = saving.seconds / max(1, candidate.num_bytes)
        if heap and benefit < -heap[0][0]:
            heapq.heappush(heap, (-benefit, position))
            continue
        liveness.swap(position)
        candidates.append(candidate)
    return candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saving:
    """What swapping one output changes."""

    output: OperatorRecord
    not_run: Sequence[OperatorRecord]
    """Operators that backward need not run again, its own among them."""
    not_offloaded: Sequence[OperatorRecord]
    """Outputs swapped before that only those needed."""

    @property
    def seconds(self) -> float:
        return sum(operator.seconds for operator in self.not_run)

    def candidate(self) -> SwapCandidate:
        return SwapCandidate(
            operator=self.output.name,
            key=self.output.key,
            num_bytes=self._offloaded(lambda operator: operator.num_bytes),
            flops=sum(operator.flops for operator in self.not_run),
            seconds=self.seconds,
            saved_bytes=self._offloaded(lambda operator: operator.saved_bytes),
            # Forward is known to have the outputs of operators with FLOPs anyway, when outputs stay.
            held_bytes=self._offloaded(lambda operator: operator.num_bytes if operator.flops else 0),
        )

    def _offloaded(self, bytes_of: Callable[[OperatorRecord], int]) -> int:
        return bytes_of(self.output) - sum(map(bytes_of, self.not_offloaded))
