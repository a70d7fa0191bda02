"""Bytes that forward leaves behind: block inputs, which always stay, and activations, which may.

Estimates from shapes, for `planning.capacity` and `planning.choose`; the engine measures in the first step
what each block's activations take, and keeps as many blocks' as the plan has room for. Pure.
"""

from __future__ import annotations

import math

from ratel_cli.model.spec import BlockSpec, ModelSpec, ParameterSpec
from ratel_cli.planning.placement import Placement
from ratel_cli.planning.traffic import StateBytes

_ACTIVE_EXPERTS = 8
"""Of a stack of experts, those that a token visits: the most that models in use choose."""
_WIDTHS_OF_VECTORS = 12
"""Norms, residuals, rotations and attention, in hidden sizes per token."""


def block_activation_bytes(spec: ModelSpec, block: BlockSpec, state: StateBytes, *, tokens: int) -> int:
    """Of one block: every matrix leaves one output for each token, and there are vectors of the hidden size.

    For the papers' GPT that is 48 bytes per token and hidden size in 16 bit, where they count 34: what runs keeps
    some vectors in fp32. A Llama layer was measured to keep 43 to 46 (46 to 49 by this estimate).
    """
    width = sum(_output_width(parameter) for parameter in block.parameters if block.kind == "layer")
    return tokens * (width + _WIDTHS_OF_VECTORS * spec.hidden_size) * state.compute


def all_activation_bytes(spec: ModelSpec, state: StateBytes, *, tokens: int) -> int:
    """Of all layers: what there is to keep."""
    return sum(block_activation_bytes(spec, block, state, tokens=tokens) for block in spec.blocks[1:-1])


def kept_activation_bytes(spec: ModelSpec, state: StateBytes, placement: Placement, *, tokens: int) -> int:
    """What can be kept in the room that the placement has for it."""
    resident = [block for block in spec.blocks[1:-1] if block.index in placement.resident_weights]
    all_bytes = sum(block_activation_bytes(spec, block, state, tokens=tokens) for block in resident)
    return min(placement.activation_bytes, all_bytes)


def block_input_bytes(spec: ModelSpec, state: StateBytes, *, tokens: int, sequence_len: int) -> int:
    """Each layer's input, the current hidden states and their gradients; a mask for every row."""
    hidden = (spec.num_layers + 2) * tokens * spec.hidden_size * state.compute
    return hidden + tokens * sequence_len


def _output_width(parameter: ParameterSpec) -> int:
    *stacked, rows, columns = (1, 0, 0, *parameter.shape) if len(parameter.shape) < 2 else (1, *parameter.shape)
    return min(math.prod(stacked), _ACTIVE_EXPERTS) * max(rows, columns)
