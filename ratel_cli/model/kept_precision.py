"""What transformers keeps in fp32 although a model is loaded in 16 bit: routers, convolutions, biases of experts.

A block has one dtype, so a model with such parameters can be trained in fp32 only. Buffers are no part of a block.
Invariant: names come from transformers' own lists and its own matching, so that a parameter is in fp32 here exactly if
`from_pretrained(..., dtype=...)` has it in fp32.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from ratel_cli.errors import BadInput

_MAX_NAMES = 3
"""A message lists at most this many parameters."""


def reject_kept_parameters(model: PreTrainedModel) -> None:
    """Raise BadInput if transformers keeps parameters of `model` in fp32. It is built in the dtype of its config."""
    kept = set(_kept_in_fp32(model))
    names = [name for name, _ in model.named_parameters() if name in kept]
    if names:
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        error = BadInput(
            f"{type(model).__name__}: transformers keeps {', '.join(names[:_MAX_NAMES])}{more} in fp32;"
            f" dtype: {str(model.config.dtype).removeprefix('torch.')} would round them",
            "set dtype: float32",
        )
        error.key = ("dtype",)
        raise error


def keep_buffers(model: PreTrainedModel) -> None:
    """Put the buffers into fp32 that transformers keeps in fp32. `model` is built in the dtype of its config."""
    for name in _kept_in_fp32(model):
        place, _, attribute = name.rpartition(".")
        module: nn.Module = model.get_submodule(place)
        buffer = module._buffers.get(attribute)
        if buffer is not None:
            module._buffers[attribute] = buffer.float()


def _kept_in_fp32(model: PreTrainedModel) -> list[str]:
    """Names of the parameters and persistent buffers that transformers keeps in fp32 if the model's dtype has 16 bit.

    What the model's own code makes in fp32 stays so, and so does what its lists of modules match: one list is for both
    16-bit formats, another for fp16 alone.
    """
    dtype = model.config.dtype
    if not isinstance(dtype, torch.dtype) or dtype == torch.float32:
        return []
    patterns = list(model._get_dtype_plan(dtype))
    matching = build_glob_alternation(patterns)[0] if patterns else None
    return [
        name
        for name, tensor in model.state_dict(keep_vars=True).items()
        if tensor.is_floating_point()
        and (tensor.dtype == torch.float32 or (matching is not None and matching.search(name)))
    ]
