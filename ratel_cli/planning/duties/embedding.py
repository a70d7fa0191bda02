"""What the embedding takes of a GPU: vectors in forward, and in backward gradients of all its parameters at once. Rows
of the ledger. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ratel_cli.planning.duties.gradients import made_bytes
from ratel_cli.planning.duties.head import waiting_bytes
from ratel_cli.planning.duties.step import PlannedStep
from ratel_cli.planning.profile.activations import segment_activation_bytes
from ratel_cli.planning.profile.gpu_gradients import returned_bytes, shared_bytes
from ratel_cli.schedule.ledger import BACKWARD, RUN, Holding, Purpose, at, end_of

_MADE, _ROUNDED, _NORM = range(3)
"""In turn: all gradients are made; one exists in two dtypes; the norm is taken."""


def on_gpu(step: PlannedStep, holds_head: bool) -> Iterator[Holding]:
    """`holds_head`: whether the GPU has the sums of the head's gradients, as in `Placement`."""
    spec, embedding = step.spec, step.embedding_on_gpu
    vectors_bytes = segment_activation_bytes(spec, embedding, tokens=step.workload.micro_batch_tokens)
    yield Holding("gpu", "activations", 0, vectors_bytes, at(0, RUN), end_of(0, RUN))
    if spec.first_trained > 0:
        return

    def row(purpose: Purpose, num_bytes: int, first: int, last: int) -> Holding:
        return Holding(
            "gpu", purpose, 0, num_bytes, at(step.turn - 1, BACKWARD, first), at(step.turn - 1, BACKWARD, last)
        )

    is_away, is_summed = spec.tied and not holds_head, step.is_summed or spec.tied
    with_gradients = step.with_gradients_on_gpu
    sum_bytes = waiting_bytes(step, holds_head)
    if step.is_summed:  # the sum of a borrowed matrix waits since the head
        sum_bytes += 4 * sum(each.num_elements for each in embedding.trained if not (spec.tied and each.is_looked_up))
    yield row("gradients", embedding.updated_bytes + vectors_bytes // 2, _MADE, _MADE)
    if not is_away:
        yield row("gradients", made_bytes(with_gradients, is_summed=is_summed), _ROUNDED, _ROUNDED)
    yield row("partial sums", shared_bytes(embedding), _MADE, _ROUNDED)
    yield row("sums", sum_bytes, _MADE, _ROUNDED)
    norm_bytes = returned_bytes(spec.embedding) if is_away else _matrix_norm_bytes(step, is_summed=is_summed)
    yield row("gradients", norm_bytes, _NORM, _NORM)


def _matrix_norm_bytes(step: PlannedStep, *, is_summed: bool) -> int:
    """The norm of an embedding's gradient that has rows only: it is laid out in the whole matrix, when the sum is
    rounded and gone. If the loss is scaled, both are in fp32, next to what was rounded."""
    lookup, with_gradients = step.spec.lookup_block, step.with_gradients_on_gpu
    if lookup is None or with_gradients is step.spec.embedding:
        return 0
    rows = with_gradients.parameters[0].num_elements
    others_bytes = with_gradients.sum_bytes - 4 * rows if is_summed else 0
    rounded_bytes = rows * (lookup.gradient_dtype_bytes + (4 if lookup.scales_loss else 0))
    norm_bytes = 4 if lookup.scales_loss else lookup.gradient_dtype_bytes
    return others_bytes + rounded_bytes + lookup.parameters[0].num_elements * norm_bytes
