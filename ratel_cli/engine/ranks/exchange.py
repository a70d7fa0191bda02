"""Exchanges a block's gradients: each rank gets its slice of them from all ranks, and adds them up.

    1. wait    for the sum of this rank's micro-batches, in host memory
    2. swap    slices with all ranks, in fp32, on a thread of its own
    3. add     what came, in fp32 and in the order of ranks
    4. round   once, and take the norms of the slice's parameters

What is done goes to the updates on the thread that computes, in the order in which it was handed over.

Invariant: the bits depend on the number of ranks and on nothing else; a rank in which a parameter got no gradient adds
nothing to it, and a parameter that got none in any rank has none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ratel_cli.closing import Closing
from ratel_cli.engine.measure.telemetry import SpanLabel, Timeline
from ratel_cli.engine.optimizer.block_gradient import BlockGradient, Norms
from ratel_cli.engine.optimizer.update import Updates
from ratel_cli.engine.ranks.ranks import Ranks
from ratel_cli.engine.reading.host_weights import HostWeights
from ratel_cli.engine.reading.turns import Turns
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.tickets import Ticket, settle
from ratel_cli.io.views import VALUE_DTYPES, view
from ratel_cli.schedule.slices import EXCHANGED_BEHIND, ranges_in, slice_of


@dataclass(slots=True, kw_only=True)
class _Exchange:
    """One block's exchange."""

    gradient: BlockGradient
    """The block's whole gradient, of this rank's micro-batches."""
    weights: HostWeights | None
    ticket: Ticket
    found: list[BlockGradient]
    """This rank's slice of it, of all ranks, when the exchange is done."""

    def release(self) -> None:
        """Give back what nobody has taken over."""
        for gradient in (self.gradient, *self.found):
            gradient.release()
        if self.weights is not None:
            self.weights.release()


class GradientExchange(Closing):
    """What stands between the sums of one rank's gradients and its updates. Use as a context manager."""

    def __init__(self, ranks: Ranks, updates: Updates, pool: BufferPool, timeline: Timeline) -> None:
        """Gradients come in fp32, and become what their blocks say. Those of one rank alone are what they become."""
        self._ranks = ranks
        self._updates = updates
        self._pool = pool
        self._timeline = timeline
        self._turns = Turns("exchange")
        self._coming: deque[_Exchange] = deque()

    def pass_on(self, gradient: BlockGradient, weights: HostWeights | None) -> None:
        """Exchange a block's gradient, and hand over what is done of those before. `weights`: what this rank updates.

        Raises as `Updates.hand_over` and `Channel.swap`.
        """
        if self._ranks.size == 1:
            self._updates.hand_over(gradient, weights)
            return
        scale = self._updates.gradient_scale
        found: list[BlockGradient] = []
        ticket = self._turns.submit(lambda: found.append(self._exchanged(gradient, scale)))
        shared = None if weights is None else weights.share()
        self._coming.append(_Exchange(gradient=gradient, weights=shared, ticket=ticket, found=found))
        self._hand_over(at_most=EXCHANGED_BEHIND)

    def finish(self) -> None:
        """Hand over all that was exchanged. Raises as `pass_on`."""
        self._hand_over(at_most=0)

    def drop(self) -> None:
        """Forget what has not been handed over, after its exchange."""
        while self._coming:
            coming = self._coming.popleft()
            settle([coming.ticket])
            coming.release()

    def close(self) -> None:
        """End the thread and give all memory back. Idempotent."""
        self.drop()
        self._turns.close()

    def _hand_over(self, *, at_most: int) -> None:
        while self._coming and (len(self._coming) > at_most or self._coming[0].ticket.done):
            coming = self._coming.popleft()
            try:
                with self._timeline.stalled_on("network"):
                    coming.ticket.wait()
                self._timeline.transfer(
                    "network", SpanLabel.of("gradient", coming.gradient.block, "backward"), coming.ticket
                )
                self._updates.hand_over(coming.found.pop(), coming.weights)
            finally:
                coming.release()

    def _exchanged(self, gradient: BlockGradient, scale: float) -> BlockGradient:
        """Phases 1 to 4."""
        ranks, block = self._ranks, gradient.block
        gradient.fetch(self._pool)
        present = self._present(gradient)
        ranges = ranges_in(block, ranks.size)
        start, stop = ranges[ranks.rank]
        own = slice_of(block, ranks.slice)
        with self._received(gradient, ranges, stop - start) as parts:
            dtype = VALUE_DTYPES[block.gradient_dtype]
            lease = self._pool.lease(own.num_elements * dtype.itemsize, f"gradient of {block.name}")
            places = {each.name: index for index, each in enumerate(block.parameters)}
            norms: Norms = {}
            for parameter in own.parameters:
                of_ranks = [
                    part[parameter.start : parameter.stop]
                    for part, has_gradient in zip(parts, present, strict=True)
                    if has_gradient[places[parameter.name]]
                ]
                if not of_ranks:
                    continue
                total = of_ranks[0]
                for part in of_ranks[1:]:
                    total.add_(part)
                rounded = view(lease.memory, dtype)[parameter.start : parameter.stop].copy_(total)
                values = total.copy_(rounded)
                if scale != 1.0:
                    values.mul_(scale)
                norms[parameter.name] = float(torch.linalg.vector_norm(values, 2.0))
        has_any = tuple(any(each[places[parameter.name]] for each in present) for parameter in own.parameters)
        return BlockGradient(own, lease, dtype, has_any, norms, download=None)

    def _present(self, gradient: BlockGradient) -> list[tuple[bool, ...]]:
        """For each rank, which of the block's parameters have a gradient there."""
        size, number = self._ranks.size, len(gradient.present)
        flags = [bytearray(number) for _ in range(size)]
        flags[self._ranks.rank][:] = bytes(gradient.present)
        sent = memoryview(flags[self._ranks.rank])
        self._ranks.gradients.swap([sent] * size, [memoryview(each) for each in flags])
        return [tuple(map(bool, each)) for each in flags]

    @contextmanager
    def _received(
        self, gradient: BlockGradient, ranges: Sequence[tuple[int, int]], num_elements: int
    ) -> Iterator[list[torch.Tensor]]:
        """This rank's slice of the gradients of each rank, in fp32 `[elements of the slice]`."""
        size, rank = self._ranks.size, self._ranks.rank
        part_bytes = 4 * num_elements
        with (
            gradient.elements(0, gradient.block.num_elements, self._pool) as values,
            self._pool.lease(part_bytes * size, f"gradients of {gradient.block.name}", crosses_link=False) as lease,
        ):
            parts = [lease.memory[part_bytes * each : part_bytes * (each + 1)] for each in range(size)]
            sent = [values[4 * start : 4 * stop] for start, stop in ranges]
            self._ranks.gradients.swap(sent, parts)
            parts[rank][:] = sent[rank]
            yield [view(part, torch.float32) for part in parts]
