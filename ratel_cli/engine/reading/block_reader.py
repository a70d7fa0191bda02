"""Reads a model's weights for computing without training: from a generation in the store, or from files.

A thread reads the flat arrays of blocks into buffers, one after another; what comes then is that of a step
(engine/reading/weights.py). With `reads_ahead` it reads the next segment of a pass while one computes.

Invariant: memory is that of the segments that are bound, read ahead or resident (`weights_bytes`), whatever the number
of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch

from ratel_cli.closing import Closing
from ratel_cli.engine.device.device import Device, HostDevice
from ratel_cli.engine.device.gpu import GpuDevice
from ratel_cli.engine.measure.telemetry import Timeline
from ratel_cli.engine.reading.embedding_rows import EmbeddingRows
from ratel_cli.engine.reading.host_weights import HostWeights, ResidentWeights
from ratel_cli.engine.reading.program import AnyProgram
from ratel_cli.engine.reading.turns import Turns
from ratel_cli.engine.reading.weights import SegmentWeights, WeightReader
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.views import VALUE_DTYPES, view
from ratel_cli.model.export.checkpoint import CheckpointSource
from ratel_cli.model.files.import_weights import WeightSource
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.profile.placement import Placement
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.schedule.lifetimes import overlap, weight_lifetimes
from ratel_cli.schedule.segments import Segment
from ratel_cli.schedule.uses import Stage, Use, forward_uses
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


class _NoUpdates:
    """What updates answer where nothing changes weights."""

    def is_updating(self, _: BlockSpec) -> bool:
        return False

    def is_updated(self, _: BlockSpec) -> bool:
        return True

    def wait_updated(self, _: object) -> None:
        """No-op."""

    wait_written = start_deferred = wait_updated


class BlockReader(WeightReader, Closing):
    """Opens the segments of one program, in the order in which their uses were announced. Use as a context manager."""

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
        self._parts = ExitStack()
        self.device: Device = HostDevice(None)
        if device.type != "cpu":
            self.device = self._parts.enter_context(GpuDevice(device, None))
        self.bytes_read = 0
        """Bytes of weights that were read so far."""
        self._source = source
        self._check_stop = check_stop
        self._turns = Turns("read-ahead")
        super().__init__(
            program,
            self._begin_read,
            pool,
            _NoUpdates(),
            ResidentWeights(_blocks_of(program.spec, resident)),
            placement=Placement(prefetch_blocks=int(reads_ahead)),
            device=self.device,
            timeline=Timeline(),
        )

    def expect(self, uses: Sequence[Use], *, rows: EmbeddingRows | None = None) -> None:
        """Announce the uses of a pass, in order. One that has not come to its end is given up."""
        self.reset()
        self._timeline.take()
        super().expect(uses, rows=rows)

    def open(self, segment: Segment) -> SegmentWeights:
        """Bind the segment of the next announced use. Raises what reading raises, and DoesNotFit if the pool has no
        memory for the segment."""
        self._check_stop()
        return super().open(segment)

    def end_pass(self) -> None:
        """Give back what only this pass used, whether it came to its end or not."""
        self.reset()
        self._pool.trim()

    def close(self) -> None:
        """End the thread and give all memory back. Idempotent."""
        self.reset()
        self._turns.close()
        self._resident.forget()
        self._parts.close()

    def _begin_read(self, block: BlockSpec, _: Stage) -> HostWeights:
        lease = self._pool.lease(block.compute_bytes, f"weights of {block.name}")

        def read() -> None:
            self._source.read(block, lease.memory)
            self.bytes_read += block.compute_bytes

        return HostWeights(block, lease, self._turns.submit(read))


def weights_bytes(spec: ModelSpec, *, resident: frozenset[int] = frozenset(), reads_ahead: bool = False) -> int:
    """The most bytes of host memory that the segments take at any time of a forward pass."""
    staying, uses = _blocks_of(spec, resident), forward_uses(spec.segments)
    taken = (
        (each.of.compute_bytes, each.issued, each.last)
        for each in weight_lifetimes(uses, ahead=int(reads_ahead))
        if each.of.index not in staying
    )
    return max(overlap(taken, len(uses))) + sum(spec.blocks[index].compute_bytes for index in staying)


def _blocks_of(spec: ModelSpec, segments: frozenset[int]) -> frozenset[int]:
    """The indices of the blocks that these segments bind."""
    return frozenset(block.index for index in segments for block in spec.segments[index].bound)
