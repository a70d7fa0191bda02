"""The embedding's matrix stays in host memory: the rows of a step's tokens go up, and the bits are as ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.engine.reading.block_reader import BlockReader, GenerationBlocks
from ratel_cli.engine.reading.weights import SegmentWeights, WeightReader
from ratel_cli.engine.steps.forward import BlockwiseForward
from ratel_cli.engine.steps.step import StepEngine
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.files.skeleton import build_skeleton
from ratel_cli.planning.duties.activations import RUNTIME_BYTES
from ratel_cli.planning.memory.capacity import StepMemory
from ratel_cli.planning.memory.gpu_memory import GpuMemory
from ratel_cli.planning.profile.activations import input_bytes, offload
from ratel_cli.planning.profile.analytic import analytic_profile
from ratel_cli.planning.profile.placement import Placement, Workload
from ratel_cli.schedule.segments import Segment
from ratel_cli.sizes import PAGE_BYTES
from ratel_cli.units import align_up
from tests.engine.architectures import tiny_config
from tests.engine.exactness import AHEAD, assert_same_training, check_training, reference
from tests.engine.machine import attention_of, initial_weights_of_zeros, random_steps
from tests.gpu.machine import GPU, NEEDS_GPU, gpu_config, gpu_machine
from tests.gpu.test_memory import batches_of, config_of, distinct_tokens
from tests.planning.steps import planned_step
from tests.reference import Recipe
from tests.tiers import rotating

pytestmark = NEEDS_GPU

RECIPE = Recipe(dtype=torch.bfloat16, max_grad_norm=0.5)
IDS: dict[str, list[list[int]]] = {
    "one token": [[5]],
    "the padding token alone": [[0, 1]],
    "padding among others": [[0, 7, 0, 1], [30, 1, 30, 2]],
    "no padding": [[7, 7, 8, 9], [96, 95, 7, 7]],
    "all but one": [list(range(48)), list(range(48, 96))],
    "as many as there are": [list(range(48)), [*range(48, 96), 3]],
    "more than there are": [list(range(97)), list(range(97))],
}
"""Token ids of two micro-batches, or of one."""
EMBEDDINGS = ["llama", "llama_tied", "gpt2", "opt", "gemma2", "bloom"]
"""Bare; with the head; with learned positions; projected too; scaled; with a norm."""


def batch_of(ids: Sequence[int]) -> MicroBatch:
    row = torch.tensor([list(ids)])
    return MicroBatch(
        input_ids=row,
        targets=row.roll(-1, dims=1),
        position_ids=torch.arange(len(ids)).unsqueeze(0),
        sample_ids=(0,),
        num_targets=len(ids),
        num_tokens=len(ids),
    )


class Pinned:
    """The sizes of the buffers that are pinned, by purpose."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: dict[str, list[int]] = {}
        self._of_thread, leasing = threading.local(), BufferPool.lease

        def lease(pool: BufferPool, num_bytes: int, purpose: str, **others: Any) -> Lease:  # noqa: ANN401
            self._of_thread.purpose = purpose
            return leasing(pool, num_bytes, purpose, **others)

        monkeypatch.setattr(BufferPool, "lease", lease)

    def pin(self, address: int, num_bytes: int) -> Callable[[], None]:
        self.sizes.setdefault(self._of_thread.purpose, []).append(num_bytes)
        return lambda: None


class Opened:
    """The shapes of the embedding's matrix, each time that it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shapes: list[tuple[int, ...]] = []
        opening = WeightReader.open

        def record(reader: WeightReader, segment: Segment) -> SegmentWeights:
            weights = opening(reader, segment)
            matrices = [weights.of(block)[0] for block in segment.bound if block.is_looked_up]
            self.shapes.extend(tuple(matrix.shape) for matrix in matrices)
            return weights

        monkeypatch.setattr(WeightReader, "open", record)


@pytest.mark.parametrize(("architecture", "ids"), rotating(EMBEDDINGS, list(IDS)))
def test_any_tokens(tmp_path: Path, architecture: str, ids: str) -> None:
    batches = [batch_of(each) for each in IDS[ids]]
    config = tiny_config(architecture)
    check_training(gpu_machine, tmp_path, config, RECIPE, steps=[batches, batches], placement=AHEAD)


@pytest.mark.full
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_the_norm_is_that_of_the_whole_matrix(tmp_path: Path, num_micro_batches: int) -> None:
    """Rows of 36 elements: were they one after another, other elements would be added together."""
    config = tiny_config("llama", hidden_size=36, head_dim=8, vocab_size=4001, initializer_range=0.3)
    steps = [
        [replace(batch, input_ids=batch.input_ids * 41 + 3) for batch in batches]
        for batches in random_steps(6, num_micro_batches)
    ]
    check_training(gpu_machine, tmp_path, config, RECIPE, steps=steps, placement=AHEAD)


@pytest.mark.nightly
def test_more_tokens_than_a_gpu_compares_with_each_other(tmp_path: Path) -> None:
    """A GPU sorts more than 3072 of them first."""
    config = gpu_config("llama", num_hidden_layers=1, vocab_size=5000, max_position_embeddings=2048)
    steps = random_steps(1, 1, num_tokens=1600, packed=False)
    steps = [[replace(batch, input_ids=batch.input_ids * 51 + 1) for batch in batches] for batches in steps]
    check_training(gpu_machine, tmp_path, config, RECIPE, steps=steps, placement=AHEAD)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("gpu_embedding_rows", [None, 47, 48])
def test_rows_go_up_where_the_plan_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_embedding_rows: int | None, architecture: str
) -> None:
    """Whole, the matrix goes up for a tied head alone."""
    config, opened = gpu_config(architecture), Opened(monkeypatch)
    check_training(
        gpu_machine,
        tmp_path,
        config,
        RECIPE,
        num_steps=1,
        num_micro_batches=2,
        placement=AHEAD,
        gpu_embedding_rows=gpu_embedding_rows,
    )
    whole = (config.vocab_size, config.hidden_size)
    forward, *head, backward = opened.shapes
    assert head == [whole] * (architecture == "gpt2")
    assert forward == backward and (forward == whole) == (gpu_embedding_rows != 48)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_evaluation_gets_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    config, recipe = gpu_config(architecture), Recipe(dtype=torch.bfloat16, attn_implementation="sdpa")
    config.update({"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if architecture == "gpt2" else {})
    [batches] = random_steps(1, 3)
    opened = Opened(monkeypatch)
    with gpu_machine(tmp_path, config, recipe, placement=AHEAD) as ratel:
        engine: StepEngine[MicroBatch] = ratel.engine
        total = engine.evaluate(batches).loss
    wanted = reference(config, [batches], recipe, device=GPU.type)
    assert total / sum(batch.num_targets for batch in batches) == wanted.losses[0]
    distinct = len(torch.unique(torch.cat([batch.input_ids for batch in batches])))
    assert opened.shapes[0] == (distinct, config.hidden_size)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt"])
def test_a_generation_is_looked_up_by_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    """Its logits have the bits that they have with the whole matrix."""
    row = MicroBatch.of_tokens(torch.tensor([[0, 7, 0, 1, 30, 96]]), torch.arange(6).unsqueeze(0))
    with gpu_machine(tmp_path, tiny_config(architecture), RECIPE) as ratel:
        reader = BlockReader(ratel.model, GenerationBlocks(ratel.store.current()), ratel.pool, device=GPU)
        forward = BlockwiseForward(ratel.model, reader)
        found = forward.outputs(row)
        monkeypatch.setattr("ratel_cli.engine.reading.embedding_rows.rows_suffice", lambda spec, num_tokens: False)
        assert torch.equal(found, forward.outputs(row))
    assert found.shape == (1, 6, 97)


def test_code_that_reads_the_matrix_itself_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = gpu_config("llama")
    recipe = replace(RECIPE, attn_implementation=attention_of(config))
    skeleton = build_skeleton(config, dtype="bfloat16", attn_implementation=attention_of(config))
    module = skeleton.get_input_embeddings()
    assert isinstance(module, nn.Embedding)
    module.forward = lambda ids: nn.Embedding.forward(module, ids) + 0 * module.weight[:1]  # type: ignore[method-assign]
    model, opened = find_blocks(skeleton, name="tiny"), Opened(monkeypatch)
    with gpu_machine(tmp_path, config, recipe, model=model, placement=AHEAD) as ratel:
        steps = random_steps(2, 2)
        outcomes = ratel.train(steps, recipe)
        assert_same_training(outcomes, ratel.weights(), reference(config, steps, recipe, device=GPU.type))
    assert set(opened.shapes) == {(config.vocab_size, config.hidden_size)}


@pytest.mark.parametrize("tied", [False, True])
def test_a_token_that_the_model_looks_up_in_the_place_of_another_has_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    config = config_of(num_layers=2, tied=tied)
    config.other_parts = {"image_token_id": 9}
    recipe = replace(RECIPE, attn_implementation=attention_of(config), max_grad_norm=0.5)
    skeleton = build_skeleton(config, dtype="bfloat16", attn_implementation=attention_of(config))
    owner = skeleton.get_submodule("model")
    forward = owner.forward
    owner.forward = lambda input_ids, **keywords: forward(  # type: ignore[method-assign]
        input_ids=torch.where(input_ids == 9, 50, input_ids), **keywords
    )
    model, opened = find_blocks(skeleton, name="tiny"), Opened(monkeypatch)
    steps = [[batch_of([1, 9, 2, 9, 40]), batch_of([3, 9])], [batch_of([9]), batch_of([8, 2])]]
    with gpu_machine(tmp_path, config, recipe, model=model, placement=AHEAD) as ratel:
        outcomes = ratel.train(steps, recipe)
        replaced = [
            [replace(batch, input_ids=torch.where(batch.input_ids == 9, 50, batch.input_ids)) for batch in batches]
            for batches in steps
        ]
        assert_same_training(outcomes, ratel.weights(), reference(config, replaced, recipe, device=GPU.type))
    assert min(shape[0] for shape in opened.shapes) == 4  # 2, 8, 9 and the one that 50 has


@pytest.mark.full
@pytest.mark.parametrize(("tied", "max_grad_norm"), [(False, None), (False, 0.5), (True, 0.5)])
def test_it_fits_into_the_host_memory_that_was_planned(tmp_path: Path, tied: bool, max_grad_norm: float | None) -> None:
    """Nothing stays and nothing runs ahead, and as many rows are used as were planned."""
    config, recipe = config_of(num_layers=2, tied=tied), replace(RECIPE, max_grad_norm=max_grad_norm)
    workload = Workload(micro_batch_size=2, num_micro_batches=2, sequence_len=64)
    with gpu_machine(tmp_path, config, recipe, weights=initial_weights_of_zeros()) as ratel:
        spec = ratel.model.spec
        profile = analytic_profile(spec, workload, traits=ratel.model.traits)
        step = StepMemory(
            planned_step(spec, workload, holds_gradients=max_grad_norm is not None, on_gpu=True),
            process_bytes=0,
            gpu=GpuMemory(spec, workload, profile),
        )
        unit_bytes = input_bytes(spec, tokens=workload.micro_batch_tokens)
        planned, _ = step.fit(
            Placement(gpu_embedding_rows=workload.tokens),
            offload([unit_bytes] * 2, num_micro_batches=2, spilled_units=0),
            limit_bytes=1 << 50,
        )
        ratel.pool.limit_bytes = planned.total - RUNTIME_BYTES
        batches = distinct_tokens(batches_of(2, rows=2, tokens=64))
        outcomes = ratel.train([batches, batches, batches], recipe)
    assert all(outcome.applied for outcome in outcomes)


@pytest.mark.full
@pytest.mark.parametrize(
    ("architecture", "placement", "held_in_memory_bytes"),
    [
        ("llama", Placement(), None),
        ("llama", Placement(), 0),
        ("llama_tied", Placement(gpu_holds_lookup=True), None),
        ("llama_tied", Placement(), None),
        ("llama_tied", Placement(gpu_holds_head=False), None),
    ],
    ids=["untied", "held on NVMe", "tied", "held by the host", "summed by the host"],
)
def test_buffers_for_any_number_of_rows_are_those_of_the_plan(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    placement: Placement,
    held_in_memory_bytes: int | None,
) -> None:
    """Steps have more and more rows, up to as many as were planned: buffers double until they have the planned size."""
    most_rows, width, vocab, pinned = 130, 256, 300, Pinned(monkeypatch)
    config = tiny_config(architecture, num_hidden_layers=1, hidden_size=width, head_dim=64, vocab_size=vocab)
    steps = [[batch_of(range(each)), batch_of(range(100, 100 + each))] for each in (5, *range(20, 66, 5))]
    with gpu_machine(
        tmp_path,
        config,
        RECIPE,
        placement=placement,
        gpu_embedding_rows=most_rows,
        held_in_memory_bytes=held_in_memory_bytes,
        pin=pinned.pin,
    ) as ratel:
        ratel.train(steps, RECIPE)
    of_rows = {
        "rows of embedding": 2,  # in forward and in backward
        "gradient of embedding": 1 if architecture == "llama" else 0,
        "rows of the tied head's gradient": 2,  # of two micro-batches
        "rows of the embedding's gradient": 1,
    }
    for purpose, sizes in pinned.sizes.items():
        if most_at_once := of_rows.get(purpose):
            assert max(sizes) == align_up(2 * width * most_rows, PAGE_BYTES), purpose
            assert len(sizes) <= 4 * most_at_once, "two, eight, sixteen pages, and as many as were planned"
        elif purpose == "gradient of the tied head":
            assert len(sizes) == 1, "rows do not take the buffer of the whole matrix"
    assert {"rows of embedding", "gradient of embedding"} <= pinned.sizes.keys()
