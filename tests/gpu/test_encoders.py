"""Encoders and encoder-decoders on a GPU: the weights that plain PyTorch would have produced there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ratel_cli as ratel
from ratel_cli.sizes import Task
from tests.e2e.runs import measured_briefly
from tests.gpu.machine import GPU, NEEDS_GPU
from tests.library.encoders import AUTO_CLASSES, labelled_steps, saved_encoder, trained_encoder
from tests.library.test_encoders import RATES
from tests.reference import Recipe
from tests.tiers import pairwise, thinned

pytestmark = NEEDS_GPU


@pytest.mark.parametrize(
    ("name", "task", "num_micro_batches", "max_grad_norm"),
    [
        *thinned(
            pairwise(["bert", "modernbert", "electra"], ["masked_lm", "classification"], [1, 2], [None, 0.5]), every=6
        ),
        *thinned(pairwise(["t5", "t5 untied", "bart", "marian"], ["seq2seq"], [1, 2], [None, 0.5]), every=8),
    ],
)
def test_they_train_as_plain_pytorch_does(
    tmp_path: Path, name: str, task: Task, num_micro_batches: int, max_grad_norm: float | None
) -> None:
    steps = labelled_steps(task, 3, num_micro_batches)
    recipe = Recipe(
        dtype=torch.bfloat16,
        max_grad_norm=max_grad_norm,
        weight_decay=0.0,
        learning_rates=RATES[:3],
        device=GPU.type,
    )
    losses = []
    with (
        measured_briefly(),
        ratel.open(
            saved_encoder(tmp_path / "base", name, task),
            storage=[tmp_path / "state"],
            task=task,
            max_grad_norm=max_grad_norm,
        ) as model,
    ):
        for step, rate in zip(steps, RATES, strict=False):
            losses.append(model.forward_backward(step))
            model.step(learning_rate=rate)
        model.save_pretrained(tmp_path / "out")
    trained = trained_encoder(name, task, steps, recipe)
    assert losses == list(trained.losses)
    loaded = AUTO_CLASSES[task].from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    differing = [
        key for key, each in loaded.named_parameters() if not torch.equal(each, trained.weights[key].to(each.dtype))
    ]
    assert differing == []
