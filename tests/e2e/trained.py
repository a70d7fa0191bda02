"""What a run trains, as one axis of the suites: all weights, an adapter, or all weights by another optimizer.

A suite asks for one undisturbed run of each kind, and compares runs with the one of their kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.e2e.runs import Config, Tensors, write_config
from tests.reference import Trained, train_in_memory

_ADAPTER: dict[str, object] = {"lora_r": 4, "lora_alpha": 8}
TRAINED: dict[str, dict[str, object]] = {
    "all weights": {},
    "lora": {**_ADAPTER, "adapter": "lora", "lora_dropout": 0.1},
    "lora in place": {**_ADAPTER, "adapter": "lora", "base_storage": "in_place"},
    "qlora": {**_ADAPTER, "adapter": "qlora", "load_in_4bit": True},
    "dora, head whole": {**_ADAPTER, "adapter": "lora", "peft_use_dora": True, "lora_modules_to_save": ["lm_head"]},
    "adamw_8bit": {"optimizer": "adamw_8bit"},
    "muon": {"optimizer": "muon"},
    "without a master": {"bf16_master": "stochastic", "dtype": "bfloat16"},
}
"""By name: the keys of a config."""
LORA_IN_PEFT: tuple[tuple[str, object], ...] = (
    ("r", 4), ("lora_alpha", 8), ("lora_dropout", 0.1), ("target_modules", "all-linear"), ("task_type", "CAUSAL_LM"),
)  # fmt: skip
"""`lora` in PEFT's words."""
WHOLE_OR_ADAPTER = ("all weights", "lora", "qlora")
"""They differ in what is exported, and in the form that the weights have in the store."""
OfEach = Callable[[str], Config]
"""The config of the run that trains what has this name. Tests must not change it."""


def run_of_each(
    directories: pytest.TempPathFactory,
    *,
    base: Path,
    rows: Path,
    run: Callable[[Config], object] = Config.succeed,
    **changes: object,
) -> OfEach:
    """Undisturbed runs with these keys, each made when it is first asked for."""

    @cache
    def trained(what: str) -> Config:
        config = write_config(directories.mktemp("undisturbed"), base=base, rows=rows, **{**changes, **TRAINED[what]})
        run(config)
        return config

    return trained


def saved_name(name: str) -> str:
    """The name that PEFT saves a parameter of its model under."""
    return "base_model.model." + name.replace("_vector.default.weight", "_vector").replace(".default", "")


def named_as_exported(weights: Tensors) -> Tensors:
    """Weights of a model that PEFT trains: its adapter, by the names that the export has."""
    return {saved_name(name): each for name, each in weights.items() if "lora_" in name}


def in_plain_torch(
    config: Config, base: Path, *, weights: Tensors | None = None, data_of: Config | None = None, **changes: object
) -> Trained:
    """What plain PyTorch trains of a base model in the steps of a run. `weights`: in place of those of its files;
    `data_of`: the config whose batches they are, if it is another one; `changes`: of the recipe."""
    data, described = (data_of or config).load_data(), AutoConfig.from_pretrained(base)
    steps = [data.step(step) for step in range(len(config.metrics))]
    weights = load_file(base / "model.safetensors") if weights is None else weights
    return train_in_memory(described, weights, steps, replace(config.recipe, **changes))


def assert_trained(config: Config, trained: Trained, *, whole: tuple[str, ...] = ()) -> None:
    """The run has these weights in its export, bit for bit and in its dtype, and these losses and norms. Of a run of an
    adapter these are the adapter's, and those of the parameters that it has trained `whole`, which end so."""
    dtype, found, wanted = config.recipe.dtype, config.exported, trained.weights
    if config.adapts:
        whole_ones = {saved_name(name): each.to(dtype) for name, each in wanted.items() if name.endswith(whole)}
        wanted = {**whole_ones, **named_as_exported(wanted)}
    else:
        wanted = {name: each.to(dtype) for name, each in wanted.items()}
    assert found.keys() == wanted.keys()
    assert {name: each.dtype for name, each in found.items()} == {name: each.dtype for name, each in wanted.items()}
    assert [name for name, each in wanted.items() if not torch.equal(found[name], each)] == []
    assert [line["loss"] for line in config.metrics] == list(trained.losses)
    assert [line["grad_norm"] for line in config.metrics] == list(trained.norms)


def load_export(config: Config, directory: Path | None = None) -> torch.nn.Module:
    """What a run has exported to its output directory or another one, loaded as its card says."""
    directory = directory or config.output
    if not config.adapts:
        return AutoModelForCausalLM.from_pretrained(directory)
    base = yaml.safe_load(config.read_text())["base_model"]
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), directory)
