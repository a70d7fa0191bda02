"""What a loop of the caller's own gives to a horizontal engine and gets from it, and what is seen of a block's weights.

Invariant: a look tells of every change that torch counts, and with values of every change at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn

from ratel_cli.engine.cache.backward_task import running_backward
from ratel_cli.engine.measure.digest import digest
from ratel_cli.schedule.segments import Segment


class StepRule(Protocol):
    """What the caller's optimizer decides."""

    def begin_step(self) -> float:
        """The learning rate of a step whose backward begins now."""

    @property
    def num_rounds(self) -> int:
        """Rounds of forward and backward in a step."""


Look = tuple[tuple[int, int], torch.Tensor | None]
"""What is seen of a parameter: where it is and how often it was written to, as torch counts that, and a digest of its
values."""


class Computed(NamedTuple):
    """What a block has computed once more, with a graph."""

    outputs: Sequence[torch.Tensor]
    """Outputs that have a gradient."""
    gradients: Sequence[torch.Tensor]


class BlockCall:
    """A call of a block whose backward may come. When nothing refers to it any more, it will not."""

    def __init__(self, segment: Segment, epoch: int) -> None:
        self.segment = segment
        self.epoch = epoch
        """Which weights it has computed with."""
        self.waits = True
        """Whether its backward has still to come."""
        self.is_made_in_backward = running_backward() is not None
        """Whether a backward computes it again, as a checkpoint around it does."""


def look_at(parameters: Sequence[nn.Parameter], *, at_values: bool) -> list[Look]:
    """What changes when parameters do. Without `at_values`: when torch knows that they do."""
    return [((each.data_ptr(), each._version), digest(each) if at_values else None) for each in parameters]


def first_changed(before: Sequence[Look], after: Sequence[Look]) -> int | None:
    """The number of the first parameter that has changed between two looks, as far as both have looked."""
    pairs = zip(before, after, strict=False)  # none are left of a block whose weights are gone
    changed = (
        number
        for number, ((known, values), (known_then, values_then)) in enumerate(pairs)
        if known != known_then or not (values is None or values_then is None or torch.equal(values, values_then))
    )
    return next(changed, None)
