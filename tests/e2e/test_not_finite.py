"""Weights that float16 cannot hold, and runs that learn nothing: no such run succeeds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import assert_rejected
from tests.e2e.test_adapters import CHANGES
from tests.e2e.test_quantised_bases import WEIGHTS, copied
from tests.tiers import thinned

FP16: dict[str, object] = {"dtype": "float16", "max_steps": 3}


def with_weight(base: Path, directory: Path, name: str, number: float, *, everywhere: bool = False) -> Path:
    """The base model with another weight in a tensor."""
    tensors = load_file(base / WEIGHTS)
    tensors[name].view(-1)[slice(None) if everywhere else slice(5, 6)] = number
    return copied(base, directory, tensors)


@pytest.mark.parametrize("keys", thinned([{}, CHANGES], every=2), ids=["full", "adapter"])
def test_a_base_beyond_float16(make_config: MakeConfig, base: Path, tmp_path: Path, keys: dict[str, object]) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    config = make_config(base=with_weight(base, tmp_path / "large", name, 70000.0), **{**keys, **FP16})
    for _ in range(2):
        ended = config.finetune()
        assert_rejected(ended, 2, f"tensor {name} has the value 70000, which is beyond the range of float16")
        assert "set dtype: bfloat16" in ended.stderr
    assert not list(config.output.glob("*.safetensors"))
    config.succeed("dtype=bfloat16")


def test_a_run_that_applies_no_step_exports_nothing(make_config: MakeConfig, base: Path, tmp_path: Path) -> None:
    """However often it is resumed."""
    large = with_weight(base, tmp_path / "large", "lm_head.weight", 60000.0, everywhere=True)
    config = make_config(base=large, **FP16)
    for num_steps in (3, 3, 4):
        ended = config.finetune(f"max_steps={num_steps}")
        assert_rejected(ended, 5, f"no update in {num_steps} steps", "and is not exported")
        assert "set dtype: bfloat16" in ended.stderr and f"{2.0 ** (16 - num_steps):g} now" in ended.stderr
        assert [line["applied"] for line in config.metrics] == [False] * num_steps
        assert not list(config.output.glob("*.safetensors"))


@pytest.mark.full
def test_ranks_that_apply_no_step(make_config: MakeConfig, base: Path, tmp_path: Path) -> None:
    large = with_weight(base, tmp_path / "large", "lm_head.weight", 60000.0, everywhere=True)
    config = make_config(base=large, **FP16)
    assert config.finetune("--ranks", "2").code == 5
    assert not list(config.output.glob("*.safetensors"))


def test_steps_that_are_skipped_at_first_are_no_failure(make_config: MakeConfig, base: Path, tmp_path: Path) -> None:
    """The loss is finite, its gradients are not: a smaller scale helps. Resuming goes on where the run was."""
    large = with_weight(base, tmp_path / "large", "model.norm.weight", 90.0, everywhere=True)
    config = make_config(base=large, **FP16)
    ended = config.finetune("max_steps=1")
    assert_rejected(ended, 5, "no update in 1 step: ")
    said = config.succeed("max_steps=12")
    assert [line["applied"] for line in config.metrics].count(True) > 0, said
    assert (config.output / WEIGHTS).is_file()


def test_a_run_that_begins_with_another_counts_its_own_steps(
    make_config: MakeConfig, base: Path, tmp_path: Path
) -> None:
    """Its first weights are the other run's, and so is the number of updates."""
    begun, config = make_config("begun", **FP16, max_grad_norm=None), make_config(**FP16)
    begun.succeed("max_steps=1", "learning_rate=3000.0")
    for num_steps in (3, 4):
        ended = config.finetune(f"max_steps={num_steps}", "--from", str(begun.output))
        assert_rejected(ended, 5, f"no update in {num_steps - 1} steps")
    assert not list(config.output.glob("*.safetensors"))


def test_numbers_that_are_not_finite_in_the_files_of_a_base(
    make_config: MakeConfig, base: Path, tmp_path: Path
) -> None:
    broken = with_weight(base, tmp_path / "broken", "model.norm.weight", torch.nan)
    ended = make_config(base=broken, **FP16).finetune()
    assert_rejected(ended, 2, "tensor model.norm.weight has the value nan")
    assert "range of" not in ended.stderr, "no other dtype helps"
    half = {name: each.half() for name, each in load_file(broken / WEIGHTS).items()}
    save_file(half, broken / WEIGHTS, metadata={"format": "pt"})
    ended = make_config("other", base=broken, **FP16).finetune()
    assert_rejected(ended, 2, "tensor model.norm.weight has the value nan")
