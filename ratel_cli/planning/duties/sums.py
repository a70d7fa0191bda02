"""Sums of gradients: of the head over chunks, of layers over micro-batches, of shared blocks over segments. Rows of the
ledger. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ratel_cli.planning.duties.step import PlannedStep
from ratel_cli.planning.profile.activations import lookup_chunk_bytes, lookup_rows_bytes, lookup_sum_bytes
from ratel_cli.planning.profile.analytic import num_head_chunks
from ratel_cli.schedule.ledger import Row, Work, held
from ratel_cli.schedule.lifetimes import partial_sum_lifetimes


def of_head(step: PlannedStep, holds_head: bool, holds_lookup: bool) -> Iterator[Row]:
    """The head's gradient over chunks of tokens. What it borrows of the embedding waits for that one's backward, with
    rows of each micro-batch. `holds_head`, `holds_lookup`: whether a GPU has both, as in `Placement`.

    Where host memory has the sums, a chunk's gradient leaves before the next one is made, and the rounded sum, which is
    where it is needed, comes back for its norm: computing waits for both.
    """
    spec, workload, head, last = step.spec, step.workload, step.head, step.turn - 1
    # On a CPU it becomes the sum of the embedding, which is counted as making. It counts even if a GPU has it, since
    # whether it does depends on what is offloaded.
    until = last if step.on_gpu else last - 1
    yield from held("sums", head, lookup_sum_bytes(spec, workload), head, until)
    rows_bytes = workload.num_micro_batches * lookup_rows_bytes(spec, workload)
    if holds_head and not holds_lookup:
        yield Work("up", "sums", head, spec.lent.sum_bytes + rows_bytes, "backward")
        yield Work("down", "sums", head, spec.lent.sum_bytes + rows_bytes, "backward")
    if holds_head:
        return
    summed, chunks = spec.lent if spec.tied else spec.head, num_head_chunks(spec, workload)
    if step.on_gpu and spec.tied:
        yield from held("sums", head, summed.updated_bytes, head, last)
        yield from held("sums", head, lookup_chunk_bytes(spec, workload), head, head)
    elif step.on_gpu:
        yield from held("sums", head, summed.sum_bytes + summed.updated_bytes, head, head)
    down_bytes, up_bytes = chunks * summed.updated_bytes, summed.gradient_bytes
    yield Work("down", "sums", head, rows_bytes + down_bytes - up_bytes, "backward")
    yield Work("up", "sums", head, up_bytes, "backward")
    yield Work("waited", "sums", head, up_bytes + down_bytes, "backward")
    yield Work("added", "sums", head, summed.trained_elements, "backward", chunks)
    yield Work("add bytes", "sums", head, summed.updated_bytes + 2 * summed.sum_bytes, "backward", chunks)


def of_layers(step: PlannedStep, holds_sums: bool) -> Iterator[Work]:
    """A layer's gradients over micro-batches, where host memory has the sums: those of all micro-batches but the last
    come down, and the sum goes up with the last one. `holds_sums` as in `Placement.gpu_holds_sums`."""
    if not step.is_summed or holds_sums:
        return
    number = step.workload.num_micro_batches - 1
    for layer in step.spec.layers:
        made_bytes, sum_bytes = layer.updated_bytes, layer.sum_bytes
        if step.on_gpu:
            yield Work("up", "sums", layer.index, sum_bytes, "backward")
            yield Work("down", "sums", layer.index, made_bytes, "backward", number)
        yield Work("added", "sums", layer.index, layer.trained_elements, "backward", number)
        moved_bytes = number * (made_bytes + sum_bytes) + (number - 1) * sum_bytes  # the first one is copied
        yield Work("add bytes", "sums", layer.index, moved_bytes, "backward")


def partial(step: PlannedStep) -> Iterator[Row]:
    """Gradients of shared blocks, of which every micro-batch has its own: from the first segment of backward that binds
    one to the last, to host memory and back between two of them."""
    number = step.workload.num_micro_batches
    for sums in partial_sum_lifetimes(step.uses):
        block = sums.of
        yield from held("partial sums", block.segment, number * block.compute_bytes, sums.first, sums.last)
        for way in ("up", "down"):
            yield Work(
                way, "partial sums", block.segment, block.compute_bytes, "backward", number * len(block.borrowers)
            )
