"""What a step moves over NVMe, against a step that is walked event by event, and against sums written by hand."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given

from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.duties.updates import checksum_bytes
from ratel_cli.planning.profile.activations import NOTHING_OFFLOADED, OffloadedActivations, offload
from ratel_cli.planning.profile.analytic import spec_from_shape
from ratel_cli.planning.profile.placement import Overlap, Placement, gradient_bytes
from ratel_cli.planning.time.traffic import Traffic, store_bytes
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.schedule.rules import rules_of
from ratel_cli.sizes import CHUNK_ELEMENTS, DtypeName
from tests.planning.shapes import BFLOAT16, FLOAT16, FLOAT32, SEEDS, Widths, gpt
from tests.planning.steps import step_traffic
from tests.tiers import examples

# Elements of the blocks, with the gaps: 512 * 64, then 12 * 64^2 + 2 * 64 up to a multiple of 2048, then 513 * 64.
EMBEDDING, LAYER, HEAD = 32768, 51200, 34816
TABLE = 4096  # of checksums: one of each field of each block, and one on top
NOTHING = Placement()


@dataclass
class Walk:
    """A run, step by step, that remembers what is in memory and counts what it has to move."""

    spec: ModelSpec
    state: Widths
    placement: Placement
    offloaded: OffloadedActivations
    holds_gradients: bool
    spilled_segments: int
    overlap: Overlap
    moved: Counter[tuple[str, str]] = field(default_factory=Counter)
    first: int = 0
    in_memory: set[tuple[str, int]] = field(default_factory=set)
    put_off: list[BlockSpec] = field(default_factory=list)

    def step(self) -> None:
        self.moved.clear()
        self.moved["forward", "written"] += self.offloaded.written_bytes
        self.moved["backward", "read"] += self.offloaded.read_bytes
        embedding, *layers, head = self.spec.blocks
        forward = [embedding, *layers]
        at_head = [head, embedding] if self.spec.tied else [head]
        uses = [*(([b], "forward") for b in forward), (at_head, "backward")]
        uses += [([b], "backward") for b in reversed(forward)]
        open_uses: list[tuple[int, BlockSpec]] = []
        issued = 0
        for position, (blocks, stage) in enumerate(uses):
            open_uses = [use for use in open_uses if use[0] >= position]
            while issued < min(len(uses), position + 1 + self.placement.prefetch_blocks):
                for coming in uses[issued][0]:
                    if all(coming is not other for _, other in open_uses):
                        is_handed_on = coming is head and head in self.put_off
                        self.read_weights(coming, "forward" if is_handed_on else uses[issued][1])
                    open_uses.append((issued, coming))
                issued += 1
            block = blocks[0]
            if (stage == "forward" or block is head) and block in self.put_off:
                self.put_off.remove(block)
                self.update(block, "forward")
            if stage == "backward":
                self.gradient_arrives(block)
        if self.overlap == "separate":
            for block in self.put_off:
                self.read_weights(block, "update")
                self.update(block, "update")
            self.put_off.clear()

    def gradient_arrives(self, block: BlockSpec) -> None:
        if not (self.holds_gradients or self.overlap == "separate" or block.index in self.placement.deferred):
            self.update(block, "backward")
            return
        self.put_off.append(block)
        if block.index < self.spilled_segments:
            self.moved["backward", "written"] += block.num_elements * self.state.gradient

    def read_weights(self, block: BlockSpec, stage: str) -> None:
        self.read("weights", block, stage, self.state.compute, self.placement.resident_weights)

    def update(self, block: BlockSpec, stage: str) -> None:
        states = self.state.record - self.state.compute
        self.read("states", block, stage, states, self.placement.resident_states)
        if block.index < self.spilled_segments:
            self.moved[stage, "read"] += block.num_elements * self.state.gradient
        self.moved[stage, "written"] += block.num_elements * self.state.record

    def read(self, what: str, block: BlockSpec, stage: str, each: int, resident: frozenset[int]) -> None:
        if (what, block.index) in self.in_memory:
            return
        if block.index in resident:
            self.in_memory.add((what, block.index))
            self.first += block.num_elements * each
        else:
            self.moved[stage, "read"] += block.num_elements * each


@pytest.mark.parametrize("overlap", ["optimized", "naive", "separate"])
@pytest.mark.parametrize("tied", [False, True])
@examples(40)
@given(seed=SEEDS)
def test_it_is_what_a_walk_through_a_run_counts(seed: int, overlap: Overlap, tied: bool) -> None:
    choice = random.Random(seed)
    state = choice.choice([BFLOAT16, FLOAT32, FLOAT16])
    spec = gpt(num_layers=choice.randint(1, 5), tied=tied, dtype=state.dtype)
    indices = range(len(spec.blocks))
    holds_gradients = choice.random() < 0.5
    num_deferred = 0 if holds_gradients or overlap == "separate" else choice.randint(0, len(indices))
    can_spill = holds_gradients or overlap == "separate"
    spilled_segments = choice.randint(0, len(indices)) if can_spill else 0
    placement = Placement(
        prefetch_blocks=choice.randint(0, 4),
        resident_weights=frozenset(choice.sample(indices, choice.randint(0, len(indices)))),
        resident_states=frozenset(choice.sample(indices, choice.randint(0, len(indices)))),
        deferred=frozenset(indices[len(indices) - num_deferred :]),
    )
    offloaded = offload(
        [choice.randint(1, 20_000) for _ in range(spec.num_layers)],
        num_micro_batches=2,
        spilled_units=choice.randint(0, 2 * (spec.num_layers - 1)),
    )
    walk = Walk(spec, state, placement, offloaded, holds_gradients, spilled_segments, overlap)
    for _ in range(3):
        walk.step()
    walk.moved["forward", "written"] += checksum_bytes(spec)
    traffic = step_traffic(
        spec,
        placement,
        offloaded,
        holds_gradients=holds_gradients,
        spilled_segments=spilled_segments,
        overlap=overlap,
    )
    assert traffic == Traffic(
        **{f"{s}_{d}_bytes": walk.moved[s, d] for s in ("forward", "backward", "update") for d in ("read", "written")},
        first_read_bytes=walk.first,
    )


def test_the_blocks_are_what_the_sums_assume() -> None:
    assert [block.num_elements for block in gpt().blocks] == [EMBEDDING, LAYER, LAYER, LAYER, HEAD]


@pytest.mark.parametrize(
    ("state", "layer", "head"),
    [(BFLOAT16, 26, 24), (FLOAT32, 4 + 4 + 8 + 12, 4 + 8 + 12), (FLOAT16, 2 + 2 + 12 + 14, 2 + 12 + 14)],
)
@pytest.mark.parametrize("holds_gradients", [False, True])
def test_bytes_per_parameter(state: Widths, layer: int, head: int, holds_gradients: bool) -> None:
    traffic = step_traffic(gpt(dtype=state.dtype), NOTHING, NOTHING_OFFLOADED, holds_gradients=holds_gradients)
    assert traffic.read_bytes + traffic.written_bytes == layer * (EMBEDDING + 3 * LAYER) + head * HEAD + TABLE
    assert traffic.written_bytes == state.record * (EMBEDDING + 3 * LAYER + HEAD) + TABLE
    assert (traffic.update_read_bytes, traffic.update_written_bytes, traffic.first_read_bytes) == (0, 0, 0)


@pytest.mark.parametrize(
    ("num_blocks", "elements"),
    [(0, 0), (1, EMBEDDING), (2, EMBEDDING + LAYER), (5, EMBEDDING + 3 * LAYER + HEAD)],
)
def test_spilled_gradients_go_and_come_back(num_blocks: int, elements: int) -> None:
    spec = gpt()
    spilled = step_traffic(spec, NOTHING, NOTHING_OFFLOADED, holds_gradients=True, spilled_segments=num_blocks)
    none = step_traffic(spec, NOTHING, NOTHING_OFFLOADED, holds_gradients=True)
    assert sum(gradient_bytes(spec, None)[:num_blocks]) == 2 * elements
    assert spilled.backward_written_bytes - none.backward_written_bytes == 2 * elements
    assert spilled.forward_read_bytes - none.forward_read_bytes == 2 * elements


@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_the_store_holds_every_record_in_every_slot(num_slots: int) -> None:
    records_bytes = 14 * (EMBEDDING + 3 * LAYER + HEAD)
    assert store_bytes(gpt(dtype="float16"), num_slots=num_slots) == num_slots * (records_bytes + TABLE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("num_layers", [1, 3, 1000])
def test_checksums_take_what_the_store_gives_them(dtype: DtypeName, num_layers: int) -> None:
    spec = gpt(num_layers=num_layers, dtype=dtype)
    num_fields = 3 if dtype == "float32" else 4
    num_chunks = num_fields * sum(-(-block.num_elements // CHUNK_ELEMENTS) for block in spec.blocks)
    assert checksum_bytes(spec) == -(-8 * (1 + num_chunks) // 4096) * 4096


@pytest.mark.parametrize(
    ("optimizer", "has_momentum", "per_parameter", "of_embedding"),
    [
        ("adamw", False, 26, 26),
        ("adamw_8bit", False, 2 + 2 * (6 + 1 / 8 + 2 * 4 / 256), 26),
        ("lion", False, 2 + 2 * (8 + 1 / 8), 0),
        ("sgd", False, 2 + 2 * (4 + 1 / 8), 0),
        ("sgd", True, 2 + 2 * (8 + 1 / 8), 0),
        ("muon", False, 2 + 2 * (8 + 1 / 8), 2 + 2 * 12),
    ],
)
def test_the_bytes_of_a_rule_are_those_of_its_record(
    optimizer: str, has_momentum: bool, per_parameter: float, of_embedding: float
) -> None:
    """In bf16, of a large model: weights read in forward and in backward, the record written and read once, the weights
    of it from memory. The head is a norm; what is small or an embedding has moments in fp32."""
    rules = rules_of(optimizer, has_momentum=has_momentum)
    spec = spec_from_shape(name="large", num_layers=4, hidden_size=2048, vocab_size=32_000, rules=rules)
    traffic = step_traffic(spec, NOTHING, NOTHING_OFFLOADED, holds_gradients=False)
    moved = traffic.read_bytes + traffic.written_bytes
    lent_bytes = sum(block.compute_bytes for block in spec.lent.blocks)  # of the tied embedding, read for the head too
    embedded = 32_000 * 2048
    wanted = per_parameter * (spec.num_parameters - embedded) + max(per_parameter, of_embedding) * embedded
    assert moved - lent_bytes == pytest.approx(wanted, rel=0.002)
    assert (
        spec.num_parameters
        == spec_from_shape(name="large", num_layers=4, hidden_size=2048, vocab_size=32_000).num_parameters
    )
