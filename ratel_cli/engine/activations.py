"""What forward leaves behind for backward: every layer's input, and the operator outputs that the plan swaps.

`engine.step` puts one unit for each (layer, micro-batch) in forward and fetches it once in backward, in the
opposite order. The first units of a step, as many as the placement says, are spilled to NVMe, the last ones stay on
the device that computes, if it has room, the others in host memory; the last layer's, which backward wants at once,
are never spilled. What stays on the device is left where it is, and so is what stays in host memory if the CPU
computes. All others are packed into a leased buffer. Their phases:

    1. put      start the copy of the unit's tensors into its buffer
    2. write    start the write, if the unit is spilled, when the copy is over: at the latest as the next one is put
    3. window   the buffers of the last few spilled units stay; as one more comes, the oldest goes, its write over
    4. ahead    in backward the next units' reads run ahead by the same window; what is still there is not read
    5. prepare  before a unit is computed with, room on the device for the next one, and its copy, if it is there
    6. fetch    wait for the read, copy what is not copied; tensors that look into the copy; release the buffer

(SSDTrain section III-C: forwarding of what is still being stored; here it never depends on timing.)

Invariants: what is fetched are the bytes that were put, or there is an IntegrityFailure; which bytes move depends on
the order of units alone; no more buffers are leased for spilled units than the window, whatever the number of layers.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ratel_cli.engine.device.device import Device, DeviceBuffer, Download, SpanLabel, Upload
from ratel_cli.engine.telemetry import Resource, Timeline
from ratel_cli.errors import RatelError
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.io.scratch import Checksum, Scratch
from ratel_cli.io.tickets import Ticket
from ratel_cli.planning.placement import SPILL_WINDOW_UNITS, Placement, Stage
from ratel_cli.sizes import PACKED_ALIGNMENT, PAGE_BYTES
from ratel_cli.units import align_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What one layer's backward needs for one micro-batch."""

    leaf: torch.Tensor
    """The layer's input [batch, tokens, hidden_size]."""
    offloaded: dict[int, tuple[torch.Tensor, ...]]
    """Outputs of swapped operators, by position in the tape."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.leaf, *(tensor for tensors in self.offloaded.values() for tensor in tensors)]

    @property
    def num_bytes(self) -> int:
        """As it is packed: of storages, each on a boundary of its own."""
        return sum(align_up(tensor.untyped_storage().nbytes(), PACKED_ALIGNMENT) for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in a unit's buffer, and how to look at it there."""

    start: int
    num_bytes: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    storage_offset: int

    def look(self, values: torch.Tensor) -> torch.Tensor:
        """The tensor in the bytes of the buffer."""
        # Not a view: views of one tensor share a version, and autograd would take a change of one for one of all.
        first = (values.storage_offset() + self.start) // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=values.device)
        return empty.set_(values.untyped_storage(), first + self.storage_offset, self.size, self.stride)


class _PackedUnit:
    """A unit that lies in a buffer, now or later, and on NVMe if it is spilled."""

    def __init__(self, block: int, unit: Unit, offset: int | None) -> None:
        self.block = block
        self.offset = offset
        """On NVMe; None: it stays in memory."""
        position = 0

        def place(tensor: torch.Tensor) -> _Place:
            nonlocal position
            storage = tensor.untyped_storage()
            start, position = position, position + align_up(storage.nbytes(), PACKED_ALIGNMENT)
            return _Place(
                start, storage.nbytes(), tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
            )

        self.leaf = place(unit.leaf)
        self.offloaded = {
            index: tuple(place(tensor) for tensor in tensors) for index, tensors in unit.offloaded.items()
        }
        self.num_bytes = align_up(position, PAGE_BYTES)
        self.lease: Lease | None = None
        self.departure: Download | None = None
        self.transfer: Ticket | None = None
        self.seal: Checksum | None = None
        """Of what was written."""
        self.is_being_read = False
        self.room: DeviceBuffer | None = None
        self.arrival: Upload | None = None

    @property
    def places(self) -> list[_Place]:
        return [self.leaf, *(place for each in self.offloaded.values() for place in each)]

    @property
    def memory(self) -> memoryview:
        assert self.lease is not None
        return self.lease.memory

    def about(self, stage: Stage) -> SpanLabel:
        return SpanLabel(label=f"activations of block {self.block}", block=self.block, stage=stage)


class Activations:
    """The units of one step at a time. Belongs to the compute thread."""

    def __init__(
        self, pool: BufferPool, scratch: Scratch | None, placement: Placement, *, device: Device, timeline: Timeline
    ) -> None:
        assert scratch is not None or not placement.spilled_units
        self._pool = pool
        self._scratch = scratch
        self._spilled_units = placement.spilled_units
        self._kept_from = placement.spilled_units if device.is_host else placement.gpu_units_from
        self._device = device
        self._timeline = timeline
        self._order: list[tuple[int, int]] = []
        """Put and not fetched; backward wants the last one first."""
        self._in_place: dict[tuple[int, int], Unit] = {}
        self._packed: dict[tuple[int, int], _PackedUnit] = {}
        self._to_write: _PackedUnit | None = None
        """Spilled, and perhaps still on its way into its buffer."""
        self._window: deque[_PackedUnit] = deque()
        """Spilled ones that are in a buffer, in the order in which they got it."""
        self._to_read: list[_PackedUnit] = []
        """Spilled, and no longer in a buffer; backward wants the last one first."""
        self._end = 0
        self.put_bytes = 0
        """Of all units of the step so far, as they are packed."""

    def put(self, block: int, micro_batch: int, unit: Unit) -> None:
        """Keep it until it is fetched."""
        key = block, micro_batch
        number = len(self._order)
        is_spilled = number < self._spilled_units
        is_kept = self._kept_from is not None and number >= self._kept_from
        self._order.append(key)
        self.put_bytes += unit.num_bytes
        self._start_writing()
        if is_kept:
            self._in_place[key] = Unit(leaf=unit.leaf.detach(), offloaded=unit.offloaded)
            return
        packed = self._packed[key] = _PackedUnit(block, unit, self._end if is_spilled else None)
        if is_spilled:
            self._end += packed.num_bytes
            self._make_room()
        self._lease(packed)
        pieces = [
            (_bytes_of(tensor), packed.memory[place.start : place.start + place.num_bytes])
            for tensor, place in zip(unit.tensors, packed.places, strict=True)
        ]
        packed.departure = self._device.download(pieces, packed.about("forward"))
        if is_spilled:
            self._to_write = packed
            if packed.departure.done:
                self._start_writing()

    @contextlib.contextmanager
    def fetch(self, block: int, micro_batch: int) -> Iterator[Unit]:
        """The unit on the compute device, its input as a fresh leaf that wants a gradient; good inside only."""
        key = block, micro_batch
        assert self._order.pop() == key, "units are fetched in the opposite order"
        self._start_writing()
        unit = self._in_place.pop(key, None)
        if unit is not None:
            self._read_ahead()
            self._prepare()
            yield Unit(leaf=unit.leaf.requires_grad_(), offloaded=unit.offloaded)
            return
        packed = self._packed[key]
        self._bring_to_memory(packed)
        arrival = self._upload(packed)  # before the next one's, which the same stream takes
        self._prepare()
        values = arrival.open()
        yield Unit(
            leaf=packed.leaf.look(values).requires_grad_(),
            offloaded={
                index: tuple(place.look(values) for place in places) for index, places in packed.offloaded.items()
            },
        )
        del values
        with self._timeline.waiting("up"):
            arrival.wait()
        self._release(packed)
        del self._packed[key]

    def reset(self) -> None:
        """Forget everything: the step is over, however it ended."""
        for packed in self._packed.values():
            with contextlib.suppress(RatelError):  # nobody wants these bytes any more
                if packed.transfer is not None:
                    packed.transfer.wait()
            for copy in (packed.departure, packed.arrival):
                if copy is not None:
                    copy.wait()
            if packed.lease is not None:
                packed.lease.release()
        self._order.clear()
        self._in_place.clear()
        self._packed.clear()
        self._to_write = None
        self._window.clear()
        self._to_read.clear()
        self._end = self.put_bytes = 0

    def _start_writing(self) -> None:
        """Phase 2, of the unit put last, if it is spilled."""
        packed, self._to_write = self._to_write, None
        if packed is None:
            return
        assert self._scratch is not None and packed.departure is not None and packed.offset is not None
        with self._timeline.waiting("down"):
            packed.departure.wait()
        packed.transfer = self._scratch.write(packed.offset, packed.memory)
        packed.seal = Checksum(packed.memory)  # while the drive works

    def _bring_to_memory(self, packed: _PackedUnit) -> None:
        if packed.lease is None:
            self._make_room()
            self._read(self._to_read.pop())
        self._read_ahead()
        if packed.is_being_read:
            self._await(packed)

    def _prepare(self) -> None:
        """Phase 5, for a device with memory of its own."""
        if self._device.is_host or not self._order:
            return
        coming = self._packed.get(self._order[-1])
        if coming is None:  # it is on the device
            return
        coming.room = self._device.reserve(coming.num_bytes)
        if coming.lease is not None and not coming.is_being_read:
            coming.arrival = self._upload(coming)

    def _upload(self, packed: _PackedUnit) -> Upload:
        if packed.arrival is None:
            room = packed.room or self._device.reserve(packed.num_bytes)
            packed.arrival = self._device.upload(
                packed.memory, room, packed.about("backward"), after=None if packed.is_being_read else packed.departure
            )
        return packed.arrival

    def _read_ahead(self) -> None:
        while self._to_read and len(self._window) < SPILL_WINDOW_UNITS:
            self._read(self._to_read.pop())

    def _read(self, packed: _PackedUnit) -> None:
        assert self._scratch is not None and packed.offset is not None
        packed.is_being_read = True
        self._lease(packed)
        packed.transfer = self._scratch.read(packed.offset, packed.memory)

    def _lease(self, packed: _PackedUnit) -> None:
        packed.lease = self._pool.lease(packed.num_bytes, f"activations of block {packed.block}")
        if packed.offset is not None:
            self._window.append(packed)

    def _make_room(self) -> None:
        """In forward: the oldest buffer of a full window goes."""
        if len(self._window) == SPILL_WINDOW_UNITS:
            oldest = self._window[0]
            self._release(oldest)
            self._to_read.append(oldest)

    def _release(self, packed: _PackedUnit) -> None:
        if packed.transfer is not None:
            self._await(packed)
        if packed.offset is not None:
            self._window.remove(packed)
        lease, packed.lease = packed.lease, None
        assert lease is not None
        lease.release()

    def _await(self, packed: _PackedUnit) -> None:
        resource: Resource = "nvme read" if packed.is_being_read else "nvme write"
        about = packed.about("backward" if packed.is_being_read else "forward")
        transfer, packed.transfer = packed.transfer, None
        assert transfer is not None
        with self._timeline.waiting(resource):
            transfer.wait()
        self._timeline.transfer(resource, about.label, transfer, block=about.block, stage=about.stage)
        if packed.is_being_read:
            assert packed.seal is not None
            packed.seal.check(packed.memory, about.label)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of its storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
