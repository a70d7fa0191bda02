"""All segments of a program, their uses, and a pass over them without backward, as of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ratel_cli.engine.device.device import Device
from ratel_cli.engine.reading.program import AnyBatch, Program
from ratel_cli.engine.reading.weights import WeightReader
from ratel_cli.engine.segments.embedding import Embedding
from ratel_cli.engine.segments.head import Head
from ratel_cli.engine.segments.layer import Layer
from ratel_cli.engine.segments.segment import RunnableSegment
from ratel_cli.engine.steps.following import Following
from ratel_cli.engine.steps.state import PassState, StepState
from ratel_cli.schedule.segments import Segment
from ratel_cli.schedule.uses import forward_uses


def runnable_segments(
    program: Program[AnyBatch], device: Device, segments: Sequence[Segment]
) -> tuple[RunnableSegment[AnyBatch], ...]:
    """The segments of a program in the order of forward: each of a kind, which its place decides."""
    first, *between, last = segments
    layers = (Layer(segment, program, device) for segment in between)
    return Embedding(first, program, device), *layers, Head(last, program, device)


def run_forward(segment: RunnableSegment[AnyBatch], state: PassState[AnyBatch], reader: WeightReader) -> None:
    """One use in forward: bind the segment's weights, and run every micro-batch."""
    with reader.open(segment.segment) as weights:
        for number in state.forward_order():
            segment.forward(state, number, weights)


def run_backward(
    segment: RunnableSegment[AnyBatch],
    state: StepState[AnyBatch],
    following: Following,
    begin_updates: Callable[[], None] | None,
) -> None:
    """One use in backward: bind the segment's weights, run every micro-batch, and hand the gradients over; wait if too
    many updates are pending.

    `begin_updates` is called at once if the update of the step before is written, otherwise when all is computed.
    """
    reader, updates, exchange = following.reader, following.updates, following.exchange
    with segment.summing(state) as sums, reader.open(segment.segment) as weights:
        if begin_updates is not None and updates.is_written:
            begin_updates()
            begin_updates = None
        for number in range(len(state.batches)):
            segment.backward(state, number, weights, sums)
        if begin_updates is not None:
            begin_updates()
        weights.unbind()
        for block_sum, host in zip(sums.blocks, weights.hosts, strict=True):
            exchange.pass_on(block_sum.finish(), host)
        weights.close()
        updates.wait_pending()


def forward_pass(
    segments: Sequence[RunnableSegment[AnyBatch]],
    state: PassState[AnyBatch],
    reader: WeightReader,
    *,
    progress: Callable[[int], None] = lambda number: None,
) -> None:
    """Run all segments. `progress` is called with the number of micro-batches that have passed one. No pass may be
    going on; gradients must be off, and dropout too."""
    reader.expect(forward_uses([each.segment for each in segments]), rows=state.rows)
    for segment in segments:
        run_forward(segment, state, reader)
        progress(len(state.batches))
