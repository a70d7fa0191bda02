"""The last segment and the loss, a chunk of tokens at a time, so that large logits never exist whole.

The segment's weights must be bound. A chunk has tokens of several rows one after another, as if they were one row: each
token must be treated alone, which `ratel_cli/model/cut/around_layers.py` sees to in a decoder. The loss of a step is
the sum over the targets of all its micro-batches, divided by the number of targets. Invariant: however a step is cut
into micro-batches, its loss is that mean.

Where rows are compared, the loss is a function of all tokens at once. Then there are two passes over the chunks:

    1. values     of each token, without a graph; they give the loss, and its derivative by each value
    2. gradients  of the same values, a chunk at a time, weighted with these derivatives

That is the chain rule, so the gradients are those of the loss, whatever the chunks are. The loss of a step is then the
mean over its micro-batches, as in TRL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ratel_cli.model.values.finished import Finished
from ratel_cli.sizes import FIGURES


class MeanLoss(NamedTuple):
    """The loss of a step, of which all gradients are taken: `loss_scale * sum / num_targets`."""

    num_targets: int
    loss_scale: float

    def of(self, loss: torch.Tensor) -> torch.Tensor:
        """The part of it that a part of the sum makes."""
        mean = loss / self.num_targets
        return mean if self.loss_scale == 1.0 else mean * self.loss_scale


class Figures:
    """Means over micro-batches of what is known of them besides the loss, by name (`sizes.FIGURES`)."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[torch.Tensor, int]] = {}

    def add(self, figures: Mapping[str, torch.Tensor]) -> None:
        """Add those of one micro-batch, scalars; it may lack some."""
        for name, value in figures.items():
            before, number = self._sums.get(name, (torch.zeros((), dtype=torch.float64, device=value.device), 0))
            self._sums[name] = before + value, number + 1  # not read here: on a GPU that would wait for it

    def sums(self) -> tuple[float, ...]:
        """The sum of each figure of `FIGURES`, and then the number of micro-batches that had each."""
        found = [self._sums.get(name) for name in FIGURES]
        return (
            *(0.0 if each is None else float(each[0]) for each in found),
            *(0.0 if each is None else float(each[1]) for each in found),
        )


def mean_figures(sums: Sequence[Sequence[float]]) -> dict[str, float]:
    """The figures, from `Figures.sums` of all who have micro-batches."""
    totals = [sum(each) for each in zip(*sums, strict=True)]
    numbers = dict(zip(FIGURES, totals[len(FIGURES) :], strict=True))
    return {name: total / numbers[name] for name, total in zip(FIGURES, totals, strict=False) if numbers[name]}


NO_FIGURES = (0.0,) * (2 * len(FIGURES))


class EvaluatedSums(NamedTuple):
    """What the targets of some micro-batches add up to, without gradients."""

    loss: float
    num_right: int | None
    """Targets that have the largest output; None if they are not counted."""
    num_targets: int
    """What the loss is the sum over: targets, or pairs and answers that are compared."""
    figures: tuple[float, ...] = NO_FIGURES
    """See `Figures.sums`."""

    def and_of(self, other: EvaluatedSums) -> EvaluatedSums:
        """Return the sums over the targets of both."""
        both = None if self.num_right is None or other.num_right is None else self.num_right + other.num_right
        figures = tuple(one + more for one, more in zip(self.figures, other.figures, strict=True))
        return EvaluatedSums(self.loss + other.loss, both, self.num_targets + other.num_targets, figures)

    @property
    def mean_loss(self) -> float:
        """The mean loss. There must be targets."""
        return self.loss / self.num_targets

    @property
    def accuracy(self) -> float | None:
        """The share of the targets that are right; None if they are not counted."""
        return None if self.num_right is None else self.num_right / self.num_targets


NOTHING_EVALUATED = EvaluatedSums(0.0, 0, 0)


class ChunkSums:
    """Gradients of one micro-batch, added up over its chunks: in fp32 once there are two, and rounded at the end."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._dtypes = [parameter.dtype for parameter in parameters]
        self._sums: list[torch.Tensor | None] = [None for _ in parameters]
        self._summed: set[int] = set()
        """Numbers of the parameters whose gradients have a sum of their own, in fp32."""

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
    figures: Figures | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Loss of one micro-batch, and its gradients through the last segment.

    `leaf`: the hidden states that `finished` was made of. `take` is called for each chunk, and for what comes before
    them, with the gradients of `parameters`, in their order and shapes, so that only one set of them exists at a time.
    `figures` gets what else is known of rows that are compared.
    Returns the sum of the losses (fp64 scalar) and the gradient of `leaf`, None if it needs none.
    """
    if finished.compared is None:
        total, gradient = _through_chunks(finished, parameters, take, mean, chunk_tokens=chunk_tokens)
    else:
        values = token_values(finished, chunk_tokens=chunk_tokens).requires_grad_()
        found = finished.compared.loss_of(values)
        [weights] = torch.autograd.grad(mean.of(found.loss), values)
        _, gradient = _through_chunks(finished, parameters, take, mean, weights, chunk_tokens=chunk_tokens)
        total = found.loss.detach().double()
        if figures is not None:
            figures.add(found.figures)
    if finished.hidden is leaf or gradient is None:
        return total, gradient
    first, others = _gradients(finished.hidden, leaf, parameters, gradient)
    take(others)
    return total, first


def evaluated_sums(finished: Finished, *, num_targets: int, chunk_tokens: int) -> EvaluatedSums:
    """What the targets of one micro-batch add up to, without gradients."""
    if finished.compared is not None:
        found, figures = finished.compared.loss_of(token_values(finished, chunk_tokens=chunk_tokens)), Figures()
        figures.add(found.figures)
        number = finished.compared.num_compared
        return EvaluatedSums(number * float(found.loss), None, number, figures.sums())
    sums = NOTHING_EVALUATED
    for start, part in _chunks(_flat(finished.hidden), chunk_tokens):
        loss = float(finished.loss_sum(part, start))
        sums = sums.and_of(EvaluatedSums(loss, finished.num_right(part, start), 0))
    return sums._replace(num_targets=num_targets)


def token_values(finished: Finished, *, chunk_tokens: int) -> torch.Tensor:
    """The values of all tokens of rows that are compared, fp32 `[rows * tokens]`, without a graph."""
    assert finished.compared is not None
    with torch.no_grad():
        parts = _chunks(_flat(finished.hidden), chunk_tokens)
        return torch.cat([finished.compared.token_values(part, start) for start, part in parts])


def _through_chunks(
    finished: Finished,
    parameters: Sequence[nn.Parameter],
    take: Callable[[Sequence[torch.Tensor | None]], None],
    mean: MeanLoss,
    weights: torch.Tensor | None = None,
    *,
    chunk_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sum of the losses, and the gradient of the finished hidden states, None if they need none. With `weights`
    `[rows * tokens]`, the gradient is that of the values of rows that are compared, weighted; and the sum is 0."""
    hidden = finished.hidden
    gradient = hidden.new_empty(_flat(hidden).shape) if hidden.requires_grad else None
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for start, part in _chunks(_flat(hidden.detach()), chunk_tokens):
        chunk = part.requires_grad_(hidden.requires_grad)
        if weights is None:
            loss = finished.loss_sum(chunk, start)
            first, others = _gradients(mean.of(loss), chunk, parameters)
            total += loss.detach()  # not read here: on a GPU that would wait for it
        else:
            assert finished.compared is not None
            values = finished.compared.token_values(chunk, start)
            first, others = _gradients(values, chunk, parameters, weights[start : start + chunk_tokens])
        if gradient is not None and first is not None:
            gradient[:, start : start + chunk_tokens] = first
        take(others)
        del others
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
