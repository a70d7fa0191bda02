"""A rank's slices: the part of each block that it stores and updates. Pure.

Invariant: the slices of all ranks follow one another and make up the block. They are cut at multiples of
`BLOCK_ALIGNMENT` elements and of what has whole pages in every field, so no slice cuts what a rule updates as one. What
a rule updates as a whole is not cut: one rank has the block, the next one the next such block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ratel_cli.schedule.blocks import BlockSpec, ParameterSpec
from ratel_cli.schedule.segments import Segment
from ratel_cli.sizes import BLOCK_ALIGNMENT
from ratel_cli.store.layout import RankSlice

GATHERED_AHEAD: Final = 2
"""Segments whose weights several ranks bring to host memory while one computes: one is read, or updated, while another
is gathered."""
EXCHANGED_BEHIND: Final = 2
"""Blocks whose gradients several ranks exchange while the next ones are computed."""


def range_in(block: BlockSpec, rank_slice: RankSlice) -> tuple[int, int]:
    """The elements [start, stop) of a block that are a rank's."""
    if block.rule.takes_whole:
        before = (rank_slice.size - 1 - block.index) % rank_slice.size  # ranks before the one that has it
        return block.num_elements * (rank_slice.rank > before), block.num_elements * (rank_slice.rank >= before)
    return rank_slice.range_of(block.num_elements, unit=math.lcm(BLOCK_ALIGNMENT, block.record.page_elements))


def ranges_in(block: BlockSpec, num_ranks: int) -> list[tuple[int, int]]:
    """Return the elements [start, stop) of a block that each rank has, in the order of ranks."""
    return [range_in(block, RankSlice(rank, num_ranks)) for rank in range(num_ranks)]


def fullest_slice(blocks: Sequence[BlockSpec], num_ranks: int) -> RankSlice:
    """The slice of the rank that stores most: the last one, which has no less of any block that is cut than another."""
    slices = [RankSlice(rank, num_ranks) for rank in range(num_ranks)]
    if not any(block.rule.takes_whole for block in blocks):
        return slices[-1]
    return max(reversed(slices), key=lambda each: sum(slice_of(block, each).record_bytes for block in blocks))


def slice_of(block: BlockSpec, rank_slice: RankSlice) -> BlockSpec:
    """A rank's part of a block, as a block: of each parameter the elements that lie in it, flat, without its rows, or,
    if it has the whole block, its parameters. One rank alone has the block."""
    if rank_slice.size == 1:
        return block
    start, stop = range_in(block, rank_slice)
    if block.rule.takes_whole and start < stop:
        return replace(block, is_looked_up=False)
    pieces = []
    for parameter in block.parameters:
        first, last = max(parameter.start, start), min(parameter.stop, stop)
        if first < last:
            pieces.append(
                ParameterSpec(
                    name=parameter.name,
                    shape=(last - first,),
                    start=first - start,
                    decay=parameter.decay,
                    first=first - parameter.start,
                )
            )
    file_bytes = block.file_bytes
    if file_bytes:  # its share, but for pages
        file_bytes = -(-file_bytes * (stop - start) // block.num_elements)
    return replace(
        block, parameters=tuple(pieces), num_elements=stop - start, is_looked_up=False, file_bytes=file_bytes
    )


def slices_of(blocks: Sequence[BlockSpec], rank_slice: RankSlice) -> tuple[BlockSpec, ...]:
    """A rank's part of each block."""
    return tuple(slice_of(block, rank_slice) for block in blocks)


def sliced_segments(segments: Sequence[Segment], rank_slice: RankSlice) -> tuple[Segment, ...]:
    """The segments with a rank's part of each block."""
    if rank_slice.size == 1:
        return tuple(segments)
    return tuple(
        replace(
            segment,
            blocks=slices_of(segment.blocks, rank_slice),
            borrowed=slices_of(segment.borrowed, rank_slice),
        )
        for segment in segments
    )
