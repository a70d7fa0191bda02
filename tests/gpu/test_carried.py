"""On a GPU too: what goes from use to use besides hidden states, its gradients, and the memory that it takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratel_cli.sizes import DtypeName
from tests.engine.exactness import AHEAD, PLACEMENTS, check_training
from tests.engine.mixed import CARRYING, mixed_config, mixed_recipe
from tests.gpu.machine import NEEDS_GPU, gpu_machine
from tests.simulated_gpu import is_simulated
from tests.tiers import rotating

pytestmark = NEEDS_GPU

FAMILIES = [family for family in CARRYING if family != "zaya" or not is_simulated()]
"""The simulated GPU has no convolutions."""


@pytest.mark.parametrize(
    ("family", "dtype", "max_grad_norm"),
    rotating(FAMILIES, ["bfloat16", "float32"], [None, 0.5], every=8),
)
def test_equals_plain_pytorch(tmp_path: Path, family: str, dtype: DtypeName, max_grad_norm: float | None) -> None:
    recipe = mixed_recipe(family, dtype, max_grad_norm=max_grad_norm)
    check_training(gpu_machine, tmp_path, mixed_config(family), recipe, num_micro_batches=3, placement=AHEAD)


@pytest.mark.parametrize(("placement", "family"), rotating(list(PLACEMENTS), FAMILIES, every=24))
def test_wherever_bytes_rest(tmp_path: Path, placement: str, family: str) -> None:
    recipe = mixed_recipe(family, "bfloat16", max_grad_norm=0.5)
    check_training(gpu_machine, tmp_path, mixed_config(family), recipe, **PLACEMENTS[placement])
