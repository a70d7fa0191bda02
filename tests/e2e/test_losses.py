"""Losses that a config chooses, against the definitions of the trainers that they come from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers.trainer_pt_utils import LabelSmoother

from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import (
    as_json,
    assert_rejected,
)
from tests.e2e.trained import in_plain_torch

NUM_STEPS = 3
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def smoothed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """transformers' own, which is a mean."""
    mean: torch.Tensor = LabelSmoother(epsilon=0.2)({"logits": logits.unsqueeze(0)}, targets.view(1, -1, 1))
    return mean * (targets != -100).sum()


def dft(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The published formula: minus log p, times p without a gradient."""
    kept = targets != -100
    chosen = logits[kept].softmax(dim=-1).gather(1, targets[kept].unsqueeze(1)).squeeze(1)
    return (chosen.detach() * -chosen.log()).sum()


@pytest.mark.parametrize(
    ("keys", "loss"),
    [
        ({"label_smoothing_factor": 0.2}, smoothed),
        ({"use_dft_loss": True}, dft),
        ({"use_dynamic_finetuning": True, "gradient_accumulation_steps": 3}, dft),
    ],
)
def test_it_trains_what_the_other_trainer_does(
    make_config: MakeConfig, base: Path, keys: dict[str, object], loss: Loss
) -> None:
    config = make_config(**keys, max_steps=NUM_STEPS, dtype="float32")
    config.succeed()
    wanted = in_plain_torch(config, base, token_loss=loss)
    assert [line["loss"] for line in config.metrics] == pytest.approx(wanted.losses, rel=2e-5)
    for name, values in config.exported.items():
        torch.testing.assert_close(values, wanted.weights[name], rtol=1e-3, atol=2e-4)
    assert next(iter(keys)).replace("dynamic_finetuning", "dft_loss") in (config.output / "README.md").read_text()


@pytest.mark.full
def test_another_loss_is_another_run_and_is_no_perplexity(make_config: MakeConfig, rows: Path) -> None:
    """`eval` has the cross-entropy, whatever was trained with."""
    config, plain = make_config(max_steps=1, label_smoothing_factor=0.2), make_config("plain", max_steps=1)
    config.succeed()
    plain.succeed()
    ended = config.finetune("label_smoothing_factor=0.1", "max_steps=2")
    assert_rejected(ended, 2, "label_smoothing_factor was 0.2, is now 0.1")
    losses = [as_json("eval", each, rows)["loss"] for each in (config, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
