"""Layers of several blocks on a GPU: parameters in fp32 within a 16-bit model, and frozen ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ratel_cli.planning.profile.placement import bytes_ahead
from ratel_cli.sizes import DtypeName
from tests.engine.exactness import AHEAD, PLACEMENTS, check_training
from tests.engine.machine import initial_weights, random_steps
from tests.engine.mixed import IN_FP32, MIXED, TIED_AND_FROZEN, mixed_config, mixed_recipe
from tests.gpu.machine import NEEDS_GPU, gpu_machine
from tests.tiers import rotating

pytestmark = NEEDS_GPU


@pytest.mark.parametrize(
    ("family", "dtype", "num_micro_batches", "max_grad_norm"),
    rotating(MIXED, ["bfloat16", "float16"], [1, 3], [None, 0.5], every=2, full_rotation=True),
)
def test_equals_plain_pytorch(
    tmp_path: Path, family: str, dtype: DtypeName, num_micro_batches: int, max_grad_norm: float | None
) -> None:
    recipe = mixed_recipe(family, dtype, max_grad_norm=max_grad_norm)
    check_training(
        gpu_machine, tmp_path, mixed_config(family), recipe, num_micro_batches=num_micro_batches, placement=AHEAD
    )


@pytest.mark.parametrize(
    ("placement", "family", "max_grad_norm"), rotating(list(PLACEMENTS), MIXED, [None, 0.5], every=18)
)
def test_wherever_bytes_rest(tmp_path: Path, placement: str, family: str, max_grad_norm: float | None) -> None:
    recipe = mixed_recipe(family, "bfloat16", max_grad_norm=max_grad_norm)
    check_training(gpu_machine, tmp_path, mixed_config(family), recipe, **PLACEMENTS[placement])


@pytest.mark.full
@pytest.mark.parametrize("family", [IN_FP32, TIED_AND_FROZEN])
def test_a_window_may_end_within_any_block(tmp_path: Path, family: str) -> None:
    """At the beginning of every parameter of a layer, and of what is behind the last one."""
    config, recipe = mixed_config(family), mixed_recipe(family, "bfloat16", max_grad_norm=None)
    with gpu_machine(tmp_path / "spec", config, recipe, weights=initial_weights(config)) as ratel:
        spec = ratel.model.spec
    segment = next(each for each in reversed(spec.segments) if len(each.blocks) > 1)
    windows = [cut for cut in segment.cuts if cut > segment.blocks[0].compute_bytes - 2048]
    assert len(windows) > 1
    for window in windows:
        assert bytes_ahead(segment, window) == window
        placement = replace(AHEAD, gpu_window_bytes=window)
        steps = random_steps(2, 1, packed=False)
        check_training(gpu_machine, tmp_path / str(window), config, recipe, steps=steps, placement=placement)


def test_sums_of_all_blocks_of_a_layer_come_back_from_host_memory(tmp_path: Path) -> None:
    config, recipe = mixed_config(IN_FP32), mixed_recipe(IN_FP32, "bfloat16", max_grad_norm=0.5)
    placement = replace(AHEAD, gpu_holds_sums=False, gpu_holds_head=False)
    check_training(gpu_machine, tmp_path, config, recipe, num_micro_batches=3, placement=placement)
    assert recipe.kept and recipe.dtype == torch.bfloat16
