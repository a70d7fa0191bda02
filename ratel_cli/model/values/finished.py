"""What a model's last segment gives, of which the loss is a sum, or which rows are compared by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedLoss:
    """The loss of one micro-batch whose rows are compared."""

    loss: torch.Tensor
    """An fp32 scalar: a mean over what the micro-batch compares."""
    figures: Mapping[str, torch.Tensor]
    """What else is known of it, such as rewards: scalars without a graph, by the names that TRL has for them."""


class ComparedRows(Protocol):
    """Rows whose loss is no sum over their tokens, but a function of one value of each token of all rows."""

    @property
    def num_compared(self) -> int:
        """Pairs or answers: what the loss is a mean over."""

    def token_values(self, hidden: torch.Tensor, first: int) -> torch.Tensor:
        """The values of some tokens, fp32 `[tokens]`. `hidden` `[1, tokens, hidden]`: theirs, which begin at token
        `first` of all rows one after another."""

    def loss_of(self, values: torch.Tensor) -> ComparedLoss:
        """The loss of all rows, from the values of all their tokens `[rows * tokens]`."""


class Finished(Protocol):
    """What the last segment made of hidden states before it treats each token alone."""

    @property
    def hidden(self) -> torch.Tensor:
        """`[batch, tokens, hidden]`."""

    @property
    def compared(self) -> ComparedRows | None:
        """How rows are compared; None: they are not, and the loss is the sum of `loss_sum`."""

    def outputs(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the model returns for a part of `hidden`, `[rows, tokens, hidden]`: logits `[rows, tokens, vocab]`."""

    def loss_sum(self, hidden: torch.Tensor, first: int) -> torch.Tensor:
        """The sum of the losses of some tokens, an fp32 scalar. `hidden` and `first` as in `ComparedRows`."""

    def num_right(self, hidden: torch.Tensor, first: int) -> int | None:
        """How many of these tokens have their target as the largest output; None: that is not counted."""
