"""Computes a model's logits from one generation in the store, with one block in memory at a time.

Nothing is read ahead and nothing is updated; training and evaluation are in `engine.step`.

Invariant: the modules, the shapes and the order of operations are those of the model's own forward, so that on one
device the logits are those of the whole model, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.views import FIELD_DTYPES, view
from ratel_cli.model.blocks import DecoderModel
from ratel_cli.model.layer_runner import last_hidden_state
from ratel_cli.model.spec import BlockSpec
from ratel_cli.store.generation import Generation


class GenerationForward:
    """The forward pass of one model with one generation's weights."""

    def __init__(
        self,
        model: DecoderModel,
        generation: Generation,
        pool: BufferPool,
        *,
        device: torch.device,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """`check_stop` is called before each block; what it raises ends the forward pass."""
        self._model = model
        self._generation = generation
        self._pool = pool
        self._device = device
        self._check_stop = check_stop

    def logits(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Logits `[1, tokens, vocab]` of one row of tokens, with dropout off.

        `input_ids` and `position_ids` are `[1, tokens]`, on the compute device. Raises IntegrityFailure if the
        generation is damaged.
        """
        skeleton = self._model.skeleton
        was_training = skeleton.training
        skeleton.eval()
        try:
            with torch.no_grad():
                return self._logits(input_ids, position_ids)
        finally:
            skeleton.train(was_training)
            self._pool.trim()

    def _logits(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        layer_runner, (embedding, *layers, head) = self._model.layer_runner, self._model.spec.blocks
        with self._bound(embedding):
            embedded = layer_runner.embed(input_ids, position_ids)
        hidden = embedded.hidden
        for index, block in enumerate(layers):
            with self._bound(block):
                hidden = layer_runner.run_layer(index, hidden, embedded.calls[index])
        with ExitStack() as bound:
            if self._model.spec.tied:
                self._model.tie(bound.enter_context(self._bound(embedding)))
            bound.enter_context(self._bound(head))
            finished = layer_runner.finish(hidden, input_ids, position_ids)
            return layer_runner.logits(finished, last_hidden_state(finished))

    @contextmanager
    def _bound(self, block: BlockSpec) -> Iterator[tuple[torch.nn.Parameter, ...]]:
        self._check_stop()
        field = self._generation.layout.compute_field
        with self._pool.lease(block.num_elements * field.bytes_per_element, f"weights of {block.name}") as lease:
            self._generation.read(block.index, field.name, 0, block.num_elements, lease.memory).wait()
            weights = view(lease.memory, FIELD_DTYPES[field.name]).to(self._device)
            try:
                yield self._model.bind(block, weights)
            finally:
                self._model.release(block)
