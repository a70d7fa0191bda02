"""`ratel finetune` on latents on a GPU: the weights that plain PyTorch would have produced there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.latents import denoised_by_pytorch, exported_denoiser, latents_of, save_denoiser, write_latents
from tests.e2e.runs import DTYPES, write_config
from tests.e2e.test_latents import KEYS
from tests.gpu.machine import GPU, NEEDS_GPU
from tests.gpu.test_runs import GPU_KEY
from tests.tiers import rotating

pytestmark = NEEDS_GPU


@pytest.mark.parametrize(("dtype", "clip"), rotating(["float32", "bfloat16"], [0.5, None], every=2, full_rotation=True))
def test_it_trains_as_plain_pytorch_does(tmp_path: Path, dtype: str, clip: float | None) -> None:
    base, rows = save_denoiser(tmp_path / "dit"), write_latents(tmp_path / "latents.safetensors")
    changes = {**KEYS, "dtype": dtype, "max_grad_norm": clip, "device": GPU_KEY, "deterministic": True}
    datasets = [{"path": str(rows), "type": "latents"}]
    config = write_config(tmp_path / "run", base=base, rows=rows, **{**changes, "datasets": datasets})
    config.succeed()
    before = {name: each.float() for name, each in load_file(base / "diffusion_pytorch_model.safetensors").items()}
    data = latents_of(config)
    steps = [[batch.to(GPU) for batch in data.step(number)] for number in range(5)]
    wanted = denoised_by_pytorch(base, before, steps, replace(config.recipe, device=GPU.type))
    assert [line["grad_norm"] for line in config.metrics] == list(wanted.norms)
    for name, values in exported_denoiser(config.output).items():
        assert torch.equal(values, wanted.weights[name].to(DTYPES[dtype])), name
