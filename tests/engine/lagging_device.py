"""A device with memory of its own that is always behind: every copy happens as late as a GPU's may, and is watched.

It computes on the CPU, so that whoever relies on more than `engine.device` promises is found out without a GPU: what
was not opened yet reads as garbage, and so does host memory that nobody waited for; host memory that changes before
its copy is over, and tensors that are overwritten before they have left, are an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

import torch

from ratel_cli.engine.device import About, Departure, HostDevice, Room
from ratel_cli.engine.telemetry import Timeline
from ratel_cli.movement.copies import view

_GARBAGE = 0xFF


@contextmanager
def open_lagging_device(timeline: Timeline) -> Iterator[LaggingDevice]:
    """In place of `open_device`."""
    yield LaggingDevice(timeline)


class _Room:
    def __init__(self, num_bytes: int) -> None:
        self.values = torch.full((num_bytes,), _GARBAGE, dtype=torch.uint8)


class _Arrival:
    def __init__(self, memory: memoryview, room: _Room, after: Departure | None, opened: list[_Arrival]) -> None:
        self._memory = memory
        self._values = room.values
        self._after = after
        self._opened = opened
        self._lock = Lock()  # whoever waits may let the memory change
        self._is_over = False
        # A GPU may be as quick as that; or as slow as `open` and `wait` let it.
        self._sent = None if after is not None and not after.done else view(memory, torch.uint8).clone()

    def open(self) -> torch.Tensor:
        with self._lock:
            if not self._is_over:  # else it was opened before: it stays on the device for another use
                self._values.copy_(self._unchanged())
        self._opened.append(self)
        return self._values

    def wait(self) -> None:
        with self._lock:
            if not self._is_over:
                self._unchanged()
            self._is_over = True

    def _unchanged(self) -> torch.Tensor:
        if self._after is not None:
            self._after.wait()
        now = view(self._memory, torch.uint8)
        if self._sent is None:
            self._sent = now.clone()
        assert torch.equal(self._sent, now), "host memory changed before it was copied"
        return self._sent


@dataclass(frozen=True, slots=True)
class _Piece:
    tensor: torch.Tensor
    before: torch.Tensor
    memory: memoryview


class _Departure:
    def __init__(self, pieces: Sequence[tuple[torch.Tensor, memoryview]], behind: Sequence[_Arrival]) -> None:
        self._lock = Lock()
        self._behind = list(behind)
        """Opened before: what was computed with them is what leaves, so they are over when this is."""
        self._pieces = [_Piece(tensor, tensor.clone(), memory) for tensor, memory in pieces]
        for piece in self._pieces:
            view(piece.memory, torch.uint8).fill_(_GARBAGE)

    @property
    def done(self) -> bool:
        return not self._pieces

    def wait(self) -> None:
        with self._lock:
            for arrival in self._behind:
                arrival.wait()
            self._behind.clear()
            pieces, self._pieces = self._pieces, []
            for piece in pieces:
                assert torch.equal(piece.tensor, piece.before), "a tensor was overwritten before it had left"
                view(piece.memory, torch.uint8).copy_(piece.tensor)


class LaggingDevice(HostDevice):
    """The CPU, as if it were a GPU."""

    is_host = False

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._leaving: _Departure | None = None
        self._opened: list[_Arrival] = []
        self.went_up: list[About] = []
        self.went_down: list[About] = []

    def reserve(self, num_bytes: int) -> _Room:
        return _Room(num_bytes)

    def upload(
        self,
        memory: memoryview,
        room: Room,
        about: About,
        *,
        after: Departure | None = None,
    ) -> _Arrival:
        assert isinstance(room, _Room)
        self.went_up.append(about)
        return _Arrival(memory, room, after, self._opened)

    def download(self, pieces: Sequence[tuple[torch.Tensor, memoryview]], about: About) -> _Departure:
        self.went_down.append(about)
        if self._leaving is not None:
            self._leaving.wait()
        self._leaving = _Departure(pieces, self._opened)
        self._opened.clear()
        return self._leaving
