"""LoRA on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratel_cli.sizes import DtypeName
from tests.engine.architectures import tiny_config
from tests.engine.exactness import AHEAD, PLACEMENTS, check_training
from tests.engine.test_adapters import ADAPTERS, recipe_of
from tests.gpu.machine import NEEDS_GPU, gpu_machine
from tests.tiers import rotating

pytestmark = NEEDS_GPU


@pytest.mark.parametrize(
    ("adapter", "architecture", "dtype", "num_micro_batches", "max_grad_norm"),
    rotating(
        list(ADAPTERS),
        ["llama", "llama_tied", "gpt2"],
        ["bfloat16", "float16"],
        [1, 3],
        [None, 0.5],
        every=4,
        full_rotation=True,
    ),
)
def test_equals_peft(
    tmp_path: Path,
    architecture: str,
    adapter: str,
    dtype: DtypeName,
    num_micro_batches: int,
    max_grad_norm: float | None,
) -> None:
    settings = ADAPTERS[adapter]
    recipe = recipe_of(settings, dtype, max_grad_norm=max_grad_norm)
    check_training(
        gpu_machine,
        tmp_path,
        tiny_config(architecture),
        recipe,
        num_micro_batches=num_micro_batches,
        placement=AHEAD,
        adapter=settings,
    )


@pytest.mark.parametrize(
    ("placement", "architecture"), rotating(list(PLACEMENTS), ["llama", "llama_tied"], every=6, full_rotation=True)
)
def test_wherever_bytes_rest(tmp_path: Path, placement: str, architecture: str) -> None:
    settings = ADAPTERS["dropout"]
    recipe = recipe_of(settings, "bfloat16", max_grad_norm=0.5)
    check_training(gpu_machine, tmp_path, tiny_config(architecture), recipe, adapter=settings, **PLACEMENTS[placement])


@pytest.mark.parametrize(("architecture", "dtype"), [("llama_tied", "bfloat16"), ("qwen3_moe", "float16")])
def test_a_base_that_stays_in_its_files(tmp_path: Path, architecture: str, dtype: DtypeName) -> None:
    settings = ADAPTERS["all linear"]
    recipe = recipe_of(settings, dtype, max_grad_norm=1.0)
    placed = dict[str, object](base_directory=tmp_path / "base", placement=AHEAD)
    check_training(gpu_machine, tmp_path, tiny_config(architecture), recipe, adapter=settings, **placed)
