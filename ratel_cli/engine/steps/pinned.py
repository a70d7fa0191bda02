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
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby
from operator import attrgetter
from typing import NamedTuple

from ratel_cli.engine.cache.units import WINDOW_PURPOSE, purpose_of_units
from ratel_cli.io.buffers import PinnedBuffers
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.profile.placement import SPILL_WINDOW_UNITS, Overlap, Placement
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.sizes import PAGE_BYTES
from ratel_cli.units import align_up


class _Buffer(NamedTuple):
    """A kind of buffer."""

    what: str
    elements: int
    num_bytes: int


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
    placement: Placement,
    *,
    num_micro_batches: int,
    holds_gradients: bool,
    overlap: Overlap,
    spilled_segments: int,
) -> Iterator[PinnedBuffers]:
    """Buffers for weights, gradients and their sums. The gradients of the first `spilled_segments` go to NVMe."""

    def weights_of(block: BlockSpec) -> _Buffer:
        return _Buffer("weights", block.num_elements, block.compute_bytes)

    def gradient_of(block: BlockSpec) -> _Buffer:
        return _Buffer("gradients", block.num_elements, block.gradient_bytes)

    def passing(blocks: Iterable[BlockSpec], of: Callable[[BlockSpec], _Buffer], most: int) -> Counter[_Buffer]:
        """How many of each kind are there while those of no more than `most` segments are."""
        numbers, per_segment = Counter[_Buffer](), Counter[_Buffer]()
        for _, group in groupby(sorted(blocks, key=attrgetter("segment")), key=attrgetter("segment")):
            own = Counter(map(of, group))
            numbers.update(own)
            per_segment |= own
        return Counter({buffer: min(number, most * per_segment[buffer]) for buffer, number in numbers.items()})

    resident = placement.resident_weights
    weights = passing(
        [block for block in spec.blocks if block.segment not in resident],
        weights_of,
        1 + placement.prefetch_blocks + placement.pending_updates,
    )
    trained = [block for block in spec.blocks if block.is_trained]
    # The gradient of an embedding of which the GPU gets rows alone has another size in each step.
    whole = trained if placement.gpu_embedding_rows is None or spec.tied else trained[1:]
    stages = {
        segment.index: placement.update_stage(segment.index, holds_gradients=holds_gradients, overlap=overlap)
        for segment in spec.segments
    }
    held = [block for block in whole if stages[block.segment] != "backward" and block.segment >= spilled_segments]
    gradients = passing([block for block in whole if block not in held], gradient_of, 1 + placement.pending_updates)
    weights.update(weights_of(block) for block in spec.blocks if block.segment in resident)
    gradients.update(map(gradient_of, held))
    has_sums = num_micro_batches > 1 and not placement.gpu_holds_sums
    sums = {
        _Buffer("sums of gradients", block.num_elements, 4 * block.num_elements + block.compute_bytes)
        for layer in spec.layers
        for block in layer.trained
        if has_sums
    }
    for buffer, number in chain(weights.items(), gradients.items(), ((each, 1) for each in sums)):
        yield PinnedBuffers(f"{buffer.what} of {buffer.elements} parameters", buffer.num_bytes, number)


def other_bytes(spec: ModelSpec, placement: Placement) -> int:
    """What the pool will have besides: buffers of groups, and optimizer states that stay. They never cross the link; if
    no memory were left for them, they would take some that was pinned ahead."""
    states = sum(spec.segments[index].state_bytes for index in placement.resident_states)
    return placement.groups.buffer_bytes(spec.blocks) + states
