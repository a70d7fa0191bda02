"""Micro-batches of samples that are no text: latents, vectors, images in the place of text. A sample has as many tokens
as a model makes hidden states of it, the same number of each. Images beside text have no batch yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self, TypeAlias

import torch

from ratel_cli.data.samples.packing import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleBatch:
    """The data of one forward and backward pass: of each tensor `[samples, ..]`, one row belongs to a sample."""

    inputs: Mapping[str, torch.Tensor]
    """What the model gets, by name."""
    targets: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What the loss gets besides."""
    sample_ids: tuple[int, ...] = ()
    """The numbers of the samples."""
    sample_tokens: int = 1
    """Tokens of each sample."""
    is_made_up: bool = False
    """Whether it is for a trial, and has no targets."""

    @property
    def num_samples(self) -> int:
        """Rows of each tensor."""
        return len(next(iter(self.inputs.values())))

    num_targets = num_samples
    """The loss of a step is the mean over its samples."""

    @property
    def shape(self) -> tuple[int, int]:
        """Samples, and the tokens of each."""
        return self.num_samples, self.sample_tokens

    @property
    def width(self) -> int:
        """Tokens of a line, which is a sample."""
        return self.sample_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return self.num_samples * self.sample_tokens

    num_computed_tokens = num_tokens

    def to(self, device: torch.device) -> Self:
        """Return a copy with its tensors on a device."""

        def moved(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {name: each.to(device) for name, each in tensors.items()}

        return replace(self, inputs=moved(self.inputs), targets=moved(self.targets))

    def part(self, first: int, stop: int) -> Self:
        """The samples from `first` up to `stop`; itself if these are all."""
        if (first, stop) == (0, self.num_samples):
            return self

        def cut(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {name: each[first:stop] for name, each in tensors.items()}

        ids = self.sample_ids[first:stop]
        return replace(self, inputs=cut(self.inputs), targets=cut(self.targets), sample_ids=ids)


AnyModelBatch: TypeAlias = MicroBatch | SampleBatch
"""A micro-batch of a model of any kind."""
