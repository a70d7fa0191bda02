"""Weights: read ahead, shared between uses, gathered from other ranks, sent up, given up. Rows of the ledger. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ratel_cli.planning.duties.step import PlannedStep
from ratel_cli.planning.profile.activations import expanded_bytes
from ratel_cli.planning.profile.placement import bytes_ahead, looked_up
from ratel_cli.schedule.ledger import Holding, Row, Work, at, end_of, held
from ratel_cli.schedule.lifetimes import upload_lifetimes, weight_lifetimes
from ratel_cli.schedule.slices import GATHERED_AHEAD
from ratel_cli.schedule.uses import Stage


def read(step: PlannedStep, ahead: int, resident: frozenset[int], stages: tuple[Stage, ...]) -> Iterator[Row]:
    """Weights in host memory, from the drives, until their last use has closed. What the deferred update of the last
    segment passes on to it is read in forward, before it opens."""
    for weights in weight_lifetimes(step.uses, ahead=ahead):
        block = weights.of
        if block.segment in resident:
            continue
        # Behind the last use, the next step has begun to read.
        issued = weights.issued if weights.issued > 0 else -(not step.is_separate)
        yield from held("weights", block.segment, block.compute_bytes, issued, weights.last)
        is_passed_on = block.segment == step.head and stages[step.head] == "forward"
        stage: Stage = "forward" if is_passed_on else step.uses[weights.first].stage
        own = step.own.blocks[block.index]
        yield Work("read", "weights", block.segment, own.read_bytes, stage)
        yield Work("in files", "weights", block.segment, own.file_bytes or 0, stage)


def resident(step: PlannedStep, resident: frozenset[int]) -> Iterator[Row]:
    """What stays from step to step."""
    for segment in step.own.segments:
        if segment.index in resident:
            yield from held("resident", segment.index, segment.own_bytes, 0, step.cycle - 1)
            yield Work("first read", "weights", segment.index, segment.read_bytes, "forward")


def rows(step: PlannedStep, num_rows: int | None) -> Iterator[Holding]:
    """Rows of the embedding's matrix that are gathered for a GPU that does not read them in place."""
    if num_rows is None:
        return
    blocks = looked_up(step.spec, num_rows).blocks
    num_bytes = sum(each.parameters[0].num_elements * each.dtype_bytes for each in blocks if each.is_looked_up)
    yield from held("rows", 0, num_bytes, 0, 0)
    if step.spec.first_trained == 0:
        yield from held("rows", 0, num_bytes, step.turn - 2, step.turn - 1)


def sent_up(step: PlannedStep, staying: frozenset[int], window_bytes: int, num_rows: int | None) -> Iterator[Work]:
    """Weights go up to a GPU, once for all micro-batches: what the window takes while the use before computes, the
    rest while nothing does. Of an embedding that is looked up, rows."""
    for upload in upload_lifetimes(step.uses, staying=staying):
        segment = upload.of if upload.of.index else looked_up(step.spec, num_rows)
        stage, ahead = step.uses[upload.first].stage, bytes_ahead(segment, window_bytes)
        yield Work("up", "weights", segment.index, ahead, stage)
        yield Work("up", "weights", segment.index, segment.compute_bytes - ahead, stage, is_exposed=True)


def gathered(step: PlannedStep) -> Iterator[Work]:
    """A rank sends its slice of each block to every other one, whenever the block comes into host memory."""
    others = step.num_ranks - 1
    if not others:
        return
    for weights in weight_lifetimes(step.uses, ahead=GATHERED_AHEAD):
        block, stage, is_first = weights.of, step.uses[weights.first].stage, weights.first == 0
        own_bytes = step.own.blocks[block.index].compute_bytes
        yield Work("sent", "weights", block.segment, own_bytes, stage, others, is_first)
        yield Work("received", "weights", block.segment, block.compute_bytes - own_bytes, stage, 1, is_first)


def on_gpu(step: PlannedStep) -> Iterator[Holding]:
    """The weights of the segment that a use opens, with what is made of them."""
    for position, use in enumerate(step.uses):
        segment, begins, ends = step.on_gpu_of(use.segment), at(position), end_of(position)
        yield Holding("gpu", "weights", segment.index, segment.compute_bytes, begins, ends)
        yield Holding("gpu", "expanded", segment.index, expanded_bytes(step.spec, segment), begins, ends)


def ahead_on_gpu(step: PlannedStep, window_bytes: int) -> Iterator[Holding]:
    """What the window takes of the next segment's weights while a use is open."""
    for position, use in enumerate(step.uses[1:]):
        segment = step.on_gpu_of(use.segment)
        ahead = bytes_ahead(segment, window_bytes)
        yield Holding("gpu", "weights", segment.index, ahead, at(position), end_of(position), at_most=True)
