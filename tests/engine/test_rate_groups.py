"""Groups of parameters with learning rates of their own: the bits of torch's AdamW with such groups."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from transformers import AutoModelForCausalLM

from ratel_cli.model.values.adapter_settings import AdapterSettings
from ratel_cli.model.values.rate_groups import SECOND, RateGroups
from ratel_cli.sizes import DtypeName
from tests.engine.architectures import tiny_config
from tests.engine.exactness import PLACEMENTS, check_training
from tests.engine.machine import machine
from tests.engine.test_adapters import recipe_of
from tests.reference import Recipe
from tests.tiers import rotating

RATES = (1.6e-2, 3e-5)
"""Of the second matrices, and of embedding and head."""
ENDS = {
    "llama": ("model.embed_tokens.weight", "lm_head.weight"),
    "llama_tied": ("model.embed_tokens.weight",),
    "gpt2": ("transformer.wte.weight",),
    "cohere": ("model.embed_tokens.weight",),
}
ADAPTER = AdapterSettings(rank=2, alpha=4, dropout=0.1, has_magnitudes=True, saved_modules=("model.norm", "lm_head"))


@pytest.mark.parametrize("adapter", [ADAPTER, replace(ADAPTER, has_magnitudes=False)], ids=["dora", "lora"])
@pytest.mark.parametrize(
    ("dtype", "num_micro_batches", "max_grad_norm"),
    rotating(["bfloat16", "float32", "float16"], [1, 3], [None, 0.5], every=2),
)
def test_lora_plus(
    tmp_path: Path, adapter: AdapterSettings, dtype: DtypeName, num_micro_batches: int, max_grad_norm: float | None
) -> None:
    recipe = replace(
        recipe_of(adapter, dtype, max_grad_norm=max_grad_norm),
        group_rates=((r"^lm_head", RATES[1]), (r"lora_B|magnitude|norm", RATES[0])),
        never_decayed=r"^lm_head",
    )
    rates = RateGroups(has_second=True, ends=frozenset({"lm_head.weight"}))
    config = tiny_config("llama")
    options = {"num_micro_batches": num_micro_batches, "adapter": adapter, "rates": rates, "group_rates": RATES}
    check_training(machine, tmp_path, config, recipe, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("architecture", "dtype", "max_grad_norm"), rotating(list(ENDS), ["bfloat16", "float32"], [None, 0.5], every=2)
)
def test_embedding_and_head(tmp_path: Path, architecture: str, dtype: DtypeName, max_grad_norm: float | None) -> None:
    """Tied or not; they do not decay."""
    ends = ENDS[architecture]
    pattern = "|".join(f"^{name}$" for name in ends)
    recipe = Recipe(
        dtype=getattr(torch, dtype),
        max_grad_norm=max_grad_norm,
        group_rates=((pattern, RATES[1]),),
        never_decayed=pattern,
    )
    options = {"rates": RateGroups(ends=frozenset(ends)), "group_rates": RATES, "num_steps": 3}
    check_training(machine, tmp_path, tiny_config(architecture), recipe, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("placement", ["all gradients on disk", "in place", "everything resident"])
def test_wherever_bytes_rest(tmp_path: Path, placement: str) -> None:
    ends = ENDS["llama"]
    pattern = "|".join(f"^{name}$" for name in ends)
    recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=0.5, group_rates=((pattern, RATES[1]),), never_decayed=pattern)
    options = {"rates": RateGroups(ends=frozenset(ends)), "group_rates": RATES, **PLACEMENTS[placement]}
    check_training(machine, tmp_path, tiny_config("llama"), recipe, **options)  # type: ignore[arg-type]


def test_the_groups_are_those_of_peft() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    config = LoraConfig(target_modules="all-linear", r=2, use_dora=True, modules_to_save=["model.norm", "lm_head"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, config)
    optimizer = create_loraplus_optimizer(adapted, torch.optim.AdamW, lr=1.0, loraplus_lr_ratio=16.0)
    rate_of = {id(each): group["lr"] for group in optimizer.param_groups for each in group["params"]}
    groups, seen = RateGroups(has_second=True), set[int]()
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            group = groups.of(name, parameter.dim())
            assert rate_of[id(parameter)] == (16.0 if group == SECOND else 1.0), name
            seen.add(group)
    assert seen == {0, SECOND}
