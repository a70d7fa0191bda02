"""What head and loss take of a GPU: chunk by chunk of a micro-batch. Rows of the ledger. Pure.

The fp32 sums of the head's gradients over chunks are on the GPU, or in host memory (engine/optimizer/host_sums.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from ratel_cli.planning.duties.step import PlannedStep
from ratel_cli.planning.profile.activations import head_chunk_tokens, logits_bytes, lookup_rows_bytes
from ratel_cli.planning.profile.gpu_gradients import largest_bytes, others_leaving_bytes, returned_bytes
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.schedule.ledger import RUN, Holding, Purpose, at
from ratel_cli.schedule.segments import Segment

_LOGITS, _GRADIENTS, _LOGITS_2, _GRADIENTS_2, _LOGITS_3, _NORM, _END, _LEAVING = range(8)
"""What happens in turn with the last micro-batch: up to three chunks' logits and gradients, of which all later ones are
like the last; the final norm's backward; the end of the micro-batch, where its part of the gradient of a borrowed
matrix is added up; then rounding and leaving."""


def on_gpu(step: PlannedStep, profile: ModelProfile, holds_head: bool) -> Iterator[Holding]:
    """`holds_head`: whether the GPU has the sums, as in `Placement`."""
    moments = _summing(step, profile) if holds_head else _passing(step, profile)
    # Partial sums of shared blocks of the micro-batch before are leaving.
    yield _row(step, "partial sums", sum(block.compute_bytes for block in step.spec.head.unfinished), _LOGITS, _END)
    yield from moments


def waiting_bytes(step: PlannedStep, holds_head: bool) -> int:
    """The gradient of a matrix that the head borrows, and rows of it, until the embedding's is there."""
    spec, workload = step.spec, step.workload
    rows_bytes = min(2, workload.num_micro_batches) * lookup_rows_bytes(spec, workload)
    return rows_bytes + (spec.lent.sum_bytes if holds_head else 0)


def _row(step: PlannedStep, purpose: Purpose, num_bytes: int, first: int, last: int) -> Holding:
    return Holding("gpu", purpose, step.head, num_bytes, at(step.head, RUN, first), at(step.head, RUN, last))


def _passing(step: PlannedStep, profile: ModelProfile) -> Iterator[Holding]:
    """Where host memory has the sums: a chunk's logits; its gradients, and those of the logits that they are made of;
    the rounded sum, back for its norm. What a head has besides a matrix that it borrows is summed on the GPU, but
    small."""
    spec, head = step.spec, step.spec.head
    chunk_tokens = head_chunk_tokens(spec, step.workload)
    made_bytes = head.made_bytes + chunk_tokens * spec.vocab_size * spec.dtype_bytes
    yield _row(step, "partial sums", Segment(head.unfinished).sum_bytes, _LOGITS, _END)
    yield _row(step, "sums", head.sum_bytes if spec.tied else 0, _LOGITS, _NORM)
    yield _row(step, "logits", logits_bytes(spec, chunk_tokens), _LOGITS, _LOGITS)
    yield _row(step, "gradients", made_bytes, _GRADIENTS, _GRADIENTS)
    yield _row(step, "activations", profile.norm_held_bytes, _LOGITS, _GRADIENTS)
    yield _row(step, "activations", profile.norm_bytes, _NORM, _NORM)
    yield _row(step, "gradients", 0 if spec.tied else returned_bytes(head), _END, _END)


def _summing(step: PlannedStep, profile: ModelProfile) -> Iterator[Holding]:
    """Where the GPU has the sums. With several micro-batches they are there from the first one on, and the rows of the
    one before are leaving. That of a borrowed matrix is in the compute dtype after the first chunk, and from the second
    one on in fp32."""
    spec, workload, head = step.spec, step.workload, step.spec.head
    waiting, borrowed = waiting_bytes(step, holds_head=True), Segment(head.borrowed)
    tokens, chunk_tokens = workload.micro_batch_tokens, head_chunk_tokens(spec, workload)
    num_chunks, last_tokens = -(-tokens // chunk_tokens), tokens % chunk_tokens or chunk_tokens
    yield _row(step, "sums", head.sum_bytes, _LOGITS if step.is_summed else _GRADIENTS, _LEAVING)
    if step.is_summed:
        yield _row(step, "sums", waiting - lookup_rows_bytes(spec, workload), _LOGITS, _NORM)
    yield _row(step, "sums", waiting, _END, _LEAVING)
    for number, (logits, gradients) in enumerate(
        ((_LOGITS, _GRADIENTS), (_LOGITS_2, _GRADIENTS_2), (_LOGITS_3, None))[:num_chunks], start=1
    ):
        chunk = chunk_tokens if number < num_chunks else last_tokens
        yield _row(step, "logits", logits_bytes(spec, chunk), logits, logits)
        if gradients is not None:
            yield _row(step, "gradients", head.made_bytes, gradients, gradients)
    last_chunk = (_GRADIENTS, _GRADIENTS_2, _LOGITS_3)[min(num_chunks, 3) - 1]
    if num_chunks > 1:
        yield _row(step, "gradients", borrowed.updated_bytes, _LOGITS_2, _GRADIENTS_2)
        yield _row(step, "sums", borrowed.sum_bytes, _GRADIENTS_2, last_chunk)
    yield _row(step, "activations", profile.norm_held_bytes, _LOGITS, last_chunk)
    yield _row(step, "activations", profile.norm_bytes, _NORM, _NORM)
    inputs_bytes = tokens * spec.hidden_size * spec.dtype_bytes
    yield _row(step, "gradients", spec.lent.updated_bytes + inputs_bytes, _END, _END)
    yield _row(step, "leaving", largest_bytes(head) + others_leaving_bytes(head), _LEAVING, _LEAVING)
