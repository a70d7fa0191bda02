"""An optimizer as someone would add it: two rules in plain torch, of which the product knows nothing.

Matrices, and stacks of them, have the mean of their squared gradients by row and by column (Shazeer and Stern, 2018);
what has one dimension has it whole. `tests/reference_optimizers.py` has the same in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ratel_cli.schedule.rules import CHOICES, V32, Rule, RuleChoice, Vector, records
from ratel_cli.schedule.updates import InTorch, Numbers

State = Mapping[str, torch.Tensor]


def update_stack(weight: torch.Tensor, gradient: torch.Tensor, state: State, numbers: Numbers) -> None:
    square, share = gradient.square().add_(1e-30), numbers.number**-0.8
    rows, columns = state["rows"].lerp_(square.mean(-1), share), state["columns"].lerp_(square.mean(-2), share)
    size = (rows / rows.mean(-1, keepdim=True)).unsqueeze(-1).mul(columns.unsqueeze(-2)).sqrt_()
    step = gradient / size
    move(weight, step.div_(step.square().mean().sqrt().clamp_(min=1)), numbers)


def update_vector(weight: torch.Tensor, gradient: torch.Tensor, state: State, numbers: Numbers) -> None:
    mean = state["v32"].lerp_(gradient.square().add_(1e-30), numbers.number**-0.8)
    move(weight, gradient / mean.sqrt(), numbers)


def move(weight: torch.Tensor, step: torch.Tensor, numbers: Numbers) -> None:
    weight.mul_(1 - numbers.learning_rate * numbers.weight_decay).add_(step, alpha=-numbers.learning_rate)


OF_STACKS = Rule(
    "factored",
    records(),
    "Factored",
    update=InTorch(update_stack, num_temporaries=4),
    takes_whole=True,
    vectors=(Vector("rows", "row"), Vector("columns", "column")),
)
OF_VECTORS = Rule("factored_vector", records(V32), "Factored", update=InTorch(update_vector, num_temporaries=3))
CHOICE = RuleChoice(OF_VECTORS, ((lambda kind: len(kind.shape) > 1, OF_STACKS),))


def take_the_place_of_lion() -> None:
    """Let a config choose these rules, in this process, by a name that it knows."""
    CHOICES["lion"] = CHOICE
