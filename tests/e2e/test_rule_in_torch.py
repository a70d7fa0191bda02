"""An optimizer in plain torch that the product does not have: planned, in two ranks, killed, resumed and verified."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratel_cli.schedule.rules import CHOICES
from tests import factored
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import (
    RULES_OF,
    works,
)
from tests.e2e.trained import assert_trained, in_plain_torch


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
    works("plan", config, "--ranks", "2")
    assert -9 in config.run_ranks(2, kill_at={0: "commit.written:4", 1: "commit.written:4"}), config.stderr
    assert "resuming from step" in config.succeed_ranks(2)
    whole = make_config("whole", **keys, gradient_accumulation_steps=4)
    assert_trained(config, in_plain_torch(config, base, data_of=whole, of_rank=2, optimizer="factored"))
    works("verify", config.output)
