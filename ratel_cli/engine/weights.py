"""Brings compute weights (P16) from NVMe to where a block's modules can use them, ahead of time.

The step announces in which order it will use blocks, and opens them in that order. For each use:

    1. issue   when the use comes within `prefetch_blocks`: lease a buffer and start the read, or share the buffer that
               already holds the block; if the block's update was deferred until this use, start the update too
    2. open    wait for the read or for the update; upload the weights; bind them to the block's modules
    3. close   unbind; the last user gives the buffer back to the pool

A GPU has memory for the block that computes, and a window for the first parameters of the next one: from none to all
of them, as the placement says. The window's upload is overlapped with computing: it starts when the block before is
opened, or at the block's own opening if the weights are still being read or updated then. The other parameters go up
when the block before has given its memory back.
If the GPU has more memory, the last layers (`gpu_weights`) stay there from forward to backward and are uploaded once.
Where tokens are looked up, the rows of the step's tokens go up instead of the embedding's matrix
(engine/embedding_rows.py); the block's other parameters follow them.

Nothing is read that is in host memory: resident blocks are read once, since the update changes them in place; and a
block that is used again before it was closed (the last layer, between forward and backward) shares its buffer.

Invariants: the weights that are bound are the newest, committed or not; which reads happen depends on the order of
uses alone, never on timing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from ratel_cli.closing import Closing
from ratel_cli.engine.device.device import Device, DeviceBuffer, Upload
from ratel_cli.engine.embedding_rows import EmbeddingRows
from ratel_cli.engine.host_weights import HostWeights, ResidentWeights
from ratel_cli.engine.optimizer.update import Updates
from ratel_cli.engine.telemetry import SpanLabel, Timeline
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.io.views import VALUE_DTYPES, view
from ratel_cli.model.blocks import DecoderModel
from ratel_cli.planning.placement import Stage, bytes_ahead
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.store.store import Store


@dataclass(slots=True, eq=False)
class _Use:
    block: BlockSpec
    stage: Stage
    rows: EmbeddingRows | None = None
    """Rows of the matrix that are used; None: the whole block is."""
    weights: HostWeights | None = None
    gathered: Lease | None = None
    """Those rows in host memory."""
    buffers: list[DeviceBuffer] = field(default_factory=list)
    """Reserved on the device for the first parts, which are in the window."""
    uploads: list[Upload] = field(default_factory=list)
    """The parts that are being uploaded: what is in the window, then the others."""


class WeightReader:
    """Opens blocks for compute, in the order in which their uses were announced."""

    def __init__(
        self,
        model: DecoderModel,
        store: Store,
        pool: BufferPool,
        updates: Updates,
        resident: ResidentWeights,
        *,
        prefetch_blocks: int,
        gpu_weights: frozenset[int],
        gpu_window_bytes: int,
        device: Device,
        timeline: Timeline,
    ) -> None:
        """`prefetch_blocks`: number of blocks read ahead of the one that computes. `gpu_weights`: indices of the
        layers whose weights stay in GPU memory from forward to backward. `gpu_window_bytes`: GPU memory for the next
        block while one computes."""
        self._model = model
        self._store = store
        self._pool = pool
        self._updates = updates
        self._resident = resident
        self._prefetch_blocks = prefetch_blocks
        layers = frozenset(block.index for block in model.spec.blocks if block.kind == "layer")
        self._gpu_weights = frozenset() if device.is_host else gpu_weights & layers
        self._gpu_window_bytes = gpu_window_bytes
        self._device = device
        self._timeline = timeline
        self._element_bytes = model.spec.dtype_bytes
        self._dtype = VALUE_DTYPES[model.spec.dtype]
        self._uses: deque[_Use] = deque()
        self._shared: dict[int, HostWeights] = {}
        """Weights that are issued or open, by block."""
        self._on_gpu: dict[int, list[Upload]] = {}
        """Uploads that stay on the GPU for a later use, by block."""

    def expect(self, blocks: Sequence[BlockSpec], stage: Stage, *, rows: EmbeddingRows | None = None) -> None:
        """Announce the next uses, in order. The first of them are issued as soon as a block is opened.

        `rows`: what is used of the blocks' matrix, if that is not all of it.
        """
        self._uses.extend(_Use(block, stage, rows) for block in blocks)

    def open(self, block: BlockSpec) -> BlockWeights:
        """Bind the block of the next announced use. Raises RatelError if its read or its update failed."""
        use = self._uses.popleft()
        assert use.block is block, f"{use.block.name} comes before {block.name}"
        try:
            if not self._issue(use):
                with self._timeline.stalled_on("nvme write"):
                    self._updates.wait_written(block)
                assert self._issue(use)
            for coming, _ in zip(self._uses, range(self._prefetch_blocks), strict=False):
                if not self._issue(coming):
                    break
            weights = use.weights
            assert weights is not None
            with self._timeline.stalled_on("optimizer"):
                self._updates.wait_updated(block)
            with self._timeline.stalled_on("nvme read"):
                weights.wait(self._timeline, use.stage)
            if block.index in self._on_gpu:
                use.uploads = self._on_gpu.pop(block.index)
            else:
                self._upload(use)
            if block.index in self._gpu_weights and any(coming.block is block for coming in self._uses):
                self._on_gpu[block.index] = use.uploads
            self._prepare()
        except BaseException:
            self._close(use)
            raise
        close = partial(self._close, use)
        return BlockWeights(self._model, weights, use.uploads, self._dtype, rows=use.rows, close=close)

    def reset(self) -> None:
        """Forget the announced uses, which will not come, and release what was issued for them."""
        for use in self._uses:
            self._close(use)
        self._uses.clear()
        self._on_gpu.clear()

    def _close(self, use: _Use) -> None:
        """End a use, or one that does not come: wait for its uploads, and release what was issued for it."""
        weights, use.weights = use.weights, None
        if weights is None:
            return
        for upload in use.uploads:
            upload.wait()  # no stall of its own: what computes has waited for it where it was opened
        use.uploads, use.buffers = [], []
        if use.gathered is not None:
            use.gathered.release()
            use.gathered = None
        weights.num_uses -= 1
        if not weights.num_uses:
            del self._shared[weights.block.index]
        weights.release()

    def _issue(self, use: _Use) -> bool:
        """Phase 1. False if the block can neither be shared nor be read now."""
        if use.weights is not None:
            return True
        block = use.block
        shared = self._shared.get(block.index)
        weights = self._resident.get(block) if shared is None else shared.share()
        if weights is None:
            if self._updates.is_updating(block):
                return False
            weights = self._read(block)
            self._resident.add(weights)
        self._shared[block.index] = weights
        weights.num_uses += 1
        use.weights = weights
        self._updates.start_deferred(weights)
        return True

    def _upload(self, use: _Use) -> None:
        """Start what has not started yet of a use's uploads."""
        for number, memory in enumerate(self._parts(use)):
            if number == len(use.uploads):
                buffer = use.buffers[number] if number < len(use.buffers) else self._device.reserve(len(memory))
                self._upload_part(use, memory, buffer)

    def _upload_part(self, use: _Use, memory: memoryview, buffer: DeviceBuffer) -> None:
        label = SpanLabel.of("weights", use.block, use.stage)
        use.uploads.append(self._device.upload(memory, buffer, label))

    def _prepare(self) -> None:
        """On a GPU: reserve the window's buffers for the next use, and start its upload if its weights are ready."""
        if self._device.is_host or not self._uses:
            return
        coming = self._uses[0]
        if coming.block.index in self._on_gpu:
            return
        coming.buffers = [self._device.reserve(num_bytes) for num_bytes in self._ahead_bytes(coming)]
        if coming.weights is None or not coming.weights.is_read or not self._updates.is_updated(coming.block):
            return
        for memory, buffer in zip(self._parts(coming), coming.buffers, strict=False):
            self._upload_part(coming, memory, buffer)

    def _ahead_bytes(self, use: _Use) -> list[int]:
        """Bytes of the parts that go up while the block before computes: the first parameters, as many as fit into the
        window."""
        if use.rows is None:
            sizes: tuple[int, ...] = (bytes_ahead(use.block, self._gpu_window_bytes),)
        else:
            sizes = use.rows.parts_ahead(self._gpu_window_bytes)
        return [size for size in sizes if size]

    def _parts(self, use: _Use) -> list[memoryview]:
        """What goes up, in order: what is in the window and the others. Of an embedding that is looked up, first the
        rows, then what is behind the matrix.

        The weights must have been read and updated.
        """
        assert use.weights is not None
        memory, size, rows = use.weights.memory, self._element_bytes, use.rows
        ahead_bytes = self._ahead_bytes(use) if use.buffers else []
        if rows is None:
            start = sum(ahead_bytes)
            return [part for part in (memory[:start], memory[start:]) if part]
        rows_bytes = size * rows.num_elements
        others, start = memory[size * rows.others_start :], sum(ahead_bytes[1:])
        if use.gathered is None:
            packed_bytes = size * rows.packed.parameters[0].num_elements
            largest_bytes = size * rows.largest.parameters[0].num_elements
            use.gathered = self._pool.lease(packed_bytes, f"rows of {use.block.name}", at_most_bytes=largest_bytes)
            rows.gather(view(memory, self._dtype), view(use.gathered.memory[:rows_bytes], self._dtype))
        return [part for part in (use.gathered.memory[:rows_bytes], others[:start], others[start:]) if part]

    def _read(self, block: BlockSpec) -> HostWeights:
        field = block.record.compute_field
        lease = self._pool.lease(block.compute_bytes, f"weights of {block.name}")
        in_shadow = self._updates.is_in_shadow(block)
        newest = self._store.shadow().generation if in_shadow else self._store.current()
        try:
            return HostWeights(block, lease, newest.read(block.index, field.name, 0, block.num_elements, lease.memory))
        except BaseException:
            lease.release()
            raise


class BlockWeights(Closing):
    """One block's weights, bound to its modules until `unbind`."""

    def __init__(
        self,
        model: DecoderModel,
        host: HostWeights,
        uploads: Sequence[Upload],
        dtype: torch.dtype,
        *,
        rows: EmbeddingRows | None,
        close: Callable[[], None],
    ) -> None:
        """`uploads`: the block's parts, in their order. `rows`: what they have of the embedding's matrix, if that is
        not all of it. `close` ends the use of the memory."""
        self.block = host.block
        self.host = host
        """The compute field in host memory, which the update changes in place."""
        self._model = model
        self._close = close
        self._is_bound = True
        self.parameters: tuple[nn.Parameter, ...] = model.bind(
            host.block,
            *(upload.open().view(dtype) for upload in uploads),
            tokens=None if rows is None else rows.tokens,
        )
        """The block's parameters on the compute device, each in its own shape, in the order of the block's spec."""

    def unbind(self) -> None:
        """Remove the weights from the modules. An autograd graph may use them until `close`. Idempotent."""
        if self._is_bound:
            self._is_bound = False
            self._model.release(self.block)

    def close(self) -> None:
        """Unbind, and end this use of the memory. Idempotent."""
        self.unbind()
        self.parameters = ()
        self._close()
