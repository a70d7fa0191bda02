"""Adapters in a loop of one's own, against PEFT in plain PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ratel_cli as ratel
from tests.engine.architectures import tiny_config
from tests.engine.machine import attention_of, initial_weights
from tests.library.adapters import IN_PEFT, KEYS
from tests.library.test_own_loop import RATES, Batch, batches, for_reference, saved, wanted
from tests.quantised import Form, dequantised_weights
from tests.reference import Recipe, Trained, train_in_memory
from tests.tiers import rotating, thinned

pytestmark = pytest.mark.usefixtures("_measured_briefly")


def trained(
    base: Path, directory: Path, steps: list[list[Batch]], adapter: Mapping[str, object], *, first: int = 0
) -> list[float]:
    """The losses of a loop from step `first` on, which saves the adapter. The state is in the directory."""
    with ratel.open(base, storage=[directory / "state"], dtype="bfloat16", device="cpu", adapter=adapter) as model:
        losses = []
        for batch, rate in zip(steps[first:], RATES[first:], strict=False):
            losses.append(model.forward_backward(batch))
            model.step(learning_rate=rate)
        model.save_pretrained(directory / "adapter", overwrite=True)
    return losses


LORA: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "all linear": ({}, {}),
    "a regular expression": (
        {"lora_target_modules": r".*\.(q_proj|c_attn)"},
        {"target_modules": r".*\.(q_proj|c_attn)"},
    ),
    "rslora": ({"peft_use_rslora": True}, {"use_rslora": True}),
}
"""Keys of a config, and what they are in PEFT."""
FORMS = [pytest.param("load_in_4bit", "nf4 double"), pytest.param("load_in_8bit", "int8")]


@pytest.mark.parametrize(("architecture", "what"), rotating(["llama", "gpt2", "mixtral"], list(LORA)))
def test_it_trains_the_adapter_that_peft_trains(tmp_path: Path, architecture: str, what: str) -> None:
    keys, lora = LORA[what]
    base, steps = saved(tmp_path / "base", architecture), batches(len(RATES), 2)
    before = (base / "model.safetensors").read_bytes()
    losses = trained(base, tmp_path, steps, KEYS | keys)
    plain = wanted(
        architecture, steps, Recipe(dtype=torch.bfloat16, weight_decay=0.0, lora=tuple({**IN_PEFT, **lora}.items()))
    )
    assert losses == list(plain.losses)
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    adapters = {f"base_model.model.{n.replace('.default', '')}": v for n, v in plain.weights.items() if "lora_" in n}
    assert found.keys() == adapters.keys()
    assert [name for name, values in adapters.items() if not torch.equal(found[name], values)] == []
    assert (base / "model.safetensors").read_bytes() == before
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it has ranks for experts, which have no adapter
        assert PeftModel.from_pretrained(loaded, tmp_path / "adapter").active_adapter == "default"


@pytest.mark.parametrize(("key", "form"), thinned(FORMS, every=2))
def test_beside_a_quantised_model(tmp_path: Path, key: str, form: Form) -> None:
    base, steps = saved(tmp_path / "base", "llama"), batches(len(RATES), 2)
    losses = trained(base, tmp_path, steps, KEYS | {key: True})
    config = tiny_config("llama")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    recipe = Recipe(dtype=torch.bfloat16, weight_decay=0.0, lora=tuple(IN_PEFT.items()))
    weights = dequantised_weights(model, initial_weights(config), form, torch.bfloat16)
    assert losses == list(plain_of(steps, weights, recipe).losses)


def plain_of(steps: list[list[Batch]], weights: dict[str, torch.Tensor], recipe: Recipe) -> Trained:
    config = tiny_config("llama")
    recipe = replace(recipe, attn_implementation=attention_of(config), learning_rates=RATES)
    return train_in_memory(config, weights, [list(map(for_reference, step)) for step in steps], recipe)


def test_it_goes_on_where_it_was_left(tmp_path: Path) -> None:
    base, steps = saved(tmp_path / "base", "llama"), batches(len(RATES), 1)
    wanted = trained(base, tmp_path / "whole", steps, KEYS)
    losses = trained(base, tmp_path / "parts", steps[:2], KEYS)
    losses += trained(base, tmp_path / "parts", steps, KEYS, first=2)
    assert losses == wanted
    found, whole = (load_file(tmp_path / each / "adapter" / "adapter_model.safetensors") for each in ("parts", "whole"))
    assert all(torch.equal(found[name], values) for name, values in whole.items())
    with pytest.raises(ratel.RatelError, match="another model or dtype"):
        trained(base, tmp_path / "parts", steps, KEYS | {"lora_r": 2})


def test_what_is_wrong_with_an_adapter(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "llama")
    for keys, message in (
        ({"r": 4}, "adapter: r is no key of an adapter"),
        ({"lora_r": 0}, "lora_r"),
        ({"lora_target_modules": ["nothing"]}, "has no module named nothing"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "are both set"),
    ):
        with pytest.raises(ratel.RatelError, match=message):
            ratel.open(base, storage=[tmp_path / "state"], device="cpu", adapter=keys)
        assert not (tmp_path / "state").exists()
    with pytest.raises(ratel.RatelError, match="adapter is for language models"):
        ratel.open(torch.nn.Linear(2, 2), storage=[tmp_path / "state"], device="cpu", adapter={})
