"""Where ranks' slices cut the parameters of a model of transformers, by the rule that docs/guide/ranks.md promises.

The parameters of what runs before the layers, of each layer, and of what runs behind them are a block each, in their
order. Each begins at a multiple of 128 elements, and the block ends at a multiple of 2048. Rank r of N has the units of
2048 elements from floor(units * r / N) to floor(units * (r + 1) / N). What is trained beside an adapter's frozen model
is cut by itself.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig


def cuts_of(
    config: PretrainedConfig, num_ranks: int, *, lora: Sequence[tuple[str, object]] | None = None
) -> dict[str, tuple[int, ...]]:
    """By parameter that is trained: the elements at which it is cut. `lora`: the adapter, in PEFT's words; None: the
    model is trained."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if lora is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = get_peft_model(model, LoraConfig(**dict(lora))).base_model.model  # type: ignore[arg-type]
    found = {}
    for parameters in _blocks(model).values():
        starts, position = {}, 0
        for name, number in parameters.items():
            starts[name] = position
            position = -(-(position + number) // 128) * 128
        units = -(-position // 2048)
        edges = [2048 * (units * rank // num_ranks) for rank in range(1, num_ranks)]
        for name, number in parameters.items():
            inside = sorted({edge - starts[name] for edge in edges if 0 < edge - starts[name] < number})
            found[name] = tuple(inside)
    return found


def _blocks(model: nn.Module) -> dict[int, dict[str, int]]:
    """By place: the sizes of a block's parameters, by name."""
    layers = max(
        (each for each in model.modules() if isinstance(each, nn.ModuleList)),
        key=lambda each: sum(parameter.numel() for parameter in each.parameters()),
    )
    place, place_of = 0, dict[int, int]()
    handles = []

    def begin(index: int) -> None:
        nonlocal place
        place = index

    for index, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(lambda *_, index=index: begin(index + 1)))
    handles.append(layers[-1].register_forward_hook(lambda *_: begin(len(layers) + 1)))

    def note(module: nn.Module, *_: object) -> None:
        for parameter in module.parameters(recurse=False):
            place_of.setdefault(id(parameter), place)

    handles += [module.register_forward_pre_hook(note) for module in model.modules()]
    with torch.no_grad():
        model(torch.arange(4).unsqueeze(0))
    for handle in handles:
        handle.remove()
    for index, layer in enumerate(layers):
        place_of |= {id(parameter): index + 1 for parameter in layer.parameters()}
    blocks = defaultdict[int, dict[str, int]](dict)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            blocks[place_of[id(parameter)]][name] = parameter.numel()
    return blocks
