"""The device that computes, and what lies between it and host memory: nothing, or a link.

`engine.step` and the parts beneath it hold one `Device`, whichever it is. On `HostDevice` the CPU computes in the
memory that the store was read into: nothing is copied, everything has happened when a call returns. `CudaDevice`
(engine/device/cuda.py) only queues: copies up, copies down and computing go on beside each other. Bytes go up in
phases,

    1. reserve   room on the device, before that work is queued which the copy is to run beneath
    2. upload    start the copy: from now on the host memory must stay as it is
    3. open      whatever is queued from here on finds the bytes there
    4. wait      return when the copy is over, and the host memory may change

and down in two: `download` starts the copy, of tensors that nothing may overwrite; `wait` returns when it is over.

Invariants: no bytes are computed with, or read by the host, before they have arrived; how much memory the device takes
follows from the order of calls alone, not from how far it is behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import torch

from ratel_cli.engine.telemetry import Timeline
from ratel_cli.io.views import view
from ratel_cli.planning.placement import Stage

Mark = Callable[[], float]
"""A moment in the course of computing, in seconds of `perf_counter`; known when computing has got there."""


class DeviceBuffer(Protocol):
    """Memory on the device for one upload. Letting go of it frees it, if nothing was uploaded."""


class Upload(Protocol):
    """Bytes on their way up. Whoever uploads them waits for them, opened or not, before letting go."""

    def open(self) -> torch.Tensor:
        """The bytes on the device, for what is computed from here on. Any number of times."""
        ...

    def wait(self) -> None:
        """Return when the host memory may change. From any thread, any number of times."""
        ...


class Download(Protocol):
    """Bytes on their way down."""

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> None:
        """Return when they are in host memory. From any thread, any number of times."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanLabel:
    """What a transfer or computing is for, as the timeline tells it."""

    label: str
    block: int
    stage: Stage


class Device(Protocol):
    """What the engine asks of it. All methods are for the compute thread."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def is_host(self) -> bool:
        """Whether its memory is host memory."""
        ...

    def reserve(self, num_bytes: int) -> DeviceBuffer:
        """Memory for an upload of so many bytes."""
        ...

    def upload(
        self, memory: memoryview, room: DeviceBuffer, about: SpanLabel, *, after: Download | None = None
    ) -> Upload:
        """Copy `memory` into the room; `after` is what fills the memory, if it may not be full yet."""
        ...

    def download(self, pieces: Sequence[tuple[torch.Tensor, memoryview]], about: SpanLabel) -> Download:
        """Copy flat tensors of bytes, each into memory of its size."""
        ...

    def computing(self, about: SpanLabel) -> AbstractContextManager[None]:
        """Note the work inside."""
        ...

    def mark(self) -> Mark:
        """Where computing will be when all is done that is queued so far."""
        ...

    def translate_errors(self) -> AbstractContextManager[None]:
        """Turn the device's own errors into ours, where they are the user's to mend."""
        ...

    def collect(self) -> None:
        """Computing has ended for now: tell the timeline what is known of it."""
        ...


class HostDevice:
    """The CPU."""

    is_host = True
    torch_device = torch.device("cpu")

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def reserve(self, num_bytes: int) -> DeviceBuffer:  # noqa: ARG002
        return _HERE

    def upload(
        self,
        memory: memoryview,
        room: DeviceBuffer,  # noqa: ARG002
        about: SpanLabel,  # noqa: ARG002
        *,
        after: Download | None = None,  # noqa: ARG002
    ) -> Upload:
        return _Here(view(memory, torch.uint8))

    def download(self, pieces: Sequence[tuple[torch.Tensor, memoryview]], about: SpanLabel) -> Download:
        with self._timeline.during("down", about.label, block=about.block, stage=about.stage):
            for tensor, memory in pieces:
                view(memory, torch.uint8).copy_(tensor)
        return _HERE

    def computing(self, about: SpanLabel) -> AbstractContextManager[None]:
        return self._timeline.during("compute", about.label, block=about.block, stage=about.stage)

    def mark(self) -> Mark:
        now = perf_counter()
        return lambda: now

    def translate_errors(self) -> AbstractContextManager[None]:
        return nullcontext()

    def collect(self) -> None:
        return


class _Here:
    """What is there already."""

    done = True

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def open(self) -> torch.Tensor:
        return self._values

    def wait(self) -> None:
        return


_HERE = _Here(torch.empty(0, dtype=torch.uint8))
