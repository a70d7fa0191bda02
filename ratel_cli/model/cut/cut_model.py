"""A model cut at its layers: weights are bound to one segment at a time, and the model's own code runs.

1. `bind` gives a block its weights. When all blocks of a segment have theirs, it can run. The first segment can be
   given some rows of the matrix that it looks up alone.
2. `release` takes the weights away again.

Invariant: an unbound parameter takes no memory. In the layers it is a meta parameter, so that using it by mistake
fails. What code outside the layers uses is a placeholder (one zero, expanded), because the owner's code also runs
through the part whose result is not needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import nn

from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.data.samples.sample_batch import SampleBatch
from ratel_cli.errors import BadInput
from ratel_cli.model.cut.binding import PlacedParameter, bound_views
from ratel_cli.model.cut.two_stacks import AnyRunner
from ratel_cli.model.values.carried import Embedded, LayerCall, LayerOutput
from ratel_cli.model.values.finished import Finished
from ratel_cli.model.values.row_lookup import DistinctTokens, RowLookup
from ratel_cli.model.values.spec import LayerTraits, ModelSpec
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.schedule.segments import Segment

ModelBatch = TypeVar("ModelBatch", MicroBatch, SampleBatch)


class CutModel(ABC, Generic[ModelBatch]):
    """A module whose blocks are known. Bind those of one segment at a time."""

    def __init__(
        self,
        module: nn.Module,
        layer_runner: AnyRunner,
        spec: ModelSpec,
        traits: LayerTraits,
        parameters: Sequence[tuple[PlacedParameter, ...]],
        lookup: RowLookup | None = None,
    ) -> None:
        """`parameters`: those of each block, in the order of `spec`. `lookup`: the module that looks rows up."""
        self.root = module
        """The whole module."""
        self.layer_runner = layer_runner
        self.spec = spec
        self.traits = traits
        self.parameter_names = tuple(name for name, _ in module.named_parameters())
        """All parameters, in the order of torch's `named_parameters`."""
        self._parameters = tuple(parameters)
        self._lookup = lookup
        self._device = torch.device("cpu")

    @abstractmethod
    def sample(self, num_tokens: int) -> ModelBatch:
        """See `Program`."""

    @abstractmethod
    def any_batch(self, size: int, num_tokens: int, *, num_samples: int = 1) -> ModelBatch:
        """A micro-batch of `size` lines with this many tokens, made up; of `num_samples` in a line, where lines may
        have several. Every token has a target."""

    @abstractmethod
    def losing(self, loss: Callable[..., torch.Tensor] | None) -> AbstractContextManager[None]:
        """A context in which the model has another loss than its own. Raises BadInput there if it is no sum."""

    @abstractmethod
    def begin(self, batch: ModelBatch) -> Embedded:
        """The first hidden states and every layer's arguments. Raises BadInput."""

    @abstractmethod
    def looked_up(self, batch: ModelBatch) -> torch.Tensor:
        """See `Program`."""

    @abstractmethod
    def finish(self, hidden: torch.Tensor, batch: ModelBatch) -> Finished:
        """See `Program`. `hidden`: the last layer's output. Raises BadInput."""

    def run(self, index: int, hidden: torch.Tensor, call: LayerCall) -> LayerOutput:
        """The output of a layer, counted from 0, and what it returns besides for later layers."""
        return self.layer_runner.run_layer(index, hidden, call)

    def module(self, index: int) -> nn.Module:
        """A layer, counted from 0."""
        return self.layer_runner.layers[index]

    def move_to(self, device: torch.device) -> None:
        """Move buffers and placeholders to the device that computes. Weights are where their caller binds them."""
        if device == self._device:
            return
        self._device = device
        for module in self.root.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
        self._parameters = tuple(tuple(_moved(each, device) for each in of_block) for of_block in self._parameters)

    def train(self, mode: bool) -> bool:
        """Switch dropout on or off. Returns whether it was on before."""
        before = self.root.training
        self.root.train(mode)
        return before

    def disable_dropout(self) -> None:
        """Let the model's dropout modules drop nothing, as TRL does. Other modules call dropout as a function."""
        for module in self.root.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0

    def bind(
        self, block: BlockSpec, *parts: torch.Tensor, tokens: DistinctTokens | None = None
    ) -> tuple[nn.Parameter, ...]:
        """Put views of the block's flat array into its modules. `parts` are that array, `[block.num_elements]` in all;
        each begins where a parameter begins.

        `tokens` are for an embedding whose matrix has the rows of these tokens alone: they are the first part, and the
        others begin with the second parameter.
        Returns the views, each in its parameter's shape, in the order of `block.parameters`.
        """
        if tokens is not None:
            assert self._lookup is not None
            self._lookup.bind(tokens)
        views = bound_views(block, parts, num_rows=None if tokens is None else len(tokens))
        parameters = tuple(nn.Parameter(values, requires_grad=block.is_trained) for values in views)
        for placed, parameter in zip(self._parameters[block.index], parameters, strict=True):
            placed.put(parameter)
        return parameters

    def release(self, segment: Segment) -> None:
        """Put the unbound parameters back. Afterwards the model has no reference to the bound weights."""
        for block in segment.bound:
            for parameter in self._parameters[block.index]:
                parameter.unbind()
        if segment.index == 0 and self._lookup is not None:
            self._lookup.unbind()


AnyModel: TypeAlias = CutModel[Any]
"""A model, where its micro-batches do not matter."""


def checked_sum(loss: object, of: str) -> torch.Tensor:
    """What a caller's own loss has given, in fp32. Raises BadInput if it is no sum over those `of` which it must be."""
    if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.is_floating_point():
        raise BadInput(f"the loss must be one number: the sum over the {of}, as a tensor")
    return loss.float()


def _moved(parameter: PlacedParameter, device: torch.device) -> PlacedParameter:
    """A parameter that is not bound, with its placeholder on a device; without one as it is."""
    if parameter.unbound.is_meta:
        return parameter
    moved = replace(parameter, unbound=placeholder(parameter.unbound, device))
    moved.unbind()
    return moved


def placeholder(parameter: torch.Tensor, device: torch.device | None = None) -> nn.Parameter:
    """A parameter of zeros with the same shape, in the memory of one element."""
    zero = torch.zeros((), dtype=parameter.dtype, device=device)
    return nn.Parameter(zero.expand(parameter.shape), requires_grad=False)
