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
from itertools import chain
from typing import NamedTuple

from ratel_cli.engine.cache.units import WINDOW_PURPOSE, purpose_of_units
from ratel_cli.io.buffers import PinnedBuffers
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.duties.placed import PlacedStep
from ratel_cli.planning.profile.placement import SPILL_WINDOW_UNITS, Placement
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.schedule.ledger import place_of
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


def block_buffers(placed: PlacedStep, *, spilled_segments: int) -> Iterator[PinnedBuffers]:
    """Buffers for weights, gradients and their sums: of each size, as many as the ledger has at once. The gradients of
    the first `spilled_segments` go to NVMe."""
    step, placement = placed.step, placed.placement
    # The gradient of an embedding of which the GPU gets rows alone has another size in each step.
    has_rows = placement.gpu_embedding_rows is not None and not step.spec.tied
    found = Counter[_Buffer]()
    for weights, gradients in _present(placed, spilled_segments):
        now = Counter(_weights(block) for block in step.spec.blocks if block.segment in weights)
        now.update(
            _Buffer("gradients", block.num_elements, block.gradient_bytes)
            for block in step.spec.blocks
            if block.is_trained and block.segment in gradients and not (has_rows and block.is_looked_up)
        )
        found |= now
    found.update(_weights(block) for block in step.spec.blocks if block.segment in placement.resident_weights)
    if step.is_summed and not placement.gpu_holds_sums:
        for block in chain.from_iterable(layer.trained for layer in step.spec.layers):
            size = 4 * block.num_elements + block.compute_bytes
            found[_Buffer("sums of gradients", block.num_elements, size)] = 1
    for buffer, number in found.items():
        yield PinnedBuffers(f"{buffer.what} of {buffer.elements} parameters", buffer.num_bytes, number)


def _weights(block: BlockSpec) -> _Buffer:
    return _Buffer("weights", block.num_elements, block.compute_bytes)


def _present(placed: PlacedStep, spilled_segments: int) -> list[tuple[set[int], set[int]]]:
    """The segments whose passing weights are there, and those whose gradients are, at each position."""
    step = placed.step
    found = [(set[int](), set[int]()) for _ in range(step.cycle)]
    for row in placed.of_segments():
        if row.purpose != "held" or row.owner >= spilled_segments:
            for position in range(place_of(row.begins)[0], place_of(row.ends)[0] + 1):
                found[position % step.cycle][row.purpose != "weights"].add(row.owner)
    return found


def other_bytes(spec: ModelSpec, placement: Placement) -> int:
    """What the pool will have besides: buffers of groups, and optimizer states that stay. They never cross the link; if
    no memory were left for them, they would take some that was pinned ahead."""
    states = sum(spec.segments[index].state_bytes for index in placement.resident_states)
    return placement.groups.buffer_bytes(spec.blocks) + states
