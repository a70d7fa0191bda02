"""Losses of tokens that a config may choose instead of their cross-entropy, as other trainers define them."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.functional import cross_entropy

from ratel_cli.model.cut.layer_runner import TokenLoss, loss_sum
from ratel_cli.sizes import IGNORED_TARGET


def token_loss(*, label_smoothing: float, is_dft: bool) -> TokenLoss:
    """The loss with label smoothing, of dynamic fine-tuning, or the cross-entropy."""
    if is_dft:
        return _dft_sum
    return partial(_smoothed_sum, factor=label_smoothing) if label_smoothing else loss_sum


def _smoothed_sum(logits: torch.Tensor, targets: torch.Tensor, *, factor: float) -> torch.Tensor:
    """The cross-entropy with a target that has `1 - factor` of the probability, of which the whole vocabulary shares
    the rest, as in transformers' LabelSmoother."""
    return cross_entropy(
        logits[0].float(), targets, ignore_index=IGNORED_TARGET, reduction="sum", label_smoothing=factor
    )


def _dft_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of each token times its probability, which has no gradient (arXiv 2508.05629, eq. 9)."""
    losses = cross_entropy(logits[0].float(), targets, ignore_index=IGNORED_TARGET, reduction="none")
    return (losses * torch.exp(-losses.detach())).sum()
