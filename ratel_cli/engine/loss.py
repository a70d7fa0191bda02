"""The head and the loss, a chunk of tokens at a time, so that large logits never exist whole.

The head's weights must be bound. A chunk has tokens of several rows one after another, as if they were one row: the
head must treat each token alone, which `ratel_cli/model/around_layers.py` sees to. The loss of a step is the sum of the
cross-entropies over the targets of all its micro-batches, divided by the number of targets. Invariant: however a step
is cut into micro-batches, its loss is that mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ratel_cli.model.layer_runner import LayerRunner, last_hidden_state, loss_sum


def loss_and_gradients(
    layer_runner: LayerRunner,
    finished: object,
    targets: torch.Tensor,
    parameters: Sequence[nn.Parameter],
    take: Callable[[Sequence[torch.Tensor | None]], None],
    *,
    chunk_tokens: int,
    num_targets: int,
    loss_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of one micro-batch, and its gradients through the head.

    `finished`: what `LayerRunner.finish` returned. `targets`: `[batch, tokens]`. `take` is called for each chunk with
    the gradients of `parameters`, in their order and shapes, so that only one set of them exists at a time. Returns the
    sum of the cross-entropies (fp64 scalar) and the gradient of the finished hidden states `[batch, tokens, hidden]`.
    All gradients are those of `loss_scale * sum / num_targets`.
    """
    hidden = last_hidden_state(finished)
    flat = hidden.detach().reshape(1, -1, hidden.shape[-1])
    flat_targets = targets.reshape(-1)
    gradient = torch.empty_like(flat)
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for start in range(0, flat.shape[1], chunk_tokens):
        chunk = flat[:, start : start + chunk_tokens].requires_grad_()
        loss = _loss_sum(layer_runner, finished, chunk, flat_targets[start : start + chunk_tokens])
        scaled = loss / num_targets if loss_scale == 1.0 else loss / num_targets * loss_scale
        first, *others = torch.autograd.grad(scaled, (chunk, *parameters), allow_unused=True)
        gradient[:, start : start + chunk_tokens] = first
        take(others)
        del others
        total += loss.detach()  # not read here: on a GPU that would wait for it
    return total, gradient.view_as(hidden)


def loss_only(layer_runner: LayerRunner, finished: object, targets: torch.Tensor, *, chunk_tokens: int) -> float:
    """Sum of the cross-entropies of one micro-batch, without gradients. Arguments as in `loss_and_gradients`."""
    hidden = last_hidden_state(finished)
    flat, flat_targets = hidden.reshape(1, -1, hidden.shape[-1]), targets.reshape(-1)
    return sum(
        float(
            _loss_sum(
                layer_runner,
                finished,
                flat[:, start : start + chunk_tokens],
                flat_targets[start : start + chunk_tokens],
            )
        )
        for start in range(0, flat.shape[1], chunk_tokens)
    )


def _loss_sum(layer_runner: LayerRunner, finished: object, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum of the cross-entropies of one chunk, an fp32 scalar.

    `finished`: what `LayerRunner.finish` returned. `hidden`: finished hidden states `[1, tokens, hidden]`. `targets`:
    `[tokens]`.
    """
    return loss_sum(layer_runner.logits(finished, hidden), targets)
