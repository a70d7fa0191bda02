"""Losses of preference tuning, as TRL (1.16) defines them. Each is a function of the log-probabilities of answers.

Invariant: the loss of a micro-batch is a mean over its pairs or answers, and all is computed in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid, sigmoid

from ratel_cli.data.samples.comparison import Comparison
from ratel_cli.model.values.finished import ComparedLoss
from ratel_cli.sizes import PreferenceMethod

_Figures = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    """A loss with its settings, which the config describes."""

    method: PreferenceMethod
    beta: float
    simpo_gamma: float
    cpo_alpha: float
    desirable_weight: float
    undesirable_weight: float

    def of(self, log_probabilities: torch.Tensor, has_target: torch.Tensor, comparison: Comparison) -> ComparedLoss:
        """The loss of a micro-batch. `log_probabilities`: of the targets of all rows, `[rows, tokens]`; 0 where there
        is no target, as bool `has_target` of this shape says."""
        sums, lengths = answer_sums(log_probabilities, comparison), comparison.is_answer.sum(dim=1).clamp(min=1)
        match self.method:
            case "dpo" | "ipo":
                return self._against_reference(sums, lengths, comparison)
            case "kto":
                return self._of_verdicts(sums, comparison)
            case "simpo":
                return self._simpo(sums, lengths)
            case "orpo":
                return self._orpo(sums / lengths, log_probabilities, has_target)

    def _against_reference(self, sums: torch.Tensor, lengths: torch.Tensor, comparison: Comparison) -> ComparedLoss:
        """DPO (arXiv 2305.18290, eq. 7), and IPO (arXiv 2310.12036, eq. 17) of means over the tokens of an answer."""
        ratios = sums - comparison.reference
        if self.method == "dpo":
            chosen, rejected = ratios.chunk(2)
            losses = -logsigmoid(self.beta * (chosen - rejected))
        else:
            chosen, rejected = (ratios / lengths).chunk(2)
            losses = (chosen - rejected - 1 / (2 * self.beta)) ** 2
        return ComparedLoss(loss=losses.mean(), figures=self._figures(ratios, sums))

    def _simpo(self, sums: torch.Tensor, lengths: torch.Tensor) -> ComparedLoss:
        """SimPO (arXiv 2405.14734, eq. 6), and the cross-entropy of the chosen answers' tokens, as CPO has it."""
        means = sums / lengths
        chosen, rejected = means.chunk(2)
        losses = -logsigmoid(self.beta * (chosen - rejected - self.simpo_gamma / self.beta))
        nll = sums.new_zeros(())  # what is no part of the loss
        if self.cpo_alpha:
            nll = -sums.chunk(2)[0].sum() / lengths.chunk(2)[0].sum()
        loss = losses.mean() + self.cpo_alpha * nll
        return ComparedLoss(loss=loss, figures={**self._figures(means, means), "nll_loss": nll.detach()})

    def _orpo(self, means: torch.Tensor, log_probabilities: torch.Tensor, has_target: torch.Tensor) -> ComparedLoss:
        """ORPO (arXiv 2403.07691, eq. 6), with the cross-entropy of all tokens of the chosen rows, prompts included."""
        chosen, rejected = means.chunk(2)
        odds = (chosen - rejected) - (_log_of_rest(chosen) - _log_of_rest(rejected))
        ratio = logsigmoid(odds)
        nll = -log_probabilities.chunk(2)[0].sum() / has_target.chunk(2)[0].sum()
        more = {"nll_loss": nll, "log_odds_ratio": ratio.mean(), "log_odds_chosen": odds.mean()}
        figures = self._figures(means, means) | {name: each.detach() for name, each in more.items()}
        return ComparedLoss(loss=nll - (self.beta * ratio).mean(), figures=figures)

    def _of_verdicts(self, sums: torch.Tensor, comparison: Comparison) -> ComparedLoss:
        """KTO (arXiv 2402.01306, eq. 7). The second half of the rows estimates the KL divergence, without gradient."""
        assert comparison.is_good is not None
        is_good, num_good = comparison.is_good, comparison.num_good
        ratios, of_others = (sums - comparison.reference).chunk(2)
        kl = of_others.detach().mean().clamp(min=0)
        sign = torch.where(is_good, 1.0, -1.0)
        weights = torch.where(is_good, self.desirable_weight, self.undesirable_weight)
        losses = weights * (1 - sigmoid(self.beta * (sign * (ratios - kl))))
        rewards, log_probabilities = self.beta * ratios.detach(), sums.detach().chunk(2)[0]
        figures: _Figures = {"kl": kl}
        for name, chosen, number in (
            ("chosen", is_good, num_good),
            ("rejected", ~is_good, comparison.num_compared - num_good),
        ):
            if number:
                figures[f"rewards/{name}"] = torch.where(chosen, rewards, 0.0).sum() / number
                figures[f"logps/{name}"] = torch.where(chosen, log_probabilities, 0.0).sum() / number
        if "rewards/chosen" in figures and "rewards/rejected" in figures:
            figures["rewards/margins"] = figures["rewards/chosen"] - figures["rewards/rejected"]
        return ComparedLoss(loss=losses.mean(), figures=figures)

    def _figures(self, scores: torch.Tensor, log_probabilities: torch.Tensor) -> _Figures:
        """Metrics of pairs, by TRL's names. `scores`, `log_probabilities`: of all rows, `[rows]`; a reward is a score
        times beta."""
        chosen, rejected = (self.beta * scores.detach()).chunk(2)
        of_chosen, of_rejected = log_probabilities.detach().chunk(2)
        return {
            "rewards/chosen": chosen.mean(),
            "rewards/rejected": rejected.mean(),
            "rewards/accuracies": (chosen > rejected).float().mean(),
            "rewards/margins": (chosen - rejected).mean(),
            "logps/chosen": of_chosen.mean(),
            "logps/rejected": of_rejected.mean(),
        }


def answer_sums(log_probabilities: torch.Tensor, comparison: Comparison) -> torch.Tensor:
    """The log-probability of each answer, fp32 `[rows]`, from those of the targets of all rows `[rows, tokens]`."""
    return torch.where(comparison.is_answer, log_probabilities, 0.0).sum(dim=1)


def _log_of_rest(log_probability: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(x)) without cancellation: by log1p below -log 2, else by expm1."""
    small = log_probability < -0.6931471805599453
    return torch.where(small, torch.log1p(-torch.exp(log_probability)), torch.log(-torch.expm1(log_probability)))
