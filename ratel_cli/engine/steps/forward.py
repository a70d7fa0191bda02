"""A forward pass without training, with one segment bound at a time: outputs, or the loss of many micro-batches.

A segment is read once for all micro-batches of a pass, whose hidden states wait in memory. Nothing is updated; training
and the evaluations in it are in `engine/steps/step.py`, and run the same segments.

Invariant: the modules, the shapes and the order of operations are those of the model's own forward, so that on one
device the logits are those of the whole model, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

import torch

from ratel_cli.engine.reading.block_reader import BlockReader
from ratel_cli.engine.reading.embedding_rows import EmbeddingRows
from ratel_cli.engine.reading.program import AnyBatch, Program, tokens_looked_up
from ratel_cli.engine.replay.loss import EvaluatedSums, evaluated_sums
from ratel_cli.engine.segments.passes import forward_pass, runnable_segments
from ratel_cli.engine.steps.state import PassState
from ratel_cli.errors import DoesNotFit
from ratel_cli.model.values.finished import Finished
from ratel_cli.model.values.spec import ModelSpec
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


class _FittingPass(PassState[AnyBatch]):
    """A pass of as many of the waiting micro-batches as fit: the first segment takes them."""

    def __init__(
        self,
        waiting: Iterator[AnyBatch],
        measure: Callable[[int, Finished], None],
        *,
        held_bytes: int,
        spec: ModelSpec,
        device: torch.device,
    ) -> None:
        """`held_bytes`: for what waits between two segments. `waiting` must have a micro-batch."""
        super().__init__([], rows=None, measure=measure)
        self._waiting = waiting
        self._held_bytes = held_bytes
        self._spec = spec
        self._device = device

    def forward_order(self) -> Iterable[int]:
        return super().forward_order() if self.batches else self._taken()

    def _taken(self) -> Iterator[int]:
        """The numbers of the micro-batches that are taken one after another, each when the one before has run."""
        taken_bytes = largest_bytes = 0
        for number, batch in enumerate(self._waiting):
            self.batches.append(batch.to(self._device))
            yield number
            num_bytes = self._waiting_bytes(number)
            if num_bytes > self._held_bytes:
                raise _does_not_fit(num_bytes, self._held_bytes, self._device)
            taken_bytes += num_bytes
            largest_bytes = max(largest_bytes, num_bytes)
            if taken_bytes + largest_bytes > self._held_bytes:
                return

    def _waiting_bytes(self, number: int) -> int:
        """What of a micro-batch waits between two segments."""
        hidden = self.hidden[number]
        arguments = [tensor for call in self.carried[number].calls for tensor in call.tensors]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in arguments}
        made_bytes = hidden.numel() // self._spec.hidden_size * self._spec.carried_bytes  # what layers leave for others
        return hidden.nbytes + sum(storages.values()) + made_bytes


class BlockwiseForward(Generic[AnyBatch]):
    """The forward pass of one model, block by block, with dropout off."""

    def __init__(self, program: Program[AnyBatch], reader: BlockReader) -> None:
        self._program = program
        self._reader = reader
        self._device = reader.device.torch_device
        self._segments = runnable_segments(program, reader.device, program.spec.segments)

    def outputs(self, batch: AnyBatch) -> torch.Tensor:
        """What the model returns for all tokens of one micro-batch: logits `[batch, tokens, vocab]`.

        Raises what the reader raises.
        """
        found: list[torch.Tensor] = []

        def measure(_: int, finished: Finished) -> None:
            found.append(finished.outputs(finished.hidden))

        with self._computing():
            state = PassState([batch.to(self._device)], rows=self._rows_of(batch), measure=measure)
            forward_pass(self._segments, state, self._reader)
        return found[0]

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
        for first in waiting:
            yield self._measured(chain([first], waiting), measure, held_bytes, progress)

    def _measured(
        self,
        waiting: Iterator[AnyBatch],
        measure: Callable[[Finished, AnyBatch], Measured],
        held_bytes: int,
        progress: Callable[[int], None],
    ) -> list[tuple[AnyBatch, Measured]]:
        """One pass of the next micro-batches; there is one."""
        found: list[tuple[AnyBatch, Measured]] = []

        def note(number: int, finished: Finished) -> None:
            batch = state.batches[number]
            found.append((batch, measure(finished, batch)))

        state = _FittingPass(waiting, note, held_bytes=held_bytes, spec=self._program.spec, device=self._device)
        with self._computing():
            forward_pass(self._segments, state, self._reader, progress=progress)
        return found

    @contextmanager
    def _computing(self) -> Iterator[None]:
        was_training = self._program.train(False)
        try:
            with torch.no_grad():
                yield
        finally:
            self._program.train(was_training)
            self._reader.end_pass()

    def _rows_of(self, batch: AnyBatch) -> EmbeddingRows | None:
        """What a GPU needs of the embedding's matrix; None: all of it."""
        if self._reader.device.is_host:
            return None
        spec, tokens = self._program.spec, tokens_looked_up(self._program, [batch])
        most_rows = num_looked_up(spec, sum(each.numel() for each in tokens))
        return EmbeddingRows.of(spec, tokens, self._device, most_rows=most_rows)


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
