"""Gradients: made, downloaded, held until their update; and weights that wait with them. Rows of the ledger. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from ratel_cli.planning.duties.step import PlannedStep
from ratel_cli.planning.profile.activations import lookup_chunk_bytes
from ratel_cli.planning.profile.gpu_gradients import (
    largest_elements,
    least_leaving_bytes,
    others_leaving_bytes,
    summed_elements,
)
from ratel_cli.planning.profile.placement import gradient_bytes
from ratel_cli.schedule.ledger import Holding, Work, at, end_of, held
from ratel_cli.schedule.segments import Segment
from ratel_cli.schedule.slices import EXCHANGED_BEHIND
from ratel_cli.schedule.uses import Stage


def updated_bytes(step: PlannedStep, num_rows: int | None) -> Sequence[int]:
    """The gradients of each segment that this rank updates with."""
    if step.num_ranks > 1:
        return [segment.gradient_bytes for segment in step.own.segments]
    return gradient_bytes(step.spec, num_rows)


def waiting(
    step: PlannedStep,
    way: tuple[Stage, ...],
    stages: tuple[Stage, ...],
    ahead: int,
    pending: int,
    resident: frozenset[int],
    num_rows: int | None,
) -> Iterator[Holding]:
    """Gradients from when they have come until they are updated, and the weights that an update finds in memory.

    An update is pending until `pending` other segments have been handed over after it, and with it its weights, which
    are written where they lie. From then on a gradient that waits for a later stage is held, in memory or on the
    drives, until the update asks for it again. `way`: when segments are updated; `stages`: when they are if all that
    waits has to.
    """
    sizes = updated_bytes(step, num_rows)
    last = step.turn - 1 if step.is_separate else step.turn
    for segment, (written, is_pending) in zip(step.backward, _written(step, pending, last), strict=True):
        index, num_bytes, comes = segment.index, sizes[segment.index], step.arrival(segment.index) + 1
        weights_bytes = 0 if index in resident else segment.updated_bytes
        opens = min(step.cycle + index, step.cycle + step.head - 1)
        asked = index - ahead  # for its update, or by the next forward
        match way[index]:
            case "forward":
                issued = step.cycle + max(0, asked)
                yield from held("gradients", index, num_bytes, comes, written)
                yield from held("weights", index, weights_bytes, comes, written)
                yield from held("held", index, num_bytes, written + 1, issued - 1)
                yield from held("gradients", index, num_bytes, issued, opens)
                ends = opens
            case "update":  # groups bring the weights with them; a gradient comes back whole
                updated = step.turn + index
                yield from held("gradients", index, num_bytes, comes, written)
                yield from held("weights", index, weights_bytes, comes, written)
                yield from held("held", index, num_bytes, written + 1, updated - 1)
                yield from held("gradients", index, num_bytes, updated, updated)
                ends = updated
            case "backward":  # what is pending is read when it is written
                ends = opens if is_pending else written
                yield from held("gradients", index, num_bytes, comes, ends)
                until = step.cycle + asked - 1 if is_pending and asked > 0 else written
                yield from held("weights", index, weights_bytes, comes, until)
                if stages[index] != "backward":  # it was speculated that nothing would be clipped
                    yield from held("held", index, num_bytes, written + 1, step.turn)
                    ends = max(ends, step.turn)
        yield from held("gradients", index, _norms_bytes(step, segment), comes, ends)


def _norms_bytes(step: PlannedStep, segment: Segment) -> int:
    """The norms of a segment's gradients, which come from a GPU behind them."""
    return 4 * sum(len(block.parameters) for block in segment.trained) if step.on_gpu else 0


def _written(step: PlannedStep, pending: int, last: int) -> Iterator[tuple[int, bool]]:
    """The position up to which a segment's update is pending, and whether it still is when the next step begins; one
    for each segment in the order of backward."""
    behind = EXCHANGED_BEHIND if step.num_ranks > 1 else 0
    arrivals = [step.arrival(index) for index in step.handed_over]
    number = 0
    for segment in step.backward:
        if not segment.trained:
            yield min(step.arrival(segment.index) + behind, last), False
            continue
        is_pending = number + pending >= len(arrivals)
        written = last if is_pending else arrivals[number + pending]
        yield min(written + behind, last), is_pending and pending > 0
        number += 1


def made(step: PlannedStep, num_rows: int | None) -> Iterator[Holding]:
    """While a segment's backward runs: its gradients over all micro-batches; or the sums, their rounding and one norm.
    Where a GPU computes: what is downloaded, the sums that are here, and what is added to them."""
    downloaded = gradient_bytes(step.spec, num_rows)
    for segment in step.backward:
        position = step.arrival(segment.index)
        num_bytes = downloaded[segment.index] + _norms_bytes(step, segment)
        if not step.on_gpu:
            num_bytes = _made_on_cpu(step, segment)
        elif step.spec.is_layer(segment) and step.is_summed and step.has_sums:
            num_bytes += segment.sum_bytes + segment.updated_bytes
        yield from held("gradients", segment.index, num_bytes, position, position)


def _made_on_cpu(step: PlannedStep, segment: Segment) -> int:
    spec, is_head = step.spec, segment.index == step.head
    is_summed = is_head or step.is_summed or (spec.tied and segment.index == 0)
    computing_bytes = segment.made_bytes + (segment.sum_bytes if is_summed else segment.gradient_bytes)
    if is_head:
        computing_bytes += lookup_chunk_bytes(spec, step.workload) + Segment(segment.unfinished).sum_bytes
    rounded_bytes = sum(block.gradient_bytes for block in segment.trained if block.gradient_dtype_bytes < 4)
    summed_bytes = segment.sum_bytes + rounded_bytes if is_summed else segment.gradient_bytes
    norm_bytes = 4 * max(map(largest_elements, segment.trained), default=0)
    return max(computing_bytes, summed_bytes + norm_bytes)


def downloaded(step: PlannedStep, num_rows: int | None) -> Iterator[Work]:
    """Gradients that a GPU sends, once they are complete."""
    for index, num_bytes in enumerate(gradient_bytes(step.spec, num_rows)):
        yield Work("down", "gradients", index, num_bytes, "backward")


def spilled(step: PlannedStep, stages: tuple[Stage, ...], num_rows: int | None, num_segments: int) -> Iterator[Work]:
    """Held gradients of the first `num_segments`, which go to the drives and come back for their update."""
    sizes = gradient_bytes(step.own, num_rows)
    for index in range(num_segments):
        yield Work("write", "held", index, sizes[index], "backward")
        yield Work("read", "held", index, sizes[index], stages[index])


def held_by_number(sizes: Sequence[int], stages: tuple[Stage, ...]) -> list[int]:
    """The bytes of held gradients by how many segments have them, in the order of backward."""
    held_bytes = [0 if stage == "backward" else size for size, stage in zip(sizes, stages, strict=True)]
    return list(accumulate(reversed(held_bytes), initial=0))


def leaving(step: PlannedStep, holds_sums: bool, holds_head: bool) -> Iterator[Holding]:
    """Gradients on a GPU until their downloads have ended: room for the largest parameter's, whichever segment's it is;
    and the sums of a layer's over micro-batches. `holds_sums`, `holds_head`: whether the GPU has them, as in
    `Placement`."""
    spec = step.spec
    # The embedding's is the last, and is held until the first unit is downloaded.
    last_bytes = least_leaving_bytes(step.with_gradients_on_gpu)
    yield Holding("gpu", "leaving", 0, last_bytes, at(0), end_of(min(1, step.head - 1)), at_most=True)
    for segment in step.backward[1:]:
        position = step.arrival(segment.index)
        own_bytes, sum_bytes = least_leaving_bytes(segment), 0
        if segment.index == 0:
            own_bytes = 0 if spec.tied and not holds_head else others_leaving_bytes(step.with_gradients_on_gpu)
        elif step.is_summed and holds_sums:  # what leaves makes room for itself
            yield Holding("gpu", "sums", segment.index, segment.sum_bytes, at(position), end_of(position))
            own_bytes = 0
        elif step.is_summed:  # with the last micro-batch one comes while another one leaves
            sum_bytes = 4 * sum(map(summed_elements, segment.trained))
        num_bytes = max(_left_before(step, segment, holds_head), own_bytes + sum_bytes)
        yield Holding("gpu", "leaving", segment.index, num_bytes, at(position), end_of(position), at_most=True)


def _left_before(step: PlannedStep, segment: Segment, holds_head: bool) -> int:
    """Gradients of the segment behind this one that are still downloading."""
    spec, head = step.spec, step.spec.head
    if segment.index + 1 < step.head:
        return least_leaving_bytes(spec.segments[segment.index + 1])
    shared_bytes = sum(block.compute_bytes for block in head.unfinished)
    if not spec.tied:
        return shared_bytes + (least_leaving_bytes(head) if holds_head else 0)
    # The last to leave is the sum of the borrowed matrix, which may have left chunk by chunk.
    return shared_bytes + (spec.lent.sum_bytes if holds_head else head.gradient_bytes)


def made_bytes(segment: Segment, *, is_summed: bool) -> int:
    """One parameter's gradient as autograd makes it on a GPU, and in another dtype. That of a stack of matrices is laid
    out anew. If the loss is scaled, the norm is that of an fp32 copy; a sum that is rounded serves as that copy. In a
    layer, a sum is rounded into the memory of the last micro-batch's gradient."""
    most_bytes = 0
    for block in segment.trained:
        is_stack = any(len(parameter.shape) > 2 for parameter in block.parameters)
        compute_bytes, gradient_bytes = block.dtype_bytes, block.gradient_dtype_bytes
        other_bytes = gradient_bytes if gradient_bytes != compute_bytes else 0
        copy_bytes = 4 if segment.scales_loss and not (is_summed and gradient_bytes < 4) else 0
        widths = ((1 + is_stack) * compute_bytes, compute_bytes + other_bytes, gradient_bytes + copy_bytes)
        most_bytes = max(most_bytes, largest_elements(block) * max(widths))
    return most_bytes
