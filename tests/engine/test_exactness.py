"""The promise: the weights that plain PyTorch would have produced, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PretrainedConfig

from ratel_cli.engine.state import StepOutcome
from ratel_cli.model.skeleton import DTYPES
from ratel_cli.planning.placement import Placement
from ratel_cli.sizes import BLOCK_ALIGNMENT, DtypeName
from tests.engine.architectures import ARCHITECTURES, tiny_config
from tests.engine.machine import Batch, attention_of, initial_weights, machine, random_steps
from tests.engine.swaps import EVERYTHING, ChosenEverywhere
from tests.reference import Recipe, Trained, train_in_memory


def assert_same_training(outcomes: list[StepOutcome], weights: dict[str, torch.Tensor], wanted: Trained) -> None:
    assert [outcome.loss for outcome in outcomes] == list(wanted.losses)
    assert [outcome.grad_norm for outcome in outcomes] == list(wanted.norms)
    assert weights.keys() == wanted.weights.keys()
    different = [
        name
        for name, found in weights.items()
        if not torch.equal(found.view(torch.int32), wanted.weights[name].view(torch.int32))
    ]
    assert different == []


def reference(config: PretrainedConfig, steps: list[list[Batch]], recipe: Recipe) -> Trained:
    return train_in_memory(config, initial_weights(config), steps, recipe)


@pytest.mark.parametrize("max_grad_norm", [None, 0.5], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equals_plain_pytorch(
    tmp_path: Path, architecture: str, dtype: DtypeName, num_micro_batches: int, max_grad_norm: float | None
) -> None:
    config = tiny_config(architecture)
    recipe = Recipe(dtype=DTYPES[dtype], max_grad_norm=max_grad_norm, attn_implementation=attention_of(config))
    with machine(tmp_path, config, recipe, dtype=dtype, weights=initial_weights(config)) as ratel:
        steps = random_steps(2, num_micro_batches, packed=ratel.model.packs)
        outcomes = ratel.train(steps, recipe)
        assert_same_training(outcomes, ratel.weights(), reference(config, steps, recipe))


@pytest.mark.parametrize("architecture", ["llama", "llama_tied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_steps_do_not_drift(tmp_path: Path, architecture: str, dtype: DtypeName) -> None:
    config = tiny_config(architecture)
    recipe = Recipe(dtype=DTYPES[dtype], max_grad_norm=1.0)
    steps = random_steps(25, 2)
    with machine(tmp_path, config, recipe, dtype=dtype, weights=initial_weights(config)) as ratel:
        assert_same_training(ratel.train(steps, recipe), ratel.weights(), reference(config, steps, recipe))


@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16])
def test_gradient_dtype_is_what_sums_are_rounded_to(tmp_path: Path, gradient_dtype: torch.dtype) -> None:
    config = tiny_config("llama")
    recipe = Recipe(dtype=torch.bfloat16, gradient_dtype=gradient_dtype)
    steps = random_steps(2, 3)
    with machine(tmp_path, config, recipe, dtype="bfloat16", weights=initial_weights(config)) as ratel:
        assert_same_training(ratel.train(steps, recipe), ratel.weights(), reference(config, steps, recipe))


def test_fp16_with_a_scaled_loss(tmp_path: Path) -> None:
    config = tiny_config("llama")
    recipe = Recipe(dtype=torch.float16, loss_scale=1024.0, max_grad_norm=0.5)
    steps = random_steps(3, 2)
    with machine(tmp_path, config, recipe, dtype="float16", weights=initial_weights(config)) as ratel:
        assert_same_training(ratel.train(steps, recipe), ratel.weights(), reference(config, steps, recipe))


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("gpt2", {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}),
        ("opt", {"dropout": 0.3, "attention_dropout": 0.3}),
        ("llama", {"attention_dropout": 0.3}),
        ("bloom", {"hidden_dropout": 0.3, "attention_dropout": 0.3}),
        ("falcon", {"hidden_dropout": 0.3, "attention_dropout": 0.3, "parallel_attn": False}),
    ],
)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
def test_dropout_draws_the_same_when_recomputed(
    tmp_path: Path, architecture: str, changes: dict[str, object], share: float
) -> None:
    config = tiny_config(architecture, **changes)
    recipe = Recipe(attn_implementation=attention_of(config))
    placement = Placement(swapped=ChosenEverywhere(share))
    with machine(tmp_path, config, recipe, weights=initial_weights(config), placement=placement) as ratel:
        steps = random_steps(2, 2, packed=ratel.model.packs)
        assert_same_training(ratel.train(steps, recipe), ratel.weights(), reference(config, steps, recipe))


EVERY_BLOCK = frozenset(range(8))
AHEAD = Placement(prefetch_blocks=2, pending_updates=2)
PLACEMENTS: dict[str, dict[str, object]] = {
    "io_uring": {"io_engine": "auto"},
    "two drives": {"num_directories": 2},
    "held though nothing clips": {"hold": True},
    "in place": {"in_place": True},
    "all gradients on disk": {"held_in_memory_bytes": 0, "hold": True},
    "some gradients on disk": {"held_in_memory_bytes": 40_000, "hold": True},
    "one ahead": {"placement": Placement(prefetch_blocks=1, pending_updates=1)},
    "two ahead": {"placement": AHEAD},
    "all ahead": {"placement": Placement(prefetch_blocks=9, pending_updates=9)},
    "two ahead, small groups": {"placement": AHEAD, "group_elements": BLOCK_ALIGNMENT},
    "resident weights": {"placement": replace(AHEAD, resident_weights=EVERY_BLOCK)},
    "some resident weights": {"placement": replace(AHEAD, resident_weights=frozenset((0, 2)))},
    "resident states": {
        "placement": replace(AHEAD, resident_states=frozenset((0, 1, 3))),
        "group_elements": BLOCK_ALIGNMENT,
    },
    "everything resident": {
        "placement": replace(AHEAD, resident_weights=EVERY_BLOCK, resident_states=EVERY_BLOCK, swapped=EVERYTHING)
    },
    "three threads of AdamW": {"placement": replace(AHEAD, adamw_threads=3), "group_elements": BLOCK_ALIGNMENT},
    "many chunks": {"placement": AHEAD, "chunk_elements": BLOCK_ALIGNMENT},
    "three threads of AdamW, many chunks": {
        "placement": replace(AHEAD, adamw_threads=3, resident_weights=EVERY_BLOCK),
        "chunk_elements": BLOCK_ALIGNMENT,
        "group_elements": 8 * BLOCK_ALIGNMENT,
    },
    "everything swapped": {"placement": replace(AHEAD, swapped=EVERYTHING)},
    "everything swapped to NVMe": {"placement": replace(AHEAD, swapped=EVERYTHING, spilled_units=99)},
    "some operators, some on NVMe": {"placement": replace(AHEAD, swapped=ChosenEverywhere(0.5), spilled_units=3)},
    "inputs on NVMe": {"placement": Placement(spilled_units=99)},
    "all kept on a GPU": {"placement": replace(AHEAD, swapped=EVERYTHING, kept_from=0, kept_weights=EVERY_BLOCK)},
    "some kept on a GPU": {
        "placement": replace(
            AHEAD, swapped=ChosenEverywhere(0.5), spilled_units=1, kept_from=3, kept_weights=frozenset((2, 3))
        )
    },
    "some deferred": {"placement": replace(AHEAD, deferred=frozenset((1, 2)))},
    "all deferred": {"placement": replace(AHEAD, deferred=EVERY_BLOCK)},
    "naive": {"placement": AHEAD, "overlap": "naive", "group_elements": BLOCK_ALIGNMENT},
    "separate": {"placement": AHEAD, "overlap": "separate"},
    "separate, resident": {
        "placement": replace(AHEAD, resident_weights=EVERY_BLOCK, resident_states=EVERY_BLOCK),
        "overlap": "separate",
    },
    "in place, ahead": {"placement": replace(AHEAD, resident_weights=frozenset((0, 3))), "in_place": True},
    "gradients on disk, ahead": {"placement": AHEAD, "held_in_memory_bytes": 40_000, "hold": True},
    "io_uring, ahead": {"placement": AHEAD, "io_engine": "auto"},
}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("max_grad_norm", [None, 0.5], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("architecture", ["llama", "llama_tied"])
def test_what_stays_and_what_runs_ahead_changes_no_bit(
    tmp_path: Path, architecture: str, max_grad_norm: float | None, placement: str
) -> None:
    config = tiny_config(architecture)
    recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=max_grad_norm)
    steps = random_steps(4, 2)
    with machine(
        tmp_path,
        config,
        recipe,
        dtype="bfloat16",
        weights=initial_weights(config),
        **PLACEMENTS[placement],  # type: ignore[arg-type]
    ) as ratel:
        assert_same_training(ratel.train(steps, recipe), ratel.weights(), reference(config, steps, recipe))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("share", "spilled_units"), [(1.0, 0), (0.5, 4), (0.2, 99)], ids=["all", "half, some spilled", "few, all spilled"]
)
def test_swapping_changes_no_bit(tmp_path: Path, architecture: str, share: float, spilled_units: int) -> None:
    """Any operators of any layers, chosen by chance; several of these models have dropout."""
    config = tiny_config(architecture)
    recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=0.5, attn_implementation=attention_of(config))
    seed = ARCHITECTURES.index(architecture)
    placement = replace(AHEAD, swapped=ChosenEverywhere(share, seed), spilled_units=spilled_units)
    with machine(
        tmp_path, config, recipe, dtype="bfloat16", weights=initial_weights(config), placement=placement
    ) as ratel:
        steps = random_steps(2, 2, packed=ratel.model.packs)
        assert_same_training(ratel.train(steps, recipe), ratel.weights(), reference(config, steps, recipe))


@pytest.mark.parametrize("resident", [frozenset(), EVERY_BLOCK], ids=["streamed", "resident"])
def test_a_speculation_that_was_wrong_is_done_again(tmp_path: Path, resident: frozenset[int]) -> None:
    """Eight steps are not clipped, so the ninth is updated on arrival; the eleventh must be clipped."""
    config = tiny_config("llama_tied")
    steps = random_steps(13, 2)
    for batch in steps[10]:
        batch.targets[:, 1:] = -100  # few targets: a large gradient
    steps[10] = [replace(batch, num_targets=int((batch.targets != -100).sum())) for batch in steps[10]]
    norms = reference(config, steps, Recipe(dtype=torch.bfloat16)).norms
    recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=1.2 * max(norms[:10]))
    assert norms[10] > 1.2 * max(norms[:10])
    placement = replace(AHEAD, resident_weights=resident, resident_states=resident)
    with machine(
        tmp_path, config, recipe, dtype="bfloat16", weights=initial_weights(config), placement=placement
    ) as ratel:
        written_bytes, wanted = [], reference(config, steps, recipe)
        for end in range(1, len(steps) + 1):
            before = ratel.queue.written_bytes
            outcomes = ratel.train(steps[:end], recipe)
            written_bytes.append((ratel.queue.written_bytes - before) / ratel.store.slot_bytes)
            assert outcomes[0].grad_norm == wanted.norms[end - 1]
        assert written_bytes[9] == 1
        assert written_bytes[10] > 1.5
        assert written_bytes[11] == 1
        assert_same_training([], ratel.weights(), replace(wanted, losses=(), norms=()))


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
    config = tiny_config("llama")
    recipe = Recipe(dtype=torch.bfloat16, chunk_tokens=7)
    steps = random_steps(2, 2)
    with machine(tmp_path, config, recipe, dtype="bfloat16", weights=initial_weights(config)) as ratel:
        assert_same_training(ratel.train(steps, recipe), ratel.weights(), reference(config, steps, recipe))


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
    narrow = Batch(
        input_ids=second[0].input_ids[:1, :6],
        targets=second[0].targets[:1, :6],
        position_ids=second[0].position_ids[:1, :6],
        num_targets=int((second[0].targets[:1, :6] != -100).sum()),
    )
    steps = [[first[0], blind, first[2]], [second[1], narrow], third[:1]]
    with machine(tmp_path, config, recipe, dtype="bfloat16", weights=initial_weights(config)) as ratel:
        assert_same_training(ratel.train(steps, recipe), ratel.weights(), reference(config, steps, recipe))


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
