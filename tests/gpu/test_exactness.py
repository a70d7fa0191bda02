"""On a GPU too: the weights that plain PyTorch would have produced there, bit for bit.

Both sides compute on the GPU, with deterministic kernels; masters and AdamW are on the CPU on both sides.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ratel_cli.model.files.skeleton import DTYPES
from ratel_cli.planning.profile.placement import Placement
from ratel_cli.sizes import DtypeName
from tests.engine.architectures import ARCHITECTURES
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
from tests.engine.machine import attention_of, initial_weights, packs, random_steps
from tests.engine.swaps import EVERYTHING, ChosenEverywhere
from tests.gpu.machine import GPU, NEEDS_GPU, gpu_config, gpu_machine
from tests.reference import Recipe
from tests.simulated_gpu import is_simulated
from tests.tiers import rotating

pytestmark = NEEDS_GPU


@pytest.mark.parametrize(
    ("architecture", "dtype", "num_micro_batches", "max_grad_norm"),
    rotating(list(ARCHITECTURES), *SETTINGS, every=3, offset=3, full_rotation=True),
)
def test_equals_plain_pytorch(
    tmp_path: Path, architecture: str, dtype: DtypeName, num_micro_batches: int, max_grad_norm: float | None
) -> None:
    config, recipe = gpu_config(architecture), Recipe(dtype=DTYPES[dtype], max_grad_norm=max_grad_norm)
    check_training(gpu_machine, tmp_path, config, recipe, num_micro_batches=num_micro_batches, placement=AHEAD)


def test_fp16_with_a_scaled_loss(tmp_path: Path) -> None:
    recipe = Recipe(dtype=torch.float16, loss_scale=1024.0, max_grad_norm=0.5)
    check_training(gpu_machine, tmp_path, gpu_config("llama"), recipe, num_steps=3, placement=AHEAD)


@pytest.mark.parametrize(("dtype", "max_grad_norm"), [("bfloat16", None), ("float32", 0.5)])
def test_muon_multiplies_its_matrices_on_the_gpu(tmp_path: Path, dtype: DtypeName, max_grad_norm: float | None) -> None:
    recipe = Recipe(dtype=DTYPES[dtype], max_grad_norm=max_grad_norm, optimizer="muon")
    check_training(gpu_machine, tmp_path, gpu_config("llama"), recipe, num_steps=3, placement=AHEAD)


def test_an_overflow_is_seen_and_the_step_not_applied(tmp_path: Path) -> None:
    config = gpu_config("llama")
    recipe = Recipe(dtype=torch.float16, loss_scale=2.0**24)
    with gpu_machine(tmp_path, config, recipe, dtype="float16") as ratel:
        before = ratel.weights()
        [outcome] = ratel.train(random_steps(1, 1), recipe)
        assert not outcome.applied
        assert all(torch.equal(before[name], after) for name, after in ratel.weights().items())


@pytest.mark.full
@pytest.mark.parametrize(
    ("max_grad_norm", "architecture"), rotating([None, 1e9, 0.5], ["llama", "llama_tied"], every=2)
)
def test_another_plan_before_every_step_changes_no_bit(
    tmp_path: Path, max_grad_norm: float | None, architecture: str
) -> None:
    config, steps = gpu_config(architecture), random_steps(5, 2)
    recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=max_grad_norm)
    plans = [
        (Placement(prefetch_blocks=1, swapped=ChosenEverywhere(0.5), spilled_units=2), None),
        (replace(AHEAD, resident_weights=EVERY_BLOCK, gpu_weights=EVERY_BLOCK, gpu_units_from=1), None),
        (replace(AHEAD, swapped=EVERYTHING, gpu_holds_sums=True, gpu_holds_lookup=True, gpu_window_bytes=1 << 20), 0),
        (Placement(prefetch_blocks=1, resident_weights=EVERY_BLOCK, resident_states=frozenset({1, 2})), None),
    ]
    with gpu_machine(tmp_path, config, recipe) as ratel:

        def follow_another(step: int) -> None:
            placement, held_in_memory_bytes = plans[step % len(plans)]
            ratel.follow(placement, held_in_memory_bytes=held_in_memory_bytes)

        outcomes = ratel.train(steps, recipe, before_step=follow_another)
        assert_same_training(outcomes, ratel.weights(), reference(config, steps, recipe, device=GPU.type))


@pytest.mark.parametrize(
    ("placement", "max_grad_norm", "architecture"),
    rotating(list(PLACEMENTS), [None, 0.5], ["llama", "llama_tied"], every=4, full_rotation=True),
)
def test_what_stays_and_what_runs_ahead_changes_no_bit(
    tmp_path: Path, placement: str, max_grad_norm: float | None, architecture: str
) -> None:
    recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=max_grad_norm)
    check_training(gpu_machine, tmp_path, gpu_config(architecture), recipe, num_steps=3, **PLACEMENTS[placement])


@pytest.mark.full
@pytest.mark.parametrize(
    ("architecture", "dtype", "num_micro_batches", "chunk_tokens", "max_grad_norm"),
    rotating(["llama", "phi3"], list(DTYPES.values()), [3, 1], [7, None], [0.5, None], full_rotation=True),
)
def test_a_head_that_is_summed_in_host_memory_is_that_of_plain_pytorch(
    tmp_path: Path,
    architecture: str,
    dtype: torch.dtype,
    num_micro_batches: int,
    chunk_tokens: int | None,
    max_grad_norm: float | None,
) -> None:
    """Chunks of 7 tokens: several of each micro-batch, and a short last one."""
    config = gpu_config(architecture)
    recipe = Recipe(dtype=dtype, max_grad_norm=max_grad_norm, chunk_tokens=chunk_tokens)
    placement = replace(AHEAD, gpu_holds_head=False)
    check_training(
        gpu_machine, tmp_path, config, recipe, num_micro_batches=num_micro_batches, num_steps=3, placement=placement
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("architecture", "dtype", "num_micro_batches", "chunk_tokens"),
    rotating(["llama_tied", "gemma2", "gpt2"], list(DTYPES.values()), [3, 1], [7, None], full_rotation=True),
)
def test_a_tied_head_that_is_summed_in_host_memory_changes_no_bit(
    tmp_path: Path, architecture: str, dtype: torch.dtype, num_micro_batches: int, chunk_tokens: int | None
) -> None:
    """Against plain PyTorch where a micro-batch is one chunk, and always against the sums on the GPU."""
    config = gpu_config(architecture)
    recipe = Recipe(dtype=dtype, max_grad_norm=0.5, chunk_tokens=chunk_tokens, attn_implementation=attention_of(config))
    [name] = [name for name, each in DTYPES.items() if each == dtype]
    trained = []
    for holds_head in (True, False):
        placement = replace(AHEAD, gpu_holds_head=holds_head)
        directory = tmp_path / str(holds_head)
        weights = initial_weights(config)
        with gpu_machine(directory, config, recipe, dtype=name, weights=weights, placement=placement) as ratel:
            steps = random_steps(3, num_micro_batches, packed=packs(config))
            trained.append((ratel.train(steps, recipe), ratel.weights()))
            if chunk_tokens is None:
                assert_same_training(*trained[-1], reference(config, steps, recipe, device=GPU.type))
    (outcomes, weights_of_gpu), (host_outcomes, weights_of_host) = trained
    assert [(each.loss, each.grad_norm) for each in outcomes] == [(each.loss, each.grad_norm) for each in host_outcomes]
    assert all(torch.equal(weights_of_gpu[name], weights_of_host[name]) for name in weights_of_gpu)


@pytest.mark.parametrize(("architecture", "offloading"), rotating(list(ARCHITECTURES), ["none", *OFFLOADING], every=3))
def test_offloading_changes_no_bit(tmp_path: Path, architecture: str, offloading: str) -> None:
    share, spilled_units = OFFLOADING.get(offloading, (0.0, 0))
    placement = replace(AHEAD, swapped=ChosenEverywhere(share, 3), spilled_units=spilled_units)
    recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=0.5)
    check_training(gpu_machine, tmp_path, gpu_config(architecture), recipe, placement=placement)


@pytest.mark.parametrize(
    ("architecture", "packed", "share"), rotating(["gpt2", "llama", "bloom"], [False, True], [0.0, 0.5, 1.0], offset=3)
)
def test_dropout_draws_the_same_when_recomputed(tmp_path: Path, architecture: str, packed: bool, share: float) -> None:
    config, recipe = gpu_config(architecture, **DROPOUT[architecture]), Recipe(dtype=torch.bfloat16)
    placement = Placement(swapped=ChosenEverywhere(share))
    check_training(gpu_machine, tmp_path, config, recipe, packed=packed, placement=placement)


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
@pytest.mark.parametrize("share", [0.0, 1.0], ids=["recomputed", "swapped"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_every_kernel_of_attention(tmp_path: Path, backend: SDPBackend, share: float, dropout: float) -> None:
    """Without packing, so that there is no mask: flash attention takes none. Efficient attention takes as many heads
    of keys as of queries."""
    if is_simulated() and backend != SDPBackend.MATH:
        pytest.skip("the simulated GPU has one kernel of attention")
    heads = {"num_key_value_heads": 4} if backend == SDPBackend.EFFICIENT_ATTENTION else {}
    config = gpu_config("llama", attention_dropout=dropout, **heads)
    placement = replace(AHEAD, swapped=ChosenEverywhere(share))
    with sdpa_kernel(backend):
        recipe = Recipe(dtype=torch.bfloat16)
        check_training(gpu_machine, tmp_path, config, recipe, packed=False, num_tokens=64, placement=placement)


def test_evaluation_is_that_of_plain_pytorch(tmp_path: Path) -> None:
    config = gpu_config("llama")
    recipe = Recipe(dtype=torch.bfloat16)
    [batches] = random_steps(1, 3)
    with gpu_machine(tmp_path, config, recipe) as ratel:
        total = ratel.engine.evaluate(batches).loss
    wanted = reference(config, [batches], recipe, device=GPU.type)
    assert total / sum(batch.num_targets for batch in batches) == wanted.losses[0]
