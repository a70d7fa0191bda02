"""A hooked module on a GPU: the weights that plain PyTorch would have produced there."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ratel_cli as ratel
from tests.gpu.machine import GPU, NEEDS_GPU
from tests.library.nets import NetBatch
from tests.library.test_hook import LEARNING_RATE, built, hooked, net_steps, run, saved, wanted
from tests.reference import Recipe
from tests.tiers import pairwise, thinned

pytestmark = NEEDS_GPU


def on_gpu(batch: NetBatch) -> NetBatch:
    inputs = {name: each.to(GPU) for name, each in batch.inputs.items()}
    return replace(batch, inputs=inputs, target=batch.target.to(GPU))


@pytest.mark.parametrize(
    ("name", "dtype", "num_rounds", "max_grad_norm"),
    thinned(
        pairwise(
            ["sequential", "two streams", "gpt2", "llama", "bert", "albert", "t5"],
            [torch.float32, torch.bfloat16],
            [1, 2],
            [None, 0.5],
        ),
        every=2,
    ),
)
def test_it_trains_as_plain_pytorch_does(
    tmp_path: Path, name: str, dtype: torch.dtype, num_rounds: int, max_grad_norm: float | None
) -> None:
    plain = built(name, dtype)
    model = copy.deepcopy(plain)
    steps = [list(map(on_gpu, step)) for step in net_steps(name, 3, num_rounds)]
    recipe = Recipe(
        dtype=dtype, learning_rate=LEARNING_RATE, weight_decay=0.1, max_grad_norm=max_grad_norm, device=GPU.type
    )
    trained = wanted(name, plain, steps, recipe)
    torch.manual_seed(3)
    with hooked(name, model, tmp_path) as state:
        ratel.AdamW(
            model, lr=LEARNING_RATE, weight_decay=0.1, max_grad_norm=max_grad_norm, accumulation_steps=num_rounds
        )
        assert {each.device.type for each in model.parameters()} == {GPU.type}
        found = run(name, model, steps, state)
        assert (found.losses, found.norms) == (trained.losses, trained.norms)
        weights = saved(state, tmp_path)
    assert trained.weights.keys() <= weights.keys()
    for each, wanted_values in trained.weights.items():
        assert torch.equal(weights[each], wanted_values.to(dtype)), each
