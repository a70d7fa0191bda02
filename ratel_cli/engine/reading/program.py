"""What the engine needs of a model: its own code, cut at the segments, and where weights are bound.

A program runs its segments in order for each micro-batch, and alone decides what a micro-batch has:

    begin    the first segment: from the micro-batch to the first hidden states, and the arguments of each layer
    run      a layer: from hidden states and its arguments to hidden states, and what it leaves for later layers
    finish   the last segment: from the last hidden states to those of which the loss is a sum over tokens

Backward runs `begin` again, replays `run` with what was recorded, and takes `finish` as it is. A program of another
shape than a decoder has its own first and last segment, with or without parameters.

Invariant: each method is a function of its arguments, of the weights that are bound and of the random generators: run
again with the same of these, it does the same operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self, TypeAlias, TypeVar

import torch
from torch import nn

from ratel_cli.model.values.carried import Embedded, LayerCall, LayerOutput
from ratel_cli.model.values.finished import Finished
from ratel_cli.model.values.row_lookup import DistinctTokens
from ratel_cli.model.values.spec import LayerTraits, ModelSpec
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.schedule.segments import Segment


class Batch(Protocol):
    """The data of one forward and backward pass."""

    @property
    def num_targets(self) -> int:
        """Tokens with a loss. The loss of a step is the mean over those of all its micro-batches."""

    def to(self, device: torch.device) -> Self:
        """Return the batch with its tensors on `device`."""


AnyBatch = TypeVar("AnyBatch", bound=Batch)


class BoundModel(Protocol):
    """A model whose weights are bound one segment at a time, whatever runs it."""

    spec: ModelSpec
    parameter_names: tuple[str, ...]
    """All parameters, in the order in which the norms of their gradients are added up."""

    def move_to(self, device: torch.device) -> None:
        """Move what no block has to the device that computes."""

    def bind(
        self, block: BlockSpec, *parts: torch.Tensor, tokens: DistinctTokens | None = None
    ) -> tuple[nn.Parameter, ...]:
        """Let a block's parameters be views of its flat array, `[block.num_elements]` in all parts; each part begins
        where a parameter begins. With `tokens`, the matrix that is looked up has their rows alone, which are the first
        part. Returns the parameters, in the order of the block."""

    def release(self, segment: Segment) -> None:
        """Give up the weights of all blocks that the segment binds."""


class Program(BoundModel, Protocol[AnyBatch]):
    """A model whose segments run one at a time."""

    traits: LayerTraits
    """What the shapes of its parameters do not show."""

    def sample(self, num_tokens: int) -> AnyBatch:
        """A micro-batch of one row with this many tokens, of all of them a loss, and of two samples if rows may have
        several; of a program with `spec.sample_tokens` this many samples."""

    def train(self, mode: bool) -> bool:
        """Switch dropout on or off. Returns whether it was on before."""

    def looked_up(self, batch: AnyBatch) -> torch.Tensor:
        """The tokens `[batch, tokens]` that the first segment looks up, of a program with a `spec.lookup_block`."""

    def begin(self, batch: AnyBatch) -> Embedded:
        """Run the first segment."""

    def run(self, index: int, hidden: torch.Tensor, call: LayerCall) -> LayerOutput:
        """Run a layer, counted from 0."""

    def finish(self, hidden: torch.Tensor, batch: AnyBatch) -> Finished:
        """Run the last segment up to where its tokens part. `hidden`: the last layer's output."""

    def module(self, index: int) -> nn.Module:
        """A layer's module, counted from 0; for the names of its operators."""


AnyProgram: TypeAlias = Program[Any]
"""A program, where its micro-batches do not matter."""


def trained_of(parameters: Sequence[nn.Parameter]) -> tuple[nn.Parameter, ...]:
    """Return the bound parameters that have gradients, in their order."""
    return tuple(parameter for parameter in parameters if parameter.requires_grad)


def tokens_looked_up(program: Program[AnyBatch], batches: Sequence[AnyBatch]) -> list[torch.Tensor]:
    """The tokens `[batch, tokens]` of each micro-batch that the first segment looks up; none if it looks none up."""
    return [] if program.spec.lookup_block is None else [program.looked_up(batch) for batch in batches]
