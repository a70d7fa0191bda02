"""The order in which a step, or an evaluation, uses the segments of a model. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ratel_cli.schedule.segments import Segment, first_trained

Stage = Literal["forward", "backward", "update"]
"""`forward`: from the first segment to the last but one. `backward`: the last segment, and down to the first one that
is trained. `update`: between that and the next forward; empty unless the optimizer is separate."""


@dataclass(frozen=True, slots=True)
class Use:
    """A segment's weights are bound to its modules, for all micro-batches."""

    segment: Segment
    stage: Stage

    @property
    def looks_up(self) -> bool:
        """Whether tokens are looked up: of a matrix, the rows of the step's tokens are all that is used."""
        return any(block.is_looked_up for block in self.segment.blocks)


def step_uses(segments: Sequence[Segment]) -> list[Use]:
    """Return the uses of one step (P16): forward, the last segment, backward. The last segment's backward follows its
    forward, so it is used once. Backward ends where nothing below is trained."""
    *below, last = segments
    return [
        *(Use(segment, "forward") for segment in below),
        Use(last, "backward"),
        *(Use(segment, "backward") for segment in reversed(below[first_trained(segments) :])),
    ]


def forward_uses(segments: Sequence[Segment]) -> list[Use]:
    """Return the uses of an evaluation."""
    return [Use(segment, "forward") for segment in segments]
