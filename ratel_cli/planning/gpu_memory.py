"""Will it fit on the GPU: its memory at the peak of a step, and what the rest is used for. Pure.

Used by `planning.capacity` and `planning.choose`. All micro-batches' hidden states and gradients of them stay there. A
step is followed use by use (planning/placement.py); each takes the weights of its block and room for those of
the next (engine/weights.py), the activations of a layer, the unit that leaves or comes beneath it
(engine/activations.py), and in backward gradients, their sum in fp32 and what of the block before is still on its way
down (engine/device/cuda.py).

What is left over keeps units, then weights, of the last layers from forward to backward: a byte of a unit spares the
link one down and one up, a byte of weights one up. They count as if they were there all along.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ratel_cli.hardware.spec import GPU_CONTEXT_BYTES
from ratel_cli.model.spec import BlockSpec, ModelSpec
from ratel_cli.planning.activations import (
    block_activation_bytes,
    head_chunk_tokens,
    logits_bytes,
    passing_bytes,
    tied_bytes,
)
from ratel_cli.planning.placement import BlockUse, StateBytes, Workload, block_schedule
from ratel_cli.units import MIB

_WORKSPACE_BYTES = 256 * MIB
"""Of cuBLAS, 32 MiB for each of its handles: forward and backward have their own, and so do products with a bias."""

_KEPT_SHARE = 0.9
"""Of what is left over. What lies there for long, among what comes and goes, leaves gaps that nothing fits into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuResident:
    """What a GPU keeps from forward to backward: parts of a `Placement`."""

    units_from: int
    """In forward order; the number of all units if none is kept."""
    weights: frozenset[int]


def gpu_memory_bytes(spec: ModelSpec, state: StateBytes, workload: Workload, *, largest_unit_bytes: int) -> int:
    """The most that a step takes. `largest_unit_bytes` is what one layer offloads for one micro-batch."""
    step = _GpuStep(spec, state, workload, largest_unit_bytes)
    always = passing_bytes(spec, state, tokens=workload.tokens, sequence_len=workload.sequence_len)
    return GPU_CONTEXT_BYTES + _WORKSPACE_BYTES + always + max(step.bytes_at(place) for place in range(step.num_uses))


def keep(
    spec: ModelSpec, state: StateBytes, workload: Workload, unit_bytes: Sequence[int], *, limit_bytes: int
) -> GpuResident:
    """What is best kept in the memory that is left over; `unit_bytes` is for each layer.

    The first unit goes down in any case: what the step before sent down last is held until then
    (engine/device/cuda.py).
    """
    taken_bytes = gpu_memory_bytes(spec, state, workload, largest_unit_bytes=max(unit_bytes))
    available_bytes = int(_KEPT_SHARE * max(0, limit_bytes - taken_bytes))
    units_from = workload.num_micro_batches * len(unit_bytes)
    for size in reversed(unit_bytes):
        fitting = min(workload.num_micro_batches, available_bytes // size)
        units_from -= fitting
        available_bytes -= fitting * size
        if fitting < workload.num_micro_batches:
            break
    units_from = max(1, units_from)
    weights = []
    for block in reversed(spec.blocks[1:-1]):
        available_bytes -= block.num_elements * state.compute
        if available_bytes < 0:
            break
        weights.append(block.index)
    return GpuResident(units_from=units_from, weights=frozenset(weights))


def weight_bytes_of(spec: ModelSpec, state: StateBytes, blocks: Collection[int]) -> int:
    """Of compute weights that stay on the GPU."""
    return sum(block.num_elements for block in spec.blocks if block.index in blocks) * state.compute


class _GpuStep:
    """The uses of one step, and what each takes."""

    def __init__(self, spec: ModelSpec, state: StateBytes, workload: Workload, largest_unit_bytes: int) -> None:
        self._spec = spec
        self._state = state
        self._workload = workload
        self._uses = block_schedule(spec)
        self._head_position = len(spec.blocks) - 1
        # One is computed with or leaves, one is offloaded or comes.
        self._unit_bytes = 2 * largest_unit_bytes
        self._tied_bytes = tied_bytes(spec, state, workload)

    @property
    def num_uses(self) -> int:
        return len(self._uses)

    def bytes_at(self, position: int) -> int:
        """Beside what stays all along."""
        if position < self._head_position:
            return self._forward(position)
        if position == self._head_position:
            return self._head()
        if self._spec.tied and position == self._head_position + 1:
            return 0  # the embedding is open beside the head
        return self._backward(position)

    def _forward(self, position: int) -> int:
        # The embedding's gradient is the last one to go down, and held until the first unit does.
        leaving = self._uses[0].block.num_elements * self._state.gradient if position < 2 else 0
        return self._window(position) + leaving + self._activations(self._uses[position].block) + self._unit_bytes

    def _head(self) -> int:
        spec, state, tokens = self._spec, self._state, self._workload.micro_batch_tokens
        head, embedding = spec.blocks[-1], spec.blocks[0]
        multiplied = head.num_elements + (embedding.num_elements if spec.tied else 0)
        # The chunks' gradients of a tied weight are added up in fp32 before they become one.
        tied_part = 4 * embedding.num_elements if spec.tied and head_chunk_tokens(spec, tokens=tokens) < tokens else 0
        computing = multiplied * state.compute + 4 * head.num_elements + tied_part
        return (
            self._window(self._head_position, num_open=2 if spec.tied else 1)
            + self._tied_bytes
            + max(computing, self._handing_over(head, sum_bytes=4))
            + logits_bytes(spec, tokens=tokens)
            + 2 * self._activations(head)
            + self._unit_bytes
        )

    def _backward(self, position: int) -> int:
        state, use = self._state, self._uses[position]
        is_embedding = position == len(self._uses) - 1
        is_summed = self._workload.num_micro_batches > 1 or (self._spec.tied and is_embedding)
        sum_bytes = 4 if is_summed else state.gradient
        computing = use.block.num_elements * (state.compute + sum_bytes)
        before = self._arrived_before(use)
        return (
            self._window(position)
            + (0 if is_embedding else self._tied_bytes)
            + max(computing, self._handing_over(use.block, sum_bytes=sum_bytes))
            + before.num_elements * state.gradient
            + 2 * self._activations(use.block)
            + self._unit_bytes
        )

    def _arrived_before(self, use: BlockUse) -> BlockSpec:
        return self._spec.blocks[use.block.index + 1]

    def _window(self, position: int, *, num_open: int = 1) -> int:
        """Weights of the uses that are open, and room for those of the next."""
        coming = self._uses[position : position + num_open + 1]
        return self._state.compute * sum(use.block.num_elements for use in coming)

    def _activations(self, block: BlockSpec) -> int:
        """Of one micro-batch; and its mask, as attention makes it."""
        workload = self._workload
        tokens = workload.micro_batch_tokens
        mask_bytes = tokens * workload.sequence_len * self._state.compute if block.kind == "layer" else 0
        return block_activation_bytes(self._spec, block, self._state, tokens=tokens) + mask_bytes

    def _handing_over(self, block: BlockSpec, *, sum_bytes: int) -> int:
        """The sum and its rounding; then that and one parameter in fp32, twice where it is scaled."""
        rounded = self._state.gradient if sum_bytes != self._state.gradient else 0
        norm = 8 * max((parameter.num_elements for parameter in block.parameters), default=0)
        return max(block.num_elements * (sum_bytes + rounded), block.num_elements * self._state.gradient + norm)
