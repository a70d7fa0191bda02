"""Which modules and stacks of a mixture of experts get an adapter, under any two keys of adapters.

The oracle is PEFT's own `get_peft_model` on a model in memory, with what names modules or stacks and nothing else. The
names that it has adapted are then filtered by hand: those of the chosen layers, and none within a module that is
trained whole.
"""

from __future__ import annotations

import re
import warnings
from functools import cache

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer, ParamWrapper
from torch import nn
from transformers import AutoModelForCausalLM

from ratel_cli.errors import BadInput
from ratel_cli.model.export.adapters import inject
from ratel_cli.model.files.quantised_model import quantise_layers, quantised_weights
from ratel_cli.model.files.skeleton import build_skeleton
from ratel_cli.model.values.adapter_settings import AdapterSettings
from scripts.family_configs import tiny_config
from tests.tiers import pairwise, thinned

FAMILIES = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"]
Targets = tuple[str, ...] | str
STACKS = ("experts.gate_up_proj", "experts.down_proj")
NAMES: dict[str, dict[str, dict[str, Targets]]] = {
    "all": {family: {"target_modules": "all-linear"} for family in FAMILIES},
    "experts by the names that they had": {
        "mixtral": {"target_modules": ("q_proj", "w1", "w2", "w3", "gate")},
        "qwen3_moe": {"target_modules": ("gate_proj", "up_proj", "down_proj")},
        "deepseek_v3": {"target_modules": ("o_proj", "gate", "down_proj")},
        "gpt_oss": {"target_modules": ("q_proj",), "target_parameters": STACKS},
    },
    "an expression": {
        "mixtral": {"target_modules": r".*\.experts\.(w1|w2|w3)"},
        "qwen3_moe": {"target_modules": r"model\.layers\.\d+\.(self_attn\.q_proj|mlp\.experts\..*_proj)"},
        "deepseek_v3": {"target_modules": r".*\.self_attn\.o_proj"},
        "gpt_oss": {"target_modules": r".*\.self_attn\.o_proj"},
    },
    "stacks": {family: {"target_parameters": STACKS} for family in FAMILIES},
    "one stack and modules": {
        family: {"target_modules": ("o_proj",), "target_parameters": STACKS[1:]} for family in FAMILIES
    },
}
SAVED = ["", "lm_head", "o_proj", "mlp.experts", "self_attn"]
OTHER: dict[str, dict[str, object]] = {
    "nothing": {},
    "rslora": {"scales_by_root": True},
    "drawn": {"initialisation": "gaussian"},
}
LAYERS = [(), (1,), (0, 2), (3,)]


def adapted_names(model: nn.Module) -> set[str]:
    """The weights that have an adapter, by the names that they have without one."""
    return {
        f"{path.replace('.base_layer', '')}.{layer.parameter_name if isinstance(layer, ParamWrapper) else 'weight'}"
        for path, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
    }


@cache
def of_peft(family: str, names: str) -> set[str]:
    """What PEFT adapts with these names and no other key."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(tiny_config(family))
        wanted = {key: each if isinstance(each, str) else list(each) for key, each in NAMES[names][family].items()}
        adapted = get_peft_model(model, LoraConfig(r=2, **wanted)).base_model.model
    return adapted_names(adapted)


@pytest.mark.parametrize(
    ("family", "names", "layers", "saved", "other", "form"),
    thinned(pairwise(FAMILIES, list(NAMES), LAYERS, SAVED, list(OTHER), ["", "nf4", "nf4 and experts"]), every=4),
)
def test_two_keys_at_once(family: str, names: str, layers: tuple[int, ...], saved: str, other: str, form: str) -> None:
    if names == "an expression" and layers:
        layers = ()  # rejected with the config
    wanted = {
        name
        for name in of_peft(family, names)
        if (not layers or int(re.findall(r"layers\.(\d+)\.", name)[0]) in layers)
        and (not saved or f".{saved}." not in f".{name}.")
    }
    skeleton = build_skeleton(tiny_config(family), dtype="float32", attn_implementation="eager")
    if form:
        quantise_layers(skeleton, "nf4", with_experts=form != "nf4")
    settings = AdapterSettings(
        rank=2, alpha=4, layers=layers, saved_modules=(saved,) if saved else (),
        **{"target_modules": (), **NAMES[names][family]}, **OTHER[other],  # type: ignore[arg-type]
    )  # fmt: skip
    quantised = quantised_weights(skeleton)
    is_saved = saved and any(f".{saved}." in f".{name}" for name in quantised)
    if is_saved or not wanted or any(quantised[name].layout.num_stacked for name in wanted if name in quantised):
        with pytest.raises(BadInput):
            inject(skeleton, settings)
        return
    inject(skeleton, settings)
    assert adapted_names(skeleton) == wanted


@pytest.mark.parametrize(("family", "name"), [("qwen3_moe", "gate_proj"), ("mixtral", "w2"), ("gpt_oss", "q_proj")])
def test_names_beside_all_linear_layers_may_be_those_of_experts(family: str, name: str) -> None:
    skeleton = build_skeleton(tiny_config(family), dtype="float32", attn_implementation="eager")
    inject(skeleton, AdapterSettings(rank=2, alpha=4, also_named=(name,)))
    assert adapted_names(skeleton) == of_peft(family, "all")
    skeleton = build_skeleton(tiny_config(family), dtype="float32", attn_implementation="eager")
    with pytest.raises(BadInput, match="lora_target_modules: no_proj: no linear layer"):
        inject(skeleton, AdapterSettings(rank=2, alpha=4, also_named=(name, "no_proj")))
