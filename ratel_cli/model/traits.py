"""What a model's layers compute with, read from its configuration and its modules.

Invariant: a model that can be streamed has traits. What its configuration does not give is taken as absent.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from ratel_cli.model.spec import LayerTraits, decays


def layer_traits(config: PretrainedConfig, layers: Sequence[nn.Module]) -> LayerTraits:
    """The traits of `layers`, which are those of the model that `config` describes."""
    text = config.get_text_config()
    values = text.to_dict()  # attributes raise where they differ from layer to layer

    def number(name: str) -> int:
        value = values.get(text.attribute_map.get(name, name))
        return value if isinstance(value, int) else 0

    num_heads = number("num_attention_heads")
    return LayerTraits(
        num_heads=num_heads,
        head_dim=number("head_dim") or number("hidden_size") // max(1, num_heads),
        active_experts=max(1, number("num_experts_per_tok")),
        inputs_first=tuple(sorted({name for layer in layers for name in _inputs_first(layer)})),
    )


def _inputs_first(layer: nn.Module) -> list[str]:
    """GPT-2's linear layer and some stacks of experts hold their matrices as [inputs, outputs]."""
    return [
        f"{module_name}.{name}"
        for module_name, module in layer.named_modules()
        if isinstance(module, Conv1D) or getattr(module, "is_transposed", False)
        for name, parameter in module.named_parameters(recurse=False)
        if decays(name, parameter.dim())
    ]
