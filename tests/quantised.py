"""What bitsandbytes makes of weights: the oracle of quantised models.

Its CPU kernel for 4 bit (0.50) takes the magnitudes of other blocks with AVX-512, where a row is no whole number of
blocks. What it has for any device does not, and takes its place in every process that imports this.

Invariant: it imports nothing from `ratel_cli`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Literal

import bitsandbytes.functional as bnb
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel
from transformers.pytorch_utils import Conv1D

_OVERRIDES = torch.library.Library("bitsandbytes", "IMPL")


def _dequantize_4bit(
    codes: torch.Tensor,
    magnitudes: torch.Tensor,
    blocksize: int,
    quant_type: str,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
    found: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit.default.redispatch(
        keys, codes, magnitudes, blocksize, quant_type, shape, dtype
    )
    return found


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch says that there was a kernel before
    _OVERRIDES.impl("dequantize_4bit", _dequantize_4bit, "CPU", allow_override=True)

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


def packed_down(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """`[codes, columns]` in words of 32 bits, `[words, columns]`, the first code in the lowest bits."""
    words = torch.zeros(codes.shape[0] * bits // 32, codes.shape[1], dtype=torch.int64)
    for row in range(len(codes)):
        words[row * bits // 32] |= codes[row].long() << (row * bits % 32)
    return words.to(torch.int32)


def packed_across(codes: torch.Tensor) -> torch.Tensor:
    """`[rows, codes]` of 4 bits in words, `[rows, words]`, in AWQ's order: a word has, from its lowest bits on, its
    first column, its third one and so on, then the second one, the fourth one and so on."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    mixed = codes.view(len(codes), -1, 8)[:, :, order].reshape(len(codes), -1)
    return packed_down(mixed.T, 4).T.contiguous()


def of_words(
    shape: tuple[int, int],
    method: Literal["gptq", "gptq_v2", "awq"],
    *,
    size: int,
    by_activation: bool,
    seed: int,
    bits: int = 4,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What GPTQ or AWQ has of some matrix `[outputs, inputs]`, by the ends of names, and the matrix in fp16. Groups
    have `size` inputs."""
    generator, (outputs, inputs) = torch.Generator().manual_seed(seed), shape
    number = inputs // size
    codes = torch.randint(0, 1 << bits, (inputs, outputs), generator=generator)
    zeros = torch.randint(0, 1 << bits, (number, outputs), generator=generator)
    scales = torch.rand(number, outputs, generator=generator).half() / 40
    groups = torch.arange(inputs) // size
    if by_activation:
        groups = groups[torch.randperm(inputs, generator=generator)]
    matrix = torch.empty(shape, dtype=torch.float16)
    for column in range(inputs):
        matrix[:, column] = scales[groups[column]] * (codes[column] - zeros[groups[column]]).half()
    if method == "awq":
        return {"qweight": packed_across(codes), "qzeros": packed_across(zeros), "scales": scales}, matrix
    stored_zeros = zeros if method == "gptq_v2" else (zeros - 1) % (1 << bits)
    packed_zeros = packed_down(stored_zeros.T, bits).T.contiguous()
    parts = {"qweight": packed_down(codes, bits), "qzeros": packed_zeros, "scales": scales, "g_idx": groups.int()}
    return parts, matrix
