"""What forward leaves behind for backward: every layer's input, and the operator outputs that the plan swaps.

`engine.step` puts one unit for each (layer, micro-batch) in forward and fetches it once in backward, in the
opposite order. The first units of a step, as many as the placement says, are spilled to NVMe, the others
stay in host memory; the last layer's, which backward wants at once, are always among those. A spilled unit,
in phases:

    1. put      pack its tensors into a leased buffer, start the write
    2. window   the buffers of the last few units stay; as one more comes, the oldest is released, its write over
    3. ahead    in backward the next units' reads run ahead by the same window; what is still there is not read
    4. fetch    wait for the read; tensors that look into the buffer; release it when their unit is done

(SSDTrain section III-C: forwarding of what is still being stored; here it never depends on timing.)

Invariants: what is fetched are the bytes that were put; which bytes move depends on the order of units
alone; no more buffers are leased than the window, whatever the number of layers.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ratel_cli.engine.tape import PACKED_ALIGNMENT
from ratel_cli.engine.telemetry import Resource, Stage, Timeline
from ratel_cli.errors import RatelError
from ratel_cli.movement.buffers import PAGE_BYTES, BufferPool, Lease
from ratel_cli.movement.copies import view
from ratel_cli.movement.scratch import Scratch
from ratel_cli.movement.tickets import Ticket
from ratel_cli.planning.placement import SPILL_WINDOW_UNITS
from ratel_cli.units import align_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What one layer's backward needs for one micro-batch."""

    leaf: torch.Tensor
    """The layer's input [batch, tokens, hidden_size]."""
    aside: dict[int, tuple[torch.Tensor, ...]]
    """Outputs of swapped operators, by position in the tape."""

    @property
    def num_bytes(self) -> int:
        """As it is packed: of storages, each on a boundary of its own."""
        tensors = [self.leaf, *(tensor for tensors in self.aside.values() for tensor in tensors)]
        return sum(align_up(tensor.untyped_storage().nbytes(), PACKED_ALIGNMENT) for tensor in tensors)


@dataclass(frozen=True, slots=True)
class _Packed:
    """Where a tensor lies in a unit's buffer, and how to look at it there."""

    start: int
    num_bytes: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    storage_offset: int


class _SpilledUnit:
    """A unit whose place is on NVMe; for a while it is in a buffer too."""

    def __init__(self, name: str, block: int, offset: int, unit: Unit) -> None:
        self.name = name
        self.block = block
        self.offset = offset
        position = 0

        def place(tensor: torch.Tensor) -> _Packed:
            nonlocal position
            storage = tensor.untyped_storage()
            start, position = position, position + align_up(storage.nbytes(), PACKED_ALIGNMENT)
            return _Packed(
                start, storage.nbytes(), tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
            )

        self.leaf = place(unit.leaf)
        self.aside = {index: tuple(place(tensor) for tensor in tensors) for index, tensors in unit.aside.items()}
        self.num_bytes = align_up(position, PAGE_BYTES)
        self.lease: Lease | None = None
        self.transfer: Ticket | None = None
        self.is_being_read = False


class Activations:
    """The units of one step at a time. Belongs to the compute thread."""

    def __init__(
        self, pool: BufferPool, scratch: Scratch | None, *, spilled_units: int, device: torch.device, timeline: Timeline
    ) -> None:
        assert scratch is not None or not spilled_units
        self._pool = pool
        self._scratch = scratch
        self._spilled_units = spilled_units
        self._device = device
        self._timeline = timeline
        self._in_memory: dict[tuple[int, int], Unit] = {}
        self._spilled: dict[tuple[int, int], _SpilledUnit] = {}
        self._leased: deque[_SpilledUnit] = deque()
        """Those that are in a buffer, in the order in which they got it."""
        self._to_read: list[_SpilledUnit] = []
        """Put, and no longer in a buffer; backward wants the last one first."""
        self._num_put = 0
        self._end = 0
        self.put_bytes = 0
        """Of all units of the step so far, as they are packed."""

    def put(self, block: int, micro_batch: int, unit: Unit) -> None:
        """Keep it until it is fetched."""
        self._num_put += 1
        self.put_bytes += unit.num_bytes
        if self._num_put > self._spilled_units:
            self._in_memory[block, micro_batch] = Unit(
                leaf=unit.leaf.detach().to("cpu"),
                aside={index: tuple(t.to("cpu") for t in tensors) for index, tensors in unit.aside.items()},
            )
            return
        spilled = _SpilledUnit(f"activations of block {block}", block, self._end, unit)
        self._end += spilled.num_bytes
        self._spilled[block, micro_batch] = spilled
        self._make_room()
        self._write(spilled, unit)

    @contextlib.contextmanager
    def fetch(self, block: int, micro_batch: int) -> Iterator[Unit]:
        """The unit on the compute device, its input as a fresh leaf that wants a gradient; good inside only."""
        spilled = self._spilled.pop((block, micro_batch), None)
        if spilled is None:
            self._read_ahead()
            kept = self._in_memory.pop((block, micro_batch))
            yield Unit(
                leaf=kept.leaf.to(self._device).requires_grad_(),
                aside={index: tuple(t.to(self._device) for t in tensors) for index, tensors in kept.aside.items()},
            )
            return
        if spilled.lease is None:
            self._make_room()
            self._read(self._to_read.pop())
        self._read_ahead()
        if spilled.is_being_read:
            self._await(spilled)
        memory = _leased(spilled)
        yield Unit(
            leaf=_look(memory, spilled.leaf).to(self._device).requires_grad_(),
            aside={
                index: tuple(_look(memory, packed).to(self._device) for packed in tensors)
                for index, tensors in spilled.aside.items()
            },
        )
        self._release(spilled)

    def reset(self) -> None:
        """Forget everything: the step is over, however it ended."""
        while self._leased:
            spilled = self._leased.popleft()
            with contextlib.suppress(RatelError):  # nobody wants these bytes any more
                if spilled.transfer is not None:
                    spilled.transfer.wait()
            assert spilled.lease is not None
            spilled.lease.release()
        self._in_memory.clear()
        self._spilled.clear()
        self._to_read.clear()
        self._num_put = self._end = self.put_bytes = 0

    def _write(self, spilled: _SpilledUnit, unit: Unit) -> None:
        memory = self._lease(spilled)
        pairs = [(unit.leaf.detach(), spilled.leaf)]
        for index, tensors in unit.aside.items():
            pairs += zip(tensors, spilled.aside[index], strict=True)
        with self._timeline.during("down", spilled.name, block=spilled.block, stage="forward"):
            for tensor, packed in pairs:
                into = view(memory[packed.start : packed.start + packed.num_bytes], torch.uint8)
                into.copy_(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()))
        assert self._scratch is not None
        spilled.transfer = self._scratch.write(spilled.offset, memory)

    def _read_ahead(self) -> None:
        while self._to_read and len(self._leased) < SPILL_WINDOW_UNITS:
            self._read(self._to_read.pop())

    def _read(self, spilled: _SpilledUnit) -> None:
        assert self._scratch is not None
        spilled.is_being_read = True
        spilled.transfer = self._scratch.read(spilled.offset, self._lease(spilled))

    def _lease(self, spilled: _SpilledUnit) -> memoryview:
        spilled.lease = self._pool.lease(spilled.num_bytes, spilled.name)
        self._leased.append(spilled)
        return spilled.lease.memory

    def _make_room(self) -> None:
        """In forward: the oldest buffer of a full window goes."""
        if len(self._leased) == SPILL_WINDOW_UNITS:
            oldest = self._leased[0]
            self._release(oldest)
            self._to_read.append(oldest)

    def _release(self, spilled: _SpilledUnit) -> None:
        if spilled.transfer is not None:
            self._await(spilled)
        self._leased.remove(spilled)
        assert spilled.lease is not None
        spilled.lease.release()
        spilled.lease = None

    def _await(self, spilled: _SpilledUnit) -> None:
        resource: Resource = "nvme read" if spilled.is_being_read else "nvme write"
        stage: Stage = "backward" if spilled.is_being_read else "forward"
        transfer, spilled.transfer = spilled.transfer, None
        assert transfer is not None
        with self._timeline.waiting(resource):
            transfer.wait()
        self._timeline.transfer(resource, spilled.name, transfer, block=spilled.block, stage=stage)


def _leased(spilled: _SpilledUnit) -> memoryview:
    assert spilled.lease is not None
    return spilled.lease.memory


def _look(memory: memoryview, packed: _Packed) -> torch.Tensor:
    flat = view(memory[packed.start : packed.start + packed.num_bytes], packed.dtype)
    return flat.as_strided(packed.size, packed.stride, packed.storage_offset)
