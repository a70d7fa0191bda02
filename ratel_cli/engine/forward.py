"""A model's forward pass without training, with one segment bound at a time: logits, or the loss of many micro-batches.

A segment is read once for all micro-batches of a pass, whose hidden states wait in memory. Nothing is updated; training
and the evaluations in it are in `engine.step`.

Invariant: the modules, the shapes and the order of operations are those of the model's own forward, so that on one
device the logits are those of the whole model, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch

from ratel_cli.data.packing import MicroBatch
from ratel_cli.engine.block_reader import BlockReader
from ratel_cli.engine.embedding_rows import EmbeddingRows, rows_suffice
from ratel_cli.engine.loss import loss_only
from ratel_cli.engine.state import place
from ratel_cli.errors import DoesNotFit
from ratel_cli.model.blocks import DecoderModel
from ratel_cli.model.carried import Carried, Embedded
from ratel_cli.model.layer_runner import last_hidden_state
from ratel_cli.model.row_lookup import DistinctTokens
from ratel_cli.planning.placement import num_looked_up
from ratel_cli.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoss:
    """The loss of one micro-batch."""

    batch: MicroBatch
    total: float
    """The sum of the cross-entropies over its targets."""


@dataclass(slots=True, kw_only=True)
class _Passing:
    """A micro-batch on its way through the blocks."""

    hidden: torch.Tensor
    """The output of the last block that has run: `[batch, tokens, hidden]`."""
    carried: Carried
    """What each layer gets besides."""
    num_bytes: int
    """What waits between two blocks."""

    @classmethod
    def behind(cls, embedded: Embedded, *, made_bytes: int) -> Self:
        """A micro-batch behind the embedding. `made_bytes`: what layers leave for others."""
        arguments = [tensor for call in embedded.calls for tensor in call.tensors]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in arguments}
        num_bytes = embedded.hidden.nbytes + sum(storages.values()) + made_bytes
        return cls(hidden=embedded.hidden, carried=Carried(embedded), num_bytes=num_bytes)


class BlockwiseForward:
    """The forward pass of one model, block by block, with dropout off."""

    def __init__(self, model: DecoderModel, reader: BlockReader) -> None:
        self._model = model
        self._reader = reader

    def logits(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Logits `[1, tokens, vocab]` of one row of tokens.

        `input_ids` and `position_ids` are `[1, tokens]`, on the compute device. Raises what the reader raises.
        """
        layer_runner = self._model.layer_runner
        with self._computing():
            with self._reader.bound(self._model.spec.embedding, self._rows_of(input_ids)):
                item = self._embedded(input_ids, position_ids)
            self._run_layers([item], lambda count: None)
            with self._reader.bound(self._model.spec.head):
                finished = layer_runner.finish(item.hidden, input_ids, position_ids)
                return layer_runner.logits(finished, last_hidden_state(finished))

    def losses(
        self,
        batches: Iterable[MicroBatch],
        *,
        held_bytes: int,
        chunk_tokens: int,
        progress: Callable[[int], None] = lambda count: None,
    ) -> Iterator[BatchLoss]:
        """The loss of each micro-batch, in order. As many pass through the blocks together as fit into `held_bytes`.

        These are the bytes, on the device that computes, of what waits between two blocks: hidden states, masks and
        rotary tables. `chunk_tokens`: tokens whose logits exist at once. `progress` is called with the number of
        micro-batches that have passed a block. Raises what the reader raises, and DoesNotFit if a single micro-batch
        does not fit.
        """
        waiting = iter(batches)
        while True:
            with self._computing():
                found = self._pass(waiting, held_bytes, chunk_tokens, progress)
            if not found:
                return
            yield from found

    @contextmanager
    def _computing(self) -> Iterator[None]:
        skeleton = self._model.skeleton
        was_training = skeleton.training
        skeleton.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            skeleton.train(was_training)
            self._reader.end_pass()

    def _pass(
        self, waiting: Iterator[MicroBatch], held_bytes: int, chunk_tokens: int, progress: Callable[[int], None]
    ) -> list[BatchLoss]:
        """The losses of the next micro-batches, as many as fit; none if there are no more."""
        batches, passing = self._embed(waiting, held_bytes)
        if not batches:
            return []
        progress(len(batches))
        self._run_layers(passing, progress)
        losses = []
        with self._reader.bound(self._model.spec.head):
            for batch, item in zip(batches, passing, strict=True):
                finished = self._model.layer_runner.finish(item.hidden, batch.input_ids, batch.position_ids)
                total = loss_only(self._model.layer_runner, finished, batch.targets, chunk_tokens=chunk_tokens)
                losses.append(BatchLoss(batch=batch, total=total))
        progress(len(batches))
        return losses

    def _embed(self, waiting: Iterator[MicroBatch], held_bytes: int) -> tuple[list[MicroBatch], list[_Passing]]:
        """The next micro-batches, on the device that computes, and what is behind the embedding."""
        batches: list[MicroBatch] = []
        passing: list[_Passing] = []
        taken_bytes = largest_bytes = 0
        batch = next(waiting, None)
        if batch is None:
            return batches, passing
        with self._reader.bound(self._model.spec.embedding):
            while batch is not None:
                (placed,) = place([batch], self._reader.device)
                item = self._embedded(placed.input_ids, placed.position_ids)
                if item.num_bytes > held_bytes:
                    raise _does_not_fit(item.num_bytes, held_bytes, self._reader.device)
                batches.append(placed)
                passing.append(item)
                taken_bytes += item.num_bytes
                largest_bytes = max(largest_bytes, item.num_bytes)
                batch = next(waiting, None) if taken_bytes + largest_bytes <= held_bytes else None
        return batches, passing

    def _embedded(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> _Passing:
        embedded = self._model.layer_runner.embed(input_ids, position_ids)
        return _Passing.behind(embedded, made_bytes=input_ids.numel() * self._model.spec.carried_bytes)

    def _run_layers(self, passing: Sequence[_Passing], progress: Callable[[int], None]) -> None:
        """Run every layer on all micro-batches."""
        for index, layer in enumerate(self._model.spec.layers):
            with self._reader.bound(layer):
                for item in passing:
                    run = partial(self._model.layer_runner.run_layer, index, item.hidden)
                    item.hidden = item.carried.forward(index, run)
            progress(len(passing))

    def _rows_of(self, input_ids: torch.Tensor) -> EmbeddingRows | None:
        """What a GPU needs of the embedding's matrix; None: all of it."""
        spec, device = self._model.spec, self._reader.device
        num_rows = num_looked_up(spec, input_ids.numel())
        if device.type == "cpu" or not rows_suffice(spec, num_rows):
            return None
        tokens = DistinctTokens.of([input_ids.cpu()], device, substitutes=spec.substitutes)
        return EmbeddingRows(spec.lookup_block, tokens, num_rows=num_rows, most_rows=num_rows)


def _does_not_fit(num_bytes: int, held_bytes: int, device: torch.device) -> DoesNotFit:
    is_gpu = device.type != "cpu"
    where, key = ("GPU memory", "limits.gpu_memory") if is_gpu else ("RAM", "limits.host_memory")
    return DoesNotFit(
        f"{where}: a micro-batch takes {format_bytes(num_bytes)} between two blocks, {format_bytes(max(0, held_bytes))}"
        f" available (short by {format_bytes(num_bytes - held_bytes)})",
        f"raise {key}, or lower micro_batch_size or sequence_len",
        shortfall_bytes=num_bytes - held_bytes,
        is_gpu_memory=is_gpu,
    )
