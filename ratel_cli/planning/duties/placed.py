"""The ledger of a step under one placement: what every duty has in it, summed and overlapped. Pure.

Here stands what each duty reads of a placement; what those of a GPU's memory do, in planning/memory/gpu_uses.py.

Invariant: what an applied step of the engine moves is the sum of the rows, to the byte; what it leases at any moment is
no more than what overlaps there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property

from ratel_cli.planning.duties import activations, exchange, gradients, sums, updates, weights
from ratel_cli.planning.duties.step import Folded, PlannedStep
from ratel_cli.planning.profile.placement import Placement
from ratel_cli.schedule.ledger import Amounts, Holding, Purpose
from ratel_cli.schedule.uses import Stage


class PlacedStep:
    """A step and a placement."""

    def __init__(self, step: PlannedStep, placement: Placement) -> None:
        self.step = step
        self.placement = placement
        self.stages = step.stages(placement.deferred)
        """When each segment is updated."""

    @cached_property
    def ways(self) -> list[tuple[Stage, ...]]:
        """When segments may have been updated: where all wait for the next forward, a step that was not clipped may
        have updated them in its own backward."""
        if set(self.stages) == {"forward"}:
            in_backward: Stage = "backward"
            return [self.stages, (in_backward,) * len(self.stages)]
        return [self.stages]

    def memory(self, way: tuple[Stage, ...]) -> dict[Purpose, list[int]]:
        """Host memory at each position, by purpose, without units."""
        found: dict[Purpose, list[int]] = {}
        for folded in (*self._duties, *self._duties_of(way)):
            for purpose, taken in folded.memory.items():
                found[purpose] = [*map(int.__add__, found[purpose], taken)] if purpose in found else taken
        return found

    def waiting(self, way: tuple[Stage, ...]) -> Iterator[Holding]:
        """Gradients that wait for their update."""
        return gradients.waiting(self.step, *self._read_by_waiting(way))

    def of_segments(self) -> Iterator[Holding]:
        """Weights and gradients in host memory, those left out that stay."""
        placed = self.placement
        for row in weights.read(self.step, placed.prefetch_blocks, placed.resident_weights, self.stages):
            if isinstance(row, Holding):
                yield row
        yield from gradients.made(self.step, placed.gpu_embedding_rows)
        yield from self.waiting(self.stages)

    @cached_property
    def amounts(self) -> Amounts:
        """What the step uses of drives, link, network and additions, without units."""
        return _added(folded.amounts for folded in self._duties)

    @cached_property
    def exposed(self) -> Amounts:
        """The part while which nothing computes."""
        return _added(folded.exposed for folded in self._duties)

    @property
    def layer_sums(self) -> Folded:
        """Sums of layers' gradients in host memory."""
        return self.step.folded(sums.of_layers, self.placement.gpu_holds_sums)

    @cached_property
    def _duties(self) -> list[Folded]:
        folded, placed = self.step.folded, self.placement
        resident, num_rows = placed.resident_weights, placed.gpu_embedding_rows
        found = [
            folded(weights.read, placed.prefetch_blocks, resident, self.stages),
            folded(weights.resident, resident),
            folded(weights.gathered),
            folded(updates.records, self.stages, resident, placed.resident_states),
            folded(updates.commit),
            folded(gradients.made, num_rows),
            folded(sums.of_head, placed.gpu_holds_head, placed.gpu_holds_lookup),
            self.layer_sums,
            folded(sums.partial),
            folded(exchange.exchanged, num_rows),
            folded(activations.working),
            folded(activations.hidden),
        ]
        if self.step.on_gpu:
            found += [
                folded(weights.rows, num_rows),
                folded(weights.sent_up, placed.gpu_weights, placed.gpu_window_bytes, num_rows),
                folded(gradients.downloaded, num_rows),
            ]
        return found

    def _duties_of(self, way: tuple[Stage, ...]) -> list[Folded]:
        """The duties that depend on when segments have been updated."""
        folded, placed = self.step.folded, self.placement
        resident, shape = placed.resident_weights, placed.groups
        return [
            folded(updates.groups, way, shape, placed.pending_updates, resident, placed.gpu_embedding_rows),
            folded(updates.being_written, way, placed.prefetch_blocks, resident, shape),
            folded(gradients.waiting, *self._read_by_waiting(way)),
        ]

    def _read_by_waiting(
        self, way: tuple[Stage, ...]
    ) -> tuple[tuple[Stage, ...], tuple[Stage, ...], int, int, frozenset[int], int | None]:
        placed = self.placement
        return (
            way,
            self.stages,
            placed.prefetch_blocks,
            placed.pending_updates,
            placed.resident_weights,
            placed.gpu_embedding_rows,
        )


def _added(each: Iterator[Amounts]) -> Amounts:
    found: Amounts = defaultdict(int)
    for part in each:
        for key, amount in part.items():
            found[key] += amount
    return found
