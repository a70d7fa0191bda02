"""Moves saved tensors away from where they were computed, and back: to host memory, to NVMe, or both in turn.

Storages that leave together lie in one leased buffer, one after another, and come back together or in parts. What stays
in host memory has no phases 2 and 3:

    1. leave     start the download of the storages into the buffer
    2. write     to their place in scratch space, once the download has ended; then the buffer may be released
    3. read      into a buffer
    4. reserve   take memory on the device, for all storages or as many as fit into some bytes
    5. upload    what has memory there, once the read has ended; uploads of activations have a queue of their own on the
                 device, so that none stands behind the weights of a block that comes later
    6. open      give out the storages: on a GPU each has memory of its own, which is free when nothing refers to it;
                 where the host computes they lie in the buffer, until it is released

What goes where and when is not decided here. The units of a step follow its plan (engine/cache/activations.py), the
tensor cache follows its amount and its buffers (engine/cache/saved_transfers.py).

Leases: a buffer is released when its write and its uploads have ended, whoever has leased it. Errors: a failed read
releases its buffer, so that only the drives have the bytes again. Endings: what is dropped waits for its transfers, and
nobody needs to know whether they failed.

Invariant: what comes back are the bytes that left, or an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, Self

import torch

from ratel_cli.engine.device.device import Device, DeviceBuffer, Download, Transfer, Upload
from ratel_cli.engine.measure.telemetry import SpanLabel, Timeline
from ratel_cli.errors import RatelError
from ratel_cli.io.buffers import Lease
from ratel_cli.io.scratch import ScratchPlace
from ratel_cli.io.tickets import Ticket
from ratel_cli.planning.profile.placement import tensors_ahead
from ratel_cli.planning.time.step_time import Resource
from ratel_cli.schedule.uses import Stage
from ratel_cli.sizes import PACKED_ALIGNMENT, PAGE_BYTES
from ratel_cli.units import align_up


class TensorLayout(NamedTuple):
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """In elements."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        return cls(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def tensor_in(self, values: torch.Tensor) -> torch.Tensor:
        """The tensor in the bytes of its storage, which are flat uint8 `[bytes]`."""
        # Not a view: a view keeps the version counter of its base.
        first = values.storage_offset() // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=values.device)
        return empty.set_(values.untyped_storage(), first + self.offset, self.size, self.stride)


@dataclass(slots=True, eq=False, kw_only=True)
class Offloaded:
    """Storages that leave together: where they are, and what moves them."""

    what: str
    """Names them in messages and spans."""
    block: int
    """Index of the segment that they belong to; 0 outside of steps."""
    sizes: Sequence[int]
    """Bytes of each storage."""
    place: ScratchPlace | None = None
    """On the drives; None if they stay in host memory."""
    lease: Lease | None = None
    """Their buffer, while they have one."""
    is_read: bool = False
    """Whether the buffer is one for reading."""
    download: Download | None = None
    """Fills the buffer, until the write begins."""
    write: Ticket | None = None
    read: Ticket | None = None
    written: tuple[float, float] | None = None
    """When the write began and ended, once it has."""
    buffers: dict[int, DeviceBuffer] = field(default_factory=dict)
    """By number of the storage: memory for uploads that have not begun."""
    uploads: dict[int, Upload] = field(default_factory=dict)
    """By number of the storage, until they are opened."""
    uploaded: Sequence[Transfer] = ()
    """The transfers of opened uploads."""

    @property
    def buffer_bytes(self) -> int:
        """Size of a buffer for all storages: each aligned to `PACKED_ALIGNMENT`, whole pages in all."""
        return align_up(sum(align_up(size, PACKED_ALIGNMENT) for size in self.sizes), PAGE_BYTES)

    @property
    def pieces(self) -> list[memoryview]:
        """The part of the buffer for each storage."""
        assert self.lease is not None
        starts = accumulate((align_up(size, PACKED_ALIGNMENT) for size in self.sizes), initial=0)
        return [self.lease.memory[start : start + size] for start, size in zip(starts, self.sizes, strict=False)]

    @property
    def is_in_memory(self) -> bool:
        """Whether the buffer has the bytes, or will have them when the download has ended."""
        return self.lease is not None and (self.read is None or self.read.done)

    @property
    def is_not_uploading(self) -> bool:
        """No upload is in flight."""
        return all(each.done for each in (*self.uploads.values(), *self.uploaded))

    @property
    def transfers(self) -> list[Transfer | Ticket]:
        """All transfers that may be in flight."""
        each = (self.download, self.write, self.read, *self.uploads.values(), *self.uploaded)
        return [transfer for transfer in each if transfer is not None]

    def label(self, stage: Stage) -> SpanLabel:
        return SpanLabel(text=self.what, block=self.block, stage=stage)


class Offloader:
    """Moves what is offloaded. All methods are for threads that wait for one another."""

    def __init__(self, device: Device, timeline: Timeline | None = None) -> None:
        """`timeline` gets transfers with the drives, and stalls; None: nothing is recorded."""
        self.device = device
        self._timeline = timeline

    def leave(
        self, offloaded: Offloaded, tensors: Sequence[torch.Tensor], lease: Lease, *, beside_bytes: int = 0
    ) -> None:
        """Start the download of the tensors' storages, which must not be changed afterwards, into the buffer.
        `beside_bytes`: see `Device.download`."""
        offloaded.lease = lease
        pieces = list(zip(map(bytes_of, tensors), offloaded.pieces, strict=True))
        offloaded.download = self.device.download(pieces, offloaded.label("forward"), beside_bytes=beside_bytes)

    def write(self, offloaded: Offloaded) -> None:
        """Wait for the download, and start the write."""
        assert offloaded.download is not None and offloaded.place is not None and offloaded.lease is not None
        with self._stalled_on("down"):
            offloaded.download.wait()
        offloaded.write = offloaded.place.scratch.write_sealed(offloaded.place.offset, offloaded.lease.memory)
        offloaded.download = None

    def end_write(self, offloaded: Offloaded) -> None:
        """Return when the write has ended, if there is one. Raises RatelError if it failed."""
        write, offloaded.write = offloaded.write, None
        if write is not None:
            self._wait(write, "nvme write", offloaded.label("forward"))
            offloaded.written = write.span

    def read(self, offloaded: Offloaded, lease: Lease) -> None:
        """Start the read into a buffer."""
        assert offloaded.place is not None and offloaded.lease is None
        offloaded.lease, offloaded.is_read = lease, True
        try:
            offloaded.read = offloaded.place.scratch.read_sealed(offloaded.place.offset, lease.memory, offloaded.what)
        except BaseException:
            self.release(offloaded)
            raise

    def reserve(self, offloaded: Offloaded, most_bytes: int | None = None) -> None:
        """Take memory on the device for storages that have none there, as many as fit into `most_bytes` together with
        those that have; None: for all."""
        most_bytes = sum(offloaded.sizes) if most_bytes is None else most_bytes
        for number in tensors_ahead(offloaded.sizes, most_bytes, taken={*offloaded.buffers, *offloaded.uploads}):
            offloaded.buffers[number] = self.device.reserve(offloaded.sizes[number])

    def upload(self, offloaded: Offloaded) -> None:
        """Start the uploads of what has memory on the device, when the read has ended. Raises RatelError if it failed,
        IntegrityFailure if the bytes are not those that left; then only the drives have them again."""
        read, offloaded.read = offloaded.read, None
        label = offloaded.label("backward")
        if read is not None:
            try:
                self._wait(read, "nvme read", label)
            except BaseException:
                self.release(offloaded)
                raise
        pieces = offloaded.pieces
        for number, buffer in offloaded.buffers.items():
            offloaded.uploads[number] = self.device.upload(
                pieces[number], buffer, label, lane="activations", after=offloaded.download
            )
        offloaded.buffers = {}

    def open(self, offloaded: Offloaded) -> list[torch.Tensor]:
        """The bytes of all storages on the device, each flat uint8 `[bytes]`, for work that is queued from now on. All
        uploads have begun. The caller alone holds the bytes afterwards."""
        opened = [offloaded.uploads[number].open() for number in range(len(offloaded.sizes))]
        offloaded.uploaded = [upload.give_up() for upload in offloaded.uploads.values()]
        offloaded.uploads = {}
        return opened

    def release(self, offloaded: Offloaded) -> None:
        """Release the buffer, when uploads that were opened and the write have ended. Raises as `end_write`."""
        uploaded, offloaded.uploaded = offloaded.uploaded, ()
        if uploaded:
            with self._stalled_on("up"):
                for each in uploaded:
                    each.wait()
        self.end_write(offloaded)
        lease, offloaded.lease = offloaded.lease, None
        offloaded.is_read = False
        if lease is not None:
            lease.release()

    def drop(self, offloaded: Offloaded) -> None:
        """Wait for what is in flight, and release the buffer. Nobody needs the bytes, so no failure matters."""
        transfers = offloaded.transfers
        offloaded.download = offloaded.write = offloaded.read = None
        offloaded.buffers, offloaded.uploads, offloaded.uploaded = {}, {}, ()
        for transfer in transfers:
            with contextlib.suppress(RatelError):
                transfer.wait()
        self.release(offloaded)

    def _wait(self, transfer: Ticket, resource: Resource, label: SpanLabel) -> None:
        with self._stalled_on(resource):
            transfer.wait()
        if self._timeline is not None:
            self._timeline.transfer(resource, label, transfer)

    def _stalled_on(self, cause: Resource) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._timeline is None else self._timeline.stalled_on(cause)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's whole storage, flat uint8 `[bytes]`."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
