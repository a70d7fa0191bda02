"""GPU memory: a step counted anew, use by use; what it must not depend on; and what is left to host memory then."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given

from ratel_cli.hardware.spec import GPU_CONTEXT_BYTES
from ratel_cli.model.spec import ModelSpec
from ratel_cli.planning.activations import NOTHING_OFFLOADED, block_activation_bytes, offload, tied_bytes
from ratel_cli.planning.capacity import HostMemory, StepMemory
from ratel_cli.planning.gpu_memory import GpuMemory, least_leaving_bytes, weight_bytes_of
from ratel_cli.planning.placement import Placement, StateBytes, Workload
from ratel_cli.units import MIB
from tests.planning.shapes import BFLOAT16, FLOAT16, FLOAT32, SEEDS, WORKLOAD, gpt
from tests.tiers import examples


def walk(spec: ModelSpec, state: StateBytes, workload: Workload, unit_bytes: int) -> int:
    """Written anew: what is on the GPU at each use of a step, in order."""
    size = [block.num_elements for block in spec.blocks]
    largest = [max(parameter.num_elements for parameter in block.parameters) for block in spec.blocks]
    num_layers, tokens = spec.num_layers, workload.micro_batch_tokens
    head, is_summed = num_layers + 1, workload.num_micro_batches > 1
    order = [*range(num_layers + 1), head, *([0] if spec.tied else []), *range(num_layers, -1, -1)]

    def weights(position: int, num_open: int) -> int:
        return sum(state.compute * size[i] for i in order[position : position + num_open + 1])

    def vectors(i: int) -> int:
        mask = tokens * workload.sequence_len * state.compute if 0 < i < head else 0
        return block_activation_bytes(spec, spec.blocks[i], state, tokens=tokens) + mask

    def made(i: int, is_summed: bool) -> int:
        """One parameter's gradient, and once more in another layout; then rounded, and for its norm in fp32."""
        norm = 0 if is_summed and state.gradient == 2 else 4
        return largest[i] * max(2 * state.compute, state.gradient + norm)

    def leaving(i: int) -> int:
        return min(state.gradient * size[i], state.gradient * largest[i] + MIB)

    tied = 0
    if spec.tied:
        rows = workload.num_micro_batches * min(workload.tokens, spec.vocab_size)
        tied = 4 * size[0] + rows * spec.hidden_size * state.compute
    stages = [weights(i, 1) + vectors(i) + 2 * unit_bytes + (leaving(0) if i < 2 else 0) for i in range(num_layers + 1)]
    chunk = min(tokens, max(16, (64 * MIB) // (4 * spec.vocab_size)))
    both = size[head] + (size[0] if spec.tied else 0)
    parts = 4 * size[0] if spec.tied and chunk < tokens else 0
    stages.append(
        weights(head, 2 if spec.tied else 1)
        + tied
        + 4 * size[head]
        + max(state.compute * both + parts, made(head, True) + leaving(head))
        + 16 * chunk * spec.vocab_size
        + 2 * vectors(head)
        + 2 * unit_bytes
    )
    first = len(order) - num_layers - 1
    for number, i in enumerate(range(num_layers, -1, -1)):
        is_summed_here = is_summed or (spec.tied and not i)
        stages.append(
            weights(first + number, 1)
            + (tied if spec.tied and not i else 4 * size[i] if is_summed_here else 0)
            + made(i, is_summed_here)
            + (0 if i else state.compute * size[0])
            + max(leaving(i), leaving(i + 1))
            + 2 * vectors(i)
            + 2 * unit_bytes
        )
    hidden = 2 * workload.tokens * spec.hidden_size * state.compute + workload.tokens * workload.sequence_len
    return GPU_CONTEXT_BYTES + 256 * MIB + hidden + max(stages)


@pytest.mark.parametrize("tied", [False, True])
@examples(60)
@given(seed=SEEDS)
def test_it_is_the_most_that_a_use_takes(seed: int, tied: bool) -> None:
    choice = random.Random(seed)
    spec = gpt(
        num_layers=choice.randint(1, 6),
        hidden_size=choice.choice([32, 256, 1024]),
        vocab_size=choice.choice([100, 5000, 50000]),
        tied=tied,
    )
    workload = Workload(
        micro_batch_size=choice.randint(1, 4),
        num_micro_batches=choice.randint(1, 4),
        sequence_len=choice.choice([64, 1024]),
    )
    state, unit_bytes = choice.choice([BFLOAT16, FLOAT16, FLOAT32]), choice.choice([0, 1, 10**6, 10**9])
    found = GpuMemory(spec, state, workload).needed_bytes(largest_unit_bytes=unit_bytes)
    assert found == walk(spec, state, workload, unit_bytes)


def test_it_does_not_grow_with_the_number_of_layers() -> None:
    few, many = (
        GpuMemory(gpt(num_layers=number), BFLOAT16, WORKLOAD).needed_bytes(largest_unit_bytes=MIB) for number in (3, 96)
    )
    assert few == many


def test_micro_batches_cost_their_hidden_states_alone() -> None:
    spec = gpt()
    two, three = (
        GpuMemory(spec, BFLOAT16, replace(WORKLOAD, num_micro_batches=number)).needed_bytes(largest_unit_bytes=MIB)
        for number in (2, 3)
    )
    tokens = WORKLOAD.micro_batch_tokens
    assert three - two == tokens * (2 * 2 * spec.hidden_size + WORKLOAD.sequence_len)


@examples(60)
@given(seed=SEEDS)
def test_units_and_then_weights_are_kept_while_there_is_room(seed: int) -> None:
    choice = random.Random(seed)
    spec = gpt(num_layers=choice.randint(1, 8), hidden_size=256, vocab_size=20_000, tied=choice.random() < 0.5)
    workload = replace(WORKLOAD, num_micro_batches=choice.randint(1, 4))
    unit_bytes = [choice.randint(1, 10 * MIB) for _ in range(spec.num_layers)]
    needed = GpuMemory(spec, BFLOAT16, workload).needed_bytes(largest_unit_bytes=max(unit_bytes))
    limit_bytes = needed + choice.choice([-MIB, 0, choice.randint(0, 200 * MIB)])
    resident = GpuMemory(spec, BFLOAT16, workload).resident(unit_bytes, limit_bytes=limit_bytes)
    units = [size for size in unit_bytes for _ in range(workload.num_micro_batches)]
    weights = [BFLOAT16.compute * block.num_elements for block in spec.blocks]
    least_bytes = max(least_leaving_bytes(block, BFLOAT16.gradient) for block in spec.blocks[1:-1])
    more_bytes, layer_bytes = resident.leaving_bytes - least_bytes, BFLOAT16.gradient * spec.blocks[1].num_elements
    spare_bytes = int(0.9 * max(0, limit_bytes - needed))
    waiting_bytes = tied_bytes(spec, BFLOAT16, workload)
    assert resident.holds_tied == (0 < waiting_bytes <= spare_bytes)
    spare_bytes -= waiting_bytes if resident.holds_tied else 0
    assert more_bytes == min(spare_bytes, max(0, layer_bytes - least_bytes))
    available_bytes = spare_bytes - more_bytes
    units_bytes = sum(units[resident.units_from :])
    assert units_bytes + weight_bytes_of(spec, BFLOAT16, resident.weights) <= available_bytes
    assert resident.weights == frozenset(range(spec.num_layers + 1 - len(resident.weights), spec.num_layers + 1))
    if resident.units_from > 1:
        assert units_bytes + units[resident.units_from - 1] > available_bytes - 1, "one unit more does not fit"
    if len(resident.weights) < spec.num_layers:
        one_more = weights[spec.num_layers - len(resident.weights)]
        always_bytes = 0 if resident.units_from > 1 else units[0]
        taken_bytes = units_bytes + weight_bytes_of(spec, BFLOAT16, resident.weights)
        assert taken_bytes + always_bytes + one_more > available_bytes - 1


def workload_of(*, tokens: int, num_micro_batches: int = 3) -> Workload:
    return Workload(micro_batch_size=1, num_micro_batches=num_micro_batches, sequence_len=tokens)


def need(spec: ModelSpec, *, on_gpu: bool, tokens: int = 128) -> HostMemory:
    workload = workload_of(tokens=tokens)
    gpu = GpuMemory(spec, BFLOAT16, workload) if on_gpu else None
    step = StepMemory(spec, BFLOAT16, workload, holds_gradients=True, process_bytes=MIB, gpu=gpu)
    offloaded = offload([MIB] * spec.num_layers, num_micro_batches=3, spilled_units=0)
    return step.fit(Placement(prefetch_blocks=2, pending_updates=2), offloaded, limit_bytes=1 << 50)[0]


@pytest.mark.parametrize("tied", [False, True])
def test_host_memory_has_what_goes_up_and_comes_down_alone(tied: bool) -> None:
    spec = gpt(num_layers=4, hidden_size=256, vocab_size=5000, tied=tied)
    on_gpu, on_cpu = need(spec, on_gpu=True), need(spec, on_gpu=False)
    assert on_gpu.total < on_cpu.total
    assert (on_gpu.hidden_states, on_gpu.activations) == (0, on_cpu.activations)
    assert on_gpu.device == GpuMemory(spec, BFLOAT16, workload_of(tokens=128)).needed_bytes(largest_unit_bytes=MIB)


def test_host_memory_does_not_depend_on_tokens_where_a_gpu_computes() -> None:
    spec = gpt(num_layers=4, hidden_size=256, vocab_size=5000)
    short, long = (need(spec, on_gpu=True, tokens=tokens) for tokens in (64, 4096))
    assert replace(short, device=0) == replace(long, device=0)
    assert short.device < long.device


def test_nothing_put_aside_is_nothing_on_the_way() -> None:
    assert NOTHING_OFFLOADED.largest_unit_bytes == 0
    spec = gpt()
    without, with_some = (
        GpuMemory(spec, BFLOAT16, WORKLOAD).needed_bytes(largest_unit_bytes=number) for number in (0, 5 * MIB)
    )
    assert with_some - without == 2 * 5 * MIB
