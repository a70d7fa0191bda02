"""The compute device, and the link between it and host memory, if there is one.

The engine holds one `Device`. On `HostDevice` the CPU computes in the memory that the store was read into: nothing is
copied, and all work is done when a call returns. `GpuDevice` (engine/device/gpu.py) only queues work: uploads,
downloads and computing run next to each other. An upload has these phases:

    1. reserve   allocate a device buffer, before the work is queued that the copy should be overlapped with
    2. upload    start the copy; from now on the host memory must not change
    3. open      everything that is queued from now on finds the bytes in the device buffer
    4. wait      return when the copy has ended; now the host memory may change

Uploads in one lane follow each other in the order in which they were started. Those in another lane do not wait for
them: what is needed soon does not stand behind what must wait for memory.

Work may also read host memory where it is (`mapped`), and collect rows of a table there into a device buffer
(`upload_rows`).

A download has two phases: `download` starts the copy of tensors that nothing may overwrite, and `wait` returns when the
copy has ended.

Invariants: nothing computes with bytes, and the host reads no bytes, before they have arrived; how much memory the
device takes follows from the order of calls alone, not from how far the device is behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Literal, Protocol

import torch

from ratel_cli.engine.measure.telemetry import SpanLabel, Timeline
from ratel_cli.io.views import view
from ratel_cli.planning.time.step_time import Resource

UploadLane = Literal["weights", "activations"]
"""What an upload queues behind: earlier uploads in the same lane."""
Moment = Callable[[], float]
"""A moment in the course of computing. Calling it waits until computing has got there, and returns seconds of
`perf_counter`."""


class DeviceBuffer(Protocol):
    """Memory on the device for one upload. It is free again when nothing refers to the buffer or to its upload."""


class Transfer(Protocol):
    """Bytes on their way."""

    @property
    def done(self) -> bool:
        """True if `wait` would return at once."""

    def wait(self) -> None:
        """Return when they have arrived. May be called from any thread, any number of times."""


class Upload(Transfer, Protocol):
    """Bytes on their way to the device. When they have arrived, the host memory may change. Their owner must call
    `wait` before it drops the upload, opened or not."""

    def open(self) -> torch.Tensor:
        """Return the bytes on the device, flat uint8 `[bytes]`, for work that is queued from now on. Repeatable."""

    def give_up(self) -> Transfer:
        """Return the upload without the device buffer, so that this can be dropped. Not before it is opened, unless its
        owner also calls `wait`."""


class Download(Transfer, Protocol):
    """Bytes on their way to host memory."""

    @property
    def has_left(self) -> bool:
        """True if what is computed from now on begins after the copy: then its tensors may be dropped, or changed."""


class Device(Protocol):
    """The device that computes. All methods but `joined` are for the compute thread."""

    torch_device: torch.device
    """Where the tensors are that the device computes with."""
    is_host: bool
    """True if the device computes in host memory, so that nothing is copied."""

    def reserve(self, num_bytes: int) -> DeviceBuffer:
        """Allocate a device buffer of `num_bytes` for one upload."""

    def upload(
        self,
        memory: memoryview,
        buffer: DeviceBuffer,
        label: SpanLabel,
        *,
        lane: UploadLane = "weights",
        after: Download | None = None,
    ) -> Upload:
        """Copy host memory to the buffer. `after` is the download that fills the memory, if it may still be running."""

    def mapped(self, memory: memoryview) -> torch.Tensor | None:
        """Host memory as a tensor of the device, flat uint8 `[bytes]`, which is read where it is; None if the device
        cannot. Until the work that reads it is done, the host memory must not change."""

    def upload_rows(self, table: torch.Tensor, rows: torch.Tensor, buffer: DeviceBuffer, label: SpanLabel) -> Upload:
        """Copy chosen rows of a mapped table `[rows, width]` to the buffer. `rows` are on the device."""

    def download(
        self, pieces: Sequence[tuple[torch.Tensor, memoryview]], label: SpanLabel, *, beside_bytes: int = 0
    ) -> Download:
        """Copy flat uint8 tensors `[bytes]`, each to host memory of its size.

        `beside_bytes`: how much device memory earlier downloads may still take meanwhile. What is computed from now on
        waits for the oldest of them until they take no more.
        """

    def free_downloads(self, beside_bytes: int = 0) -> None:
        """Have what is computed from now on wait for the oldest downloads, until tensors of those that remain take no
        more device memory than `beside_bytes`."""

    def computing(self, label: SpanLabel) -> AbstractContextManager[None]:
        """Record the work that is queued inside as a span of computing."""

    def joined(self) -> AbstractContextManager[object]:
        """A context for any other thread: what it queues inside takes turns with what is computed."""

    def mark(self) -> Moment:
        """Return the moment at which all work that is queued so far will be done."""

    def translate_errors(self) -> AbstractContextManager[None]:
        """Turn the device's errors that the user can correct into ours."""

    def collect(self) -> None:
        """Wait for what is queued, and record the spans and stalls that are known now in the timeline."""


class HostDevice:
    """The CPU as a `Device`."""

    is_host = True
    torch_device = torch.device("cpu")

    def __init__(self, timeline: Timeline | None) -> None:
        """None: nothing is recorded."""
        self._timeline = timeline

    def reserve(self, num_bytes: int) -> DeviceBuffer:
        return _NOTHING

    def upload(
        self,
        memory: memoryview,
        buffer: DeviceBuffer,
        label: SpanLabel,
        *,
        lane: UploadLane = "weights",
        after: Download | None = None,
    ) -> Upload:
        return InPlace(view(memory, torch.uint8))

    def mapped(self, memory: memoryview) -> torch.Tensor | None:
        return view(memory, torch.uint8)

    def upload_rows(self, table: torch.Tensor, rows: torch.Tensor, buffer: DeviceBuffer, label: SpanLabel) -> Upload:
        return InPlace(table[rows].view(-1).view(torch.uint8))

    def download(
        self, pieces: Sequence[tuple[torch.Tensor, memoryview]], label: SpanLabel, *, beside_bytes: int = 0
    ) -> Download:
        with self._recorded("down", label):
            for tensor, memory in pieces:
                view(memory, torch.uint8).copy_(tensor)
        return _NOTHING

    def free_downloads(self, beside_bytes: int = 0) -> None:
        return

    def computing(self, label: SpanLabel) -> AbstractContextManager[None]:
        return self._recorded("compute", label)

    def joined(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self) -> Moment:
        now = perf_counter()
        return lambda: now

    def translate_errors(self) -> AbstractContextManager[None]:
        return nullcontext()

    def collect(self) -> None:
        return

    def _recorded(self, resource: Resource, label: SpanLabel) -> AbstractContextManager[None]:
        return nullcontext() if self._timeline is None else self._timeline.during(resource, label)


class InPlace:
    """A transfer of bytes that are already where they are needed: nothing moves, and `wait` waits for nobody."""

    done = has_left = True

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def open(self) -> torch.Tensor:
        return self._values

    def wait(self) -> None:
        return

    def give_up(self) -> Transfer:
        return self


_NOTHING = InPlace(torch.empty(0, dtype=torch.uint8, device="cpu"))
