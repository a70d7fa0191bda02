"""The last segment and the loss, a chunk of tokens at a time, so that large logits never exist whole.

The segment's weights must be bound. A chunk has tokens of several rows one after another, as if they were one row: each
token must be treated alone, which `ratel_cli/model/around_layers.py` sees to in a decoder. The loss of a step is the
sum over the targets of all its micro-batches, divided by the number of targets. Invariant: however a step is cut into
micro-batches, its loss is that mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ratel_cli.model.finished import Finished


class MeanLoss(NamedTuple):
    """The loss of a step, of which all gradients are taken: `loss_scale * sum / num_targets`."""

    num_targets: int
    loss_scale: float

    def of(self, loss: torch.Tensor) -> torch.Tensor:
        """The part of it that a part of the sum makes."""
        mean = loss / self.num_targets
        return mean if self.loss_scale == 1.0 else mean * self.loss_scale


class EvaluatedSums(NamedTuple):
    """What the targets of some micro-batches add up to, without gradients."""

    loss: float
    num_right: int | None
    """Targets that have the largest output; None if they are not counted."""

    def and_of(self, other: EvaluatedSums) -> EvaluatedSums:
        """Those of both."""
        both = None if self.num_right is None or other.num_right is None else self.num_right + other.num_right
        return EvaluatedSums(self.loss + other.loss, both)


NOTHING_EVALUATED = EvaluatedSums(0.0, 0)


class ChunkSums:
    """Gradients of one micro-batch, added up over its chunks: in fp32 once there are two, and rounded at the end."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._dtypes = [parameter.dtype for parameter in parameters]
        self._sums: list[torch.Tensor | None] = [None for _ in parameters]
        self._summed: set[int] = set()
        """Those of which there is a sum of its own, in fp32."""

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add a chunk's: for each of the parameters a gradient or None."""
        for index, gradient in enumerate(gradients):
            before = self._sums[index]
            if gradient is None:
                continue
            if before is None:
                self._sums[index] = gradient  # as autograd made it: it may be that of another parameter, too
            elif index in self._summed:
                before.add_(gradient)
            else:
                self._sums[index] = before.to(torch.float32, copy=True).add_(gradient)
                self._summed.add(index)

    def take(self) -> list[torch.Tensor | None]:
        """The sums, each in the dtype of its parameter; they begin anew."""
        sums, self._sums = self._sums, [None for _ in self._sums]
        self._summed.clear()
        return [None if each is None else each.to(dtype) for each, dtype in zip(sums, self._dtypes, strict=True)]


def loss_and_gradients(
    finished: Finished,
    leaf: torch.Tensor,
    parameters: Sequence[nn.Parameter],
    take: Callable[[Sequence[torch.Tensor | None]], None],
    *,
    mean: MeanLoss,
    chunk_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Loss of one micro-batch, and its gradients through the last segment.

    `leaf`: the hidden states that `finished` was made of. `take` is called for each chunk, and for what comes before
    them, with the gradients of `parameters`, in their order and shapes, so that only one set of them exists at a time.
    Returns the sum of the losses (fp64 scalar) and the gradient of `leaf`, None if it needs none.
    """
    total, gradient = _through_chunks(finished, parameters, take, mean, chunk_tokens=chunk_tokens)
    if finished.hidden is leaf or gradient is None:
        return total, gradient
    first, others = _gradients(finished.hidden, leaf, parameters, gradient)
    take(others)
    return total, first


def evaluated_sums(finished: Finished, *, chunk_tokens: int) -> EvaluatedSums:
    """What the targets of one micro-batch add up to, without gradients."""
    sums = NOTHING_EVALUATED
    for start, part in _chunks(_flat(finished.hidden), chunk_tokens):
        loss = float(finished.loss_sum(part, start))
        sums = sums.and_of(EvaluatedSums(loss, finished.num_right(part, start)))
    return sums


def _through_chunks(
    finished: Finished,
    parameters: Sequence[nn.Parameter],
    take: Callable[[Sequence[torch.Tensor | None]], None],
    mean: MeanLoss,
    *,
    chunk_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sum of the losses, and the gradient of the finished hidden states, None if they need none."""
    hidden = finished.hidden
    gradient = hidden.new_empty(_flat(hidden).shape) if hidden.requires_grad else None
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for start, part in _chunks(_flat(hidden.detach()), chunk_tokens):
        chunk = part.requires_grad_(hidden.requires_grad)
        loss = finished.loss_sum(chunk, start)
        first, others = _gradients(mean.of(loss), chunk, parameters)
        if gradient is not None and first is not None:
            gradient[:, start : start + chunk_tokens] = first
        take(others)
        del others
        total += loss.detach()  # not read here: on a GPU that would wait for it
    return total, None if gradient is None else gradient.view_as(hidden)


def _gradients(
    output: torch.Tensor, leaf: torch.Tensor, parameters: Sequence[nn.Parameter], gradient: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, Sequence[torch.Tensor | None]]:
    """The gradient of the leaf, None if it needs none, and those of the parameters. `gradient`: that of the output,
    1 if None."""
    if leaf.requires_grad:
        first, *others = torch.autograd.grad(output, (leaf, *parameters), gradient, allow_unused=True)
        return first, others
    return None, torch.autograd.grad(output, parameters, gradient, allow_unused=True)


def _flat(hidden: torch.Tensor) -> torch.Tensor:
    """All rows one after another: `[1, tokens, hidden]`."""
    return hidden.reshape(1, -1, hidden.shape[-1])


def _chunks(flat: torch.Tensor, chunk_tokens: int) -> Iterator[tuple[int, torch.Tensor]]:
    for start in range(0, flat.shape[1], chunk_tokens):
        yield start, flat[:, start : start + chunk_tokens]
