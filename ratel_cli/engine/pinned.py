"""The buffers that a step under a plan has at the same time and that cross the link to a GPU, to be pinned ahead of it.

Pinning takes as long as filling, a tenth of a second per GB, and CUDA does nothing else meanwhile. In the first step it
would fall into the times that the plan takes from it.

Units have purposes of their own, since their sizes vary with the width of rows. Everything else comes in the sizes of
blocks, and a buffer of the same size serves whatever its purpose is (io/buffers.py). What is smaller than a layer, such
as norms and rows of the embedding, is left to the step.

Invariant: no more than the plan counts in host memory: what is not there at once at its peak comes last, and the pool
ends at its limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ratel_cli.engine.activations import WINDOW_PURPOSE, purpose_of_units
from ratel_cli.io.buffers import PinnedBuffers
from ratel_cli.model.spec import BlockSpec, ModelSpec
from ratel_cli.planning.placement import SPILL_WINDOW_UNITS, Overlap, Placement, StateBytes
from ratel_cli.sizes import PAGE_BYTES
from ratel_cli.units import align_up


def unit_buffers(placement: Placement, unit_bytes: Sequence[int], num_micro_batches: int) -> Iterator[PinnedBuffers]:
    """Buffers for the units of a step that come to host memory. `unit_bytes`: the size of a unit of each layer."""
    last = num_micro_batches * len(unit_bytes) if placement.gpu_units_from is None else placement.gpu_units_from
    if placement.spilled_units:
        number = min(SPILL_WINDOW_UNITS, placement.spilled_units)
        yield PinnedBuffers(WINDOW_PURPOSE, align_up(max(unit_bytes), PAGE_BYTES), number)
    for layer, num_bytes in enumerate(unit_bytes):
        start = layer * num_micro_batches
        number = min(last, start + num_micro_batches) - max(placement.spilled_units, start)
        if number > 0:
            yield PinnedBuffers(purpose_of_units(layer + 1), num_bytes, number)


def block_buffers(
    spec: ModelSpec,
    state: StateBytes,
    placement: Placement,
    *,
    num_micro_batches: int,
    holds_gradients: bool,
    overlap: Overlap,
    spilled_blocks: int,
) -> Iterator[PinnedBuffers]:
    """Buffers for weights, gradients and their sums. The gradients of the first `spilled_blocks` go to NVMe."""

    def passing(blocks: Sequence[BlockSpec], most: int) -> Counter[int]:
        """How many of each size are there while no more than `most` of these blocks are."""
        numbers = Counter(block.num_elements for block in blocks)
        return Counter({elements: min(number, most) for elements, number in numbers.items()})

    resident = placement.resident_weights
    weights = passing(
        [block for block in spec.blocks if block.index not in resident],
        1 + placement.prefetch_blocks + placement.pending_updates,
    )
    # The gradient of an embedding of which the GPU gets rows alone has another size in each step.
    whole = spec.blocks if placement.gpu_embedding_rows is None or spec.tied else spec.blocks[1:]
    stages = {
        block.index: placement.update_stage(block.index, holds_gradients=holds_gradients, overlap=overlap)
        for block in whole
    }
    held = [block for block in whole if stages[block.index] != "backward" and block.index >= spilled_blocks]
    gradients = passing([block for block in whole if block not in held], 1 + placement.pending_updates)
    weights.update(block.num_elements for block in spec.blocks if block.index in resident)
    gradients.update(block.num_elements for block in held)
    has_sums = num_micro_batches > 1 and not placement.gpu_holds_sums
    sums = Counter({block.num_elements: 1 for block in spec.blocks if block.kind == "layer"} if has_sums else {})
    for what, numbers, bytes_per_element in (
        ("weights", weights, state.compute),
        ("gradients", gradients, state.gradient),
        ("sums of gradients", sums, 4 + state.compute),
    ):
        for elements, number in numbers.items():
            yield PinnedBuffers(f"{what} of {elements} parameters", elements * bytes_per_element, number)


def other_bytes(spec: ModelSpec, state: StateBytes, placement: Placement) -> int:
    """What the pool will have besides: buffers of groups, and optimizer states that stay. They never cross the link; if
    no memory were left for them, they would take some that was pinned ahead."""
    states = sum(spec.blocks[index].num_elements for index in placement.resident_states)
    groups_bytes = placement.groups.buffer_bytes(spec.block_elements, record_bytes=state.record)
    return groups_bytes + states * (state.record - state.compute)
