"""The order in which a step uses the blocks' compute weights (P16), and which uses find them in memory.

Asked by `planning.traffic`, which counts the reads, and by `planning.capacity`, which counts the buffers. Pure.

A block's weights are read when the use comes within `prefetch_blocks` of the one that is open, unless they
stay, or a use of the same block is still open and its buffer is shared: at the turn from forward to
backward the last layer is read once and used twice, if the reads run ahead by two blocks.

Invariant: the order is that of `engine.step`, the sharing that of `engine.weights`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ratel_cli.model.spec import BlockSpec, ModelSpec
from ratel_cli.planning.placement import Placement, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One block's weights are bound to its modules for all micro-batches."""

    block: BlockSpec
    stage: Stage


def step_uses(spec: ModelSpec) -> list[Use]:
    """Forward, the head (with the embedding, if they are tied), backward."""
    *below, head = spec.blocks
    forward = [Use(block=block, stage="forward") for block in below]
    heads = [head, spec.blocks[0]] if spec.tied else [head]
    return forward + [Use(block=block, stage="backward") for block in (*heads, *reversed(below))]


def needs_read(uses: Sequence[Use], position: int, placement: Placement) -> bool:
    """Whether the weights of the use at `position` are not in memory when their turn to be read comes."""
    block = uses[position].block
    still_open = uses[max(0, position - placement.prefetch_blocks) : position]
    return block.index not in placement.resident_weights and all(use.block is not block for use in still_open)


def window_bytes(
    uses: Sequence[Use], position: int, placement: Placement, *, compute_bytes: int, num_open: int = 1
) -> int:
    """Buffers of P16 while `num_open` uses from `position` on are open: theirs, and those that are read ahead."""
    window = uses[position : position + num_open + placement.prefetch_blocks]
    elements = {use.block.index: use.block.num_elements for use in window}
    return compute_bytes * sum(n for index, n in elements.items() if index not in placement.resident_weights)
