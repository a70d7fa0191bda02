"""Noise on what the embedding gives, in training alone (NEFTune, Jain et al. 2023): by transformers' own hook.

The noise is uniform from `-alpha / sqrt(tokens x width)` to that, tokens counted with padding. It is drawn where the
first segment draws, so it depends on seed, step and micro-batch alone, and is drawn again when the segment runs again.

Invariant: outside of `on`, and of a model that does not train, there is no noise. So the last segment, whose code runs
through the embedding for nothing, draws none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from ratel_cli.model.values.fetched_code import no_fetched_code


class EmbeddingNoise:
    """The noise of one model's embedding."""

    def __init__(self, model: PreTrainedModel, alpha: float) -> None:
        with no_fetched_code():  # transformers imports PEFT there
            from transformers.integrations.neftune import neftune_post_forward_hook

        self._add_noise: Callable[..., object] = neftune_post_forward_hook
        embedding = model.get_input_embeddings()
        embedding.neftune_noise_alpha = alpha  # type: ignore[assignment]  # where the hook reads it
        embedding.register_forward_hook(self._after_forward)
        self._is_on = False
        self._num_added = 0

    @contextmanager
    def on(self) -> Iterator[None]:
        """A context in which the embedding of a model that trains has noise."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    @property
    def num_added(self) -> int:
        """How often noise was added to hidden states `[rows, tokens, width]`."""
        return self._num_added

    def _after_forward(self, module: nn.Module, arguments: object, output: object) -> object:
        if not self._is_on or not isinstance(output, torch.Tensor) or output.dim() != _DIMENSIONS:
            return output
        self._num_added += module.training
        return self._add_noise(module, arguments, output)


_DIMENSIONS = 3
