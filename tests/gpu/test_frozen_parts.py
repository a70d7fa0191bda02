"""Training a part of the weights on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ratel_cli.model.files.skeleton import DTYPES
from ratel_cli.sizes import DtypeName
from tests.engine.architectures import tiny_config
from tests.engine.exactness import AHEAD, PLACEMENTS, check_training
from tests.engine.test_frozen_parts import PARTS, names_of
from tests.gpu.machine import NEEDS_GPU, gpu_machine
from tests.reference import Recipe
from tests.tiers import rotating

pytestmark = NEEDS_GPU


@pytest.mark.parametrize(
    ("part", "architecture", "dtype", "num_micro_batches", "max_grad_norm"),
    rotating(
        list(PARTS),
        ["llama", "llama_tied", "gpt2", "mixtral"],
        ["bfloat16", "float16"],
        [1, 3],
        [None, 0.5],
        every=4,
        full_rotation=True,
    ),
)
def test_equals_plain_pytorch(
    tmp_path: Path,
    architecture: str,
    part: str,
    dtype: DtypeName,
    num_micro_batches: int,
    max_grad_norm: float | None,
) -> None:
    config = tiny_config(architecture)
    recipe = Recipe(
        dtype=DTYPES[dtype],
        unfrozen=names_of(config, part),
        max_grad_norm=max_grad_norm,
        loss_scale=1024.0 if dtype == "float16" else 1.0,
    )
    check_training(gpu_machine, tmp_path, config, recipe, num_micro_batches=num_micro_batches, placement=AHEAD)


@pytest.mark.parametrize(
    ("placement", "part", "architecture"),
    rotating(list(PLACEMENTS), list(PARTS), ["llama", "llama_tied"], every=12, full_rotation=True),
)
def test_wherever_bytes_rest(tmp_path: Path, placement: str, part: str, architecture: str) -> None:
    config = tiny_config(architecture)
    recipe = Recipe(dtype=torch.bfloat16, unfrozen=names_of(config, part), max_grad_norm=0.5)
    check_training(gpu_machine, tmp_path, config, recipe, **PLACEMENTS[placement])
