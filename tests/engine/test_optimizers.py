"""Every optimizer trains the bits of its reference in plain PyTorch, wherever states rest and whenever updates run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.optim import _muon

from ratel_cli.planning.profile.placement import Placement
from ratel_cli.schedule.muon import orthogonal
from ratel_cli.schedule.rules import ADAMW, ADAMW_8BIT, MUON
from ratel_cli.sizes import CHUNK_ELEMENTS, DtypeName
from tests.engine.architectures import larger_config, tiny_config
from tests.engine.exactness import AHEAD, EVERY_BLOCK, check_training
from tests.engine.machine import attention_of, initial_weights, machine, random_steps
from tests.engine.test_step import NOTHING_SPILLED, moved_by_last_step
from tests.kernels.oracle import needs_fused_torch
from tests.planning.steps import step_traffic
from tests.reference import Recipe
from tests.tiers import rotating, thinned

RECIPES = {
    "adamw_8bit": Recipe(optimizer="adamw_8bit"),
    "lion": Recipe(optimizer="lion", learning_rate=1e-4),
    "sgd": Recipe(optimizer="sgd", learning_rate=0.1),
    "sgd with momentum": Recipe(optimizer="sgd", momentum=0.9, learning_rate=0.1),
    "muon": Recipe(optimizer="muon"),
    "muon otherwise": Recipe(
        optimizer="muon", momentum=0.8, nesterov=True, adjust_lr_fn="original", learning_rate=0.02
    ),
}
WITHOUT_MASTER = {
    f"{name} without a master": replace(recipe, bf16_master="stochastic")
    for name, recipe in {"adamw": Recipe(), **RECIPES}.items()
    if name != "muon otherwise"
}
BYTES_OF_AN_ELEMENT = {
    "adamw_8bit": 6 + 1 / 8 + 2 * 4 / 256,
    "lion": 65 / 8,
    "sgd": 33 / 8,
    "muon": 65 / 8,
    "adamw without a master": 10,
    "adamw_8bit without a master": 4 + 2 * 4 / 256,
    "sgd without a master": 2,
}
"""Of a whole chunk, in bf16."""
_RESIDENT = replace(AHEAD, resident_weights=EVERY_BLOCK, resident_states=EVERY_BLOCK)
WAYS: dict[str, dict[str, object]] = {
    "two ahead": {"placement": AHEAD},
    "everything resident": {"placement": _RESIDENT},
    "held gradients": {"placement": AHEAD, "hold": True},
    "some deferred": {"placement": replace(AHEAD, deferred=frozenset((1, 2)))},
    "in place": {"placement": AHEAD, "in_place": True},
    "two threads, two drives": {"placement": replace(AHEAD, adamw_threads=2), "num_directories": 2},
    "separate": {"placement": AHEAD, "overlap": "separate"},
}


@needs_fused_torch
@pytest.mark.parametrize(
    ("optimizer", "dtype", "architecture", "max_grad_norm"),
    thinned(rotating(list(RECIPES), ["bfloat16", "float32"], ["llama", "gpt2"], [None, 0.5]), every=2),
)
def test_an_optimizer_trains_the_bits_of_its_reference(
    tmp_path: Path, optimizer: str, dtype: DtypeName, architecture: str, max_grad_norm: float | None
) -> None:
    recipe = replace(RECIPES[optimizer], dtype=getattr(torch, dtype), max_grad_norm=max_grad_norm)
    check_training(machine, tmp_path, larger_config(architecture), recipe, num_steps=4, num_tokens=16)


@needs_fused_torch
@pytest.mark.parametrize("optimizer", thinned(RECIPES, every=3))
def test_fp16_with_a_scaled_loss(tmp_path: Path, optimizer: str) -> None:
    recipe = replace(RECIPES[optimizer], dtype=torch.float16, loss_scale=1024.0, max_grad_norm=0.5)
    check_training(machine, tmp_path, larger_config("llama"), recipe, num_steps=3)


@needs_fused_torch
@pytest.mark.parametrize(
    ("optimizer", "way", "max_grad_norm"),
    thinned(rotating(list(RECIPES), list(WAYS), [None, 0.5], full_rotation=True), every=2, offset=1),
)
def test_where_states_rest_and_when_updates_run_changes_no_bit(
    tmp_path: Path, optimizer: str, way: str, max_grad_norm: float | None
) -> None:
    recipe = replace(RECIPES[optimizer], dtype=torch.bfloat16, max_grad_norm=max_grad_norm)
    check_training(machine, tmp_path, larger_config("llama_tied"), recipe, num_steps=3, **WAYS[way])


@needs_fused_torch
@pytest.mark.parametrize(
    ("optimizer", "architecture", "max_grad_norm"),
    thinned(rotating(list(WITHOUT_MASTER), ["llama", "gpt2", "llama_tied", "gpt_oss"], [None, 0.5]), every=3),
)
def test_weights_without_a_master_are_rounded_stochastically(
    tmp_path: Path, optimizer: str, architecture: str, max_grad_norm: float | None
) -> None:
    recipe = replace(WITHOUT_MASTER[optimizer], dtype=torch.bfloat16, max_grad_norm=max_grad_norm)
    check_training(machine, tmp_path, larger_config(architecture), recipe, num_steps=4, num_tokens=16)


@needs_fused_torch
@pytest.mark.parametrize(
    ("optimizer", "way", "max_grad_norm"),
    thinned(rotating(list(WITHOUT_MASTER), list(WAYS), [None, 0.5], full_rotation=True), every=2, offset=1),
)
def test_where_states_rest_decides_nothing_of_the_rounding(
    tmp_path: Path, optimizer: str, way: str, max_grad_norm: float | None
) -> None:
    recipe = replace(WITHOUT_MASTER[optimizer], dtype=torch.bfloat16, max_grad_norm=max_grad_norm)
    check_training(machine, tmp_path, larger_config("llama_tied"), recipe, num_steps=3, **WAYS[way])


@needs_fused_torch
def test_a_part_without_a_master(tmp_path: Path) -> None:
    """What is frozen beside it keeps its bits."""
    recipe = replace(WITHOUT_MASTER["adamw without a master"], dtype=torch.bfloat16, max_grad_norm=0.5)
    recipe = replace(recipe, unfrozen=("model.layers.1.mlp", "model.norm"))
    check_training(machine, tmp_path, larger_config("llama"), recipe, num_steps=3)


@needs_fused_torch
@pytest.mark.parametrize(
    "optimizer", thinned(["adamw_8bit", "sgd with momentum", "muon", "adamw without a master"], every=4, offset=3)
)
def test_blocks_of_several_groups_and_chunks(tmp_path: Path, optimizer: str) -> None:
    """An embedding of 3 * 256 Ki elements, and a part of a chunk. Groups and the parts of threads are whole chunks."""
    config = larger_config("llama", vocab_size=(3 * CHUNK_ELEMENTS + 20_000) // larger_config("llama").hidden_size)
    recipe = replace((RECIPES | WITHOUT_MASTER)[optimizer], dtype=torch.bfloat16)
    check_training(
        machine,
        tmp_path,
        config,
        recipe,
        placement=replace(AHEAD, adamw_threads=2),
        group_elements=2 * CHUNK_ELEMENTS,
        chunk_elements=CHUNK_ELEMENTS,
    )


@pytest.mark.parametrize(
    ("optimizer", "max_grad_norm"), thinned(rotating(list(BYTES_OF_AN_ELEMENT), [None, 1e-3]), every=3)
)
def test_a_step_moves_the_bytes_of_the_record(tmp_path: Path, optimizer: str, max_grad_norm: float | None) -> None:
    """To the byte as predicted."""
    config = larger_config("llama")
    recipe = replace((RECIPES | WITHOUT_MASTER)[optimizer], dtype=torch.bfloat16, max_grad_norm=max_grad_norm)
    with machine(tmp_path, config, recipe, dtype="bfloat16", weights=initial_weights(config)) as ratel:
        spec = ratel.model.spec
        moved = moved_by_last_step(ratel, recipe, random_steps(3, 2))
        wanted = step_traffic(spec, Placement(), NOTHING_SPILLED, holds_gradients=max_grad_norm is not None)
    assert moved == (wanted.read_bytes, wanted.written_bytes)
    record = spec.layers[0].blocks[-1 if optimizer == "muon" else 0].record
    assert record.num_bytes(CHUNK_ELEMENTS) == BYTES_OF_AN_ELEMENT[optimizer] * CHUNK_ELEMENTS


@needs_fused_torch
@pytest.mark.parametrize("architecture", thinned(["gpt_oss", "llama_tied", "opt"], every=3))
def test_what_muon_leaves_to_adamw(tmp_path: Path, architecture: str) -> None:
    """Embeddings, heads, vectors, stacks of experts, and their biases, which are of two dimensions."""
    recipe = replace(RECIPES["muon"], dtype=torch.bfloat16, attn_implementation=attention_of(tiny_config(architecture)))
    check_training(machine, tmp_path, tiny_config(architecture), recipe, num_steps=3)
    config = tiny_config(architecture)
    with machine(tmp_path / "other", config, recipe, dtype="bfloat16", weights=initial_weights(config)) as found:
        spec = found.model.spec
    for block in spec.blocks:
        assert block.rule in (ADAMW, MUON)
        for parameter in block.parameters:
            is_matrix = len(parameter.shape) == 2 and parameter.name.endswith("weight") and "layers" in parameter.name
            assert (block.rule is MUON) == is_matrix, parameter.name


@pytest.mark.parametrize("shape", [(8, 8), (24, 40), (40, 24), (1, 7), (7, 1)])
def test_directions_are_those_of_torch(shape: tuple[int, int]) -> None:
    """Next to which what is multiplied in fp32 is the same but for its rounding."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    wanted = _muon._zeropower_via_newtonschulz(matrix, (3.4445, -4.775, 2.0315), 5, 1e-7)
    assert torch.equal(orthogonal(matrix.bfloat16(), torch.bfloat16), wanted)
    in_fp32 = orthogonal(matrix.bfloat16(), torch.float32)
    assert in_fp32.dtype == torch.bfloat16 and torch.allclose(in_fp32.float(), wanted.float(), atol=0.03)


def test_small_parameters_and_embeddings_have_moments_in_fp32(tmp_path: Path) -> None:
    """As in bitsandbytes: those of fewer than 4096 elements; and embeddings, as in transformers' Trainer. They lie in
    blocks of their own."""
    with machine(
        tmp_path, larger_config("llama"), RECIPES["adamw_8bit"], weights=initial_weights(larger_config("llama"))
    ) as found:
        spec = found.model.spec
    for block in spec.blocks:
        assert block.rule in (ADAMW, ADAMW_8BIT)
        for parameter in block.parameters:
            is_exact = parameter.num_elements < 4096 or parameter.name == "model.embed_tokens.weight"
            assert (block.rule is ADAMW) == is_exact, parameter.name
            assert parameter.start % (256 if block.rule is ADAMW_8BIT else 128) == 0
    assert {block.rule for segment in spec.layers for block in segment.blocks} == {ADAMW, ADAMW_8BIT}
