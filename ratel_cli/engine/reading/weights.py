"""Brings compute weights (P16) from where they lie to where a segment's modules can use them, ahead of time.

A pass announces in which order it will use segments, and opens them in that order. For each use, and each block:

    1. issue   when the use comes within `prefetch_blocks`: lease a buffer and start the read, unless the block is there
               for an earlier use; if its update was deferred until this use, start the update too
    2. open    wait for the read or for the update; upload the weights; bind them to the segment's modules
    3. close   unbind; with the last use of a lifetime the buffer goes back to the pool

How long weights stay in a buffer, and on a GPU, is planned with the order of uses (schedule/lifetimes.py).

A GPU has memory for the segment that computes, and a window for the first parameters of the next one: from none to all
of them, as the placement says. The window's upload is overlapped with computing: it starts when the segment before is
opened, or at the segment's own opening if weights are still being read or updated then. The other parameters go up
when the segment before has given its memory back.
If the GPU has more memory, the last layers (`gpu_weights`) stay there from forward to backward and are uploaded once.
Where tokens are looked up, the rows of the step's tokens go up instead of the embedding's matrix
(engine/reading/embedding_rows.py); the block's other parameters follow them.

What is read in place (`read_in_place`; MemFerry, section IV-B) does not go up: its parameter is bound to host memory,
which the GPU reads while it computes. Of a matrix whose rows go up, the GPU collects these itself.

Resident blocks are read once, since the update changes them in place.

Invariants: the weights that are bound are the newest, committed or not; which reads happen depends on the order of
uses alone, never on timing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, groupby, islice, pairwise, takewhile
from typing import NamedTuple, Protocol

import torch
from torch import nn

from ratel_cli.closing import Closing
from ratel_cli.engine.device.device import Device, DeviceBuffer, InPlace, Upload
from ratel_cli.engine.measure.telemetry import SpanLabel, Timeline
from ratel_cli.engine.reading.embedding_rows import EmbeddingRows
from ratel_cli.engine.reading.host_weights import HostWeights, ResidentWeights
from ratel_cli.engine.reading.program import BoundModel
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.io.views import VALUE_DTYPES, view
from ratel_cli.planning.profile.placement import Placement, bytes_ahead
from ratel_cli.schedule.blocks import BlockSpec, ParameterSpec
from ratel_cli.schedule.lifetimes import upload_lifetimes, weight_lifetimes
from ratel_cli.schedule.segments import Segment
from ratel_cli.schedule.uses import Stage, Use


@dataclass(slots=True, eq=False)
class _Use:
    segment: Segment
    stage: Stage
    rows: EmbeddingRows | None = None
    """Rows of the matrix that are used; None: the whole segment is."""
    begins: set[int] = field(default_factory=set)
    """Blocks whose lifetime in host memory begins with this use."""
    ends: set[int] = field(default_factory=set)
    """Blocks whose lifetime there ends with it."""
    goes_up: bool = False
    """Whether its weights go up to the device, and are not there from an earlier use."""
    stays_up: bool = False
    """Whether they stay there for a later one."""
    weights: list[HostWeights] = field(default_factory=list)
    """Host weights of each block, once the use is issued."""
    gathered: Lease | None = None
    """The rows of the matrix that are used, in host memory."""
    buffers: list[DeviceBuffer] = field(default_factory=list)
    """Reserved on the device for the first parts, which are in the window."""
    is_prepared: bool = False
    """Whether they are reserved, if there are any."""
    uploads: list[_Part] = field(default_factory=list)
    """The parts that are being uploaded, or read in place, in the order of the weights."""


class _Piece(NamedTuple):
    """Consecutive bytes of a block's weights, which a GPU gets in one way."""

    block: BlockSpec
    start: int
    stop: int
    ahead_bytes: int
    """What goes up while the segment before computes."""
    is_in_place: bool
    """Whether the GPU reads them where they are."""
    is_rows: bool = False
    """Whether they are the matrix of which the GPU gets rows."""


class _Part(NamedTuple):
    """What the device gets of a block at once."""

    block: BlockSpec
    upload: Upload


class _Coming(NamedTuple):
    """A part that the device does not get yet."""

    block: BlockSpec
    is_ahead: bool
    """Whether it may come while the segment before computes: in the window, or without taking memory."""
    start: Callable[[], Upload]


class Updating(Protocol):
    """What may change weights while they are read."""

    def is_updating(self, block: BlockSpec, /) -> bool:
        """True if the block's newest weights cannot be read now."""

    def wait_written(self, block: BlockSpec, /) -> None:
        """Return when they can be."""

    def start_deferred(self, weights: HostWeights, /) -> None:
        """Start the update of the weights' block if it was deferred until this use."""

    def is_updated(self, block: BlockSpec, /) -> bool:
        """True if `wait_updated` would return at once."""

    def wait_updated(self, block: BlockSpec, /) -> None:
        """Return when the block's weights in memory are the newest."""


class WeightReader:
    """Opens segments for compute, in the order in which their uses were announced."""

    def __init__(
        self,
        program: BoundModel,
        read: Callable[[BlockSpec, Stage], HostWeights],
        pool: BufferPool,
        updates: Updating,
        resident: ResidentWeights,
        *,
        placement: Placement,
        device: Device,
        timeline: Timeline,
    ) -> None:
        """`read` begins to read a block's newest weights. `placement`: which segments are read ahead, and what stays on
        the GPU, goes there ahead, or is read in place."""
        self._program = program
        self._read = read
        self._pool = pool
        self._updates = updates
        self._resident = resident
        self._prefetch_blocks = placement.prefetch_blocks
        layers = frozenset(layer.index for layer in program.spec.layers)
        self._gpu_weights = frozenset() if device.is_host else placement.gpu_weights & layers
        self._gpu_window_bytes = placement.gpu_window_bytes
        self._modes = {} if device.is_host else placement.read_in_place
        self._device = device
        self._timeline = timeline
        self._uses: deque[_Use] = deque()
        self._held: dict[int, HostWeights] = {}
        """By block: weights whose lifetime has begun."""
        self._on_gpu: dict[int, list[_Part]] = {}
        """Uploads that stay on the GPU for a later use, by segment."""

    def expect(self, uses: Sequence[Use], *, rows: EmbeddingRows | None = None) -> None:
        """Announce the uses of a pass, in order. The first of them are issued as soon as a segment is opened.

        `rows`: what is used of a matrix that tokens are looked up in, if that is not all of it.
        """
        assert not self._uses, "the pass before has not come to its end"
        coming = [_Use(use.segment, use.stage, rows if use.looks_up else None) for use in uses]
        for lifetime in weight_lifetimes(uses, ahead=self._prefetch_blocks):
            coming[lifetime.first].begins.add(lifetime.of.index)
            coming[lifetime.last].ends.add(lifetime.of.index)
        for upload in upload_lifetimes(uses, staying=self._gpu_weights):
            coming[upload.first].goes_up = True
            for use in coming[upload.first : upload.last]:
                use.stays_up = use.stays_up or use.segment is upload.of
        self._uses.extend(coming)

    def open(self, segment: Segment) -> SegmentWeights:
        """Bind the segment of the next announced use. Raises RatelError if a read or an update failed."""
        use = self._uses.popleft()
        assert use.segment is segment, f"{use.segment.name} comes before {segment.name}"
        try:
            if not self._issue(use):
                with self._timeline.stalled_on("nvme write"):
                    for block in segment.bound:
                        self._updates.wait_written(block)
                assert self._issue(use)
            for coming, _ in zip(self._uses, range(self._prefetch_blocks), strict=False):
                if not self._issue(coming):
                    break
            with self._timeline.stalled_on("optimizer"):
                for block in segment.bound:
                    self._updates.wait_updated(block)
            self._wait_read(use)
            if use.goes_up:
                self._upload(use)
            else:
                use.uploads = self._on_gpu.pop(segment.index)
            if use.stays_up:
                self._on_gpu[segment.index] = use.uploads
            self._prepare()
            return SegmentWeights(self._program, use, close=partial(self._close, use))
        except BaseException:
            self._program.release(segment)
            self._close(use)
            raise

    def _wait_read(self, use: _Use) -> None:
        """Wait for what this rank reads, and then for what others send."""
        with self._timeline.stalled_on("nvme read"):
            for weights in use.weights:
                weights.own.wait(self._timeline, use.stage)
        if any(weights.own is not weights for weights in use.weights):
            with self._timeline.stalled_on("network"):
                for weights in use.weights:
                    weights.wait(self._timeline, use.stage)

    def reset(self) -> None:
        """Forget the announced uses, which will not come, and release what was issued for them."""
        for use in self._uses:
            self._close(use)
        self._uses.clear()
        self._on_gpu.clear()
        for weights in self._held.values():  # of a pass that has not come to its end
            weights.release()
        self._held.clear()

    def _close(self, use: _Use) -> None:
        """End a use, or one that does not come: wait for its uploads, and release what was issued for it."""
        issued, use.weights = use.weights, []
        if not issued:
            return
        for part in use.uploads:
            part.upload.wait()  # no stall of its own: what computes has waited for it where it was opened
        if any(isinstance(part.upload, InPlace) for part in use.uploads):
            self._device.mark()()  # until nothing that is queued now reads the memory
        use.uploads, use.buffers = [], []
        if use.gathered is not None:
            use.gathered.release()
            use.gathered = None
        for weights in issued:
            if weights.block.index in use.ends:
                self._held.pop(weights.block.index).release()

    def _issue(self, use: _Use) -> bool:
        """Phase 1. False if a block is neither in memory nor can be read now."""
        if use.weights:
            return True
        blocks = use.segment.bound
        if any(self._updates.is_updating(block) and not self._is_in_memory(block) for block in blocks):
            return False
        for block in blocks:
            if block.index in use.begins:
                weights = self._resident.get(block)
                if weights is None:
                    weights = self._read(block, use.stage)
                    self._resident.add(weights)
                self._held[block.index] = weights
            weights = self._held[block.index]
            use.weights.append(weights)
            self._updates.start_deferred(weights.own)
        return True

    def _is_in_memory(self, block: BlockSpec) -> bool:
        return block.index in self._held or block in self._resident

    def _upload(self, use: _Use) -> None:
        """Start what has not started yet of a use's uploads."""
        for coming in islice(self._coming(use), len(use.uploads), None):
            use.uploads.append(_Part(coming.block, coming.start()))

    def _prepare(self) -> None:
        """On a GPU: reserve the window's buffers for the next use, and start its upload if its weights are ready."""
        if self._device.is_host or not self._uses:
            return
        coming = self._uses[0]
        if not coming.goes_up:
            return
        coming.is_prepared = True
        ahead = [piece.ahead_bytes for piece in self._pieces(coming) if not piece.is_in_place or piece.is_rows]
        coming.buffers = [self._device.reserve(num_bytes) for num_bytes in ahead if num_bytes]
        is_read = bool(coming.weights) and all(weights.is_read for weights in coming.weights)
        if not is_read or not all(map(self._updates.is_updated, coming.segment.bound)):
            return
        for part in takewhile(lambda part: part.is_ahead, self._coming(coming)):
            coming.uploads.append(_Part(part.block, part.start()))

    def _coming(self, use: _Use) -> Iterator[_Coming]:
        """The parts of a use, in order. All weights must have been read and updated."""
        buffers = iter(use.buffers)
        memories = {weights.block.index: weights.memory for weights in use.weights}
        for piece in self._pieces(use):
            block, memory = piece.block, memories[piece.block.index]
            label = SpanLabel.of("weights", block, use.stage)
            if piece.is_rows:
                buffer = next(buffers) if piece.ahead_bytes else None
                yield _Coming(block, buffer is not None, partial(self._upload_rows, use, memory, buffer, label, piece))
                continue
            memory = memory[piece.start : piece.stop]
            if piece.is_in_place:
                yield _Coming(block, True, partial(self._read_in_place, memory, label))
                continue
            ahead, behind = memory[: piece.ahead_bytes], memory[piece.ahead_bytes :]
            if ahead:
                yield _Coming(block, True, partial(self._device.upload, ahead, next(buffers), label))
            if behind:
                yield _Coming(block, False, partial(self._upload_now, behind, label))

    def _read_in_place(self, memory: memoryview, label: SpanLabel) -> Upload:
        """What the GPU cannot read goes up."""
        mapped = self._device.mapped(memory)
        return self._upload_now(memory, label) if mapped is None else InPlace(mapped)

    def _upload_now(self, memory: memoryview, label: SpanLabel) -> Upload:
        """To a buffer that waits for what computes now."""
        return self._device.upload(memory, self._device.reserve(len(memory)), label)

    def _upload_rows(
        self, use: _Use, memory: memoryview, buffer: DeviceBuffer | None, label: SpanLabel, piece: _Piece
    ) -> Upload:
        """The rows of a matrix that is in `memory`: the GPU collects them in place, or the host does."""
        assert use.rows is not None
        if buffer is None:
            buffer = self._device.reserve(piece.block.dtype_bytes * use.rows.num_elements)
        table = use.rows.table(self._device, memory) if piece.is_in_place else None
        if table is None:
            return self._device.upload(self._rows(use, use.rows, memory), buffer, label)
        return self._device.upload_rows(table, use.rows.tokens.on_device, buffer, label)

    def _pieces(self, use: _Use) -> Iterator[_Piece]:
        """The weights of the use's blocks, cut where the GPU gets them in another way. Of an embedding that is looked
        up, first the rows, then what is behind the matrix."""
        ahead_bytes = iter(self._ahead_bytes(use) if use.is_prepared else ())
        blocks = list(use.segment.bound)
        if use.rows is not None:
            block = blocks.pop(0)
            start = block.dtype_bytes * use.rows.others_start
            is_in_place = self._is_in_place(use, block.parameters[0])
            yield _Piece(block, 0, start, next(ahead_bytes, 0), is_in_place, is_rows=True)
            yield from self._cut(use, block, start, next(ahead_bytes, 0))
        for block in blocks:
            yield from self._cut(use, block, 0, next(ahead_bytes, 0))

    def _cut(self, use: _Use, block: BlockSpec, start: int, ahead_bytes: int) -> Iterator[_Piece]:
        """A block's weights from byte `start` on, of which `ahead_bytes` go up in the window."""
        parameters = [each for each in block.parameters if each.start * block.dtype_bytes >= start]
        groups = [(key, list(each)) for key, each in groupby(parameters, partial(self._is_in_place, use))]
        starts = [group[0].start * block.dtype_bytes for _, group in groups]
        for (is_in_place, _), first, stop in zip(groups, starts, [*starts, block.compute_bytes][1:], strict=True):
            ahead = 0 if is_in_place else min(max(0, start + ahead_bytes - first), stop - first)
            yield _Piece(block, first, stop, ahead, is_in_place)

    def _is_in_place(self, use: _Use, parameter: ParameterSpec) -> bool:
        """What stays on the GPU from forward to backward is uploaded for that."""
        mode = self._modes.get(parameter.name, "GFGB")
        return not use.stays_up and (mode == "DHA" or (mode == "DFGB" and use.stage == "forward"))

    def _ahead_bytes(self, use: _Use) -> list[int]:
        """Bytes that go up while the segment before computes, of the rows and what is behind the matrix, and of each
        other block: those of the first parameters, as many as fit into the window."""
        rows, window_bytes = use.rows, self._gpu_window_bytes
        if rows is None:
            return _shares(use.segment.bound, bytes_ahead(use.segment, window_bytes))
        others = use.segment.blocks[1:]
        left_bytes = bytes_ahead(Segment((rows.packed, *others)), window_bytes) - rows.packed.compute_bytes
        return [*rows.parts_ahead(window_bytes), *_shares(others, max(0, left_bytes))]

    def _rows(self, use: _Use, rows: EmbeddingRows, memory: memoryview) -> memoryview:
        """The rows of an embedding whose weights are in `memory`, gathered when they are first asked for."""
        block, dtype = rows.block, VALUE_DTYPES[rows.block.dtype]
        num_bytes = block.dtype_bytes * rows.num_elements
        if use.gathered is None:
            packed_bytes = block.dtype_bytes * rows.packed.parameters[0].num_elements
            largest_bytes = block.dtype_bytes * rows.largest.parameters[0].num_elements
            use.gathered = self._pool.lease(packed_bytes, f"rows of {block.name}", at_most_bytes=largest_bytes)
            rows.gather(view(memory, dtype), view(use.gathered.memory[:num_bytes], dtype))
        return use.gathered.memory[:num_bytes]


class SegmentWeights(Closing):
    """One segment's weights, bound to its modules until `unbind`."""

    def __init__(self, program: BoundModel, use: _Use, *, close: Callable[[], None]) -> None:
        """`close` ends the use of the memory."""
        self.segment = use.segment
        self.hosts = tuple(weights.own for weights in use.weights if weights.block in use.segment.trained)
        """What this rank updates of each trained block of its own: compute fields in host memory, changed in place."""
        self._program = program
        self._close = close
        self._is_bound = True
        self._of_blocks: dict[int, tuple[nn.Parameter, ...]] = {}
        for block in use.segment.bound:
            dtype = VALUE_DTYPES[block.dtype]
            parts = [part.upload.open().view(dtype) for part in use.uploads if part.block is block]
            tokens = use.rows.tokens if use.rows is not None and use.rows.block is block else None
            self._of_blocks[block.index] = program.bind(block, *parts, tokens=tokens)
        self.parameters = self.of(*use.segment.bound)
        """The segment's parameters on the compute device, each in its own shape, in the order of its blocks."""
        self.trained = self.of(*use.segment.trained)
        """The parameters that have gradients in the segment's own blocks."""

    def of(self, *blocks: BlockSpec) -> tuple[nn.Parameter, ...]:
        """The parameters of some of its blocks."""
        return tuple(parameter for block in blocks for parameter in self._of_blocks[block.index])

    def unbind(self) -> None:
        """Remove the weights from the modules. An autograd graph may use them until `close`. Idempotent."""
        if self._is_bound:
            self._is_bound = False
            self._program.release(self.segment)

    def close(self) -> None:
        """Unbind, and end this use of the memory. Idempotent."""
        self.unbind()
        self.parameters = self.trained = ()
        self._of_blocks.clear()
        self._close()


def weights_in_place(
    program: BoundModel,
    segment: Segment,
    parts: Iterable[tuple[BlockSpec, torch.Tensor]],
    *,
    rows: EmbeddingRows | None,
) -> SegmentWeights:
    """Bind a segment to flat tensors of the device, which stay theirs: one for each of its blocks, in their order.

    `rows`: of a block of which they are used, there are two parts, the rows and what is behind the matrix.
    """
    uploads = [_Part(block, InPlace(part.view(torch.uint8))) for block, part in parts]
    return SegmentWeights(program, _Use(segment, "forward", rows, uploads=uploads), close=lambda: None)


def _shares(blocks: Sequence[BlockSpec], num_bytes: int) -> list[int]:
    """What each block has of the first bytes of their weights."""
    ends = [min(end, num_bytes) for end in accumulate((block.compute_bytes for block in blocks), initial=0)]
    return [end - start for start, end in pairwise(ends)]
