"""A module of any kind with one stack of layers, as a program: vision, diffusion, residual networks.

A micro-batch is a number of samples, such as images. The module makes as many hidden states of each, its tokens. The
code before the layers, and that behind them, is the module's own forward around the layers; the loss is the caller's.

Invariant: layers keep the shape of hidden states, and leave what they get as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import nn

from ratel_cli.data.samples.sample_batch import SampleBatch
from ratel_cli.errors import BadInput
from ratel_cli.model.cut.binding import PlacedParameter
from ratel_cli.model.cut.cut_model import CutModel, checked_sum
from ratel_cli.model.cut.layer_runner import LayerRunner
from ratel_cli.model.values.carried import Embedded, LayerCall, LayerOutput, tensors_of
from ratel_cli.model.values.spec import LayerTraits, ModelSpec

SampleLoss: TypeAlias = Callable[[object, Mapping[str, torch.Tensor]], torch.Tensor]
"""Computes from the module's output and all tensors of the batch the sum of the losses of its samples, a scalar."""


@dataclass(frozen=True, slots=True)
class FinishedSamples:
    """The last layer's output of one micro-batch. What is behind the layers runs with the loss, so that it is one graph
    to autograd, whatever the module returns."""

    layer_runner: LayerRunner
    of_layer: torch.Tensor
    """`[samples, ..]`."""
    batch: SampleBatch
    loss: SampleLoss
    compared: None = None

    @property
    def hidden(self) -> torch.Tensor:
        """`[1, samples, elements]`."""
        return self.of_layer.reshape(1, self.batch.num_samples, -1)

    def outputs(self, hidden: torch.Tensor) -> torch.Tensor:
        """The first tensor that the module returns for all samples, `[samples, ..]`."""
        return tensors_of(self._finished(hidden, self.batch))[0]

    def loss_sum(self, hidden: torch.Tensor, first: int) -> torch.Tensor:
        """The sum of the losses of the samples from `first` on, whose hidden states are `[1, samples, elements]`; an
        fp32 scalar."""
        batch = self.batch.part(first, first + hidden.shape[1])
        return self.loss(self._finished(hidden, batch), {**batch.inputs, **batch.targets})

    def num_right(self, hidden: torch.Tensor, first: int) -> None:  # noqa: ARG002
        """Not counted."""
        return

    def _finished(self, hidden: torch.Tensor, batch: SampleBatch) -> object:
        shaped = hidden.reshape(batch.num_samples, *self.of_layer.shape[1:])
        return self.layer_runner.finish(shaped, batch.inputs)


class StackModel(CutModel[SampleBatch]):
    """A module whose layers are known. Bind the blocks of one segment at a time."""

    def __init__(
        self,
        module: nn.Module,
        layer_runner: LayerRunner,
        spec: ModelSpec,
        parameters: Sequence[tuple[PlacedParameter, ...]],
        example: SampleBatch,
        traits: LayerTraits,
        loss: SampleLoss | None = None,
    ) -> None:
        """`example`: samples that the module takes. `loss`: None: the caller of each step gives one."""
        super().__init__(module, layer_runner, spec, traits, parameters)
        self._runner = layer_runner
        self.example = example
        self.loss = loss or square_sum
        self.has_loss = loss is not None
        """Whether the model has a loss of its own."""
        self._is_left = False
        module.register_forward_pre_hook(self._reject_call)

    def leave(self) -> None:
        """The training state is being closed: code that uses the module fails from now on. Idempotent."""
        self._is_left = True
        for of_block in self._parameters:
            for each in of_block:
                each.put(nn.Parameter(torch.empty(each.shape, dtype=each.unbound.dtype, device="meta")))

    def any_batch(self, size: int, num_tokens: int, *, num_samples: int = 1) -> SampleBatch:  # noqa: ARG002
        """Samples with `size * num_tokens` tokens, rounded up to whole ones: those of the example again and again."""
        return self.sample(-(-size * num_tokens // self.spec.sample_tokens))

    def sample(self, num_tokens: int) -> SampleBatch:
        """This many samples: see `Program`."""
        rows = torch.arange(num_tokens) % self.example.num_samples
        inputs = {name: each[rows] for name, each in self.example.inputs.items()}
        return replace(self.example, inputs=inputs, is_made_up=True)

    @contextmanager
    def losing(self, loss: SampleLoss | None) -> Iterator[None]:
        """A context in which this is the loss of a micro-batch, from the module's output and the tensors of the batch.
        Raises BadInput there if it is no sum, and if there is none."""
        if loss is None and not self.has_loss:
            raise BadInput("a module needs a loss", "loss=lambda output, batch: ..., the sum over the batch's samples")
        if loss is None:
            yield
            return

        def of_samples(output: object, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
            return checked_sum(loss(output, tensors), "samples of the batch")

        before, self.loss = self.loss, of_samples
        try:
            yield
        finally:
            self.loss = before

    def looked_up(self, batch: SampleBatch) -> torch.Tensor:  # noqa: ARG002
        """Nothing is."""
        raise AssertionError("no tokens are looked up")

    def begin(self, batch: SampleBatch) -> Embedded:
        """The first hidden states and every layer's arguments. Raises BadInput."""
        return self.layer_runner.embed(batch.inputs)

    def run(self, index: int, hidden: torch.Tensor, call: LayerCall) -> LayerOutput:
        """See `CutModel`. Raises BadInput if the layer breaks the invariant of this file."""
        version = hidden._version
        output = super().run(index, hidden, call)
        if output[0].shape != hidden.shape:
            raise self._reject(
                index,
                f"makes {list(output[0].shape[1:])} of a sample's {list(hidden.shape[1:])}; blocks must keep the shape",
            )
        if hidden._version != version:
            raise self._reject(index, "changes what it gets in place")
        return output

    def finish(self, hidden: torch.Tensor, batch: SampleBatch) -> FinishedSamples:
        """The last layer's output, before the code behind it runs."""
        return FinishedSamples(self._runner, hidden, batch, square_sum if batch.is_made_up else self.loss)

    def _reject_call(self, module: nn.Module, _: object) -> None:
        """Torch's hook: outside of a step, layers would pass on what they get."""
        if self._is_left or not self._runner.is_running:
            raise BadInput(
                f"this {type(module).__name__} is {'closed' if self._is_left else 'open'}: its weights are on drives",
                "save_pretrained of the open model writes them, or hook the module instead: ratel.hook",
            )

    def _reject(self, index: int, what: str) -> BadInput:
        return BadInput(
            f"{self.spec.architecture}: its {self.spec.layers[index].name} {what}",
            "name other blocks, blocks=['encoder.layers'] for instance, or hook the module: ratel.hook",
        )


def square_sum(output: object, _: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The sum of the squares of all that a module returns: a loss where no other is known."""
    found = [each.float().square().sum() for each in tensors_of(output) if each.is_floating_point()]
    return torch.stack(found).sum()
