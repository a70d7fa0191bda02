"""Reads a model's weights one segment at a time, for computing without training.

For each use of a segment:

    1. read     the flat arrays of its blocks into buffers, from a generation in the store or from the model's own files
    2. bind     its parameters to the modules, after an upload where a GPU computes
    3. release  the modules, and the buffers

A forward pass uses the segments in one order. With `reads_ahead` a thread reads the next segment of the pass while one
computes. Resident segments are read once and stay in host memory.

Invariant: memory is that of the segments that are bound, read ahead or resident (`weights_bytes`), whatever the number
of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from ratel_cli.closing import Closing
from ratel_cli.engine.reading.embedding_rows import EmbeddingRows
from ratel_cli.engine.reading.program import AnyProgram
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.io.views import VALUE_DTYPES, view
from ratel_cli.model.export.checkpoint import CheckpointSource
from ratel_cli.model.files.import_weights import WeightSource
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.schedule.segments import Segment
from ratel_cli.store.joined import Readable

_WITHOUT_MASTER_ELEMENTS = 1 << 20
"""Elements that are read at a time from a source of any kind: 4 MiB in fp32."""


class BlockSource(Protocol):
    """Where the weights of blocks come from."""

    def read(self, block: BlockSpec, memory: memoryview) -> None:
        """Fill `memory` with the block's flat array. What is in the gaps between parameters is not defined."""


@dataclass(frozen=True, slots=True)
class GenerationBlocks:
    """The compute weights of one generation in the store."""

    generation: Readable

    def read(self, block: BlockSpec, memory: memoryview) -> None:
        """See BlockSource. Raises IntegrityFailure if the generation is damaged."""
        field = self.generation.blocks[block.index].record.compute_field
        self.generation.read(block.index, field.name, 0, block.num_elements, memory).wait()


@dataclass(frozen=True, slots=True)
class FileBlocks:
    """The weights in a model's safetensors files, rounded once to the data type that their block computes in."""

    source: CheckpointSource

    def read(self, block: BlockSpec, memory: memoryview) -> None:
        """See BlockSource. Raises IntegrityFailure on an I/O error, BadInput if a file has become shorter."""
        weights = view(memory, VALUE_DTYPES[block.dtype])
        for parameter in block.parameters:
            self.source.read_whole_into(parameter.name, weights[parameter.start : parameter.stop])
        self.source.forget_converted()


@dataclass(frozen=True, slots=True)
class SourceBlocks:
    """The weights of any source, rounded once to the data type that their block computes in."""

    source: WeightSource

    def read(self, block: BlockSpec, memory: memoryview) -> None:
        """See BlockSource. Raises what the source raises."""
        weights = view(memory, VALUE_DTYPES[block.dtype])
        for parameter in block.parameters:
            for start in range(0, parameter.num_elements, _WITHOUT_MASTER_ELEMENTS):
                stop = min(start + _WITHOUT_MASTER_ELEMENTS, parameter.num_elements)
                values = self.source.read(parameter.name, start, stop)
                weights[parameter.start + start : parameter.start + stop] = values


class BlockReader(Closing):
    """Binds the segments of one program, in the order of forward passes. Use as a context manager."""

    def __init__(
        self,
        program: AnyProgram,
        source: BlockSource,
        pool: BufferPool,
        *,
        device: torch.device,
        resident: frozenset[int] = frozenset(),
        reads_ahead: bool = False,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """`resident`: indices of the segments that stay in host memory. `check_stop` is called before each segment;
        what it raises ends the pass."""
        self.device = device
        self.bytes_read = 0
        """Bytes of weights that were read so far."""
        self._program = program
        self._source = source
        self._pool = pool
        self._resident_indices = resident
        self._check_stop = check_stop
        self._order = program.spec.segments
        self._position = 0
        """Place of the next use in the order."""
        self._resident: dict[int, Lease] = {}
        """By block: what a resident segment has bound stays, once, whichever of them bind it."""
        self._ahead: _Ahead | None = None
        self._thread = ThreadPoolExecutor(1, "ratel-read-ahead") if reads_ahead else None

    @contextmanager
    def bound(self, segment: Segment, rows: EmbeddingRows | None = None) -> Iterator[tuple[torch.nn.Parameter, ...]]:
        """A context in which the segment can run. `rows`: what a GPU gets of the embedding's matrix; None: all of it.

        Raises what reading raises, and DoesNotFit if the pool has no memory for the segment.
        """
        self._check_stop()
        leases = self._take(segment)
        parameters: list[torch.nn.Parameter] = []
        try:
            for block, lease in zip(segment.bound, leases, strict=True):
                weights = view(lease.memory, VALUE_DTYPES[block.dtype])
                parts, tokens = [weights], None
                if rows is not None and rows.block is block:
                    parts, tokens = [weights.new_empty(rows.num_elements), weights[rows.others_start :]], rows.tokens
                    rows.gather(weights, parts[0])
                parameters += self._program.bind(block, *(part.to(self.device) for part in parts), tokens=tokens)
            yield tuple(parameters)
        finally:
            self._program.release(segment)
            _release(leases)

    def end_pass(self) -> None:
        """Give back what only this pass used, whether it came to its end or not. The next use begins a new one."""
        self._position = 0
        self._drop_ahead()
        self._pool.trim()

    def close(self) -> None:
        """End the thread and give all memory back. Idempotent."""
        self._drop_ahead()
        if self._thread is not None:
            self._thread.shutdown()
        for lease in self._resident.values():
            lease.release()
        self._resident.clear()

    def _take(self, segment: Segment) -> list[Lease]:
        """Buffers of the segment's blocks, filled, which their user releases. Starts to read the segment after it."""
        position = self._position if self._order[self._position] is segment else self._order.index(segment)
        leases = self._filled(segment)
        try:
            if segment.index in self._resident_indices:
                for block, lease in zip(segment.bound, leases, strict=True):
                    if block.index not in self._resident:
                        self._resident[block.index] = lease.share()
            following = self._order[position + 1 :]
            self._position = position + 1 if following else 0
            if following:
                self._read_ahead(following[0])
        except BaseException:
            _release(leases)
            raise
        return leases

    def _filled(self, segment: Segment) -> list[Lease]:
        if self._ahead is not None and self._ahead.segment is segment:
            ahead, self._ahead = self._ahead, None
            return ahead.wait()
        self._drop_ahead()
        leases, missing = self._lease(segment)
        try:
            self._read(missing)
        except BaseException:
            _release(leases)
            raise
        return leases

    def _read_ahead(self, segment: Segment) -> None:
        if self._thread is None or self._ahead is not None:
            return
        leases, missing = self._lease(segment)
        self._ahead = _Ahead(segment, leases, self._thread.submit(self._read, missing))

    def _drop_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.drop()

    def _lease(self, segment: Segment) -> tuple[list[Lease], list[tuple[BlockSpec, Lease]]]:
        """A buffer for each block; and those that are not resident, which must be read."""
        leases = list[Lease]()
        try:
            for block in segment.bound:
                resident = self._resident.get(block.index)
                purpose = f"weights of {segment.name}"
                leases.append(self._pool.lease(block.compute_bytes, purpose) if resident is None else resident.share())
        except BaseException:
            _release(leases)
            raise
        filled = zip(segment.bound, leases, strict=True)
        return leases, [(block, lease) for block, lease in filled if block.index not in self._resident]

    def _read(self, missing: Sequence[tuple[BlockSpec, Lease]]) -> None:
        for block, lease in missing:
            self._source.read(block, lease.memory)
            self.bytes_read += block.compute_bytes


class _Ahead(NamedTuple):
    """A segment that is being read ahead."""

    segment: Segment
    leases: list[Lease]
    reading: Future[None]

    def wait(self) -> list[Lease]:
        """The filled buffers. Raises what reading raised."""
        try:
            self.reading.result()
        except BaseException:
            self.drop()
            raise
        return self.leases

    def drop(self) -> None:
        """Give the buffers back when nothing is read into them any more."""
        self.reading.exception()
        _release(self.leases)


def _release(leases: Sequence[Lease]) -> None:
    for lease in leases:
        lease.release()


def weights_bytes(spec: ModelSpec, *, resident: frozenset[int] = frozenset(), reads_ahead: bool = False) -> int:
    """The most bytes of host memory that the segments take at any time of a forward pass."""
    resident_bytes = {block.index: block.compute_bytes for index in resident for block in spec.segments[index].bound}

    def read_bytes(segment: Segment) -> int:
        return sum(block.compute_bytes for block in segment.bound if block.index not in resident_bytes)

    most_bytes = 0
    for position in range(len(spec.segments)):
        at_once = spec.segments[position : position + 1 + reads_ahead]
        most_bytes = max(most_bytes, sum(map(read_bytes, at_once)))
    return most_bytes + sum(resident_bytes.values())
