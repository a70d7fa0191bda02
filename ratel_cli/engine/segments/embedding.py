"""The first segment: from a micro-batch to its first hidden states, and to what later uses get besides.

Its backward runs it again. Where a segment above borrows the matrix that it looks tokens up in, that segment's part of
the gradient and its own are added up here (engine/optimizer/lookup_sum.py).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ratel_cli.engine.optimizer.segment_sum import SegmentSum
from ratel_cli.engine.reading.program import AnyBatch
from ratel_cli.engine.reading.weights import SegmentWeights
from ratel_cli.engine.segments.segment import RunnableSegment
from ratel_cli.engine.steps.state import PassState, StepState
from ratel_cli.model.values.carried import Carried


class Embedding(RunnableSegment[AnyBatch]):
    """See `RunnableSegment`."""

    def forward(
        self,
        state: PassState[AnyBatch],
        number: int,
        weights: SegmentWeights,  # noqa: ARG002 - the program has them
    ) -> None:
        """Begin the micro-batch."""
        with self.computing("forward"):
            state.seed_draws(self.segment.index, number)
            embedded = self._program.begin(state.batches[number])
            state.carried[number] = Carried(embedded)
            state.hidden[number] = embedded.hidden.detach()

    @contextmanager
    def summing(self, state: StepState[AnyBatch]) -> Iterator[SegmentSum]:
        """The sum of a borrowed matrix is the one that the borrower has begun."""
        services, lookup_sum = state.services, state.lent_of(self.segment)
        services.gradient_sums.wait_released()
        with services.gradient_sums.of_embedding(
            self.segment, lookup_sum, single=state.is_single, scale=state.gradient_scale, rows=state.rows
        ) as total:
            if lookup_sum is not None:
                lookup_sum.fetch()
            yield total

    def backward(self, state: StepState[AnyBatch], number: int, weights: SegmentWeights, sums: SegmentSum) -> None:
        """Run it again, and take the gradients of all its parameters at once."""
        lookup_sum = state.lent_of(self.segment)
        with self.computing("backward"):
            state.seed_draws(self.segment.index, number)
            embedded = self._program.begin(state.batches[number])
            roots = state.carried[number].root_embedding(embedded)
            if embedded.hidden.requires_grad:
                roots.tensors.insert(0, embedded.hidden)
                roots.gradients.insert(0, state.gradients[number])
            parts: list[list[torch.Tensor | None]] = []
            if lookup_sum is not None and embedded.second is not None:
                parts.append(roots.gradients_of(embedded.second, weights.trained))
            with state.partial_sums.added_to(weights, number) as shared_roots:
                found = torch.autograd.grad(
                    [*roots.tensors, *shared_roots.tensors],
                    weights.trained,
                    [*roots.gradients, *shared_roots.gradients],
                    allow_unused=True,
                )
                parts.append(list(found))
                del found  # it holds the matrix's gradient, which need not last
                if lookup_sum is not None:
                    chosen = slice(None) if state.rows is not None else state.distinct_tokens
                    if looked_up := _looked_up(parts, chosen):
                        lookup_sum.add_embedding(*looked_up)
                    del looked_up
                sums.add([_sum(each) for each in zip(*parts, strict=True)])
            del embedded, roots, shared_roots, parts


def _looked_up(parts: Sequence[list[torch.Tensor | None]], chosen: slice | torch.Tensor) -> list[torch.Tensor]:
    """Take the gradient of the matrix, which comes first, out of each part. Returns its chosen rows."""
    matrices = [part[0] for part in parts]
    for part in parts:
        part[0] = None
    return [each[chosen] for each in matrices if each is not None]


def _sum(gradients: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """The sum of gradients, in their order; None if there are none."""
    found = [each for each in gradients if each is not None]
    return functools.reduce(torch.add, found) if found else None
