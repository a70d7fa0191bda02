"""What a run trains, as one axis of the suites: all weights, an adapter, or all weights by another optimizer.

A suite asks for one undisturbed run of each kind, and compares runs with the one of their kind.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.e2e.runs import Tensors, adapts, output_of, succeed, write_config

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
OfEach = Callable[[str], Path]
"""The config of the run that trains what has this name. Tests must not change it."""


def run_of_each(
    directories: pytest.TempPathFactory,
    *,
    base: Path,
    rows: Path,
    run: Callable[[Path], object] = succeed,
    **changes: object,
) -> OfEach:
    """Undisturbed runs with these keys, each made when it is first asked for."""

    @cache
    def trained(what: str) -> Path:
        config = write_config(directories.mktemp("undisturbed"), base=base, rows=rows, **{**changes, **TRAINED[what]})
        run(config)
        return config

    return trained


def named_as_exported(weights: Tensors) -> Tensors:
    """Weights of a model that PEFT trains: its adapter, by the names that the export has."""
    return {
        f"base_model.model.{name.replace('.default', '')}": each for name, each in weights.items() if "lora_" in name
    }


def load_export(config: Path, directory: Path | None = None) -> torch.nn.Module:
    """What a run has exported to its output directory or another one, loaded as its card says."""
    directory = directory or output_of(config)
    if not adapts(config):
        return AutoModelForCausalLM.from_pretrained(directory)
    base = yaml.safe_load(config.read_text())["base_model"]
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), directory)
