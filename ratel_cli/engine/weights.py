"""Brings compute weights (P16) from NVMe to where a block's modules can use them, ahead of time.

The step announces in which order it will use blocks, and opens them in that order. For each use:

    1. issue   when the use comes within `prefetch_blocks`: lease a buffer and start the read, or share the buffer that
               already holds the block; if the block's update was deferred until this use, start the update too
    2. open    wait for the read or for the update; upload the weights; bind them to the block's modules
    3. close   unbind; the last user gives the buffer back to the pool

A GPU has memory for the block that computes and for the next one. The next one's upload is overlapped with computing:
it starts when the block before is opened, or at its own opening if the weights are still being read or updated then.
If the GPU has more memory, the last layers (`gpu_weights`) stay there from forward to backward and are uploaded once.

Nothing is read that is in host memory: resident blocks are read once, since the update changes them in place; and a
block that is used again before it was closed (the last layer, between forward and backward) shares its buffer.

Invariants: the weights that are bound are the newest, committed or not; which reads happen depends on the order of
uses alone, never on timing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ratel_cli.closing import Closing
from ratel_cli.engine.device.device import Device, DeviceBuffer, Upload
from ratel_cli.engine.host_weights import HostWeights, ResidentWeights
from ratel_cli.engine.optimizer.update import Updates
from ratel_cli.engine.telemetry import SpanLabel, Timeline
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.views import FIELD_DTYPES
from ratel_cli.model.blocks import DecoderModel
from ratel_cli.model.spec import BlockSpec
from ratel_cli.planning.placement import Stage
from ratel_cli.store.store import Store


@dataclass(slots=True, eq=False)
class _Use:
    block: BlockSpec
    stage: Stage
    weights: HostWeights | None = None
    buffer: DeviceBuffer | None = None
    """Reserved on the device for the upload."""
    upload: Upload | None = None


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
        device: Device,
        timeline: Timeline,
    ) -> None:
        """`prefetch_blocks`: number of blocks read ahead of the one that computes. `gpu_weights`: indices of the
        blocks whose weights stay in GPU memory from forward to backward."""
        self._model = model
        self._store = store
        self._pool = pool
        self._updates = updates
        self._resident = resident
        self._prefetch_blocks = prefetch_blocks
        self._gpu_weights = frozenset() if device.is_host else gpu_weights
        self._device = device
        self._timeline = timeline
        self._uses: deque[_Use] = deque()
        self._shared: dict[int, HostWeights] = {}
        """Weights that are issued or open, by block."""
        self._on_gpu: dict[int, Upload] = {}
        """Uploads that stay on the GPU for a later use, by block."""

    def expect(self, blocks: Sequence[BlockSpec], stage: Stage) -> None:
        """Announce the next uses, in order. The first of them are issued as soon as a block is opened."""
        self._uses.extend(_Use(block, stage) for block in blocks)

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
            upload = use.upload = use.upload or self._on_gpu.pop(block.index, None) or self._upload(use, weights)
            if block.index in self._gpu_weights and any(coming.block is block for coming in self._uses):
                self._on_gpu[block.index] = upload
            self._prepare()
        except BaseException:
            if use.weights is not None:
                self.close_use(use.weights, use.upload)
            raise
        return BlockWeights(self._model, weights, self, FIELD_DTYPES[self._store.layout.compute_field.name], upload)

    def close_use(self, weights: HostWeights, upload: Upload | None = None) -> None:
        """End one use of a block: wait for its upload, and release the host memory."""
        if upload is not None:
            with self._timeline.stalled_on("up"):
                upload.wait()
        weights.num_uses -= 1
        if not weights.num_uses:
            del self._shared[weights.block.index]
        weights.release()

    def reset(self) -> None:
        """Forget the announced uses, which will not come, and release what was issued for them."""
        for use in self._uses:
            if use.weights is not None:
                self.close_use(use.weights, use.upload)
        self._uses.clear()
        self._on_gpu.clear()

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

    def _upload(self, use: _Use, weights: HostWeights) -> Upload:
        buffer = use.buffer or self._device.reserve(self._num_bytes(use.block))
        return self._device.upload(weights.memory, buffer, SpanLabel.of("weights", use.block, use.stage))

    def _prepare(self) -> None:
        """On a GPU: reserve the buffer of the next use, and start its upload if its weights are ready."""
        if self._device.is_host or not self._uses:
            return
        coming = self._uses[0]
        if coming.block.index in self._on_gpu:
            return
        coming.buffer = self._device.reserve(self._num_bytes(coming.block))
        weights = coming.weights
        if weights is not None and weights.is_read and self._updates.is_updated(coming.block):
            coming.upload = self._upload(coming, weights)

    def _num_bytes(self, block: BlockSpec) -> int:
        return block.num_elements * self._store.layout.compute_field.bytes_per_element

    def _read(self, block: BlockSpec) -> HostWeights:
        field = self._store.layout.compute_field
        lease = self._pool.lease(self._num_bytes(block), f"weights of {block.name}")
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
        self, model: DecoderModel, host: HostWeights, reader: WeightReader, dtype: torch.dtype, upload: Upload
    ) -> None:
        self.block = host.block
        self.host = host
        """The compute field in host memory, which the update changes in place."""
        self._model = model
        self._reader = reader
        self._upload: Upload | None = upload
        self._is_bound = True
        self.parameters: tuple[nn.Parameter, ...] = model.bind(host.block, upload.open().view(dtype))
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
        upload, self._upload = self._upload, None
        if upload is not None:
            self._reader.close_use(self.host, upload)
