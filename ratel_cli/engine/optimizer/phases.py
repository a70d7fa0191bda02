"""Where the update of a step stands. One value says it, and what may be asked of the update follows from it.

    Settled     nothing is left to do: the last step's update is written or discarded, and the next step may begin
    Arriving    gradients come, one block after another. A block is updated as its gradient comes, or that is held
    Decided     the step counts. Updates that have not begun wait until their blocks are used again

It goes from one to the other by the calls of `Updates`:

    begin       Settled   to Arriving
    decide      Arriving  to Decided, or if the norm is not finite to Settled
    abandon     Arriving  to Settled, and a Decided step that has no learning rate
    settle      Decided   to Settled

Invariant: a block's gradient is held, or its update has begun; both, only until the step is decided.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from ratel_cli.engine.optimizer.block_gradient import BlockGradient, Norms
from ratel_cli.engine.optimizer.groups import BlockUpdate
from ratel_cli.engine.optimizer.settings import UpdateNumbers


class Settled:
    """The newest weights are those of the current generation, or of the shadow that the caller commits."""


@dataclass(slots=True, kw_only=True, eq=False)
class BegunStep:
    """What an arriving and a decided step have."""

    numbers: UpdateNumbers
    """Without clipping until the step is decided."""
    writes: bool
    """Whether the store has begun the step, so that its updates go to the shadow."""
    held: dict[int, BlockGradient] = field(default_factory=dict)
    """By block: gradients whose updates have not begun, or may have to be done again."""
    started: dict[int, BlockUpdate] = field(default_factory=dict)
    """By block: updates that have begun."""


@dataclass(slots=True, kw_only=True, eq=False)
class Arriving(BegunStep):
    """Blocks are updated as their gradients come while it `writes`."""

    norms: Norms = field(default_factory=dict)
    """Norms of the gradients that have come, by parameter."""
    held_bytes: int = 0
    """Bytes of the gradients that are held in host memory."""
    spilled_bytes: int = 0
    """Bytes of those that are held in the scratch file."""


@dataclass(slots=True, kw_only=True, eq=False)
class Decided(BegunStep):
    """All gradients have come."""

    @property
    def waits_for_rate(self) -> bool:
        """True until the learning rate is known, if the step began without one."""
        return self.numbers.learning_rate is None

    @property
    def is_written(self) -> bool:
        """True if all updates are in the shadow."""
        return not self.held and all(update.is_written for update in self.started.values())


Phase: TypeAlias = Settled | Arriving | Decided


class StepDecision(NamedTuple):
    """What is known of a step once all its gradients have come."""

    norm: float
    """The global norm, before clipping."""
    norms: Norms
    """Norms of this rank's gradients, by parameter."""
    is_clipped: bool = False
    first_not_finite: str | None = None
    """The first parameter whose gradient is not finite; None if all are."""
