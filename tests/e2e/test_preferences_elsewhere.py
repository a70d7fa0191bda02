"""Preference tuning in several processes, and beside quantised models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.e2e.conftest import MakeConfig
from tests.e2e.preferences import assert_same_training, keys_of, pairs, recipe, verdicts, weights_of, write
from tests.quantised import Form, dequantised_weights
from tests.tiers import rotating
from tests.trl_oracle import tune

WEIGHTS = "model.safetensors"


@pytest.mark.full
@pytest.mark.parametrize(("method", "adapted"), rotating(["dpo", "kto", "simpo"], [False, True], full_rotation=True))
def test_ranks_learn_what_one_process_learns(
    method: str, adapted: bool, make_config: MakeConfig, tmp_path: Path
) -> None:
    """The reference model, too, which each of them computes a part of."""
    data = write(tmp_path / "rows.jsonl", verdicts() if method == "kto" else pairs())
    keys = {**keys_of(recipe(method, adapted=adapted)), "rows": data}
    alone = make_config("alone", **{**keys, "gradient_accumulation_steps": 4})
    config = make_config("ranks", **keys)
    alone.succeed()
    config.succeed_ranks(2)
    for line, wanted in zip(config.metrics, alone.metrics, strict=True):
        assert line["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert line["preferences"] == pytest.approx(wanted["preferences"], rel=1e-4, abs=1e-5)
    found = weights_of(config)
    for name, values in weights_of(alone).items():
        torch.testing.assert_close(found[name], values, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("form", "method"), rotating(["nf4 double", "int8"], ["dpo", "kto", "orpo"], full_rotation=True)
)
def test_beside_a_quantised_model(form: Form, method: str, make_config: MakeConfig, base: Path, tmp_path: Path) -> None:
    """As TRL beside the matrices that bitsandbytes makes: the reference is the quantised model."""
    rows, wanted = verdicts() if method == "kto" else pairs(), recipe(method, adapted=True)
    key = "load_in_8bit" if form == "int8" else "load_in_4bit"
    config = make_config(rows=write(tmp_path / "rows.jsonl", rows), **keys_of(wanted), **{key: True})
    config.succeed()
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    weights = dequantised_weights(model, load_file(base / WEIGHTS), form, torch.float32)
    plain = tmp_path / "plain"
    plain.mkdir()
    for path in base.iterdir():
        if path.name != WEIGHTS:
            (plain / path.name).write_bytes(path.read_bytes())
    save_file({name: each.contiguous() for name, each in weights.items()}, plain / WEIGHTS, {"format": "pt"})
    assert_same_training(config, tune(plain, rows, wanted))
