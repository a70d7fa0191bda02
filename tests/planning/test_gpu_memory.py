"""GPU memory: a step counted anew, use by use; what it must not depend on; and what is left to host memory then."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given

from ratel_cli.hardware.spec import GPU_CONTEXT_BYTES
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.duties.placed import PlacedStep
from ratel_cli.planning.memory.capacity import HostMemory, StepMemory
from ratel_cli.planning.memory.gpu_memory import GpuMemory, weight_bytes_of
from ratel_cli.planning.profile.activations import NOTHING_OFFLOADED, LargestUnit, lookup_sum_bytes, offload
from ratel_cli.planning.profile.gpu_gradients import least_leaving_bytes
from ratel_cli.planning.profile.model_profile import LayerProfile, ModelProfile
from ratel_cli.planning.profile.placement import LEAST_UNITS, GroupShape, Placement, UnitsOnGpu, Workload
from ratel_cli.planning.search.swap import SwapOrder
from ratel_cli.schedule.blocks import BlockSpec, lay_out_block
from ratel_cli.units import MIB
from tests.planning.profiles import by_chance, estimated
from tests.planning.shapes import BFLOAT16, FLOAT16, FLOAT32, SEEDS, WORKLOAD, Widths, gpt, unit_of
from tests.planning.steps import planned_step
from tests.tiers import examples


def head_stages(
    spec: ModelSpec, state: Widths, workload: Workload, profile: ModelProfile, tied: int, rows: int
) -> list[int]:
    """Two micro-batches, if there are as many, chunk by chunk: its logits, then its gradients; the norm; the end, when
    `tied` bytes wait for the embedding. While one computes, the `rows` of one micro-batch are leaving, not of two."""
    head, matrix = spec.blocks[-1].num_elements, spec.blocks[0].num_elements * spec.tied
    width, tokens = state.compute, workload.micro_batch_tokens
    held, most = profile.norm_held_bytes, profile.norm_bytes
    chunk = min(tokens, workload.chunk_tokens or max(16, (64 * MIB) // (4 * spec.vocab_size)))
    chunks = [min(chunk, tokens - start) for start in range(0, tokens, chunk)][: 4 if tokens % chunk else 3]
    stages, summed = [], 0
    for _ in range(min(2, workload.num_micro_batches)):
        part = 0  # of a tied gradient: as it was made, then in fp32
        for number, size in enumerate(chunks):
            stages.append(summed + part + held + 12 * size * spec.vocab_size)
            summed = summed or 4 * head
            stages.append(summed + held + width * (head + matrix) + (part + 4 * matrix if number == 1 else part))
            part = 4 * matrix if number else width * matrix
        stages.append(summed + most)
        stages.append(4 * head + tied + width * matrix + tokens * spec.hidden_size * width)
        summed = 4 * head + tied - rows
    return stages


def passing_head_stages(
    spec: ModelSpec, state: Widths, workload: Workload, profile: ModelProfile, norm: int
) -> list[int]:
    """Where host memory has the sums: a chunk's logits, or its gradients with what they are made of; the norm."""
    head, matrix = spec.blocks[-1].num_elements, spec.blocks[0].num_elements * spec.tied
    summed = 4 * head * spec.tied
    held, most = profile.norm_held_bytes, profile.norm_bytes
    chunk = min(workload.micro_batch_tokens, workload.chunk_tokens or max(16, (64 * MIB) // (4 * spec.vocab_size)))
    made = state.compute * (head + matrix + chunk * spec.vocab_size)
    return [summed + held + max(12 * chunk * spec.vocab_size, made), summed + most, norm * (not spec.tied)]


def looked_up_rows(spec: ModelSpec, workload: Workload) -> tuple[int, int]:
    """Rows of the embedding for a step's tokens, at most, and the elements of its block with so many rows."""
    rows = min(workload.tokens, spec.vocab_size)
    return rows, -(-rows * spec.hidden_size // 2048) * 2048


def layer_stages(always: int, before: int, leaving: int, sums: int, *, holds_sums: bool) -> list[int]:
    """Backward of a layer, next to `always`: what was leaving before it, or gradients of its own that leave."""
    if holds_sums:  # when the first gradient leaves, all sums are there
        return [always + before + sums, always + leaving]
    # The first micro-batch has no sums on the GPU; the last one has.
    return [always + before, always + leaving + sums]


def layer_takes(layer: LayerProfile, gradient_bytes: int) -> tuple[int, int, int]:
    """Backward; recomputing before it; and that with all that autograd saves there from the beginning."""
    return max(layer.backward_bytes, layer.making_bytes + gradient_bytes), layer.replay_bytes, layer.replay_held_bytes


def with_units(uses: list[Sequence[int]], unit: LargestUnit, input_bytes: int, units: UnitsOnGpu | None) -> int:
    """`uses` of backward as `layer_takes` says, with the unit in use and the next one."""
    working, replay, held = (max(use[number] for use in uses) for number in range(3))
    own = max(working + input_bytes, min(replay + unit.num_bytes, held + unit.unsaved_bytes))
    return own + (unit.num_bytes if units is None else min(units.ahead_bytes, unit.num_bytes))


def forward_uses(around: Sequence[int], vectors: int, layers: Sequence[LayerProfile]) -> list[tuple[int, int]]:
    """Uses of forward: without and with results that stay."""
    costs = [(vectors, vectors), *((layer.forward_bytes, layer.forward_held_bytes) for layer in layers)]
    return [(always + plain, always + held) for always, (plain, held) in zip(around, costs, strict=True)]


def with_units_made(uses: list[tuple[int, int]], unit: LargestUnit, units_bytes: int | None) -> int:
    """`uses` of forward, without and with results that stay, next to the unit that is made and the one before."""
    plain, held = (max(use[number] for use in uses) for number in range(2))
    least = min(plain + 2 * unit.num_bytes, held + unit.unheld_bytes + unit.num_bytes)
    return least if units_bytes is None else min(least, plain + max(unit.num_bytes, units_bytes))


def left_by_head(spec: ModelSpec, state: Widths, leaving: int, *, holds_head: bool) -> int:
    """What of the head's gradients is still leaving when backward begins. Host memory has all of a chunk before
    the next one is made, so nothing but what a tied head has of its own."""
    if spec.tied:
        return 4 * spec.blocks[0].num_elements if holds_head else state.gradient * spec.blocks[-1].num_elements
    return leaving if holds_head else 0


def made(state: Widths, elements: int, is_summed: bool) -> int:
    """One parameter's gradient; then next to it in another dtype, rounded from the sum, or scaled for its norm."""
    if state == FLOAT16 and not is_summed:
        return elements * 6
    return elements * (state.compute + state.gradient if state.gradient != state.compute else state.compute)


def norms(block: BlockSpec) -> int:
    return sum(parameter.num_elements for parameter in block.parameters if len(parameter.shape) == 1)


def walk(
    spec: ModelSpec,
    state: Widths,
    workload: Workload,
    profile: ModelProfile,
    unit: LargestUnit,
    *,
    holds_sums: bool,
    holds_head: bool,
    window_bytes: int,
    units: UnitsOnGpu | None,
) -> int:
    """Written anew: what is on the GPU at each use of a step, in order."""
    layers = [profile.profiles[number] for number in profile.layers]
    size = [block.num_elements for block in spec.blocks]
    largest = [max(parameter.num_elements for parameter in block.parameters) for block in spec.blocks]
    num_layers, head, is_summed = spec.num_layers, spec.num_layers + 1, workload.num_micro_batches > 1
    tokens, width = workload.micro_batch_tokens, state.compute
    order = [*range(num_layers + 1), head, *range(num_layers, -1, -1)]
    hidden = workload.tokens * spec.hidden_size * width
    vectors = 12 * tokens * spec.hidden_size * width

    # Where tokens are looked up, the embedding has a row for each token at most. A tied head uses all of it.
    rows, looked_up = looked_up_rows(spec, workload)
    taken = [looked_up, *(size[i] + (size[0] if spec.tied and i == head else 0) for i in order[1:-1]), looked_up]
    left = [size[0] if spec.tied else looked_up, *size[1:]]  # of gradients
    most = [largest[0] if spec.tied else rows * spec.hidden_size, *largest[1:]]  # of a parameter's gradient
    scaled = 4 * (state == FLOAT16)
    in_matrix = (left != size) * (most[0] * (state.gradient + scaled) + (scaled or state.gradient) * largest[0])

    def ahead(position: int) -> int:
        """As many of a block's first parameters as fit, with the gaps between them; or all of it."""
        i = order[position]
        ends = [taken[position], *(parameter.start for parameter in spec.blocks[i].parameters), size[i] * (i == head)]
        return max(state.compute * end for end in ends if state.compute * end <= window_bytes)

    def weights(position: int) -> int:
        return state.compute * taken[position] + sum(map(ahead, range(len(order))[position + 1 :][:1]))

    def leaving(i: int) -> int:
        norms_bytes = state.gradient * norms(spec.blocks[i])
        return min(state.gradient * left[i], state.gradient * most[i] + min(MIB, norms_bytes))

    row_bytes = rows * spec.hidden_size * width
    tied = (4 * size[0] * holds_head + min(2, workload.num_micro_batches) * row_bytes) * spec.tied
    norm = {i: largest[i] * (state.gradient + scaled) for i in (0, head)}  # comes back from host memory
    forward = forward_uses([weights(i) + hidden + (i < 2) * leaving(0) for i in range(head)], vectors, layers)
    stages = [with_units_made(forward, unit, None if units is None else units.forward_bytes)]

    always = weights(head) + hidden + unit.num_bytes
    gone = state.gradient * largest[head] + min(leaving(head), state.gradient * (size[head] - largest[head]))
    in_head = (
        [*head_stages(spec, state, workload, profile, tied, row_bytes * spec.tied), 4 * size[head] + tied + gone]
        if holds_head
        else passing_head_stages(spec, state, workload, profile, norm[head])
    )
    stages += [always + each for each in in_head]

    first = len(order) - num_layers - 1
    backward: list[Sequence[int]] = []
    for number, i in enumerate(range(num_layers, -1, -1)):
        always = weights(first + number) + hidden
        before = leaving(i + 1) if number or not i else left_by_head(spec, state, leaving(head), holds_head=holds_head)
        if not i:
            own = min(leaving(0), state.gradient * (left[0] - most[0]))
            summed = tied if spec.tied else 4 * left[0] if is_summed else 0
            working = max(made(state, most[0], is_summed or spec.tied), width * looked_up + vectors // 2) + summed
            working = max(working, in_matrix + is_summed * 4 * (left[0] - most[0]))
            if spec.tied and not holds_head:
                working, own = max(width * looked_up + vectors // 2 + tied, norm[0]), 0
            backward.append([always + working + max(own, before)] + 2 * [always + max(own, before)])
            continue
        sums = 4 * (size[i] if holds_sums else min(size[i], largest[i] + norms(spec.blocks[i]))) if is_summed else 0
        always = max(layer_stages(always, before, leaving(i), sums, holds_sums=holds_sums))
        backward.append([always + each for each in layer_takes(layers[i - 1], made(state, most[i], is_summed))])
    stages.append(with_units(backward, unit, max(layer.input_bytes for layer in layers), units))
    rotary_bytes = 512  # no parameters give positions
    ids = workload.tokens * (workload.sequence_len + 5 * 8 + rotary_bytes)
    return GPU_CONTEXT_BYTES + 256 * MIB + ids + max(stages)


@pytest.mark.parametrize("holds_head", [False, True])
@pytest.mark.parametrize("holds_sums", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@examples(30)
@given(seed=SEEDS)
def test_it_is_the_most_that_a_use_takes(seed: int, tied: bool, holds_sums: bool, holds_head: bool) -> None:
    choice = random.Random(seed)
    state = choice.choice([BFLOAT16, FLOAT16, FLOAT32])
    spec = gpt(
        num_layers=choice.randint(1, 6),
        hidden_size=choice.choice([32, 256, 1024]),
        vocab_size=choice.choice([100, 5000, 50000]),
        tied=tied,
        dtype=state.dtype,
    )
    workload = Workload(
        micro_batch_size=choice.randint(1, 4),
        num_micro_batches=choice.randint(1, 4),
        sequence_len=choice.choice([64, 1024]),
        chunk_tokens=choice.choice([None, 100, 700, 2048, 5000]),
    )
    unit_bytes = choice.choice([0, 1, 10**6, 10**9])
    unit = LargestUnit(unit_bytes, *(choice.choice([0, unit_bytes, choice.randint(0, unit_bytes)]) for _ in range(2)))
    made, ahead = (choice.choice([0, 2 * unit_bytes, choice.randint(0, 2 * unit_bytes)]) for _ in range(2))
    units = choice.choice([None, LEAST_UNITS, UnitsOnGpu(forward_bytes=made, ahead_bytes=ahead)])
    window_bytes = choice.choice([0, 1, choice.randint(0, 2 * 10**7), 1 << 40])
    profile = by_chance(choice, num_layers=spec.num_layers, most_kib=choice.choice([1, 64, 100_000]))
    memory = GpuMemory(spec, workload, profile)
    found = memory.needed_bytes(
        unit, holds_sums=holds_sums, holds_head=holds_head, window_bytes=window_bytes, units=units
    )
    assert found == walk(
        spec,
        state,
        workload,
        profile,
        unit,
        holds_sums=holds_sums,
        holds_head=holds_head,
        window_bytes=window_bytes,
        units=units,
    )


def memory_of(spec: ModelSpec, workload: Workload) -> GpuMemory:
    return GpuMemory(spec, workload, estimated(spec, workload))


def test_sums_stay_on_the_gpu_if_they_fit_and_as_long_as_that_is_not_slower() -> None:
    spec, unit_bytes = gpt(hidden_size=1024), [MIB] * 3
    memory = memory_of(spec, WORKLOAD)
    all_bytes = memory.needed_bytes(unit_of(MIB), holds_sums=True)
    assert all_bytes - memory.needed_bytes(unit_of(MIB)) == 4 * (12 - 4) * 1024**2
    least_bytes = memory.needed_bytes(unit_of(MIB), holds_sums=True, units=LEAST_UNITS)
    for limit_bytes, wanted in ((all_bytes, {True, False}), (least_bytes, {True, False}), (least_bytes - 1, {False})):
        found = memory.choices(unit_bytes, unit_of(MIB), limit_bytes=limit_bytes)
        assert {each.holds_sums for each in found} == wanted


def test_a_tied_gradient_stays_or_leaves_its_memory_to_units() -> None:
    spec = gpt(hidden_size=256, vocab_size=20_000, tied=True)
    workload = replace(WORKLOAD, num_micro_batches=1)
    memory, unit_bytes = memory_of(spec, workload), [10 * MIB] * 3
    needed_bytes = memory.needed_bytes(unit_of(10 * MIB), holds_head=True, window_bytes=1 << 40)
    limit_bytes = needed_bytes + 2 * lookup_sum_bytes(spec, workload)
    stays, away = memory.choices(unit_bytes, unit_of(10 * MIB), limit_bytes=limit_bytes)
    assert (stays.holds_lookup, away.holds_lookup) == (True, False)
    assert (-away.units_from, len(away.weights)) > (-stays.units_from, len(stays.weights))


@pytest.mark.parametrize("tied", [False, True])
def test_a_large_head_is_summed_in_host_memory_where_it_does_not_fit(tied: bool) -> None:
    """A vocabulary of 256,000, as Gemma has: 4 bytes per parameter of its matrix instead of 8 or more."""
    spec = gpt(hidden_size=1024, vocab_size=256_000, tied=tied)
    memory, unit_bytes, matrix = memory_of(spec, WORKLOAD), [MIB] * 3, 256_000 * 1024
    on_gpu, on_host = (memory.needed_bytes(unit_of(MIB), holds_head=holds) for holds in (True, False))
    assert on_gpu - on_host > (4 if tied else 3.8) * matrix
    found = memory.choices(unit_bytes, unit_of(MIB), limit_bytes=2 * on_gpu, holds_head=False)
    assert not any(each.holds_lookup for each in found), "nothing of it is on the GPU"


@pytest.mark.parametrize("tied", [False, True])
def test_host_memory_counts_the_sums_of_a_head_that_it_has(tied: bool) -> None:
    spec = gpt(num_layers=2, hidden_size=1024, vocab_size=256_000, tied=tied)
    workload, matrix = workload_of(tokens=128), 256_000 * 1024
    step = StepMemory(
        planned_step(spec, workload, on_gpu=True, has_sums=False), process_bytes=0, gpu=memory_of(spec, workload)
    )
    on_gpu, on_host = (
        step.fit(Placement(gpu_holds_head=holds), NOTHING_OFFLOADED, limit_bytes=1 << 40)[0].total
        for holds in (True, False)
    )
    assert on_host - on_gpu >= (2 if tied else 6) * matrix


def test_one_micro_batch_has_no_sums() -> None:
    memory = memory_of(gpt(hidden_size=1024), replace(WORKLOAD, num_micro_batches=1))
    least_bytes = memory.needed_bytes(unit_of(MIB), units=LEAST_UNITS)
    assert memory.needed_bytes(unit_of(MIB), holds_sums=True, units=LEAST_UNITS) == least_bytes
    for limit_bytes, wanted in ((least_bytes, True), (least_bytes - 1, False)):
        found = memory.choices([MIB] * 3, unit_of(MIB), limit_bytes=limit_bytes)
        assert {each.holds_sums for each in found} == {wanted}


@pytest.mark.parametrize("holds_head", [False, True])
def test_what_an_embedding_has_besides_a_borrowed_matrix_is_summed_too(holds_head: bool) -> None:
    plain = gpt(hidden_size=1024, vocab_size=64, tied=True)
    positions = lay_out_block(
        dtype="bfloat16",
        index=len(plain.blocks),
        segment=0,
        name="positions",
        parameters=[("wpe", (1 << 16, 1024), True)],
    )
    spec = replace(plain, blocks=(*plain.blocks, positions))
    once, summed = (
        memory_of(spec, replace(WORKLOAD, num_micro_batches=number)).needed_bytes(unit_of(MIB), holds_head=holds_head)
        for number in (1, 3)
    )
    assert summed - once > 4 * positions.num_elements


@examples(60)
@given(seed=SEEDS)
def test_units_and_then_weights_are_kept_while_there_is_room(seed: int) -> None:
    choice = random.Random(seed)
    spec = gpt(num_layers=choice.randint(1, 8), hidden_size=256, vocab_size=20_000, tied=choice.random() < 0.5)
    workload = replace(WORKLOAD, num_micro_batches=choice.randint(1, 4))
    unit_bytes = [choice.randint(1, 10 * MIB) for _ in range(spec.num_layers)]
    holds_sums = choice.random() < 0.5
    memory = memory_of(spec, workload)
    matrix, head = (each.num_elements for each in (spec.blocks[0], spec.blocks[-1]))
    ends = {end for each in spec.blocks for end in (*(p.start for p in each.parameters), each.num_elements)}
    windows = sorted(2 * end for end in ends | ({head + matrix} if spec.tied else set()))

    def with_window(window_bytes: int) -> int:
        return memory.needed_bytes(
            unit_of(max(unit_bytes)), holds_sums=holds_sums, holds_head=True, window_bytes=window_bytes
        )

    needed = with_window(choice.choice([0, windows[-1]]))
    limit_bytes = needed + choice.choice([0, choice.randint(0, 200 * MIB)])
    found = memory.choices(unit_bytes, unit_of(max(unit_bytes)), limit_bytes=limit_bytes)
    resident = next((each for each in found if each.units is None and each.holds_sums == holds_sums), None)
    if resident is None:
        assert holds_sums is False and workload.num_micro_batches == 1, "there are no sums, so they are on the GPU"
        return
    assert resident.window_bytes == max(each for each in windows if with_window(each) <= limit_bytes)
    needed = with_window(resident.window_bytes)
    units = [size for size in unit_bytes for _ in range(workload.num_micro_batches)]
    weights = [BFLOAT16.compute * block.num_elements for block in spec.blocks]
    least_bytes = max(least_leaving_bytes(layer) for layer in spec.layers)
    more_bytes, layer_bytes = resident.leaving_bytes - least_bytes, BFLOAT16.gradient * spec.blocks[1].num_elements
    spare_bytes = int(0.9 * max(0, limit_bytes - needed))
    waiting_bytes = lookup_sum_bytes(spec, workload)
    assert resident.holds_lookup == (0 < waiting_bytes <= spare_bytes)
    spare_bytes -= waiting_bytes if resident.holds_lookup else 0
    assert more_bytes == min(spare_bytes, max(0, layer_bytes - least_bytes))
    available_bytes = spare_bytes - more_bytes
    units_bytes = sum(units[resident.units_from :])
    assert units_bytes + weight_bytes_of(spec, resident.weights) <= available_bytes
    assert resident.weights == frozenset(range(spec.num_layers + 1 - len(resident.weights), spec.num_layers + 1))
    if resident.units_from > 1:
        assert units_bytes + units[resident.units_from - 1] > available_bytes - 1, "one unit more does not fit"
    if len(resident.weights) < spec.num_layers:
        one_more = weights[spec.num_layers - len(resident.weights)]
        always_bytes = 0 if resident.units_from > 1 else units[0]
        taken_bytes = units_bytes + weight_bytes_of(spec, resident.weights)
        assert taken_bytes + always_bytes + one_more > available_bytes - 1


def workload_of(*, tokens: int, num_micro_batches: int = 3) -> Workload:
    return Workload(micro_batch_size=1, num_micro_batches=num_micro_batches, sequence_len=tokens)


def need(spec: ModelSpec, *, on_gpu: bool, tokens: int = 128) -> HostMemory:
    workload = workload_of(tokens=tokens)
    gpu = memory_of(spec, workload) if on_gpu else None
    planned = planned_step(spec, workload, holds_gradients=True, on_gpu=on_gpu)
    step = StepMemory(planned, process_bytes=MIB, gpu=gpu)
    offloaded = offload([MIB] * spec.num_layers, num_micro_batches=3, spilled_units=0)
    return step.fit(Placement(prefetch_blocks=2, pending_updates=2), offloaded, limit_bytes=1 << 50)[0]


@pytest.mark.parametrize("tied", [False, True])
def test_host_memory_has_what_goes_up_and_comes_down_alone(tied: bool) -> None:
    spec = gpt(num_layers=4, hidden_size=256, vocab_size=5000, tied=tied)
    on_gpu, on_cpu = need(spec, on_gpu=True), need(spec, on_gpu=False)
    assert on_gpu.total < on_cpu.total
    assert (on_gpu.hidden_states, on_gpu.activations) == (0, on_cpu.activations)
    assert on_gpu.device == memory_of(spec, workload_of(tokens=128)).needed_bytes(unit_of(MIB), holds_head=True)


def test_host_memory_does_not_depend_on_tokens_where_a_gpu_computes() -> None:
    spec = gpt(num_layers=4, hidden_size=256, vocab_size=5000)
    short, long = (need(spec, on_gpu=True, tokens=tokens) for tokens in (64, 4096))
    assert replace(short, device=0) == replace(long, device=0)
    assert short.device < long.device


@pytest.mark.parametrize("tied", [False, True])
def test_host_memory_gathers_rows_and_holds_gradients_of_rows(tied: bool) -> None:
    """At the turn, when all gradients are held, and in the first use; a tied head gives every row a gradient."""
    spec = gpt(num_layers=4, hidden_size=256, vocab_size=5000, tied=tied)
    step = planned_step(spec, workload_of(tokens=100), holds_gradients=True, on_gpu=True, has_sums=False)

    def taken(num_rows: int | None) -> tuple[int, int]:
        placement = Placement(gpu_embedding_rows=num_rows, groups=GroupShape(elements=2048))
        placed = PlacedStep(step, placement)
        memory = placed.memory(placed.stages)
        return sum(taken[step.turn] for taken in memory.values()), sum(taken[0] for taken in memory.values())

    saved_bytes = 0 if tied else 2 * (5000 - 304) * 256
    spread_bytes, gathered_bytes = 0 if tied else 2 * 2048, 2 * 304 * 256
    [whole, rows] = map(taken, (None, 304))
    assert rows == (whole[0] - saved_bytes + spread_bytes, whole[1] - saved_bytes + spread_bytes + gathered_bytes)


@examples(60)
@given(seed=SEEDS)
def test_where_two_units_do_not_fit_they_take_what_there_is(seed: int) -> None:
    """At every moment of forward and backward that the plan names, and no choice takes more than the limit."""
    choice = random.Random(seed)
    spec = gpt(num_layers=choice.randint(1, 4), hidden_size=256, vocab_size=2000)
    workload = replace(WORKLOAD, num_micro_batches=choice.choice([1, 3]))
    profile = by_chance(choice, num_layers=spec.num_layers, most_kib=10_000)
    memory, order = GpuMemory(spec, workload, profile), SwapOrder(profile)
    largest, unit_bytes = order.largest_unit(order.num_outputs), order.unit_bytes(order.num_outputs)
    least, most = memory.needed_bytes(largest, units=LEAST_UNITS), memory.needed_bytes(largest, window_bytes=1 << 40)
    limit_bytes = choice.randint(least, most)
    found = memory.choices(unit_bytes, largest, limit_bytes=limit_bytes)
    assert found
    for each in found:
        needed_bytes = memory.needed_bytes(
            largest, holds_sums=each.holds_sums, window_bytes=each.window_bytes, units=each.units
        )
        assert needed_bytes <= limit_bytes
        if each.units is None:
            continue
        assert list(each.units.moments) == [block.index for block in spec.blocks[1:-1]]
        for kind, moments in zip(profile.layers, each.units.moments.values(), strict=True):
            costs, made_bytes = profile.profiles[kind], made(BFLOAT16, 4 * 256 * 256, workload.num_micro_batches > 1)
            working_bytes = max(costs.backward_bytes, costs.making_bytes + made_bytes)
            rests = {rest.after: rest.num_bytes + made_bytes for rest in costs.rests}
            for moment in moments:
                assert moment.num_bytes > each.units.ahead_bytes
                assert rests[moment.parameter] + moment.num_bytes == working_bytes + each.units.ahead_bytes
