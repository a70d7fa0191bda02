"""What transformers keeps in fp32 although a model is loaded in 16 bit: routers, convolutions, biases of experts.

Invariant: names come from transformers' own lists and its own matching, so that a tensor is in fp32 here exactly if
`from_pretrained(..., dtype=...)` has it in fp32.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation


def keep_in_fp32(model: PreTrainedModel) -> None:
    """Put the parameters and buffers into fp32 that transformers keeps there. `model` is built in the dtype of its
    config, with parameters on meta."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name in _kept_in_fp32(model):
        place, _, attribute = name.rpartition(".")
        module: nn.Module = model.get_submodule(place)
        buffer, parameter = module._buffers.get(attribute), module._parameters.get(attribute)
        if buffer is not None:
            module._buffers[attribute] = buffer.float()
        if parameter is not None and parameter.dtype != torch.float32:
            if parameter not in made:  # tied ones stay tied
                made[parameter] = nn.Parameter(parameter.float(), requires_grad=parameter.requires_grad)
            module._parameters[attribute] = made[parameter]


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
