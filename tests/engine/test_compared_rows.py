"""The gradients of rows that are compared are those of plain PyTorch, whatever the chunks of the head are."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, logsigmoid

from ratel_cli.data.samples.comparison import Comparison
from ratel_cli.engine.replay.loss import ChunkSums, Figures, MeanLoss, evaluated_sums, loss_and_gradients, mean_figures
from ratel_cli.model.cut.preferences import PreferenceLoss
from ratel_cli.model.values.finished import ComparedLoss

ROWS, TOKENS, WIDTH, VOCABULARY = 4, 7, 5, 11
DPO = PreferenceLoss(
    method="dpo", beta=0.3, simpo_gamma=0.5, cpo_alpha=1.0, desirable_weight=1.0, undesirable_weight=1.0
)


@dataclass(frozen=True)
class Rows:
    """A head behind hidden states."""

    hidden: torch.Tensor
    weight: nn.Parameter
    targets: torch.Tensor
    comparison: Comparison

    @property
    def num_compared(self) -> int:
        return self.comparison.num_compared

    @property
    def compared(self) -> Rows:
        return self

    def outputs(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.weight.T

    def token_values(self, hidden: torch.Tensor, first: int) -> torch.Tensor:
        targets = self.targets.reshape(-1)[first : first + hidden.shape[1]]
        return -cross_entropy(self.outputs(hidden)[0], targets, ignore_index=-100, reduction="none")

    def loss_of(self, values: torch.Tensor) -> ComparedLoss:
        return DPO.of(values.view_as(self.targets), self.targets != -100, self.comparison)

    def loss_sum(self, hidden: torch.Tensor, first: int) -> torch.Tensor:
        raise AssertionError("it is no sum")

    def num_right(self, hidden: torch.Tensor, first: int) -> None:
        raise AssertionError("nothing is counted")


def rows() -> Rows:
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)
    targets[:, :2], targets[1, 5:] = -100, -100
    return Rows(
        hidden=torch.randn(ROWS, TOKENS, WIDTH, generator=generator).requires_grad_(),
        weight=nn.Parameter(torch.randn(VOCABULARY, WIDTH, generator=generator)),
        targets=targets,
        comparison=Comparison(is_answer=targets != -100, reference=torch.tensor([-3.0, -9.0, -4.0, -8.0])),
    )


def plain(made: Rows, num_micro_batches: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss, and the gradients of hidden states and head, by autograd alone."""
    scores = (made.hidden.reshape(1, -1, WIDTH) @ made.weight.T)[0].log_softmax(dim=-1)
    flat = made.targets.reshape(-1)
    chosen = scores.gather(1, flat.clamp(min=0)[:, None])[:, 0]
    sums = torch.where(flat != -100, chosen, 0.0).view(ROWS, TOKENS).sum(dim=1)
    ratios = sums - made.comparison.reference
    loss = -logsigmoid(DPO.beta * (ratios[:2] - ratios[2:])).mean()
    hidden, weight = torch.autograd.grad(loss / num_micro_batches, (made.hidden, made.weight))
    return loss.detach(), hidden, weight


@pytest.mark.parametrize("chunk_tokens", [1, 4, 5, 27, 28, 29])
def test_the_gradients_are_those_of_the_loss(chunk_tokens: int) -> None:
    made, num_micro_batches, figures = rows(), 3, Figures()
    wanted_loss, wanted_hidden, wanted_weight = plain(made, num_micro_batches)
    sums = ChunkSums([made.weight])
    loss, gradient = loss_and_gradients(
        made,
        made.hidden,
        [made.weight],
        sums.add,
        mean=MeanLoss(num_micro_batches, 1.0),
        chunk_tokens=chunk_tokens,
        figures=figures,
    )
    [weight] = sums.take()
    assert gradient is not None and weight is not None
    exact = chunk_tokens >= ROWS * TOKENS
    torch.testing.assert_close(gradient, wanted_hidden, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-7)
    torch.testing.assert_close(weight, wanted_weight, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-7)
    assert float(loss) == pytest.approx(float(wanted_loss), rel=1e-6)
    found = mean_figures([figures.sums(), figures.sums()])
    assert found["rewards/margins"] == pytest.approx(found["rewards/chosen"] - found["rewards/rejected"], rel=1e-5)
    evaluated = evaluated_sums(made, num_targets=1, chunk_tokens=chunk_tokens)
    assert (evaluated.num_targets, evaluated.num_right) == (2, None)
    assert evaluated.mean_loss == pytest.approx(float(wanted_loss), rel=1e-6)
