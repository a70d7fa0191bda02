"""Gradients that several ranks exchange, whole and in fp32. Rows of the ledger. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ratel_cli.planning.duties.step import PlannedStep
from ratel_cli.planning.profile.placement import gradient_bytes
from ratel_cli.schedule.ledger import Row, Work, held
from ratel_cli.schedule.slices import EXCHANGED_BEHIND


def exchanged(step: PlannedStep, num_rows: int | None) -> Iterator[Row]:
    """Gradients from when they are made until they are exchanged; what comes of one block from all ranks; and all rows
    of a matrix of which only some came from a GPU. A byte for each parameter says whether it has a gradient."""
    others = step.num_ranks - 1
    if not others:
        return
    spec, last, end, most_received = step.spec, step.turn - 1, step.cycle - 1, 0
    for segment in step.backward:
        arrives = step.arrival(segment.index)
        until = min(arrives + EXCHANGED_BEHIND, end)
        yield from held("exchange", segment.index, segment.sum_bytes, arrives + 1, until)
        for block in segment.trained:
            own = step.own.blocks[block.index].num_elements
            most_received = max(most_received, 4 * step.num_ranks * own)
            flags, is_last = others * len(block.parameters), segment.index == 0
            sent, received = 4 * (block.num_elements - own) + flags, 4 * others * own + flags
            yield Work("sent", "gradients", segment.index, sent, "backward", 1, is_last)
            yield Work("received", "gradients", segment.index, received, "backward", 1, is_last)
    yield from held("exchange", -1, most_received, step.head, min(last + 1, end), at_most=True)
    if gradient_bytes(spec, num_rows)[0] != spec.embedding.gradient_bytes:
        yield from held("exchange", 0, spec.embedding.sum_bytes, last, min(last + EXCHANGED_BEHIND, end))
