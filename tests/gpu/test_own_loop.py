"""A loop of one's own on a GPU: the weights that plain PyTorch would have produced there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import ratel_cli as ratel
from tests.e2e.runs import measured_briefly
from tests.engine.exactness import reference
from tests.engine.machine import attention_of, initial_weights
from tests.gpu.machine import GPU, NEEDS_GPU, gpu_config
from tests.library.test_own_loop import RATES, batches, exported, for_reference
from tests.reference import Recipe
from tests.tiers import thinned

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("max_grad_norm", thinned([None, 0.5], every=2, offset=1))
def test_it_trains_as_plain_pytorch_does(tmp_path: Path, max_grad_norm: float | None) -> None:
    config, steps = gpu_config("llama"), batches(3, 2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(initial_weights(config), strict=False)
    model.save_pretrained(tmp_path / "base")
    losses = []
    with (
        measured_briefly(),
        ratel.open(tmp_path / "base", storage=[tmp_path / "state"], max_grad_norm=max_grad_norm) as own,
    ):
        for step, rate in zip(steps, RATES, strict=False):
            losses.append(own.forward_backward(step))
            own.step(learning_rate=rate)
        own.save_pretrained(tmp_path / "out")
    recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=max_grad_norm, weight_decay=0.0, learning_rates=RATES[:3])
    recipe = replace(recipe, attn_implementation=attention_of(config))
    plain = reference(config, [list(map(for_reference, step)) for step in steps], recipe, device=GPU.type)
    assert losses == list(plain.losses)
    for name, found in exported(tmp_path / "out").items():
        assert torch.equal(found, plain.weights[name].bfloat16()), name
