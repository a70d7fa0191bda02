"""Brings compute weights (P16) to where a block's modules can use them, ahead of time.

`engine.step` says in which order it will use blocks, and opens them one after another; the reader fetches
the next ones while one computes. For each use, in phases:

    1. issue   as the use comes within `prefetch_blocks`: lease a buffer and start the read, or share the
               buffer that has the block already; if the block's update waits for this use, start that too
    2. open    wait for the read, or for the update; bring it to the device, where it is bound to the block's modules
    3. close   unbind; the buffer goes back to the pool with its last user

A GPU has room for the block that computes and for the next one, whose copy runs beneath that: from the opening of
the one before on, or from its own opening, if it is still being read or updated then. If it has more room, the
last layers stay there from forward to backward (`kept`), and are not copied again.

Nothing is read that is in memory: blocks in `resident_weights` are read once and stay, since the update
changes them in place; and a block that is used again before it was closed (the last layer, at the turn
from forward to backward) is shared.

Invariants: what is bound is the newest generation, committed or not; which reads happen depends on the
order of uses alone, never on timing.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import nn

from ratel_cli.engine.device.device import Device, DeviceBuffer, SpanLabel, Upload
from ratel_cli.engine.telemetry import Timeline
from ratel_cli.errors import RatelError
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.io.tickets import Ticket
from ratel_cli.io.views import FIELD_DTYPES
from ratel_cli.model.blocks import DecoderModel
from ratel_cli.model.spec import BlockSpec
from ratel_cli.planning.placement import Stage
from ratel_cli.store.store import Store


class HostWeights:
    """The compute field of one block in host memory, for several users, and the read that fills it."""

    def __init__(self, block: BlockSpec, lease: Lease, read: Ticket) -> None:
        self.block = block
        self.num_uses = 0
        """Uses of the reader that share this; others may have it as well."""
        self._lease = lease
        self._reads = [read]  # popped by whoever waits for it; a list, since its pop is atomic

    @property
    def memory(self) -> memoryview:
        return self._lease.memory

    @property
    def is_read(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return all(read.done for read in self._reads)

    def wait(self, timeline: Timeline, stage: Stage) -> None:
        """Block until the read has ended; nothing to do after the first time. Not for two threads at once."""
        if self._reads:
            read = self._reads.pop()
            read.wait()
            timeline.transfer("nvme read", f"weights of {self.block.name}", read, block=self.block.index, stage=stage)

    def share(self) -> Self:
        """Count one more user."""
        self._lease.share()
        return self

    def release(self) -> None:
        """Count one user less. The last one gives the memory back, when nothing is being read into it."""
        with contextlib.suppress(RatelError, IndexError):  # if nobody waited, nobody wants these bytes any more
            self._reads.pop().wait()
        self._lease.release()


class ResidentWeights:
    """Compute weights that stay in host memory from step to step, by block."""

    def __init__(self, blocks: frozenset[int]) -> None:
        self._blocks = blocks
        self._weights: dict[int, HostWeights] = {}

    def get(self, block: BlockSpec) -> HostWeights | None:
        """The block's weights, with one more user, if they are here."""
        weights = self._weights.get(block.index)
        return None if weights is None else weights.share()

    def keep(self, weights: HostWeights) -> None:
        """Keep them if the placement says so."""
        if weights.block.index in self._blocks:
            self._weights[weights.block.index] = weights.share()

    def forget(self) -> None:
        """They are not those of the current generation, or no longer wanted."""
        kept, self._weights = self._weights, {}
        for weights in kept.values():
            weights.release()


class UpdateStatus(Protocol):
    """What the reader needs of `engine.update.Updates`."""

    def is_in_shadow(self, block: BlockSpec) -> bool:
        """Whether the newest weights are in the shadow, written and not committed."""
        ...

    def is_under_way(self, block: BlockSpec) -> bool:
        """Whether the block is being updated, so that neither generation can be read."""
        ...

    def start_waiting(self, weights: HostWeights) -> None:
        """Start the block's update if it was put off until its weights are used again."""
        ...

    def is_updated(self, block: BlockSpec) -> bool:
        """Whether `wait_updated` would return at once."""
        ...

    def wait_updated(self, block: BlockSpec) -> None:
        """Return when the block's update, if there is one, is in the memory that it came with."""
        ...

    def wait_written(self, block: BlockSpec) -> None:
        """Return when the block's update, if there is one, is in the shadow."""
        ...


@dataclass(slots=True, eq=False)
class _Use:
    block: BlockSpec
    stage: Stage
    weights: HostWeights | None = None
    room: DeviceBuffer | None = None
    """On the device."""
    arrival: Upload | None = None


class WeightReader:
    """Opens blocks for compute, in the order announced."""

    def __init__(
        self,
        model: DecoderModel,
        store: Store,
        pool: BufferPool,
        updates: UpdateStatus,
        resident: ResidentWeights,
        *,
        prefetch_blocks: int,
        kept: frozenset[int],
        device: Device,
        timeline: Timeline,
    ) -> None:
        self._model = model
        self._store = store
        self._pool = pool
        self._updates = updates
        self._resident = resident
        self._prefetch_blocks = prefetch_blocks
        self._keeps = frozenset() if device.is_host else kept
        self._device = device
        self._timeline = timeline
        self._uses: deque[_Use] = deque()
        self._shared: dict[int, HostWeights] = {}
        """What is open or issued, by block."""
        self._kept: dict[int, Upload] = {}
        """What is on the device, for a use to come, by block."""

    def expect(self, blocks: Sequence[BlockSpec], stage: Stage) -> None:
        """Announce the next uses, in order. Those that come first are issued as soon as a block is opened."""
        self._uses.extend(_Use(block, stage) for block in blocks)

    def open(self, block: BlockSpec) -> BlockWeights:
        """Bind the block whose turn it is."""
        use = self._uses.popleft()
        assert use.block is block, f"{use.block.name} comes before {block.name}"
        try:
            if not self._issue(use):
                with self._timeline.waiting("nvme write"):
                    self._updates.wait_written(block)
                assert self._issue(use)
            for coming, _ in zip(self._uses, range(self._prefetch_blocks), strict=False):
                if not self._issue(coming):
                    break
            weights = use.weights
            assert weights is not None
            with self._timeline.waiting("optimizer"):
                self._updates.wait_updated(block)
            with self._timeline.waiting("nvme read"):
                weights.wait(self._timeline, use.stage)
            arrival = use.arrival = use.arrival or self._kept.pop(block.index, None) or self._upload(use, weights)
            if block.index in self._keeps and any(coming.block is block for coming in self._uses):
                self._kept[block.index] = arrival
            self._prepare()
        except BaseException:
            if use.weights is not None:
                self.close(use.weights, use.arrival)
            raise
        return BlockWeights(self._model, weights, self, FIELD_DTYPES[self._store.layout.compute_field.name], arrival)

    def close(self, weights: HostWeights, arrival: Upload | None = None) -> None:
        """One use of the block is over."""
        if arrival is not None:
            with self._timeline.waiting("up"):
                arrival.wait()
        weights.num_uses -= 1
        if not weights.num_uses:
            del self._shared[weights.block.index]
        weights.release()

    def reset(self) -> None:
        """Forget the uses announced: they will not come."""
        for use in self._uses:
            if use.weights is not None:
                self.close(use.weights, use.arrival)
        self._uses.clear()
        self._kept.clear()

    def _issue(self, use: _Use) -> bool:
        """Phase 1. False if the block can neither be shared nor be read now."""
        if use.weights is not None:
            return True
        block = use.block
        shared = self._shared.get(block.index)
        weights = self._resident.get(block) if shared is None else shared.share()
        if weights is None:
            if self._updates.is_under_way(block):
                return False
            weights = self._read(block)
            self._resident.keep(weights)
        self._shared[block.index] = weights
        weights.num_uses += 1
        use.weights = weights
        self._updates.start_waiting(weights)
        return True

    def _upload(self, use: _Use, weights: HostWeights) -> Upload:
        room = use.room or self._device.reserve(self._num_bytes(use.block))
        about = SpanLabel(label=f"weights of {use.block.name}", block=use.block.index, stage=use.stage)
        return self._device.upload(weights.memory, room, about)

    def _prepare(self) -> None:
        """Where the device has memory of its own: room for the next block, and its copy, if it can begin already."""
        if self._device.is_host or not self._uses:
            return
        coming = self._uses[0]
        if coming.block.index in self._kept:
            return
        coming.room = self._device.reserve(self._num_bytes(coming.block))
        weights = coming.weights
        if weights is not None and weights.is_read and self._updates.is_updated(coming.block):
            coming.arrival = self._upload(coming, weights)

    def _num_bytes(self, block: BlockSpec) -> int:
        return block.num_elements * self._store.layout.compute_field.bytes_per_element

    def _read(self, block: BlockSpec) -> HostWeights:
        field = self._store.layout.compute_field
        lease = self._pool.lease(self._num_bytes(block), f"weights of {block.name}")
        in_shadow = self._updates.is_in_shadow(block)
        newest = self._store.shadow().generation if in_shadow else self._store.current()
        try:
            read = newest.read(block.index, field.name, 0, block.num_elements, lease.memory)
            return HostWeights(block, lease, read)
        except BaseException:
            lease.release()
            raise


class BlockWeights:
    """One block's weights, bound to its modules until `unbind`."""

    def __init__(
        self, model: DecoderModel, host: HostWeights, reader: WeightReader, dtype: torch.dtype, arrival: Upload
    ) -> None:
        self.block = host.block
        self.host = host
        """The compute field in host memory, which the update changes in place."""
        self._model = model
        self._reader = reader
        self._arrival: Upload | None = arrival
        self._is_bound = True
        self.parameters: tuple[nn.Parameter, ...] = model.bind(host.block, arrival.open().view(dtype))

    def unbind(self) -> None:
        """Take the weights out of the modules. An autograd graph that uses them may go on until `close`."""
        if self._is_bound:
            self._is_bound = False
            self._model.release(self.block)

    def close(self) -> None:
        """Unbind, and end this use of the memory. Idempotent."""
        self.unbind()
        self.parameters = ()
        arrival, self._arrival = self._arrival, None
        if arrival is not None:
            self._reader.close(self.host, arrival)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
