"""The last segment: what it makes of the last hidden states is measured, or is a loss.

Its backward follows its forward right away, in chunks of tokens, each chunk's gradients at once. So a step uses it
once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ratel_cli.engine.optimizer.segment_sum import SegmentSum
from ratel_cli.engine.reading.program import AnyBatch
from ratel_cli.engine.reading.weights import SegmentWeights
from ratel_cli.engine.replay.loss import ChunkSums, loss_and_gradients
from ratel_cli.engine.segments.segment import RunnableSegment
from ratel_cli.engine.steps.state import PassState, StepState


class Head(RunnableSegment[AnyBatch]):
    """See `RunnableSegment`."""

    def forward(
        self,
        state: PassState[AnyBatch],
        number: int,
        weights: SegmentWeights,  # noqa: ARG002 - the program has them
    ) -> None:
        """Measure what comes out; nothing is left of `state.hidden[number]`."""
        with self.computing("forward"):
            state.measure(number, self._program.finish(state.hidden.pop(number), state.batches[number]))

    @contextmanager
    def summing(self, state: StepState[AnyBatch]) -> Iterator[SegmentSum]:
        """Begin the sum of a matrix that it borrows of a segment below, too, which that segment takes over."""
        sums, scale = state.services.gradient_sums, state.gradient_scale
        lent = [
            state.lend(block, sums.of_lookup(block, state.distinct_tokens, scale=scale))
            for block in self.segment.borrowed_lookups
        ]
        with sums.of_head(self.segment, scale=scale) as total:
            yield total
        for each in lent:
            each.end_head()

    def backward(self, state: StepState[AnyBatch], number: int, weights: SegmentWeights, sums: SegmentSum) -> None:
        """Compute the loss of the micro-batch, and its gradients."""
        borrowed = self.segment.borrowed_lookups
        shared, lookup_sums = weights.of(*self.segment.unfinished), [state.lookup_sums[each.index] for each in borrowed]
        shared_sums, num_own, num_below = ChunkSums(shared), len(weights.trained), len(weights.trained) + len(shared)

        def take(contribution: Sequence[torch.Tensor | None]) -> None:
            sums.add(contribution[:num_own])
            shared_sums.add(contribution[num_own:num_below])
            for lookup_sum, gradient in zip(lookup_sums, contribution[num_below:], strict=True):
                if gradient is not None:
                    lookup_sum.add_head(gradient)

        with self.computing("backward"):
            state.seed_draws(self.segment.index, number)
            leaf = state.hidden.pop(number).requires_grad_(self._program.spec.passes_on(self.segment))
            loss, gradient = loss_and_gradients(
                self._program.finish(leaf, state.batches[number]),
                leaf,
                (*weights.trained, *shared, *weights.of(*borrowed)),
                take,
                mean=state.mean,
                chunk_tokens=state.services.chunk_tokens,
                figures=state.figures,
            )
            for each in lookup_sums:
                each.end_micro_batch()
            state.partial_sums.begin(self.segment, shared_sums.take(), number)
            state.loss += loss
            if gradient is not None:
                state.gradients[number] = gradient
            del leaf, gradient
