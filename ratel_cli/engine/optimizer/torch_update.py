"""What torch computes in an update: all of it, where the rule is in torch, or the direction that a kernel needs.

Invariants: the bits are those of the rule's operations on the same device and with as many threads of torch; a
parameter without a gradient, and the gaps between parameters, keep their bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ratel_cli import _native
from ratel_cli.engine.device.device import Device
from ratel_cli.engine.optimizer.block_gradient import BlockGradient
from ratel_cli.engine.optimizer.settings import OptimizerSettings, UpdateNumbers
from ratel_cli.io.views import VALUE_DTYPES, view
from ratel_cli.model.values.records import decode_weights, encode_weights, fields_for
from ratel_cli.schedule.blocks import BlockSpec, ParameterSpec
from ratel_cli.schedule.rules import P16, W32, WEIGHT_FIELDS
from ratel_cli.schedule.updates import Directed, InTorch
from ratel_cli.sizes import CHUNK_ELEMENTS

_PIECE_ELEMENTS = 1 << 20
"""Elements of a gradient that are in fp32 at once, on the way to a direction."""
_ROUNDING = _native.SgdScalars(
    weight_decay=0, momentum=0, learning_rate=1, gradient_scale=1, is_first=True, is_nesterov=False
)
"""A step from -0 by the whole weight: the kernel of gradient descent then does nothing but round it."""


class GroupPart(NamedTuple):
    """What lies in a group of one parameter."""

    parameter: ParameterSpec
    bounds: tuple[int, int, bool]
    """Elements `[first, last)`, counted from where the arrays begin, and whether weight decay applies."""
    first_element: int
    """The number of the first one in the flattened parameter."""


@torch.no_grad()
def update_in_torch(
    rule: InTorch,
    settings: OptimizerSettings,
    memories: Mapping[str, memoryview],
    gradient: BlockGradient,
    update: UpdateNumbers,
    parts: Sequence[GroupPart],
    *,
    values: memoryview,
    buffer: memoryview,
    roundings: Sequence[tuple[int, int]],
) -> None:
    """Update the parts of a group in place. `memories`, `values`, `roundings`: as a kernel takes them. `buffer`:
    memory for the masters and the gradients in fp32."""
    block, floats = gradient.block, view(buffer, torch.float32)
    number = len(floats) // 2
    tensors, moments = _tensors(block, memories, number)
    master, read = tensors.setdefault(W32.name, floats[:number]), fields_for(block.record, "float32")
    if len(read) > 1:
        decode_weights(read, tensors, "float32")  # joined in the master
    elif read != (W32,):
        master.copy_(tensors[read[0].name])
    gradients = floats[number:].copy_(view(values, gradient.dtype)[:number]).mul_(update.gradient_scale)
    for part in parts:
        first, last, decays = part.bounds
        shape = part.parameter.shape if block.rule.takes_whole else (last - first,)
        state = {name: each[first:last].view(shape) for name, each in moments.items()}
        state |= {each.name: tensors[each.name].view(each.shape(shape)) for each in block.rule.vectors}
        numbers = settings.numbers(update, block, decays=decays)
        rule.function(master[first:last].view(shape), gradients[first:last].view(shape), state, numbers)
    if block.rounds_stochastically:
        _round(memories[P16.name], master, [part.bounds[:2] for part in parts], roundings)
    else:
        encode_weights(block.record, tensors)


@torch.no_grad()
def make_direction(
    rule: Directed,
    settings: OptimizerSettings,
    memories: Mapping[str, memoryview],
    gradient: BlockGradient,
    update: UpdateNumbers,
    device: Device,
    *,
    values: memoryview,
    into: memoryview,
) -> None:
    """Write the direction of a block's matrix, as bf16. The memories begin with its elements. `device`: where the model
    is."""
    block, [matrix] = gradient.block, gradient.block.parameters
    _, moments = _tensors(block, memories, matrix.num_elements)
    found = view(into, torch.bfloat16)[: matrix.num_elements]
    gradients = view(values, gradient.dtype)[: matrix.num_elements]
    numbers = settings.numbers(update, block, decays=matrix.decay)
    for start in range(0, matrix.num_elements, _PIECE_ELEMENTS):
        piece = slice(start, start + _PIECE_ELEMENTS)
        state = {name: each[piece] for name, each in moments.items()}
        found[piece] = rule.on_cpu(gradients[piece].float() * update.gradient_scale, state, numbers)
    direction = found.view(matrix.shape)
    with device.joined():
        on_device = direction.to(device.torch_device)
        direction.copy_(rule.on_device(on_device, dtype_of_products(device.torch_device)))


def dtype_of_products(device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products on a device: bf16, as in torch, but fp32 on processors without instructions
    for it. There torch multiplies in bf16 element by element: a matrix of 1024 x 1024 took 24 s, and in fp32 0.1 s
    (2-core EPYC with AVX2, 2026-11)."""
    has_bf16 = device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if has_bf16 else torch.float32


def _tensors(
    block: BlockSpec, memories: Mapping[str, memoryview], number: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The values of the first elements: of all fields in memory, and of what is kept for each besides its weight."""
    fields = {each.name: each for each in block.record.fields if each.name in memories}
    found = {
        name: view(memories[name], VALUE_DTYPES[each.dtype])[: each.num_values(number)] for name, each in fields.items()
    }
    of_elements = (name for name, each in fields.items() if each not in WEIGHT_FIELDS and each.fixed is None)
    return found, {name: found[name] for name in of_elements}


def _round(
    weights: memoryview,
    master: torch.Tensor,
    parts: Sequence[tuple[int, int]],
    roundings: Sequence[tuple[int, int]],
) -> None:
    """Round the masters stochastically to bf16 weights, as kernels do. The masters are overwritten."""
    for first, last in parts:
        view(weights, torch.bfloat16)[first:last] = -0.0
    _native.update_sgd_stochastic(
        weights,
        master.neg_(),
        scalars=_ROUNDING,
        segments=[(first, last, False) for first, last in parts],
        chunk_elements=CHUNK_ELEMENTS,
        roundings=roundings,
    )
