"""The rule that gives out memory: each of its parts, what it refuses, and that more memory never harms."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ratel_cli.errors import DoesNotFit
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.planning.choose import Activations, Case, Choice, choose, evaluate, predict
from ratel_cli.planning.placement import Overlap, Placement
from ratel_cli.units import GIB, MIB
from tests.planning.shapes import BFLOAT16, WORKLOAD, gpt, machine

SPEC = gpt(num_layers=6, hidden_size=1024, vocab_size=20_000)
NUM_BLOCKS = len(SPEC.blocks)
EVERY = frozenset(range(NUM_BLOCKS))
SLOW_DEVICE = machine(flops_per_second=1e10)
SLOW_DRIVE = machine(flops_per_second=1e15)
EVEN = machine(flops_per_second=1.6e11)
"""Forward has time to spare, backward waits for the drive; in all, computing takes about as long as the drive."""
ROOMY = 64 * GIB


def case(
    hardware: HardwareProfile,
    *,
    limit_bytes: int = ROOMY,
    holds_gradients: bool = False,
    overlap: Overlap = "optimized",
    activations: Activations = "auto",
) -> Case:
    return Case(
        spec=SPEC,
        state=BFLOAT16,
        workload=WORKLOAD,
        hardware=hardware,
        holds_gradients=holds_gradients,
        overlap=overlap,
        activations=activations,
        process_bytes=100 * MIB,
        limit_bytes=limit_bytes,
    )


def needed(of: Case, placement: Placement) -> int:
    return evaluate(replace(of, limit_bytes=1 << 50), placement).memory.total


def seconds(choice: Choice) -> float:
    return choice.prediction.time.total


def moved(choice: Choice) -> int:
    return choice.prediction.traffic.read_bytes + choice.prediction.traffic.written_bytes


def depth(choice: Choice) -> tuple[int, int]:
    return choice.placement.prefetch_blocks, choice.placement.pending_updates


def deep(prefetch_blocks: int, pending_updates: int) -> Placement:
    return Placement(prefetch_blocks=prefetch_blocks, pending_updates=pending_updates)


@pytest.mark.parametrize("depths", [(2, 2), (1, 1), (0, 0)])
def test_the_deepest_that_fits_comes_first(depths: tuple[int, int]) -> None:
    total = needed(case(SLOW_DRIVE), deep(*depths))
    chosen = choose(case(SLOW_DRIVE, limit_bytes=total))
    assert depth(chosen) == depths
    assert chosen.memory.total <= total


def test_the_least_depth_is_refused_by_the_byte() -> None:
    total = needed(case(SLOW_DRIVE), deep(0, 0))
    with pytest.raises(DoesNotFit, match=r"host memory: need .* 1 B too few"):
        choose(case(SLOW_DRIVE, limit_bytes=total - 1))


def test_gradients_are_spilled_before_all_depth_is_given_up() -> None:
    limit_bytes = needed(case(EVEN, holds_gradients=True), deep(0, 0))
    chosen = choose(case(EVEN, holds_gradients=True, limit_bytes=limit_bytes))
    assert depth(chosen) == (1, 1)
    assert chosen.spilled_blocks > 0
    assert (chosen.placement.resident_weights, chosen.placement.activation_bytes) == (frozenset(), 0)


def test_depth_is_given_up_where_it_gains_nothing() -> None:
    """Next to no time of computing to hide transfers in: what counts is how much is moved."""
    limit_bytes = needed(case(SLOW_DRIVE, holds_gradients=True), deep(0, 0))
    chosen = choose(case(SLOW_DRIVE, holds_gradients=True, limit_bytes=limit_bytes))
    assert (depth(chosen), chosen.spilled_blocks) == ((0, 0), 0)


@pytest.mark.parametrize("hardware", [SLOW_DEVICE, SLOW_DRIVE])
def test_a_block_of_depth_is_given_up_before_gradients_are_spilled(hardware: HardwareProfile) -> None:
    limit_bytes = needed(case(hardware, holds_gradients=True), deep(1, 1))
    chosen = choose(case(hardware, holds_gradients=True, limit_bytes=limit_bytes))
    assert (depth(chosen), chosen.spilled_blocks) == ((1, 1), 0)


@pytest.mark.parametrize("hardware", [SLOW_DEVICE, SLOW_DRIVE])
@pytest.mark.parametrize("holds_gradients", [False, True])
def test_with_room_for_everything_everything_stays(hardware: HardwareProfile, holds_gradients: bool) -> None:
    of = case(hardware, holds_gradients=holds_gradients)
    placement = choose(of).placement
    assert (placement.resident_weights, placement.resident_states) == (EVERY, EVERY)
    assert placement.activation_bytes == of.activation_bytes


@pytest.mark.parametrize("num_blocks", range(NUM_BLOCKS + 1))
@pytest.mark.parametrize("hardware", [SLOW_DEVICE, SLOW_DRIVE])
def test_weights_come_first_from_the_first_block_upwards(num_blocks: int, hardware: HardwareProfile) -> None:
    wanted = replace(deep(2, 2), resident_weights=frozenset(range(num_blocks)))
    total = needed(case(hardware), wanted)
    chosen = choose(case(hardware, limit_bytes=total)).placement
    # More of them may cost nothing: at the peak, which is the head's, the last layers are read ahead anyway.
    found = chosen.resident_weights
    assert wanted.resident_weights <= found == frozenset(range(len(found)))
    assert chosen == replace(wanted, resident_weights=found)
    assert found == EVERY or needed(case(hardware), replace(wanted, resident_weights=found | {len(found)})) > total


def test_activations_come_before_states_where_computing_is_slow() -> None:
    wanted = replace(deep(2, 2), resident_weights=EVERY, activation_bytes=case(SLOW_DEVICE).activation_bytes // 2)
    total = needed(case(SLOW_DEVICE), wanted)
    assert choose(case(SLOW_DEVICE, limit_bytes=total)).placement == wanted
    more = choose(case(SLOW_DEVICE, limit_bytes=total + 1)).placement
    assert more == replace(wanted, activation_bytes=wanted.activation_bytes + 1)
    every = replace(wanted, activation_bytes=case(SLOW_DEVICE).activation_bytes)
    then = replace(every, resident_states=frozenset({0}))
    assert choose(case(SLOW_DEVICE, limit_bytes=needed(case(SLOW_DEVICE), then))).placement == then


@pytest.mark.parametrize("num_blocks", range(NUM_BLOCKS + 1))
def test_states_come_before_activations_where_the_drive_is_slow(num_blocks: int) -> None:
    of = case(SLOW_DRIVE, holds_gradients=True)
    wanted = replace(deep(2, 2), resident_weights=EVERY, resident_states=frozenset(range(num_blocks)))
    total = needed(of, wanted)
    assert choose(replace(of, limit_bytes=total)).placement == wanted
    more = choose(replace(of, limit_bytes=total + 7)).placement
    assert more.activation_bytes == (7 if num_blocks == NUM_BLOCKS else 0)


def test_when_the_bottleneck_changes_so_does_who_comes_next() -> None:
    """States until the drive is no longer slower, then activations until it is again, and so on."""
    of = case(EVEN, holds_gradients=True)
    start = replace(deep(2, 2), resident_weights=EVERY)
    states_alone = replace(start, resident_states=frozenset(range(NUM_BLOCKS - 2)))
    placement = choose(replace(of, limit_bytes=needed(of, states_alone))).placement
    assert 0 < len(placement.resident_states) < NUM_BLOCKS - 2
    assert 0 < placement.activation_bytes < of.activation_bytes


@pytest.mark.parametrize("limit_bytes", range(400 * MIB, 2 * GIB, 100 * MIB))
def test_activations_are_never_kept_where_the_user_says_so(limit_bytes: int) -> None:
    chosen = choose(case(SLOW_DEVICE, activations="recompute", limit_bytes=limit_bytes + GIB))
    assert chosen.placement.activation_bytes == 0
    assert choose(case(SLOW_DEVICE, activations="recompute")).placement.resident_states == EVERY


def test_all_activations_are_kept_or_none_is_where_the_user_says_so() -> None:
    of = case(SLOW_DRIVE, activations="keep")
    least = Placement(activation_bytes=of.activation_bytes, resident_weights=frozenset(range(NUM_BLOCKS - 1)))
    total = needed(of, least)
    placement = choose(replace(of, limit_bytes=total)).placement
    assert (placement.activation_bytes, placement.resident_weights) == (least.activation_bytes, least.resident_weights)
    with pytest.raises(DoesNotFit, match="kept activations") as raised:
        choose(replace(of, limit_bytes=total - 1))
    assert raised.value.hint is not None and "activations be `auto`" in raised.value.hint
    assert choose(of).placement.activation_bytes == of.activation_bytes


@pytest.mark.parametrize("hardware", [SLOW_DEVICE, SLOW_DRIVE, EVEN])
@pytest.mark.parametrize("limit_bytes", [int(1.2 * GIB), ROOMY])
def test_a_separate_optimizer_has_nothing_pending_or_deferred(hardware: HardwareProfile, limit_bytes: int) -> None:
    placement = choose(case(hardware, overlap="separate", limit_bytes=limit_bytes)).placement
    assert (placement.pending_updates, placement.deferred) == (0, frozenset())
    assert placement.prefetch_blocks > 0


@pytest.mark.parametrize("overlap", ["optimized", "naive"])
@pytest.mark.parametrize("limit_bytes", [int(1.5 * GIB), ROOMY])
def test_updates_are_deferred_where_forward_has_time_to_spare(overlap: Overlap, limit_bytes: int) -> None:
    of = case(EVEN, overlap=overlap, limit_bytes=limit_bytes)
    chosen = choose(of)
    num_deferred = len(chosen.placement.deferred)
    assert num_deferred > 0
    assert chosen.placement.deferred == frozenset(range(NUM_BLOCKS - num_deferred, NUM_BLOCKS))
    without = predict(of, replace(chosen.placement, deferred=frozenset()))
    assert seconds(chosen) < 0.98 * without.time.total
    assert moved(chosen) == without.traffic.read_bytes + without.traffic.written_bytes
    # In memory, whatever it is: here the rule says nothing of spilling.
    assert chosen.spilled_blocks == 0
    assert chosen.memory.held_gradients == 2 * sum(
        SPEC.blocks[index].num_elements for index in chosen.placement.deferred
    )


def test_deferral_needs_held_gradients_to_be_held_anyway() -> None:
    assert choose(case(EVEN, holds_gradients=True)).placement.deferred == frozenset()


def test_without_depth_nothing_is_deferred() -> None:
    limit_bytes = needed(case(EVEN), deep(0, 0))
    placement = choose(case(EVEN, limit_bytes=limit_bytes)).placement
    assert (placement.prefetch_blocks, placement.deferred) == (0, frozenset())


@pytest.mark.parametrize("flops_per_second", [1e11, 3e11, 5e11, 7e11, 1e12, 2e12, 3e12, 5e12, 1e13, 3e13, 1e15])
def test_as_many_are_deferred_as_make_the_step_shortest(flops_per_second: float) -> None:
    of = case(machine(flops_per_second=flops_per_second))
    chosen = choose(of)
    scanned = [
        predict(of, replace(chosen.placement, deferred=frozenset(range(first, NUM_BLOCKS)))).time.total
        for first in range(NUM_BLOCKS, -1, -1)
    ]
    assert scanned[len(chosen.placement.deferred)] == seconds(chosen)
    assert seconds(chosen) <= min(scanned) / 0.98
    assert not chosen.placement.deferred or seconds(chosen) < 0.98 * scanned[0]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("overlap", ["optimized", "naive", "separate"])
def test_more_memory_never_harms(seed: int, overlap: Overlap) -> None:
    choice = random.Random(seed)
    hardware = machine(
        flops_per_second=10 ** choice.uniform(10, 14),
        read_bytes_per_second=10 ** choice.uniform(8.5, 10),
        write_bytes_per_second=10 ** choice.uniform(8.5, 10),
        mixed_bytes_per_second=10 ** choice.uniform(8.5, 10),
        adam_parameters_per_second=10 ** choice.uniform(8, 10),
    )
    activations: Activations = choice.choice(["auto", "recompute"])
    of = case(hardware, holds_gradients=choice.random() < 0.5, overlap=overlap, activations=activations)
    least, most = needed(of, deep(0, 0)) // 2, needed(of, choose(of).placement)
    before: Choice | None = None
    for limit_bytes in sorted(choice.randint(least, most) for _ in range(25)):
        try:
            chosen = choose(replace(of, limit_bytes=limit_bytes))
        except DoesNotFit:
            assert before is None
            continue
        assert chosen.memory.total <= limit_bytes
        if before is not None and depth(before) == depth(chosen):
            assert seconds(chosen) <= seconds(before) / 0.98
            if bool(before.placement.deferred) == bool(chosen.placement.deferred):
                assert seconds(chosen) <= seconds(before) * (1 + 1e-12)
                assert moved(chosen) <= moved(before)
                assert chosen.spilled_blocks <= before.spilled_blocks
                assert chosen.placement.resident_weights >= before.placement.resident_weights
                assert chosen.placement.resident_states >= before.placement.resident_states
                assert chosen.placement.activation_bytes >= before.placement.activation_bytes
                assert chosen.placement.deferred >= before.placement.deferred
        before = chosen
