"""A forward pass without training, with one segment bound at a time: outputs, or the loss of many micro-batches.

A segment is read once for all micro-batches of a pass, whose hidden states wait in memory. Nothing is updated; training
and the evaluations in it are in `engine/steps/step.py`.

Invariant: the modules, the shapes and the order of operations are those of the model's own forward, so that on one
device the logits are those of the whole model, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, Self, TypeVar

import torch

from ratel_cli.engine.reading.block_reader import BlockReader
from ratel_cli.engine.reading.embedding_rows import EmbeddingRows
from ratel_cli.engine.reading.program import AnyBatch, Program, tokens_looked_up
from ratel_cli.engine.replay.loss import EvaluatedSums, evaluated_sums
from ratel_cli.errors import DoesNotFit
from ratel_cli.model.values.carried import Carried, Embedded
from ratel_cli.model.values.finished import Finished
from ratel_cli.planning.profile.placement import num_looked_up
from ratel_cli.units import format_bytes

Measured = TypeVar("Measured")
"""What is measured of a micro-batch behind the last segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedBatch(Generic[AnyBatch]):
    """A micro-batch whose targets were compared with the outputs."""

    batch: AnyBatch
    sums: EvaluatedSums
    """What its targets add up to."""


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


class BlockwiseForward(Generic[AnyBatch]):
    """The forward pass of one model, block by block, with dropout off."""

    def __init__(self, program: Program[AnyBatch], reader: BlockReader) -> None:
        self._program = program
        self._reader = reader

    def outputs(self, batch: AnyBatch) -> torch.Tensor:
        """What the model returns for all tokens of one micro-batch: logits `[batch, tokens, vocab]`.

        Raises what the reader raises.
        """
        placed = batch.to(self._reader.device)
        with self._computing():
            with self._reader.bound(self._program.spec.embedding, self._rows_of(batch)):
                item = self._begun(placed)
            self._run_layers([item], lambda count: None)
            with self._reader.bound(self._program.spec.head):
                finished = self._program.finish(item.hidden, placed)
                return finished.outputs(finished.hidden)

    def evaluated(
        self,
        batches: Iterable[AnyBatch],
        *,
        held_bytes: int,
        chunk_tokens: int,
        progress: Callable[[int], None] = lambda count: None,
    ) -> Iterator[EvaluatedBatch[AnyBatch]]:
        """The loss of each micro-batch, in order. As many pass through the blocks together as fit into `held_bytes`.

        These are the bytes, on the device that computes, of what waits between two blocks: hidden states, masks and
        rotary tables. `chunk_tokens`: tokens whose logits exist at once. `progress` is called with the number of
        micro-batches that have passed a block. Raises what the reader raises, and DoesNotFit if a single micro-batch
        does not fit.
        """

        def sums(finished: Finished, batch: AnyBatch) -> EvaluatedSums:
            return evaluated_sums(finished, num_targets=batch.num_targets, chunk_tokens=chunk_tokens)

        for of_pass in self.measured(batches, sums, held_bytes=held_bytes, progress=progress):
            yield from (EvaluatedBatch(batch=batch, sums=found) for batch, found in of_pass)

    def measured(
        self,
        batches: Iterable[AnyBatch],
        measure: Callable[[Finished, AnyBatch], Measured],
        *,
        held_bytes: int,
        progress: Callable[[int], None] = lambda count: None,
    ) -> Iterator[list[tuple[AnyBatch, Measured]]]:
        """For each pass its micro-batches, in order, and what `measure` gives for each. The rest as in `evaluated`."""
        waiting = iter(batches)
        while True:
            with self._computing():
                found = self._pass(waiting, held_bytes, measure, progress)
            if not found:
                return
            yield found

    @contextmanager
    def _computing(self) -> Iterator[None]:
        was_training = self._program.train(False)
        try:
            with torch.no_grad():
                yield
        finally:
            self._program.train(was_training)
            self._reader.end_pass()

    def _pass(
        self,
        waiting: Iterator[AnyBatch],
        held_bytes: int,
        measure: Callable[[Finished, AnyBatch], Measured],
        progress: Callable[[int], None],
    ) -> list[tuple[AnyBatch, Measured]]:
        """The next micro-batches, as many as fit, with what is measured of each; none if there are no more."""
        batches, passing = self._begin(waiting, held_bytes)
        if not batches:
            return []
        progress(len(batches))
        self._run_layers(passing, progress)
        with self._reader.bound(self._program.spec.head):
            found = [
                (batch, measure(self._program.finish(item.hidden, batch), batch))
                for batch, item in zip(batches, passing, strict=True)
            ]
        progress(len(batches))
        return found

    def _begin(self, waiting: Iterator[AnyBatch], held_bytes: int) -> tuple[list[AnyBatch], list[_Passing]]:
        """The next micro-batches, on the device that computes, and what is behind the embedding."""
        batches: list[AnyBatch] = []
        passing: list[_Passing] = []
        taken_bytes = largest_bytes = 0
        batch = next(waiting, None)
        if batch is None:
            return batches, passing
        with self._reader.bound(self._program.spec.embedding):
            while batch is not None:
                placed = batch.to(self._reader.device)
                item = self._begun(placed)
                if item.num_bytes > held_bytes:
                    raise _does_not_fit(item.num_bytes, held_bytes, self._reader.device)
                batches.append(placed)
                passing.append(item)
                taken_bytes += item.num_bytes
                largest_bytes = max(largest_bytes, item.num_bytes)
                batch = next(waiting, None) if taken_bytes + largest_bytes <= held_bytes else None
        return batches, passing

    def _begun(self, batch: AnyBatch) -> _Passing:
        embedded, spec = self._program.begin(batch), self._program.spec
        num_tokens = embedded.hidden.numel() // spec.hidden_size
        return _Passing.behind(embedded, made_bytes=num_tokens * spec.carried_bytes)

    def _run_layers(self, passing: Sequence[_Passing], progress: Callable[[int], None]) -> None:
        """Run every layer on all micro-batches."""
        for index, layer in enumerate(self._program.spec.layers):
            with self._reader.bound(layer):
                for item in passing:
                    run = partial(self._program.run, index, item.hidden)
                    item.hidden = item.carried.forward(index, run)
            progress(len(passing))

    def _rows_of(self, batch: AnyBatch) -> EmbeddingRows | None:
        """What a GPU needs of the embedding's matrix; None: all of it."""
        if self._reader.device.type == "cpu":
            return None
        spec, tokens = self._program.spec, tokens_looked_up(self._program, [batch])
        most_rows = num_looked_up(spec, sum(each.numel() for each in tokens))
        return EmbeddingRows.of(spec, tokens, self._reader.device, most_rows=most_rows)


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
