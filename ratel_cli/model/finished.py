"""What a model's last segment gives, of which the loss is a sum."""

from __future__ import annotations

from typing import Protocol

import torch


class Finished(Protocol):
    """What the last segment made of hidden states before it treats each token alone."""

    @property
    def hidden(self) -> torch.Tensor:
        """`[batch, tokens, hidden]`."""

    def outputs(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the model returns for a part of `hidden`, `[rows, tokens, hidden]`: logits `[rows, tokens, vocab]`."""

    def loss_sum(self, hidden: torch.Tensor, first: int) -> torch.Tensor:
        """The sum of the losses of some tokens, an fp32 scalar. `hidden` `[1, tokens, hidden]`: theirs, which begin at
        token `first` of all rows one after another."""

    def num_right(self, hidden: torch.Tensor, first: int) -> int | None:
        """How many of these tokens have their target as the largest output; None: that is not counted."""
