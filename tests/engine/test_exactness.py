"""The promise: the weights that plain PyTorch would have produced, bit for bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, PretrainedConfig

from ratel_cli.data.samples.packing import assemble
from ratel_cli.data.samples.samples import Sample
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.files.skeleton import DTYPES, build_skeleton
from ratel_cli.planning.profile.placement import Placement
from ratel_cli.sizes import DtypeName
from tests.engine.architectures import ARCHITECTURES, VOCAB_SIZE, larger_config, tiny_config
from tests.engine.exactness import (
    AHEAD,
    DROPOUT,
    EVERY_BLOCK,
    OFFLOADING,
    PLACEMENTS,
    SETTINGS,
    assert_same_training,
    check_training,
    reference,
)
from tests.engine.machine import initial_weights, machine, random_steps
from tests.engine.swaps import ChosenEverywhere
from tests.reference import Recipe
from tests.tiers import rotating, thinned


@pytest.mark.parametrize(
    ("architecture", "dtype", "num_micro_batches", "max_grad_norm"),
    rotating(ARCHITECTURES, *SETTINGS, full_rotation=True),
)
def test_equals_plain_pytorch(
    tmp_path: Path, architecture: str, dtype: DtypeName, num_micro_batches: int, max_grad_norm: float | None
) -> None:
    recipe = Recipe(dtype=DTYPES[dtype], max_grad_norm=max_grad_norm)
    check_training(machine, tmp_path, tiny_config(architecture), recipe, num_micro_batches=num_micro_batches)


def test_a_language_model_within_another_model(tmp_path: Path) -> None:
    """The code around it embeds the tokens as well, before the layers and once more when the head runs."""
    check_training(machine, tmp_path, untied_fuyu(), Recipe(max_grad_norm=0.5), num_micro_batches=2)


def untied_fuyu() -> PretrainedConfig:
    text = {
        "model_type": "persimmon", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": VOCAB_SIZE, "pad_token_id": 0,
    }  # fmt: skip
    return AutoConfig.for_model("fuyu", text_config=text, vocab_size=VOCAB_SIZE, tie_word_embeddings=False)


@pytest.mark.full
@pytest.mark.parametrize(
    ("architecture", "dtype"), rotating(["llama", "llama_tied"], ["float32", "bfloat16"], every=2, offset=1)
)
def test_many_steps_do_not_drift(tmp_path: Path, architecture: str, dtype: DtypeName) -> None:
    recipe = Recipe(dtype=DTYPES[dtype], max_grad_norm=1.0)
    check_training(machine, tmp_path, tiny_config(architecture), recipe, num_steps=25)


@pytest.fixture
def three_threads() -> Iterator[None]:
    """Of torch; all other tests have one."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.full
@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize(
    ("architecture", "dtype", "num_micro_batches", "max_grad_norm"),
    rotating(["llama", "llama_tied", "mixtral", "gpt2"], *SETTINGS, every=4, offset=5),
)
def test_several_threads_of_torch_change_no_bit(
    tmp_path: Path, architecture: str, dtype: DtypeName, num_micro_batches: int, max_grad_norm: float | None
) -> None:
    """Tensors are large enough here that torch shares its work out."""
    config = larger_config(architecture, vocab_size=1024)
    recipe = Recipe(dtype=DTYPES[dtype], max_grad_norm=max_grad_norm)
    check_training(
        machine, tmp_path, config, recipe, num_micro_batches=num_micro_batches, num_tokens=96, placement=AHEAD
    )


@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16])
def test_gradient_dtype_is_what_sums_are_rounded_to(tmp_path: Path, gradient_dtype: torch.dtype) -> None:
    recipe = Recipe(dtype=torch.bfloat16, gradient_dtype=gradient_dtype)
    check_training(machine, tmp_path, tiny_config("llama"), recipe, num_micro_batches=3)


@pytest.mark.parametrize("architecture", ["gpt2", pytest.param("opt", marks=pytest.mark.full)])
def test_positions_of_padded_rows_are_looked_up_once(tmp_path: Path, architecture: str) -> None:
    """In bf16 the gradient of GPT-2's table is the sum over five rows, rounded once; row by row it would be another.
    OPT's own code looks each row up."""
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, VOCAB_SIZE, (length,), generator=draw).int().numpy() for length in (4, 9, 12, 12, 7) * 2]
    samples = [Sample(input_ids=row, labels=row) for row in rows]
    steps = [
        [assemble([np.array([at]) for at in range(5)], samples[first : first + 5], packed_tokens=None, padding_id=0)]
        for first in (0, 5)
    ]
    check_training(machine, tmp_path, tiny_config(architecture), Recipe(dtype=torch.bfloat16), steps=steps)


def test_fp16_with_a_scaled_loss(tmp_path: Path) -> None:
    recipe = Recipe(dtype=torch.float16, loss_scale=1024.0, max_grad_norm=0.5)
    check_training(machine, tmp_path, tiny_config("llama"), recipe, num_steps=3)


@pytest.mark.parametrize(("architecture", "share"), rotating(list(DROPOUT), [0.0, 0.3, 0.6, 1.0]))
def test_dropout_draws_the_same_when_recomputed(tmp_path: Path, architecture: str, share: float) -> None:
    config = tiny_config(architecture, **DROPOUT[architecture])
    check_training(machine, tmp_path, config, Recipe(), placement=Placement(swapped=ChosenEverywhere(share)))


@pytest.mark.parametrize(
    ("placement", "max_grad_norm", "architecture"),
    rotating(list(PLACEMENTS), [None, 0.5], ["llama", "llama_tied"], every=2, full_rotation=True),
)
def test_what_stays_and_what_runs_ahead_changes_no_bit(
    tmp_path: Path, placement: str, max_grad_norm: float | None, architecture: str
) -> None:
    recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=max_grad_norm)
    check_training(machine, tmp_path, tiny_config(architecture), recipe, num_steps=3, **PLACEMENTS[placement])


@pytest.mark.parametrize(
    ("architecture", "offloading"), thinned(rotating(ARCHITECTURES, list(OFFLOADING), every=2), every=2)
)
def test_offloading_changes_no_bit(tmp_path: Path, architecture: str, offloading: str) -> None:
    """Any operators of any layers, chosen by chance; several of these models have dropout."""
    share, spilled_units = OFFLOADING[offloading]
    swapped = ChosenEverywhere(share, ARCHITECTURES.index(architecture))
    placement = replace(AHEAD, swapped=swapped, spilled_units=spilled_units)
    recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=0.5)
    check_training(machine, tmp_path, tiny_config(architecture), recipe, placement=placement)


@pytest.mark.parametrize(
    ("num_again", "where"),
    [*rotating(range(6), ["streamed", "resident"], full_pairs=True), (3, "without a master")],
)
def test_a_speculation_that_was_wrong_is_done_again(tmp_path: Path, num_again: int, where: str) -> None:
    """Wherever in backward that is noticed. Only step 3 is clipped. The blocks whose gradients came before that was
    certain are written twice, to the byte: all of them if the norm is above the limit by less than its margin."""
    config, steps = tiny_config("llama_tied", num_hidden_layers=3), random_steps(5, 2)
    # A loss that is divided by a million targets has almost no gradient.
    steps = [
        [replace(batch, num_targets=1 if number == 2 else 10**6) for batch in batches]
        for number, batches in enumerate(steps)
    ]
    recipe = Recipe(dtype=torch.bfloat16, bf16_master="stochastic" if where == "without a master" else "fp32")
    unclipped = reference(config, steps, recipe)
    limit = limit_that_is_passed_after(num_again, config, unclipped.parameter_norms[2])
    recipe = replace(recipe, max_grad_norm=limit)
    resident = EVERY_BLOCK if where == "resident" else frozenset()
    placement = Placement(prefetch_blocks=1, resident_weights=resident, resident_states=resident)
    with machine(
        tmp_path, config, recipe, dtype="bfloat16", weights=initial_weights(config), placement=placement
    ) as ratel:
        written_bytes, wanted = [], reference(config, steps, recipe)
        for end in range(1, len(steps) + 1):
            before = ratel.queue.written_bytes
            outcomes = ratel.train(steps[:end], recipe)
            written_bytes.append(ratel.queue.written_bytes - before)
            assert outcomes[0].grad_norm == wanted.norms[end - 1]
            assert (outcomes[0].grad_norm > limit) == (end == 3)
        assert_same_training([], ratel.weights(), replace(wanted, losses=(), norms=()))
        once, again = written_bytes[1], written_bytes[2] - written_bytes[1]
        assert written_bytes[3] == written_bytes[4] == once
        sizes = [block.record_bytes for block in ratel.model.spec.blocks]
        assert len(sizes) == 5
        assert again == sum(sizes[len(sizes) - num_again :])


def limit_that_is_passed_after(num_blocks: int, config: PretrainedConfig, norms: Mapping[str, float]) -> float:
    """Between the norm of the gradients of this many blocks, in the order of backward, and that of one more."""
    spec = find_blocks(build_skeleton(config, dtype="bfloat16", attn_implementation="sdpa"), name="tiny").spec
    squares = [sum(norms[each.name] ** 2 for each in block.parameters) for block in reversed(spec.blocks)]
    so_far = [math.sqrt(square) for square in itertools.accumulate(squares)]
    assert all(after > 1.005 * before for before, after in itertools.pairwise(so_far)), "far from the margin"
    if num_blocks == 0:
        return so_far[0] / 2
    return math.sqrt(so_far[num_blocks - 1] * so_far[num_blocks]) if num_blocks < len(so_far) else 0.9995 * so_far[-1]


def test_the_first_step_is_updated_on_arrival_and_a_clipped_one_is_not(tmp_path: Path) -> None:
    steps = random_steps(2, 2)
    for limit in (1e9, 1e-9):
        recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=limit)
        config = tiny_config("llama")
        with machine(
            tmp_path / str(limit), config, recipe, dtype="bfloat16", weights=initial_weights(config), placement=AHEAD
        ) as ratel:
            for number, batches in enumerate(steps):
                before = ratel.queue.written_bytes
                ratel.engine.run(batches, step=number, update=number + 1, learning_rate=1e-3)
                assert (ratel.queue.written_bytes > before) == (limit == 1e9)
                ratel.decided = number + 1
                ratel.settle()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_equals_undisturbed(tmp_path: Path, dtype: DtypeName) -> None:
    config = tiny_config("gpt2")
    recipe = Recipe(dtype=DTYPES[dtype], max_grad_norm=0.5)
    steps = random_steps(5, 2)
    with machine(tmp_path, config, recipe, dtype=dtype, weights=initial_weights(config)) as ratel:
        first = ratel.train(steps[:2], recipe)
    with machine(tmp_path, config, recipe, dtype=dtype) as ratel:
        rest = ratel.train(steps, recipe)
        assert_same_training(first + rest, ratel.weights(), reference(config, steps, recipe))


def test_untied_head_in_chunks_equals_chunked_pytorch(tmp_path: Path) -> None:
    check_training(machine, tmp_path, tiny_config("llama"), Recipe(dtype=torch.bfloat16, chunk_tokens=7))


def test_chunks_change_the_loss_by_rounding_alone(tmp_path: Path) -> None:
    config = tiny_config("llama_tied")
    steps = random_steps(1, 2)
    whole = reference(config, steps, Recipe())
    for chunk_tokens in (1, 5, 24, 1000):
        recipe = replace(Recipe(), chunk_tokens=chunk_tokens)
        with machine(tmp_path / str(chunk_tokens), config, recipe, weights=initial_weights(config)) as ratel:
            [outcome] = ratel.train(steps, recipe)
        assert outcome.loss == pytest.approx(whole.losses[0], rel=1e-6)
        assert outcome.grad_norm == pytest.approx(whole.norms[0], rel=1e-5)


def test_micro_batches_of_other_shapes_and_one_without_targets(tmp_path: Path) -> None:
    """As the last step of an epoch brings them: fewer rows, fewer micro-batches; and prompts that were cut."""
    config = tiny_config("llama_tied")
    recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=0.5)
    first, second, third = random_steps(3, 3)
    blind = replace(first[1], targets=torch.full_like(first[1].targets, -100), num_targets=0)
    narrow = replace(
        second[0],
        input_ids=second[0].input_ids[:1, :6],
        targets=second[0].targets[:1, :6],
        position_ids=second[0].position_ids[:1, :6],
        num_targets=int((second[0].targets[:1, :6] != -100).sum()),
    )
    steps = [[first[0], blind, first[2]], [second[1], narrow], third[:1]]
    check_training(machine, tmp_path, config, recipe, steps=steps)


def test_a_tied_head_in_chunks_stays_within_rounding(tmp_path: Path) -> None:
    config = tiny_config("llama_tied")
    steps = random_steps(1, 2)
    whole = reference(config, steps, Recipe())
    recipe = Recipe(chunk_tokens=7)
    with machine(tmp_path, config, recipe, weights=initial_weights(config)) as ratel:
        ratel.train(steps, recipe)
        weights = ratel.weights()
    for name, wanted in whole.weights.items():
        # One step of AdamW turns a last bit of a gradient into about as much of an update.
        assert float((weights[name] - wanted).norm() / wanted.norm()) < 1e-5, name
