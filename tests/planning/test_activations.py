"""What forward leaves behind, against the papers' shapes, and what goes to NVMe, against the engine's window."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given

from ratel_cli.planning.profile.activations import (
    OffloadedActivations,
    SpilledUnits,
    fewest_spilled_units,
    offload,
    passing_bytes,
    segment_activation_bytes,
)
from ratel_cli.planning.profile.placement import SPILL_WINDOW_UNITS
from ratel_cli.schedule.blocks import lay_out_block
from ratel_cli.units import align_up
from tests.planning.shapes import BFLOAT16, FLOAT32, SEEDS, Widths, gpt, unit_of
from tests.tiers import examples


@pytest.mark.parametrize(("state", "bytes_per_element"), [(BFLOAT16, 2), (FLOAT32, 4)])
@pytest.mark.parametrize("tokens", [0, 1, 1000])
def test_a_gpt_leaves_24_elements_per_token_and_hidden_size(state: Widths, bytes_per_element: int, tokens: int) -> None:
    """qkv 3, projection 1, fc1 4, fc2 4, and 12 for all vectors; the papers count 17."""
    spec = gpt(num_layers=5, hidden_size=96, dtype=state.dtype)
    one = 24 * 96 * tokens * bytes_per_element
    assert segment_activation_bytes(spec, spec.layers[0], tokens=tokens) == one


def test_embedding_and_head_leave_vectors_alone() -> None:
    spec = gpt(hidden_size=96)
    for segment in (spec.embedding, spec.head):
        assert segment_activation_bytes(spec, segment, tokens=7) == 12 * 96 * 7 * 2


def test_of_many_experts_only_those_count_that_a_token_visits() -> None:
    def left(num_experts: int) -> int:
        layer = lay_out_block(
            dtype="bfloat16",
            index=1,
            name="layer",
            parameters=[("experts", (num_experts, 2048, 512), True)],
        )
        plain = gpt(num_layers=1, hidden_size=512, vocab_size=16)
        spec = replace(plain, blocks=(plain.blocks[0], layer, plain.blocks[2]))
        return segment_activation_bytes(spec, spec.layers[0], tokens=512)

    assert left(8) == left(128) > left(4)


def test_two_hidden_states_and_a_mask_are_on_the_way() -> None:
    assert passing_bytes(gpt(), tokens=300, sequence_len=100) == 2 * 300 * 64 * 2 + 300 * 100
    carrying = replace(gpt(), carried_bytes=24)
    assert passing_bytes(carrying, tokens=300, sequence_len=100) == 2 * 300 * (64 * 2 + 24) + 300 * 100


def walk(unit_bytes: list[int], num_micro_batches: int, spilled_units: int) -> OffloadedActivations:
    """Unit by unit, as the engine does it: the window's oldest buffer goes for the next unit, or the next read."""
    units = [size for size in unit_bytes for _ in range(num_micro_batches)]
    spilled = [align_up(size, 4096) for size in units[:spilled_units]]
    window: deque[int] = deque()
    to_read: list[int] = []
    most_leased = 0

    def lease(number: int) -> None:
        nonlocal most_leased
        window.append(number)
        assert len(window) <= SPILL_WINDOW_UNITS
        most_leased = max(most_leased, sum(spilled[held] for held in window))

    for number in range(spilled_units):
        if len(window) == SPILL_WINDOW_UNITS:
            to_read.append(window.popleft())
        lease(number)
    read: list[SpilledUnits] = []
    for number in reversed(range(spilled_units)):
        while to_read and len(window) < SPILL_WINDOW_UNITS:
            read.append(SpilledUnits(1, spilled[to_read[-1]]))
            lease(to_read.pop())
        window.remove(number)
    assert not window
    found = offload(unit_bytes, num_micro_batches=num_micro_batches, spilled_units=spilled_units)
    assert most_leased <= found.window_bytes <= SPILL_WINDOW_UNITS * max(spilled, default=0)
    return OffloadedActivations(
        total_bytes=sum(units),
        host_bytes=sum(units[spilled_units:]),
        window_bytes=found.window_bytes if len(set(spilled)) > 1 else most_leased,
        num_units=len(units),
        written_units=tuple(SpilledUnits(1, size) for size in spilled),
        read_units=tuple(reversed(read)),
        largest_unit=unit_of(max(unit_bytes)),
        unit_bytes=tuple(unit_bytes),
    )


def one_by_one(offloaded: OffloadedActivations) -> OffloadedActivations:
    def singles(groups: tuple[SpilledUnits, ...]) -> tuple[SpilledUnits, ...]:
        return tuple(SpilledUnits(1, units.unit_bytes) for units in groups for _ in range(units.number))

    return replace(offloaded, written_units=singles(offloaded.written_units), read_units=singles(offloaded.read_units))


@examples(100)
@given(seed=SEEDS)
def test_what_is_put_aside_is_what_the_engine_moves(seed: int) -> None:
    choice = random.Random(seed)
    num_micro_batches = choice.randint(1, 5)
    sizes = choice.choice([[4096], [1, 4095, 4096, 4097], range(1, 50_000)])
    unit_bytes = [choice.choice(sizes) for _ in range(choice.randint(1, 8))]
    for spilled_units in range(num_micro_batches * (len(unit_bytes) - 1) + 1):
        found = offload(unit_bytes, num_micro_batches=num_micro_batches, spilled_units=spilled_units)
        assert one_by_one(found) == walk(unit_bytes, num_micro_batches, spilled_units)
        assert found.memory_bytes == found.host_bytes + found.window_bytes


@examples(50)
@given(seed=SEEDS)
def test_what_a_gpu_keeps_is_neither_in_memory_nor_on_the_link(seed: int) -> None:
    choice = random.Random(seed)
    num_micro_batches = choice.randint(1, 5)
    unit_bytes = [choice.randint(1, 50_000) for _ in range(choice.randint(1, 8))]
    units = [size for size in unit_bytes for _ in range(num_micro_batches)]
    spilled_units = choice.randint(0, num_micro_batches * (len(unit_bytes) - 1))
    without = offload(unit_bytes, num_micro_batches=num_micro_batches, spilled_units=spilled_units)
    for gpu_units_from in range(spilled_units, len(units) + 1):
        found = offload(
            unit_bytes, num_micro_batches=num_micro_batches, spilled_units=spilled_units, gpu_units_from=gpu_units_from
        )
        gpu_bytes = sum(units[gpu_units_from:])
        assert (found.gpu_bytes, found.linked_bytes) == (gpu_bytes, sum(units[:gpu_units_from]))
        assert found == replace(without, gpu_bytes=gpu_bytes, host_bytes=without.host_bytes - gpu_bytes)


def test_the_last_units_are_not_read() -> None:
    found = offload([4000, 5000, 9000], num_micro_batches=2, spilled_units=4)
    assert (found.written_bytes, found.read_bytes) == (2 * 4096 + 2 * 8192, 4096)
    assert (found.total_bytes, found.host_bytes, found.window_bytes) == (36_000, 18_000, 3 * 8192)


@examples(200)
@given(seed=SEEDS)
def test_as_few_units_are_spilled_as_fit(seed: int) -> None:
    """Compared with trying every number; where none fits, it is one that takes the least."""
    choice = random.Random(seed)
    num_micro_batches = choice.randint(1, 6)
    sizes = choice.choice([[8192], [4096, 40_960], range(1, 50_000)])
    unit_bytes = [choice.choice(sizes) for _ in range(choice.randint(1, 12))]
    if choice.random() < 0.5:
        unit_bytes.sort(reverse=choice.random() < 0.5)
    spillable = num_micro_batches * (len(unit_bytes) - 1)
    most_units = choice.choice([None, choice.randint(0, spillable + num_micro_batches)])
    taken_bytes = [
        offload(unit_bytes, num_micro_batches=num_micro_batches, spilled_units=number).memory_bytes
        for number in range(min(spillable, spillable if most_units is None else most_units) + 1)
    ]
    limits = {size + more for size in taken_bytes for more in (-1, 0, 1)}
    for available_bytes in limits | {choice.randint(0, max(taken_bytes)) for _ in range(20)}:
        found = fewest_spilled_units(
            unit_bytes, num_micro_batches=num_micro_batches, available_bytes=available_bytes, most_units=most_units
        )
        if min(taken_bytes) > available_bytes:
            assert taken_bytes[found] == min(taken_bytes)
        else:
            assert found == next(number for number, size in enumerate(taken_bytes) if size <= available_bytes)


def test_a_large_layer_that_makes_the_buffers_larger_may_stay() -> None:
    """To spill the seventh layer as well takes three buffers of its size, more than it gives back."""
    unit_bytes = [4096] * 6 + [40_960, 40_960]
    assert fewest_spilled_units(unit_bytes, num_micro_batches=1, available_bytes=2 * 40_960 + 3 * 4096) == 6
