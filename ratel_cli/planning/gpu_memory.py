"""GPU memory: what a step takes at its peak, and what the rest is used for. Pure.

The hidden states of all micro-batches and their gradients stay on the GPU. A step is followed use by use of the block
schedule (planning/placement.py). Each use takes the weights of its block and space for those of the next
(engine/weights.py), the activations of a layer, and the unit that is downloaded or uploaded meanwhile
(engine/activations.py). Backward adds the gradient of one parameter at a time, the fp32 sum of a block's gradients if
there are several micro-batches, and gradients that are still being downloaded (engine/optimizer/gradients.py).

Memory that is left over serves four purposes, in this order. The gradient of a tied head stays until that of the
embedding is there. More gradients of a layer may be on their way at once, so that computing does not wait for the link.
Units, then weights, of the last layers stay from forward to backward: a byte of a unit saves the link one byte down and
one up, a byte of weights saves one up. All of it counts as if it were there all the time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ratel_cli.hardware.spec import GPU_CONTEXT_BYTES
from ratel_cli.model.spec import BlockSpec, ModelSpec
from ratel_cli.planning.activations import (
    block_activation_bytes,
    logits_bytes,
    passing_bytes,
    tied_bytes,
    tied_sum_bytes,
)
from ratel_cli.planning.placement import Placement, StateBytes, Workload, block_schedule
from ratel_cli.units import MIB

_WORKSPACE_BYTES = 256 * MIB
"""cuBLAS takes 32 MiB for each of its handles; forward, backward and products with a bias have their own."""

_VECTORS_BYTES = MIB
"""Gradients of norms and biases that are downloaded next to that of a matrix, and should not wait for it."""

_RESIDENT_SHARE = 0.9
"""The share of the memory left over that is used. What stays for long between what comes and goes leaves gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuResident:
    """What stays on the GPU from forward to backward: parts of a `Placement`."""

    units_from: int
    """The first unit that stays, in forward order; the number of all units if none stays."""
    weights: frozenset[int]
    """Layers whose compute weights stay."""
    leaving_bytes: int
    """Memory for gradients until their downloads have ended."""
    holds_tied: bool
    """Whether a tied head's gradient stays until the embedding's is there."""


class GpuMemory:
    """The memory that the steps of one model and workload take on a GPU."""

    def __init__(self, spec: ModelSpec, state: StateBytes, workload: Workload) -> None:
        self._spec = spec
        self._state = state
        self._workload = workload
        passing = passing_bytes(spec, state, tokens=workload.tokens, sequence_len=workload.sequence_len)
        self._layers_leaving_bytes = max(least_leaving_bytes(block, state.gradient) for block in spec.blocks[1:-1])
        self._peak_bytes = GPU_CONTEXT_BYTES + _WORKSPACE_BYTES + passing + _largest_use_bytes(spec, state, workload)
        self._tied_bytes = tied_bytes(spec, state, workload)

    def needed_bytes(self, *, largest_unit_bytes: int) -> int:
        """The most that a step takes. `largest_unit_bytes` is the most that one layer offloads for one micro-batch.

        Two units count: one is in use or being downloaded, one is being offloaded or uploaded.
        """
        return self._peak_bytes + 2 * largest_unit_bytes

    def resident(self, unit_bytes: Sequence[int], *, limit_bytes: int) -> GpuResident:
        """What is best left on the GPU in the memory that `limit_bytes` leaves; `unit_bytes` is for each layer.

        The first unit never stays: the gradients that the step before downloads last are held until the first unit
        is downloaded (engine/device/cuda.py).
        """
        taken_bytes = self.needed_bytes(largest_unit_bytes=max(unit_bytes))
        available_bytes = int(_RESIDENT_SHARE * max(0, limit_bytes - taken_bytes))
        holds_tied = 0 < self._tied_bytes <= available_bytes
        available_bytes -= self._tied_bytes if holds_tied else 0
        least_bytes = self._layers_leaving_bytes
        layer_bytes = max(block.num_elements for block in self._spec.blocks[1:-1]) * self._state.gradient
        more_bytes = min(available_bytes, max(0, layer_bytes - least_bytes))
        available_bytes -= more_bytes
        num_micro_batches = self._workload.num_micro_batches
        units_from = num_micro_batches * len(unit_bytes)
        for size in reversed(unit_bytes):
            fitting = min(num_micro_batches, available_bytes // size)
            units_from -= fitting
            available_bytes -= fitting * size
            if fitting < num_micro_batches:
                break
        weights = []
        for block in reversed(self._spec.blocks[1:-1]):
            available_bytes -= block.num_elements * self._state.compute
            if available_bytes < 0:
                break
            weights.append(block.index)
        return GpuResident(
            units_from=max(1, units_from),
            weights=frozenset(weights),
            leaving_bytes=least_bytes + more_bytes,
            holds_tied=holds_tied,
        )

    def resident_bytes(self, placement: Placement) -> int:
        """What stays that `needed_bytes` does not count: weights, a tied head's gradient, gradients on their way."""
        weight_bytes = weight_bytes_of(self._spec, self._state, placement.gpu_weights)
        tied = self._tied_bytes if placement.gpu_holds_tied else 0
        return weight_bytes + tied + max(0, placement.gpu_leaving_bytes - self._layers_leaving_bytes)


def least_leaving_bytes(block: BlockSpec, gradient_bytes: int) -> int:
    """The least GPU memory for a block's gradients until their downloads have ended: for its largest parameter.

    `gradient_bytes`: those of one element.
    """
    leaving = _largest_elements(block) * gradient_bytes + _VECTORS_BYTES
    return min(leaving, block.num_elements * gradient_bytes)


def weight_bytes_of(spec: ModelSpec, state: StateBytes, blocks: Collection[int]) -> int:
    """The compute weights of these blocks."""
    return sum(block.num_elements for block in spec.blocks if block.index in blocks) * state.compute


def _largest_use_bytes(spec: ModelSpec, state: StateBytes, workload: Workload) -> int:
    """The most that one use of the block schedule takes, units left out."""
    schedule = block_schedule(spec)
    head_position = len(spec.blocks) - 1
    tokens = workload.micro_batch_tokens
    waiting_bytes = tied_bytes(spec, state, workload)

    def window(position: int, *, num_open: int = 1) -> int:
        """Weights of the uses that are open, and space for those of the next."""
        return state.compute * sum(use.block.num_elements for use in schedule[position : position + num_open + 1])

    def activations(block: BlockSpec) -> int:
        """One micro-batch's activations, and its mask as attention makes it."""
        mask_bytes = tokens * workload.sequence_len * state.compute if block.kind == "layer" else 0
        return block_activation_bytes(spec, block, state, tokens=tokens) + mask_bytes

    def forward(position: int) -> int:
        # The embedding's gradient is the last to be downloaded, and is held until the first unit is.
        leaving_bytes = least_leaving_bytes(spec.blocks[0], state.gradient) if position < 2 else 0
        return window(position) + leaving_bytes + activations(schedule[position].block)

    def head() -> int:
        block, embedding = spec.blocks[-1], spec.blocks[0]
        multiplied = block.num_elements + (embedding.num_elements if spec.tied else 0)
        computing = multiplied * state.compute + tied_sum_bytes(spec, tokens=tokens)
        return (
            window(head_position, num_open=2 if spec.tied else 1)
            + waiting_bytes
            + 4 * block.num_elements
            + max(computing, gradient(block, is_summed=True) + least_leaving_bytes(block, state.gradient))
            + logits_bytes(spec, tokens=tokens)
            + 2 * activations(block)
        )

    def gradient(block: BlockSpec, *, is_summed: bool) -> int:
        """One parameter's gradient: as autograd makes it and lays it out anew, then rounded, with an fp32 copy for its
        norm. A sum serves as that copy."""
        copy_bytes = 0 if is_summed and state.gradient < 4 else 4
        return _largest_elements(block) * max(2 * state.compute, state.gradient + copy_bytes)

    def backward(position: int) -> int:
        block = schedule[position].block
        is_embedding = position == len(schedule) - 1
        is_summed = workload.num_micro_batches > 1 or (spec.tied and is_embedding)
        made_bytes = gradient(block, is_summed=is_summed)
        if is_embedding:  # its parameters get their gradients all at once
            made_bytes += block.num_elements * state.compute
        leaving_bytes = max(least_leaving_bytes(each, state.gradient) for each in spec.blocks[block.index :][:2])
        return (
            window(position)
            + (waiting_bytes if spec.tied and is_embedding else 4 * block.num_elements if is_summed else 0)
            + made_bytes
            + leaving_bytes
            + 2 * activations(block)
        )

    first_of_backward = head_position + (2 if spec.tied else 1)  # a tied embedding is open together with the head
    return max(
        *map(forward, range(head_position)),
        head(),
        *map(backward, range(first_of_backward, len(schedule))),
    )


def _largest_elements(block: BlockSpec) -> int:
    return max((parameter.num_elements for parameter in block.parameters), default=0)
