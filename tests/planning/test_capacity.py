"""Host memory: the split of held gradients against brute force, the refusal, and what it may depend on."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ratel_cli.engine.adamw import GROUP_ELEMENTS
from ratel_cli.engine.loss import tokens_per_chunk
from ratel_cli.errors import DoesNotFit
from ratel_cli.model.spec import ModelSpec, lay_out_block
from ratel_cli.planning import capacity
from ratel_cli.planning.capacity import HostMemory, Workload, host_memory
from ratel_cli.planning.traffic import StateBytes
from ratel_cli.units import GIB, MIB
from tests.planning.shapes import BFLOAT16, FLOAT16, FLOAT32, WORKLOAD, gpt

PROCESS_BYTES = 400 * MIB


def need(
    spec: ModelSpec,
    *,
    state: StateBytes = BFLOAT16,
    workload: Workload = WORKLOAD,
    holds_gradients: bool = False,
    limit_bytes: int = 1 << 50,
) -> tuple[HostMemory, int]:
    return host_memory(
        spec,
        state,
        workload,
        holds_gradients=holds_gradients,
        process_bytes=PROCESS_BYTES,
        limit_bytes=limit_bytes,
    )


def fits(spec: ModelSpec, num_in_memory: int, limit_bytes: int) -> bool:
    """Written anew: follow the step, stage by stage, with so many of the gradients in memory."""
    stages = capacity._stages(spec, BFLOAT16, WORKLOAD)
    sizes = [2 * block.num_elements for block in reversed(spec.blocks)] + [0]
    beside = PROCESS_BYTES + capacity._input_bytes(spec, BFLOAT16, WORKLOAD)
    held = 0
    for position, (stage, size) in enumerate(zip(stages, sizes, strict=True)):
        if beside + stage.block + stage.working_set + held > limit_bytes:
            return False
        if position < num_in_memory:
            held += size
    return True


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("tied", [False, True])
def test_as_many_gradients_stay_in_memory_as_fit(seed: int, tied: bool) -> None:
    choice = random.Random(seed)
    spec = gpt(
        num_layers=choice.randint(1, 9),
        hidden_size=choice.choice([32, 256, 512]),
        vocab_size=choice.choice([100, 5000, 50000]),
        tied=tied,
    )
    everything, spilled = need(spec, holds_gradients=True)
    nothing, _ = need(spec)
    assert spilled == 0
    gap = everything.total - nothing.total
    limits = {nothing.total, everything.total - 1, everything.total, nothing.total + 1}
    for limit_bytes in limits | {nothing.total + choice.randint(0, max(1, gap)) for _ in range(20)}:
        if not fits(spec, 0, limit_bytes):
            # The update of held gradients itself may need more than a step without them.
            with pytest.raises(DoesNotFit):
                need(spec, holds_gradients=True, limit_bytes=limit_bytes)
            continue
        best = max(number for number in range(len(spec.blocks) + 1) if fits(spec, number, limit_bytes))
        memory, spilled = need(spec, holds_gradients=True, limit_bytes=limit_bytes)
        assert spilled == len(spec.blocks) - best
        assert memory.held_gradients == 2 * sum(b.num_elements for b in spec.blocks[spilled:])
        assert memory.total <= limit_bytes


def test_what_does_not_fit_is_refused_by_the_byte() -> None:
    spec = gpt()
    total = need(spec)[0].total
    assert need(spec, limit_bytes=total)[0].total == total
    with pytest.raises(DoesNotFit) as raised:
        need(spec, limit_bytes=total - 1)
    assert raised.value.shortfall_bytes == 1
    assert "1 B too few" in raised.value.message
    assert raised.value.hint is not None and "limits.host_memory" in raised.value.hint


def test_without_room_for_any_gradient_all_are_spilled() -> None:
    spec = gpt(num_layers=9, hidden_size=1024)
    needed = need(spec, holds_gradients=True)[0].total - need(spec)[0].total
    assert needed > 0
    memory, spilled = need(spec, holds_gradients=True, limit_bytes=need(spec)[0].total)
    assert (memory.held_gradients, spilled) == (0, len(spec.blocks))


@pytest.mark.parametrize("holds_gradients", [False, True])
def test_a_layer_more_costs_its_inputs_and_its_held_gradient(holds_gradients: bool) -> None:
    def total(num_layers: int) -> int:
        return need(gpt(num_layers=num_layers, hidden_size=1024), holds_gradients=holds_gradients)[0].total

    layer = gpt(num_layers=1, hidden_size=1024).blocks[1].num_elements
    inputs = WORKLOAD.tokens * 1024 * 2
    assert total(32) - total(31) == inputs + (2 * layer if holds_gradients else 0)


def test_micro_batches_cost_their_inputs_alone() -> None:
    spec = gpt(num_layers=4)
    two, many = (need(spec, workload=replace(WORKLOAD, num_micro_batches=number))[0] for number in (2, 50))
    assert (two.block, two.working_set) == (many.block, many.working_set)
    assert many.block_inputs == 25 * two.block_inputs


@pytest.mark.parametrize("state", [BFLOAT16, FLOAT16, FLOAT32])
@pytest.mark.parametrize("tied", [False, True])
def test_it_holds_at_least_what_a_step_leases(state: StateBytes, tied: bool) -> None:
    """Of the largest block: the weights, their sum in fp32, the rounded sum where it is not the same."""
    spec = gpt(num_layers=2, vocab_size=100_000, tied=tied)
    rounded = state.gradient if state.gradient < 4 else 0
    assert need(spec, state=state)[0].total >= PROCESS_BYTES + 100_000 * 64 * (state.compute + 4 + rounded)


def test_of_many_experts_only_those_count_that_a_token_visits() -> None:
    def working_set(num_experts: int) -> int:
        plain = gpt(num_layers=1, hidden_size=512, vocab_size=16)
        layer = lay_out_block(
            index=1, kind="layer", name="layer", parameters=[("experts", (num_experts, 2048, 512), True)]
        )
        spec = replace(plain, blocks=(plain.blocks[0], layer, plain.blocks[2]))
        return need(spec, workload=Workload(micro_batch_size=8, num_micro_batches=1, sequence_len=512))[0].working_set

    assert working_set(8) == working_set(128) > working_set(4)


def test_a_model_of_one_billion_parameters_fits_where_it_must() -> None:
    """The shape of `configs/llama-1b.yaml`: 4 GiB without clipping, 6 GiB with it, and less with gradients on NVMe."""
    spec = gpt(num_layers=22, hidden_size=2048, vocab_size=32000)
    workload = Workload(micro_batch_size=1, num_micro_batches=4, sequence_len=512)
    assert need(spec, workload=workload, limit_bytes=4 * GIB)[1] == 0
    assert need(spec, workload=workload, holds_gradients=True, limit_bytes=6 * GIB)[1] == 0
    assert need(spec, workload=workload, holds_gradients=True, limit_bytes=3 * GIB)[1] > 0


def test_its_constants_are_those_of_the_engine() -> None:
    assert capacity._GROUP_ELEMENTS == GROUP_ELEMENTS
    for vocab_size in (1, 4096, 262144, 10_000_000):
        assert tokens_per_chunk(vocab_size) == max(16, capacity._CHUNK_LOGITS_BYTES // (4 * vocab_size))
