"""What bitsandbytes makes of weights: the oracle of quantised models.

Invariant: it imports nothing from `ratel_cli`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import bitsandbytes.functional as bnb
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel
from transformers.pytorch_utils import Conv1D

Form = Literal["nf4", "nf4 double", "int8"]


def dequantised(matrix: torch.Tensor, form: Form) -> torch.Tensor:
    """What a model computes with instead of a matrix that is in its dtype, in that dtype."""
    if form == "int8":
        codes, magnitudes, _ = bnb.int8_vectorwise_quant(matrix.to(torch.float16))
        return codes.to(matrix.dtype).mul_(magnitudes.unsqueeze(1).mul(1.0 / 127.0))
    packed, state = bnb.quantize_4bit(matrix, blocksize=64, quant_type="nf4", compress_statistics=form == "nf4 double")
    return bnb.dequantize_4bit(packed, state).reshape(matrix.shape)  # turned if it has two elements


def quantised_bytes(matrix: torch.Tensor, form: Form) -> list[torch.Tensor]:
    """The tensors that bitsandbytes has of a matrix, flat, as bytes."""
    if form == "int8":
        codes, magnitudes, _ = bnb.int8_vectorwise_quant(matrix.to(torch.float16))
        parts = [codes, magnitudes]
    else:
        packed, state = bnb.quantize_4bit(
            matrix, blocksize=64, quant_type="nf4", compress_statistics=form == "nf4 double"
        )
        parts = [packed, state.absmax]
        if form == "nf4 double":
            parts += [state.state2.absmax, state.offset.reshape(1)]
    return [part.reshape(-1).contiguous().view(torch.uint8) for part in parts]


def quantised_names(model: PreTrainedModel, *, with_experts: bool = False) -> set[str]:
    """The weights of all linear layers but the head, and those with tied weights. `with_experts`: and theirs."""
    stacks = {name for name, each in model.named_parameters() if "expert" in name and each.ndim > 2}
    layers = {
        f"{name}.weight"
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | Conv1D) and layer is not model.get_output_embeddings()
    }
    return layers | stacks if with_experts else layers


class GPT2OfLinearLayers(GPT2LMHeadModel):
    """GPT-2 whose matrices are `[outputs, inputs]`, as they are when they are quantised."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        for name, module in list(self.named_modules()):
            if isinstance(module, Conv1D):
                owner, _, attribute = name.rpartition(".")
                linear = nn.Linear(*module.weight.shape)
                setattr(self.get_submodule(owner), attribute, linear.to(module.weight.dtype))


def dequantised_weights(
    model: PreTrainedModel,
    weights: Mapping[str, torch.Tensor],
    form: Form,
    dtype: torch.dtype,
    *,
    with_experts: bool = False,
) -> dict[str, torch.Tensor]:
    """The weights, fp32, with those of linear layers as they are after quantising, `[outputs, inputs]`."""
    found = dict(weights)
    for name in quantised_names(model, with_experts=with_experts):
        is_turned = isinstance(model.get_submodule(name.rpartition(".")[0]), Conv1D)
        matrix = weights[name].to(dtype)
        matrix = matrix.T.contiguous() if is_turned else matrix
        found[name] = dequantised(matrix.reshape(-1, matrix.shape[-1]), form).view_as(matrix).float()
    return found
