"""How the rows of a micro-batch belong together where answers are compared: for preference tuning."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """The rows of a micro-batch are two halves, and row i of one belongs to row i of the other.

    Of pairs the first half are the chosen answers, and the second the rejected ones. Of answers with a verdict the
    first half are these, and the second has behind each prompt another one's answer, by which the KL divergence from
    the reference model is estimated.
    """

    is_answer: torch.Tensor
    """bool `[rows, tokens]`: positions whose target is a token of the answer."""
    reference: torch.Tensor
    """fp32 `[rows]`: the sum of the log-probabilities of each answer by the reference model; NaN: not known."""
    is_good: torch.Tensor | None = None
    """bool `[rows / 2]`: the verdict on each answer; None: pairs have none."""
    num_good: int = 0
    """Answers with a good verdict."""

    @property
    def num_compared(self) -> int:
        """Pairs, or answers with a verdict."""
        return self.is_answer.shape[0] // 2

    def to(self, device: torch.device) -> Self:
        """Return a copy with its tensors on a device."""
        return replace(
            self,
            is_answer=self.is_answer.to(device),
            reference=self.reference.to(device),
            is_good=None if self.is_good is None else self.is_good.to(device),
        )
