"""The module of the golden run of a hooked module, and its loop; the archive is of it, so it never changes.

`python -m tests.golden.loop STORE STOP` trains it in the store and ends without closing anything, when step STOP has
been computed: the one before is committed.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ratel_cli as ratel

LEARNING_RATE, WEIGHT_DECAY, NUM_STEPS = 1e-2, 0.1, 6
_VOCABULARY, _WIDTH = 32, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Tokens `[rows, tokens]`, each with its target."""

    tokens: torch.Tensor
    target: torch.Tensor
    num_targets: int = 1


class Net(nn.Module):
    """A table, blocks and a head that is the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.norm = nn.LayerNorm(_WIDTH)
        self.norm.bias.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.table(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden) @ self.table.weight.T


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(hidden)))


def built() -> Net:
    """The module before step 1."""
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        return Net().bfloat16()


def batches() -> list[list[Batch]]:
    """A batch for each step."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, _VOCABULARY, (NUM_STEPS, 2, 9), generator=generator)
    return [[Batch(tokens=each[:, :-1], target=each[:, 1:])] for each in tokens]


def loss_of(module: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss of one batch."""
    return cross_entropy(module(batch.tokens).float().flatten(0, 1), batch.target.flatten())


def train(module: nn.Module, state: ratel.Hooked, *, stop: int = NUM_STEPS) -> list[float]:
    """The losses of all steps that are not done yet, up to `stop`."""
    ratel.AdamW(module, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    losses = []
    for [batch] in batches()[state.num_steps : stop]:
        loss = loss_of(module, batch)
        loss.backward()
        losses.append(float(loss.detach()))
    return losses


if __name__ == "__main__":
    net = built()
    train(net, ratel.hook(net, storage=[Path(sys.argv[1])]), stop=int(sys.argv[2]))
    os._exit(9)
