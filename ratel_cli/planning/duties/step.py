"""What the rows of a step depend on besides its placement: `PlannedStep`. Pure.

A position is that of a use; behind the last one comes the turn to the next step, or where the optimizer is separate one
position for the update of each segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.profile.placement import Overlap, Workload, looked_up, most_rows, update_stage
from ratel_cli.schedule.ledger import Amounts, Holding, Purpose, Row, Work, amounts, by_position
from ratel_cli.schedule.segments import Segment
from ratel_cli.schedule.uses import Stage, Use, step_uses

ONE_TOKEN = Workload(micro_batch_size=1, num_micro_batches=1, sequence_len=1)
"""The least that a step can have: for what does not depend on tokens."""


class Folded(NamedTuple):
    """What follows from the rows of one duty."""

    memory: dict[Purpose, list[int]]
    """Host memory at each position, by purpose."""
    amounts: Amounts
    exposed: Amounts
    """The part while which nothing computes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedStep:
    """A model, a workload, and decisions that no placement changes. A duty is asked through `folded`, which knows what
    it answered for the values that it reads of a placement: a search asks for the same thousands of times."""

    spec: ModelSpec
    """The model as a rank computes with it."""
    own: ModelSpec
    """What the rank stores and updates of it."""
    num_ranks: int = 1
    workload: Workload = ONE_TOKEN
    on_gpu: bool = False
    holds_gradients: bool
    """No segment is updated before the last gradient is there."""
    overlap: Overlap = "optimized"
    has_sums: bool = True
    """Where a GPU computes: whether host memory has, or may have, the sums of layers' gradients over micro-batches."""

    @cached_property
    def uses(self) -> list[Use]:
        """The uses of a step, in their order."""
        return step_uses(self.spec.segments)

    @cached_property
    def head(self) -> int:
        """The index of the last segment, and the position of its use."""
        return self.spec.head.index

    @cached_property
    def turn(self) -> int:
        """The position behind the last use."""
        return len(self.uses)

    @property
    def is_separate(self) -> bool:
        """Whether all updates come between backward and the next forward."""
        return self.overlap == "separate"

    @cached_property
    def cycle(self) -> int:
        """How many positions a step has."""
        return self.turn + (len(self.spec.segments) if self.is_separate else 1)

    @property
    def is_summed(self) -> bool:
        """Whether gradients are added up over micro-batches."""
        return self.workload.num_micro_batches > 1

    @cached_property
    def backward(self) -> tuple[Segment, ...]:
        """The segments that backward reaches, in its order."""
        return tuple(reversed(self.spec.segments[self.spec.first_trained :]))

    @cached_property
    def handed_over(self) -> list[int]:
        """The indices of segments that are updated, in the order of their gradients."""
        return [segment.index for segment in reversed(self.spec.segments) if segment.trained]

    def arrival(self, index: int) -> int:
        """The position at which backward is in a segment, which makes its gradients."""
        return 2 * self.head - index

    @cached_property
    def embedding_on_gpu(self) -> Segment:
        """The embedding as a GPU gets it: rows of its matrix, where those are enough."""
        return looked_up(self.spec, most_rows(self.spec, self.workload))

    @property
    def with_gradients_on_gpu(self) -> Segment:
        """What of the embedding gets gradients on a GPU: a head that borrows its matrix gives every row one."""
        return self.spec.embedding if self.spec.tied else self.embedding_on_gpu

    def on_gpu_of(self, segment: Segment) -> Segment:
        """A segment as a GPU gets it."""
        return segment if segment.index else self.embedding_on_gpu

    def stages(self, deferred: frozenset[int]) -> tuple[Stage, ...]:
        """The stage in which each segment is updated; `deferred` as in `Placement`."""
        if deferred not in self._known_stages:
            self._known_stages[deferred] = tuple(
                update_stage(
                    is_deferred=each.index in deferred, holds_gradients=self.holds_gradients, overlap=self.overlap
                )
                for each in self.spec.segments
            )
        return self._known_stages[deferred]

    def folded(self, duty: Callable[..., Iterator[Row]], *values: object) -> Folded:
        """The rows of a duty. `values`: what it reads of the placement."""
        key = duty, values
        if key not in self._known:
            rows = list(duty(self, *values))
            works = [row for row in rows if isinstance(row, Work)]
            self._known[key] = Folded(
                by_position((row for row in rows if isinstance(row, Holding)), self.cycle),
                amounts(works),
                amounts(works, is_exposed=True),
            )
        return self._known[key]

    @cached_property
    def _known(self) -> dict[object, Folded]:
        return {}

    @cached_property
    def _known_stages(self) -> dict[frozenset[int], tuple[Stage, ...]]:
        return {}
