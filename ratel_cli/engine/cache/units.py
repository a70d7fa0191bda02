"""What one layer's backward needs of its forward for one micro-batch, and how that lies in a buffer.

Invariant: a unit takes the same bytes wherever it lies: the storages of its tensors, one after another, aligned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import torch

from ratel_cli.engine.device.device import DeviceBuffer, Download, Upload
from ratel_cli.engine.measure.telemetry import SpanLabel
from ratel_cli.io.buffers import Lease
from ratel_cli.io.tickets import Ticket
from ratel_cli.schedule.uses import Stage
from ratel_cli.sizes import PACKED_ALIGNMENT, PAGE_BYTES
from ratel_cli.units import align_up

WINDOW_PURPOSE = "activations on their way"
"""Purpose of the buffers for units that go to NVMe."""


def purpose_of_units(block: int) -> str:
    """Return the purpose of the buffers for a block's units that stay in host memory."""
    return f"activations of block {block}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What one layer's backward needs of its forward, for one micro-batch."""

    leaf: torch.Tensor
    """The layer's input `[batch, tokens, hidden]`."""
    offloaded: dict[int, tuple[torch.Tensor, ...]]
    """Outputs of swapped operators, by position in the tape, each in the shape that the operator gave it. The replay
    takes them out."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the unit, the layer's input first."""
        return [self.leaf, *(tensor for tensors in self.offloaded.values() for tensor in tensors)]

    @property
    def num_bytes(self) -> int:
        """Size of the packed unit: the tensors' storages, each aligned to `PACKED_ALIGNMENT`."""
        return sum(align_up(tensor.untyped_storage().nbytes(), PACKED_ALIGNMENT) for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class _PackedTensor:
    """Where a tensor's storage lies in a unit's buffer, and how the tensor lies in its storage."""

    start: int
    num_bytes: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    storage_offset: int

    def tensor_in(self, values: torch.Tensor) -> torch.Tensor:
        """The tensor in the bytes of its storage, which are flat uint8 `[bytes]`."""
        # Not a view: a view keeps the version counter of its base.
        first = values.storage_offset() // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=values.device)
        return empty.set_(values.untyped_storage(), first + self.storage_offset, self.size, self.stride)


class PackedUnit:
    """A unit that is moved: it lies in a leased buffer now or later, and on NVMe if it is spilled."""

    def __init__(self, block: int, unit: Unit, offset: int | None) -> None:
        self.block = block
        self.offset = offset
        """Address of the unit in the scratch space, in bytes; None if the unit is not spilled."""
        position = 0

        def place(tensor: torch.Tensor) -> _PackedTensor:
            nonlocal position
            storage = tensor.untyped_storage()
            start, position = position, position + align_up(storage.nbytes(), PACKED_ALIGNMENT)
            return _PackedTensor(
                start, storage.nbytes(), tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
            )

        self.leaf = place(unit.leaf)
        self.offloaded = {
            index: tuple(place(tensor) for tensor in tensors) for index, tensors in unit.offloaded.items()
        }
        self.num_bytes = align_up(position, PAGE_BYTES)
        self.num_elements = unit.leaf.numel()
        self.lease: Lease | None = None
        self.download: Download | None = None
        self.write: Ticket | None = None
        """The write in flight."""
        self.read: Ticket | None = None
        """The read in flight."""
        self.buffers: dict[int, DeviceBuffer] = {}
        """By place, for tensors whose upload has not begun."""
        self.uploads: dict[int, Upload] = {}
        """By place, for tensors whose upload has begun; empty when they are opened."""
        self._uploaded: list[Callable[[], None]] = []
        """Wait for each upload that was opened."""

    @property
    def places(self) -> list[_PackedTensor]:
        """The places of all tensors, in the order of `Unit.tensors`."""
        return [self.leaf, *(place for each in self.offloaded.values() for place in each)]

    @property
    def is_in_memory(self) -> bool:
        """True if the leased buffer has the unit, or will have it when the download has ended."""
        return self.lease is not None and (self.read is None or self.read.done)

    @property
    def memory(self) -> memoryview:
        """The leased buffer."""
        assert self.lease is not None
        return self.lease.memory

    @property
    def pieces(self) -> list[memoryview]:
        """The part of the leased buffer for each tensor, in the order of `places`."""
        return [self.memory[place.start : place.start + place.num_bytes] for place in self.places]

    @property
    def reserved(self) -> set[int]:
        """The places of tensors that have memory on the device."""
        return {*self.buffers, *self.uploads}

    def open(self) -> Unit:
        """The unit in the bytes that go up, for work that is queued from now on. It alone holds them afterwards."""
        tensors = iter([place.tensor_in(self.uploads[number].open()) for number, place in enumerate(self.places)])
        self._uploaded = [upload.give_up().wait for upload in self.uploads.values()]
        self.uploads = {}
        return Unit(
            leaf=next(tensors),
            offloaded={index: tuple(islice(tensors, len(places))) for index, places in self.offloaded.items()},
        )

    def wait_uploaded(self) -> None:
        """Return when nothing reads the leased buffer for an upload."""
        for upload in self.uploads.values():
            upload.wait()
        for wait in self._uploaded:
            wait()

    def label(self, stage: Stage) -> SpanLabel:
        return SpanLabel(text=purpose_of_units(self.block), block=self.block, stage=stage)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's whole storage, flat uint8 `[bytes]`."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
