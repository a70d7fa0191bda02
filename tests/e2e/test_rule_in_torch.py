"""An optimizer in plain torch that the product does not have: planned, in two ranks, killed, resumed and verified."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from ratel_cli.schedule.rules import CHOICES
from tests import factored
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import (
    RULES_OF,
    exported,
    load_data,
    metrics,
    output_of,
    ratel,
    recipe_of,
    start_ranks,
    stderr_of,
    succeed_ranks,
    wait,
)
from tests.reference import train_in_memory


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, and in the processes of ranks."""
    monkeypatch.setitem(CHOICES, "lion", CHOICES["lion"])
    monkeypatch.setenv(RULES_OF, factored.__name__)
    factored.take_the_place_of_lion()


def test_it_trains_the_bits_of_pytorch(make_config: MakeConfig, base: Path) -> None:
    keys = {"optimizer": "lion", "learning_rate": 0.01, "weight_decay": 0.1, "dtype": "bfloat16", "max_steps": 4}
    keys |= {"lr_scheduler": "constant", "micro_batch_size": 1}
    config = make_config("ranks", **keys, gradient_accumulation_steps=2)
    planned = ratel("plan", config, "--ranks", "2")
    assert planned.code == 0, planned.stderr
    processes = start_ranks(config, 2, kill_at={0: "commit.written:4", 1: "commit.written:4"})
    assert -9 in [wait(process) for process in processes], stderr_of(config)
    assert "resuming from step" in succeed_ranks(config, 2)
    data = load_data(make_config("whole", **keys, gradient_accumulation_steps=4))
    wanted = train_in_memory(
        LlamaConfig.from_pretrained(base),
        load_file(base / "model.safetensors"),
        [data.step(step) for step in range(4)],
        replace(recipe_of(config), of_rank=2, optimizer="factored"),
    )
    found = exported(config)
    different = [name for name, values in wanted.weights.items() if not torch.equal(found[name], values.bfloat16())]
    assert different == []
    assert [line["loss"] for line in metrics(config)] == list(wanted.losses)
    verified = ratel("verify", output_of(config))
    assert verified.code == 0, verified.stderr
