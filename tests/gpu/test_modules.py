"""A module of one's own on a GPU, by `forward_backward`: the weights that plain PyTorch would have produced there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.runs import measured_briefly
from tests.gpu.machine import GPU, NEEDS_GPU
from tests.library.test_modules import KINDS, check
from tests.tiers import pairwise, thinned

pytestmark = NEEDS_GPU


@pytest.mark.parametrize(
    ("name", "dtype", "num_micro_batches", "max_grad_norm"),
    thinned(pairwise(list(KINDS), [torch.float32, torch.bfloat16], [1, 3], [None, 0.5]), every=3),
)
def test_it_trains_as_plain_pytorch_does(
    tmp_path: Path, name: str, dtype: torch.dtype, num_micro_batches: int, max_grad_norm: float | None
) -> None:
    with measured_briefly():
        check(
            tmp_path,
            KINDS[name],
            dtype,
            num_micro_batches=num_micro_batches,
            max_grad_norm=max_grad_norm,
            oracle_device=GPU.type,
            device="auto",
        )
