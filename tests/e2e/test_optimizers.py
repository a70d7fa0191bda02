"""Optimizers that a config chooses: the export is what plain PyTorch trains, however the run went."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import (
    assert_rejected,
    save_base,
    works,
)
from tests.e2e.trained import assert_trained, in_plain_torch
from tests.kernels.oracle import needs_fused_torch
from tests.tiers import rotating, thinned

KEYS: dict[str, dict[str, object]] = {
    "adamw_8bit": {"optimizer": "adamw_8bit", "weight_decay": 0.1},
    "lion": {"optimizer": "lion", "learning_rate": 1e-4, "weight_decay": 0.1},
    "sgd": {"optim": "sgd", "learning_rate": 0.1, "weight_decay": 0.01},
    "momentum": {"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 0.1},
    "muon": {"optimizer": "muon", "weight_decay": 0.1},
}
WITHOUT_MASTER: dict[str, dict[str, object]] = {
    "adamw without a master": {"bf16_master": "stochastic"},
    "adamw_8bit without a master": {"bf16_master": "stochastic", **KEYS["adamw_8bit"]},
}


@pytest.fixture(scope="module")
def wide_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its matrices have 4096 elements and more."""
    return save_base(tmp_path_factory.mktemp("models") / "wide", hidden_size=64)


@needs_fused_torch
@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    thinned(
        [
            *rotating(list(KEYS), ["bfloat16", "float32"]),
            *(pytest.param(optimizer, "bfloat16") for optimizer in WITHOUT_MASTER),
        ],
        every=3,
        offset=1,
    ),
)
def test_the_export_is_what_pytorch_trains(
    make_config: MakeConfig, wide_base: Path, optimizer: str, dtype: str
) -> None:
    keys = (KEYS | WITHOUT_MASTER)[optimizer]
    config = make_config(**keys, base_model=str(wide_base), dtype=dtype, max_steps=4, lr_scheduler="constant")
    config.succeed()
    assert_trained(config, in_plain_torch(config, wide_base))
    name = "sgd" if optimizer == "momentum" else optimizer.partition(" ")[0]
    card = (config.output / "README.md").read_text()
    assert f"optimizer: {name}" in card or name == "adamw"
    assert ("bf16_master: stochastic" in card) == (optimizer in WITHOUT_MASTER)
    works("verify", config)


@pytest.mark.parametrize(
    "optimizer", thinned(["adamw_8bit", "momentum", "muon", "adamw_8bit without a master"], every=4, offset=3)
)
def test_a_killed_run_goes_on(make_config: MakeConfig, wide_base: Path, optimizer: str) -> None:
    keys = {**(KEYS | WITHOUT_MASTER)[optimizer], "base_model": str(wide_base), "max_steps": 4}
    keys |= {"dtype": "bfloat16"} if optimizer in WITHOUT_MASTER else {}
    undisturbed, config = make_config("undisturbed", **keys), make_config(**keys)
    undisturbed.succeed()
    config.run_until_killed(kill_at="commit.written:3")
    assert "resuming from step" in config.succeed()
    config.assert_same_result(undisturbed)


def test_another_optimizer_is_another_run(make_config: MakeConfig) -> None:
    config = make_config(max_steps=1)
    config.succeed()
    ended = config.finetune("optimizer=lion", "max_steps=2")
    assert_rejected(ended, 2, "optimizer was adamw, is now lion")
    ended = config.finetune("bf16_master=stochastic", "dtype=bfloat16", "max_steps=2")
    assert_rejected(ended, 2, "bf16_master was fp32, is now stochastic")


@pytest.mark.full
@needs_fused_torch
@pytest.mark.parametrize("optimizer", ["adamw_8bit", "lion"])
def test_two_ranks(make_config: MakeConfig, wide_base: Path, base: Path, optimizer: str) -> None:
    """A slice has whole pages in every field, so blocks as small as these are not cut: one rank has all of them."""
    model = wide_base if optimizer == "adamw_8bit" else base
    keys = {**KEYS[optimizer], "base_model": str(model), "max_steps": 3, "micro_batch_size": 1, "dtype": "bfloat16"}
    keys |= {"lr_scheduler": "constant"}
    config = make_config("ranks", **keys, gradient_accumulation_steps=2)
    config.succeed_ranks(2)
    whole = make_config("whole", **keys, gradient_accumulation_steps=4)
    assert_trained(config, in_plain_torch(config, model, data_of=whole, of_rank=2))
    works("verify", config)
