"""The diffusion models of the Ratel paper's Table VI are planned, on its machine, from their configurations alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import ratel
from tests.tiers import sample

TABLE_VI = {
    "0.67B": (28, 16, 1152),
    "0.90B": (30, 16, 1280),
    "1.4B": (32, 16, 1536),
    "10B": (28, 32, 4096),
    "20B": (40, 40, 5120),
    "40B": (48, 56, 7168),
}
"""Layers, heads and the hidden dimension by the name that the paper has for it."""
MACHINE = Path(__file__).parents[2] / "configs" / "hardware" / "paper-4090-12ssd.yaml"
BATCH = 32
TOKENS = 1024
"""Patches of a latent of an image of 512 x 512: 64 x 64, two by two."""


def _planned(directory: Path, name: str) -> dict[str, dict[str, float]]:
    num_layers, num_heads, hidden_size = TABLE_VI[name]
    base = directory / name
    base.mkdir()
    values = {
        "_class_name": "DiTTransformer2DModel", "num_layers": num_layers, "num_attention_heads": num_heads,
        "attention_head_dim": hidden_size // num_heads, "in_channels": 4, "out_channels": 8, "sample_size": 64,
        "patch_size": 2, "num_embeds_ada_norm": 1000,
    }  # fmt: skip
    (base / "config.json").write_text(json.dumps(values))
    config = directory / f"{name}.yaml"
    rows = f"datasets: [{{path: {directory / 'latents.safetensors'}, type: latents}}]"
    config.write_text(f"base_model: {base}\n{rows}\nmicro_batch_size: {BATCH}\nmax_grad_norm: null\n")
    ended = ratel("plan", config, "--hardware", MACHINE, "--json")
    assert ended.code == 0, ended.stderr
    found: dict[str, dict[str, float]] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize("name", sample(TABLE_VI, every=6))
def test_it_is_planned(tmp_path: Path, name: str) -> None:
    """Parameters as counted by hand; the operations of a forward pass, but for what no layer's product is."""
    num_layers, _, h = TABLE_VI[name]
    plan = _planned(tmp_path, name)
    norm = 256 * h + h + h * h + h + 1001 * h + 6 * h * h + 6 * h  # timestep, class, and six shifts, scales and gates
    block = norm + 4 * h * h + 4 * h + 8 * h * h + 5 * h
    outside = (16 * h + h) + (2 * h * h + 2 * h) + (32 * h + 32)
    assert plan["model"]["num_parameters"] == num_layers * block + outside
    assert plan["workload"]["sequence_len"] == TOKENS
    products = BATCH * num_layers * (TOKENS * 2 * 12 * h * h + 4 * TOKENS * TOKENS * h + 2 * (norm - 1001 * h))
    assert plan["model"]["flops_forward"] == pytest.approx(products, rel=0.02)
