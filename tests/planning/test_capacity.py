"""Host memory: a step walked buffer by buffer, the split of held gradients, and the error if it is short."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given

from ratel_cli.errors import DoesNotFit
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.duties.gradients import held_by_number, updated_bytes
from ratel_cli.planning.duties.placed import PlacedStep
from ratel_cli.planning.memory.capacity import HostMemory, StepMemory, _moments_of, check_device_memory
from ratel_cli.planning.profile.activations import (
    NOTHING_OFFLOADED,
    OffloadedActivations,
    head_chunk_tokens,
    offload,
    segment_activation_bytes,
    tokens_per_chunk,
)
from ratel_cli.planning.profile.placement import GroupShape, Overlap, Placement, Workload
from ratel_cli.schedule.rules import FROZEN
from ratel_cli.sizes import GROUP_ELEMENTS
from ratel_cli.units import GIB, MIB
from tests.planning.shapes import BFLOAT16, FLOAT16, FLOAT32, SEEDS, WORKLOAD, Widths, gpt
from tests.planning.steps import planned_step
from tests.tiers import examples

PROCESS_BYTES = 400 * MIB
NOTES_BYTES = WORKLOAD.num_micro_batches * 6144 + min(WORKLOAD.num_micro_batches, 4) * 100 * 1024
"""Of a layer, in each plan."""
RUNTIME_BYTES = 128 * MIB
DEEP = Placement(prefetch_blocks=2, pending_updates=2)


def need(
    spec: ModelSpec,
    *,
    placement: Placement = DEEP,
    offloaded: OffloadedActivations = NOTHING_OFFLOADED,
    workload: Workload = WORKLOAD,
    holds_gradients: bool = False,
    overlap: Overlap = "optimized",
    limit_bytes: int = 1 << 50,
) -> tuple[HostMemory, int]:
    step = planned_step(spec, workload, holds_gradients=holds_gradients, overlap=overlap)
    return StepMemory(step, process_bytes=PROCESS_BYTES).fit(placement, offloaded, limit_bytes=limit_bytes)


class Walk:
    """An implementation of its own, in bf16: what is in memory next to what is resident, at many moments of a step."""

    def __init__(
        self, spec: ModelSpec, placement: Placement, num_spilled: int, *, holds_gradients: bool, overlap: Overlap
    ) -> None:
        self.spec, self.placement = spec, placement
        self.blocks = range(len(spec.blocks))
        self.size = [block.num_elements for block in spec.blocks]
        self.separate = overlap == "separate"
        self.held = {i for i in self.blocks if holds_gradients or self.separate or i in placement.deferred}
        self.kept = self.held - set(range(num_spilled))
        self.groups = 3 * 12 * min(GROUP_ELEMENTS, max(self.size))
        self.ahead = placement.prefetch_blocks
        below = [{i} for i in self.blocks[:-1]]
        self.uses = [*below, {self.blocks[-1]} | ({0} if spec.tied else set()), *reversed(below)]
        self.stages = [*self.forward(), *self.backward(), *self.behind()]

    def weights(self, blocks: set[int]) -> int:
        return sum(2 * self.size[i] for i in blocks - self.placement.resident_weights)

    def gradients(self, blocks: set[int]) -> int:
        return sum(2 * self.size[i] for i in blocks)

    def vectors(self, i: int) -> int:
        return segment_activation_bytes(self.spec, self.spec.segments[i], tokens=WORKLOAD.micro_batch_tokens)

    def window(self, position: int) -> set[int]:
        return set.union(*self.uses[position : position + 1 + self.ahead])

    def unwritten(self, i: int, deferred: set[int]) -> set[int]:
        """Blocks whose last group may still be written when block i is opened, before which all others are updated."""
        owners = [k for k in range(i) if k in deferred for _ in range(-(-self.size[k] // GROUP_ELEMENTS))]
        return set(owners[-2:])

    def forward(self) -> Iterator[int]:
        """Whatever is deferred waits in memory until the window has come to it. If nothing is clipped, nothing was."""
        deferred_here = set() if self.separate else self.held
        pending = set() if self.separate else set(self.blocks[: self.placement.pending_updates])
        for i in self.blocks[:-1]:
            coming = set(self.blocks[i : i + 1 + self.ahead])
            waiting = self.kept - set(range(i)) - coming
            for deferred in (deferred_here, set[int]()) if len(deferred_here) == len(self.blocks) else (deferred_here,):
                late = {k for k in pending - deferred if k >= i}
                yield (
                    self.weights(self.window(i) | (late - {i}) | self.unwritten(i, deferred))
                    + self.gradients((coming & deferred) | late)
                    + (self.gradients(waiting) if deferred else 0)
                    + (self.groups if deferred or late or (pending & self.placement.resident_weights) else 0)
                    + self.vectors(i)
                    + RUNTIME_BYTES
                )

    def backward(self) -> Iterator[int]:
        """The last `pending_updates` blocks are being updated; the gradients before those may be held."""
        spec, size, updating = self.spec, self.size, 0 if self.separate else self.groups
        position = spec.num_layers + 1
        head, embedding, largest = size[-1], size[0], [max(p.num_elements for p in b.parameters) for b in spec.blocks]
        tied = 4 * embedding + 3 * min(WORKLOAD.tokens, spec.vocab_size) * spec.hidden_size * 2 if spec.tied else 0
        chunk = min(WORKLOAD.micro_batch_tokens, max(16, (64 * MIB) // (4 * spec.vocab_size)))
        parts = 4 * embedding if spec.tied and chunk < WORKLOAD.micro_batch_tokens else 0
        both = head + (embedding if spec.tied else 0)
        block = max(2 * both + 4 * head + parts, 6 * head + 4 * largest[-1])
        logits = 12 * chunk * spec.vocab_size
        behind = self.unwritten(position, set() if self.separate else self.held)
        window = self.weights(self.window(position) | behind)
        yield window + block + tied + updating + logits + 2 * self.vectors(-1) + RUNTIME_BYTES
        arrived = [self.blocks[-1]]
        for number, i in enumerate(reversed(self.blocks[:-1])):
            pending = set(arrived[max(0, len(arrived) - self.placement.pending_updates) :])
            block = max(6 * size[i], 6 * size[i] + 4 * largest[i]) + (tied if i else 0)
            window = self.weights(self.window(position + 1 + number)) + self.weights(pending)
            waiting = self.gradients(pending) + self.gradients((set(arrived) - pending) & self.kept)
            yield window + block + waiting + updating + 2 * self.vectors(i) + RUNTIME_BYTES
            arrived.append(i)

    def behind(self) -> Iterator[int]:
        """The end of the step."""
        if self.separate:
            for i in self.blocks:
                yield self.gradients({i} | {k for k in self.kept if k > i}) + self.groups + RUNTIME_BYTES
        else:
            pending = set(range(self.placement.pending_updates))
            window = self.weights(self.window(0)) + self.weights(pending) + self.gradients(pending)
            yield window + self.groups + self.gradients(self.kept - pending) + RUNTIME_BYTES


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("overlap", ["optimized", "separate"])
@examples(30)
@given(seed=SEEDS)
def test_as_many_gradients_stay_in_memory_as_fit(seed: int, tied: bool, overlap: Overlap) -> None:
    choice = random.Random(seed)
    spec = gpt(
        num_layers=choice.randint(2, 9),
        hidden_size=choice.choice([32, 256, 512]),
        vocab_size=choice.choice([100, 5000, 50000]),
        tied=tied,
    )
    indices = range(len(spec.blocks))
    holds_gradients = choice.random() < 0.6
    num_deferred = 0 if holds_gradients or overlap == "separate" else choice.choice([0, 1, len(indices)])
    placement = Placement(
        prefetch_blocks=choice.randint(0, 3),
        pending_updates=0 if overlap == "separate" else choice.randint(0, 3),
        resident_weights=frozenset(choice.sample(indices, choice.randint(0, len(indices)))),
        resident_states=frozenset(choice.sample(indices, choice.randint(0, len(indices)))),
        deferred=frozenset(indices[len(indices) - num_deferred :]),
    )
    offloaded = offload(
        [choice.randint(1, 100_000) for _ in range(spec.num_layers)],
        num_micro_batches=3,
        spilled_units=choice.randint(0, 3 * (spec.num_layers - 1)),
    )
    num_chunks = 4 * sum(math.ceil(block.num_elements / 2**18) for block in spec.blocks)
    always = PROCESS_BYTES + 26 * num_chunks + NOTES_BYTES * spec.num_layers
    always += offloaded.host_bytes + offloaded.window_bytes
    always += 2 * WORKLOAD.tokens * spec.hidden_size * 2 + WORKLOAD.tokens * WORKLOAD.sequence_len
    always += sum(2 * spec.blocks[index].num_elements for index in placement.resident_weights)
    always += sum(10 * spec.blocks[index].num_elements for index in placement.resident_states)
    can_spill = holds_gradients or overlap == "separate"
    totals = [
        always + max(Walk(spec, placement, number, holds_gradients=holds_gradients, overlap=overlap).stages)
        for number in range(len(indices) + 1 if can_spill else 1)
    ]
    limits = {totals[0], totals[0] - 1, totals[-1], totals[-1] - 1}
    for limit_bytes in limits | {choice.randint(totals[-1], max(totals)) for _ in range(20)}:
        best = next((number for number, total in enumerate(totals) if total <= limit_bytes), None)
        found = None
        try:
            memory, found = need(
                spec,
                placement=placement,
                offloaded=offloaded,
                holds_gradients=holds_gradients,
                overlap=overlap,
                limit_bytes=limit_bytes,
            )
        except DoesNotFit as failure:
            assert failure.shortfall_bytes == totals[-1] - limit_bytes
        assert found == best
        if found is not None:
            assert memory.total == totals[found]
            assert memory.total == sum(
                (memory.process, memory.hidden_states, memory.activations, memory.resident)
            ) + max(Walk(spec, placement, found, holds_gradients=holds_gradients, overlap=overlap).stages)


def test_what_does_not_fit_is_rejected_by_the_byte() -> None:
    spec = gpt()
    total = need(spec)[0].total
    assert need(spec, limit_bytes=total)[0].total == total
    with pytest.raises(DoesNotFit) as raised:
        need(spec, limit_bytes=total - 1)
    assert raised.value.shortfall_bytes == 1
    assert "(short by 1 B)" in raised.value.message
    assert "activations" not in raised.value.message
    assert "resident" not in raised.value.message
    assert raised.value.hint is not None and "limits.host_memory" in raised.value.hint


def test_the_error_names_what_was_to_be_resident() -> None:
    placement = replace(DEEP, resident_weights=frozenset({0}))
    offloaded = offload([MIB] * 3, num_micro_batches=1, spilled_units=0)
    with pytest.raises(DoesNotFit, match=r"activations 3\.00 MiB, resident 64\.0 KiB"):
        need(gpt(), placement=placement, offloaded=offloaded, limit_bytes=0)


def test_the_device_takes_what_passes_through() -> None:
    memory = need(gpt())[0]
    assert memory.device == memory.block + memory.working_set
    check_device_memory(memory, None)
    check_device_memory(memory, memory.device)
    with pytest.raises(DoesNotFit, match=r"GPU memory: .* need .* available \(short by 1 B\)") as raised:
        check_device_memory(memory, memory.device - 1)
    assert raised.value.shortfall_bytes == 1
    assert raised.value.hint is not None and "limits.gpu_memory" in raised.value.hint


def test_micro_batches_cost_their_hidden_states_alone() -> None:
    spec = gpt(num_layers=4)
    two, many = (need(spec, workload=replace(WORKLOAD, num_micro_batches=number))[0] for number in (2, 50))
    assert (two.block, two.working_set) == (many.block, many.working_set)
    assert many.hidden_states == 25 * two.hidden_states


@pytest.mark.parametrize("state", [BFLOAT16, FLOAT16, FLOAT32])
@pytest.mark.parametrize("tied", [False, True])
def test_it_holds_at_least_what_a_step_leases(state: Widths, tied: bool) -> None:
    """Of the largest block: the weights, their sum in fp32, the rounded sum where it is not the same; three groups."""
    spec = gpt(num_layers=2, vocab_size=100_000, tied=tied, dtype=state.dtype)
    rounded = state.gradient if state.gradient < 4 else 0
    leased = 100_000 * 64 * (state.compute + 4 + rounded) + 3 * state.record * GROUP_ELEMENTS
    assert need(spec, placement=Placement())[0].total >= PROCESS_BYTES + leased


@pytest.mark.parametrize(("elements", "in_flight"), [(1 << 21, 1), (1 << 21, 2), (1 << 22, 2), (1 << 30, 2)])
def test_groups_count_with_all_their_buffers(elements: int, in_flight: int) -> None:
    """Those that are read, the one that is updated, those that are written; none is larger than the largest block."""
    spec = gpt(num_layers=2, vocab_size=100_000)
    one = need(spec, placement=Placement())[0].total
    more = need(spec, placement=Placement(groups=GroupShape(elements=elements, in_flight=in_flight)))[0].total
    buffers = (1 + 2 * in_flight) * min(elements, max(spec.block_elements))
    assert more - one == 12 * (buffers - 3 * GROUP_ELEMENTS)


def test_a_model_of_one_billion_parameters_fits_where_it_must() -> None:
    """The shape of `configs/llama-1b.yaml`: 4 GiB without clipping, 6 GiB with it, and less with gradients on NVMe."""
    spec = gpt(num_layers=22, hidden_size=2048, vocab_size=32000)
    workload = Workload(micro_batch_size=1, num_micro_batches=4, sequence_len=512)
    assert need(spec, workload=workload, limit_bytes=4 * GIB)[1] == 0
    assert need(spec, workload=workload, holds_gradients=True, limit_bytes=6 * GIB)[1] == 0
    assert need(spec, workload=workload, holds_gradients=True, limit_bytes=3 * GIB)[1] > 0


def test_the_tokens_of_a_chunk_have_64_mib_of_logits_unless_they_are_given() -> None:
    for vocab_size, tokens in ((1, 16 * MIB), (4096, 4096), (262144, 64), (10_000_000, 16)):
        spec = replace(gpt(), vocab_size=vocab_size)
        most = Workload(micro_batch_size=1 << 20, num_micro_batches=1, sequence_len=1 << 20)
        assert tokens_per_chunk(vocab_size) == head_chunk_tokens(spec, most) == tokens
        assert head_chunk_tokens(spec, replace(most, chunk_tokens=7)) == 7
        assert head_chunk_tokens(spec, replace(most, micro_batch_size=1, sequence_len=5)) == 5


@examples(60)
@given(seed=SEEDS)
def test_what_is_held_follows_from_how_many_segments_hold(seed: int) -> None:
    """Wherever segments without gradients lie, in the middle of backward too."""
    choice = random.Random(seed)
    spec = gpt(num_layers=choice.randint(1, 9), tied=choice.random() < 0.5)
    trained = choice.sample(range(len(spec.blocks)), choice.randint(1, len(spec.blocks)))
    rules = [block if block.index in trained else replace(block, rule=FROZEN) for block in spec.blocks]
    spec = replace(spec, blocks=tuple(rules))
    placement = Placement(prefetch_blocks=choice.randint(0, 3), pending_updates=choice.randint(0, 4))
    overlap: Overlap = choice.choice(["optimized", "separate"])
    step = planned_step(spec, holds_gradients=True, overlap=overlap, on_gpu=choice.random() < 0.5, has_sums=False)
    placed = PlacedStep(step, placement)
    by_number = held_by_number(updated_bytes(step, None), placed.stages)
    for way in placed.ways:
        held = placed.memory(way).get("held", [0] * step.cycle)
        assert [by_number[moment.num_held] for moment in _moments_of(placed, way)] == held
