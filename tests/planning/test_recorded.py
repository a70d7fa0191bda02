"""What a recorded step becomes: savings against liveness, times against medians, layers that are alike."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Collection
from dataclasses import replace

import pytest
from hypothesis import given

from ratel_cli.planning.profile.liveness import Decision, decide
from ratel_cli.planning.profile.model_profile import LayerProfile, ModelProfile, RestCosts
from ratel_cli.planning.profile.recorded import BlockSeconds, OperatorRecord, UnitRecord, recorded_profile
from tests.planning.profiles import candidate, layer, model
from tests.planning.shapes import SEEDS, WORKLOAD, gpt
from tests.tiers import examples

REST = RestCosts(after="up", num_bytes=3000, flops=1)
ESTIMATE = model(layer(candidate(num_bytes=5000), input_bytes=128 * 64 * 2, rests=(REST,)), layers=(0,) * 8)


def operator(
    number: int,
    *,
    reads: tuple[int, ...] = (),
    seconds: float = 1.0,
    flops: int = 1,
    num_bytes: int = 1,
    can_be_skipped: bool = True,
) -> OperatorRecord:
    """One that writes the storage of its own number."""
    return OperatorRecord(
        name=f"module op{number}",
        key=f"op#{number}",
        flops=flops,
        seconds=seconds,
        num_bytes=num_bytes,
        saved_bytes=0,
        reads=reads,
        writes=(number,),
        is_needed=not can_be_skipped,
        can_be_skipped=can_be_skipped,
    )


def unit(*operators: OperatorRecord, saved: Collection[int]) -> UnitRecord:
    operators = tuple(
        replace(each, saved_bytes=each.num_bytes if set(each.writes) <= set(saved) else 0) for each in operators
    )
    return UnitRecord(
        operators=operators, saved=frozenset(saved), saved_bytes=1000, replay_bytes=1100, replay_held_bytes=1300
    )


def profile(
    *layers: UnitRecord, num_micro_batches: int = 1, seconds: dict[int, BlockSeconds] | None = None
) -> ModelProfile:
    return recorded_profile(
        {(block, number): each for number in range(num_micro_batches) for block, each in enumerate(layers, start=1)},
        seconds or {block: BlockSeconds(forward=10.0, backward=100.0) for block in range(len(layers) + 2)},
        gpt(num_layers=len(layers)),
        WORKLOAD,
        num_micro_batches=num_micro_batches,
        estimate=ESTIMATE,
    )


def only_layer(each: UnitRecord) -> LayerProfile:
    (found,) = profile(each).profiles
    return found


def run_again(each: UnitRecord, swapped: Collection[int] = ()) -> list[OperatorRecord]:
    decisions = decide(each.operators, each.saved, swapped)
    return [op for op, decision in zip(each.operators, decisions, strict=True) if decision is Decision.EXEC]


def unit_by_chance(choice: random.Random, *, num_operators: int, saves_everything: bool = False) -> UnitRecord:
    operators = []
    for number in range(1, num_operators + 1):
        reads = tuple(choice.sample(range(number), min(number, choice.randint(1, 2))))
        operators.append(
            operator(
                number,
                reads=reads,
                seconds=choice.uniform(0.1, 1),
                flops=choice.choice([0, choice.randint(1, 1000)]),
                num_bytes=choice.choice([0, *[choice.randint(1, 100)] * 9]),
                can_be_skipped=choice.random() < 0.95,
            )
        )
    numbers = range(1, num_operators + 1)
    return unit(*operators, saved=numbers if saves_everything else choice.sample(numbers, num_operators // 2))


def aside_bytes(each: UnitRecord, swapped: Collection[int]) -> int:
    decisions = decide(each.operators, each.saved, swapped)
    return sum(
        op.num_bytes for op, decision in zip(each.operators, decisions, strict=True) if decision is Decision.SWAP
    )


def benefit_of(each: UnitRecord, position: int, chosen: Collection[int]) -> float:
    def seconds(swapped: Collection[int]) -> float:
        return sum(op.seconds for op in run_again(each, swapped))

    then = {*chosen, position}
    added_bytes = aside_bytes(each, then) - aside_bytes(each, chosen)
    return (seconds(chosen) - seconds(then)) / max(1, added_bytes)


@examples(60)
@given(seed=SEEDS)
def test_what_a_prefix_saves_is_what_liveness_leaves_out(seed: int) -> None:
    each = unit_by_chance(random.Random(seed), num_operators=20)
    found = only_layer(each)
    positions = {op.key: position for position, op in enumerate(each.operators)}
    swappable = {at for at, op in enumerate(each.operators) if op.num_bytes and op.can_be_skipped}
    flops, seconds, put_bytes, chosen = found.flops_recomputed, found.recomputed_seconds, 0, set[int]()
    least = dict.fromkeys(swappable, math.inf)
    assert flops == sum(op.flops for op in run_again(each))
    assert found.flops_forward == sum(op.flops for op in each.operators)
    for item in found.candidates:
        assert item.seconds is not None and seconds is not None
        position = positions[item.key]
        assert item.operator == each.operators[position].name
        # Greedy, but for those that save more than they did when others had not been chosen yet.
        for other in swappable - chosen:
            benefit = benefit_of(each, other, chosen)
            assert benefit <= item.seconds / max(1, item.num_bytes) + 1e-9 or benefit > least[other]
            least[other] = min(least[other], benefit)
        chosen.add(position)
        flops, seconds, put_bytes = flops - item.flops, seconds - item.seconds, put_bytes + item.num_bytes
        left = run_again(each, chosen)
        assert flops == sum(op.flops for op in left)
        assert put_bytes == aside_bytes(each, chosen)
        assert seconds == pytest.approx(sum(op.seconds for op in left))
    assert all(each.operators[at] not in run_again(each, chosen) for at in swappable - chosen)


@examples(20)
@given(seed=SEEDS)
def test_where_everything_is_saved_each_counts_for_itself(seed: int) -> None:
    each = unit_by_chance(random.Random(seed), num_operators=30, saves_everything=True)
    expected = [op for op in each.operators if op.num_bytes and op.can_be_skipped]
    expected.sort(key=lambda op: -op.seconds / op.num_bytes)
    assert [item.key for item in only_layer(each).candidates] == [op.key for op in expected]


def test_an_output_saves_those_that_only_it_needed() -> None:
    """A cheap cast of something dear that nobody keeps: one of the two is enough."""
    each = unit(operator(1, flops=90, seconds=9.0), operator(2, reads=(1,), flops=10, seconds=1.0), saved=[2])
    (item,) = only_layer(each).candidates
    assert (item.key, item.flops, item.seconds) == ("op#2", 100, 10.0)


def test_the_last_of_two_that_share_something_saves_it_too() -> None:
    shared = operator(1, seconds=8.0, flops=8, num_bytes=100)
    each = unit(shared, operator(2, reads=(1,)), operator(3, reads=(1,), seconds=0.5), saved=[2, 3])
    found = [(item.key, item.flops, item.seconds) for item in only_layer(each).candidates]
    assert found == [("op#2", 1, 1.0), ("op#3", 9, 8.5)]


def test_an_output_that_another_makes_needless_is_not_put_aside_any_more() -> None:
    each = unit(operator(1, seconds=9.0, num_bytes=1), operator(2, reads=(1,), seconds=8.0, num_bytes=5), saved=[2])
    found = [(item.key, item.num_bytes, item.seconds) for item in only_layer(each).candidates]
    assert found == [("op#1", 1, 9.0), ("op#2", 5 - 1, 8.0)]


def test_dead_work_is_no_candidate_and_never_recomputed() -> None:
    found = only_layer(unit(operator(1), operator(2, reads=(1,), flops=50), saved=[1]))
    assert (found.flops_forward, found.flops_recomputed) == (51, 1)
    assert [item.key for item in found.candidates] == ["op#1"]


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, ["op#1"]), (0.01, ["op#1"]), (0.1, ["op#1", "op#2"])])
def test_what_saves_next_to_nothing_is_no_candidate(seconds: float, expected: list[str]) -> None:
    found = only_layer(unit(operator(1, seconds=10.0), operator(2, seconds=seconds), saved=[1, 2]))
    assert [item.key for item in found.candidates] == expected


def test_layers_of_two_kinds_have_two_profiles() -> None:
    dense, sparse = unit(operator(1), saved=[1]), unit(operator(1), operator(2, flops=5), saved=[1, 2])
    wide = unit(operator(1, num_bytes=2), saved=[1])
    found = profile(dense, sparse, dense, sparse, wide)
    assert found.layers == (0, 1, 0, 1, 2)
    assert [each.flops_forward for each in found.profiles] == [1, 6, 1]
    assert (found.source, found.micro_batch_tokens, found.sequence_len) == ("recorded", 128, 64)
    assert found.flops_head == 2 * 128 * 512 * 64


def test_times_are_medians_over_layers_that_are_alike_and_of_one_micro_batch() -> None:
    layers = [unit(operator(1, seconds=each), saved=[1]) for each in (1.0, 2.0, 30.0)]
    seconds = {
        block: BlockSeconds(forward=forward, backward=10 * forward)
        for block, forward in enumerate((8.0, 2.0, 4.0, 600.0, 16.0))
    }
    found = profile(*layers, num_micro_batches=2, seconds=seconds)
    (each,) = found.profiles
    assert (each.forward_seconds, each.recomputed_seconds, each.backward_seconds) == (2.0, 2.0, 20.0 - 2.0)
    assert each.candidates[0].seconds == 2.0
    assert (found.embedding_seconds, found.head_seconds) == (88 / 2, 176 / 2)
    unit_bytes = 128 * 64 * 2
    assert (each.input_bytes, each.saved_bytes) == (unit_bytes, unit_bytes + 1000)
    # What backward takes next to what is saved, and forward, are as estimated.
    assert each.forward_bytes == ESTIMATE.profiles[0].forward_bytes
    assert each.forward_held_bytes == ESTIMATE.profiles[0].forward_held_bytes
    # So is the rest of backward, but with all that is saved more; its FLOPs grow with those of forward.
    [estimated], [rest] = ESTIMATE.profiles[0].rests, each.rests
    more_bytes = max(0, 1000 - (ESTIMATE.profiles[0].saved_bytes - ESTIMATE.profiles[0].input_bytes))
    assert (rest.after, rest.num_bytes) == (estimated.after, estimated.num_bytes + more_bytes)
    assert rest.flops == int(estimated.flops * each.flops_forward / ESTIMATE.profiles[0].flops_forward)
    assert (each.backward_bytes, each.making_bytes) == (1000 + 3 * unit_bytes, 1000 + 2 * unit_bytes)
    assert (each.replay_bytes, each.replay_held_bytes) == (1100, 1300)


def test_a_micro_batch_that_ran_more_operators_does_not_count_in_their_times() -> None:
    """Experts that no token visited are not run."""
    units = [
        unit(operator(1), saved=[1]),
        unit(operator(1, seconds=50.0), operator(2), saved=[1]),
        unit(operator(1, seconds=3.0), saved=[1]),
    ]
    found = recorded_profile(
        {(1, number): each for number, each in enumerate(units)},
        {block: BlockSeconds(forward=3.0, backward=9.0) for block in range(3)},
        gpt(num_layers=1),
        WORKLOAD,
        num_micro_batches=3,
        estimate=ESTIMATE,
    )
    assert found.profiles[0].recomputed_seconds == 2.0


def test_recomputing_may_have_been_faster_than_the_first_time() -> None:
    slow = {block: BlockSeconds(forward=9.0, backward=1.0) for block in range(3)}
    (each,) = profile(unit(operator(1, seconds=5.0), saved=[1]), seconds=slow).profiles
    assert each.backward_seconds == 0.0


def test_it_survives_as_json() -> None:
    found = profile(unit_by_chance(random.Random(3), num_operators=9), unit(operator(1), saved=[1]))
    assert ModelProfile.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_thousand_operators_take_seconds_at_most() -> None:
    """As many as a layer of 128 experts runs, one by one."""
    each = replace(unit_by_chance(random.Random(5), num_operators=1000), saved_bytes=1)
    start = time.process_time()
    assert len(only_layer(each).candidates) > 100
    assert time.process_time() - start < 30
