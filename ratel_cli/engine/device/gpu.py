"""A GPU for the engine: one stream computes, one downloads, and each lane of uploads has one.

Four rules order the streams:

    1. all device memory is allocated on the computing stream and freed in that stream's order. So the allocator may
       reuse a tensor's memory as soon as Python drops the tensor, however far the GPU is behind
    2. an upload waits for all work that was queued when its buffer was reserved: nothing later may use that memory. A
       kernel that collects rows runs on the upload's stream, and must not allocate there
    3. computing waits for an upload where the upload is opened
    4. a download waits for all work that was queued before it. Each of its tensors is held until computing has waited
       for the end of its copy. Computing waits when another download is asked for, or memory for what is computed next,
       for the oldest copies first, until the tensors that remain take no more memory than that call allows (none,
       unless it says so): so a download is overlapped with the computing of the next one's tensors

Host memory that is registered with the GPU (io/pinning.py) is copied while the host continues. Copies of other memory
are as correct, but the host waits for them. Spans and stalls are timed by events on the streams; `collect` records
them in the timeline.

Streams and events are those of the GPU's device module (`torch.cuda` for NVIDIA and AMD): they are `torch.Stream` and
`torch.Event`, but CUDA's events also know how to let a waiting thread sleep. Everything else is `torch.accelerator`.

Invariants: those of `engine.device.device`. Apart from opening and closing, the host waits for the GPU only in `wait`
and `collect`, and in copies of memory that is not registered.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch

from ratel_cli.closing import Closing
from ratel_cli.engine.device.device import DeviceBuffer, Download, Moment, Transfer, UploadLane
from ratel_cli.engine.device.mapped import mapped
from ratel_cli.engine.measure.telemetry import SpanLabel, Timeline
from ratel_cli.errors import BadInput, DoesNotFit, first_line
from ratel_cli.io.pinning import copy_in_pieces, use_device
from ratel_cli.io.views import view
from ratel_cli.planning.time.step_time import Resource
from ratel_cli.units import parse_bytes

_NOT_DETERMINISTIC = (
    "does not have a deterministic implementation", "this operation is not deterministic",
    "Deterministic backward not supported",  # flash-attn-3, for heads of more than 192 numbers
)  # fmt: skip
"""What is in messages about operators that would have to be deterministic and are not."""


_MOST_CLOCK_SECONDS = 60.0
"""Times between events are rounded to a part in ten million. Beyond this, moments are counted from a later one."""


@dataclass(frozen=True, slots=True)
class _Clock:
    """Translates times of events to the host's clock, from one moment that both have measured."""

    event: torch.Event
    seconds: float

    def at(self, event: torch.Event) -> float:
        """When an event happened, in seconds of `perf_counter`. The event must be over."""
        return self.seconds + float(self.event.elapsed_time(event)) / 1e3


@dataclass(frozen=True, slots=True)
class _Measured:
    """A span of work, or a stall of the computing stream, between two events."""

    resource: Resource
    label: SpanLabel | None
    """The label of the work; None for a stall of computing on the resource."""
    clock: _Clock
    start: torch.Event
    end: torch.Event

    def record_in(self, timeline: Timeline) -> None:
        start, end = self.clock.at(self.start), self.clock.at(self.end)
        if self.label is None:
            timeline.record_stall(self.resource, start, end)
        else:
            timeline.record(self.resource, self.label, start, end)


@dataclass(frozen=True, slots=True)
class _GpuBuffer:
    values: torch.Tensor
    """Flat uint8 `[bytes]`."""
    free: torch.Event
    """Over when all work has ended that was queued before and may still use the memory."""


class _GpuTransfer:
    def __init__(self, end: torch.Event) -> None:
        self.end = end

    @property
    def done(self) -> bool:
        return _is_over(self.end)

    def wait(self) -> None:
        _wait(self.end)


class _GpuUpload(_GpuTransfer):
    def __init__(self, device: GpuDevice, values: torch.Tensor, end: torch.Event) -> None:
        super().__init__(end)
        self._device = device
        self._values = values

    def open(self) -> torch.Tensor:
        self._device.wait_in_stream("up", self.end)
        return self._values

    def give_up(self) -> Transfer:
        return _GpuTransfer(self.end)


class _GpuDownload(_GpuTransfer):
    def __init__(self, end: torch.Event, num_held: int) -> None:
        super().__init__(end)
        self.num_held = num_held
        """Number of its tensors that are still held, since computing does not wait for their copies yet."""

    @property
    def has_left(self) -> bool:
        return not self.num_held or self.done


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A tensor that is held until its copy has ended."""

    end: torch.Event
    tensor: torch.Tensor
    download: _GpuDownload


class GpuDevice(Closing):
    """One GPU as a `Device`. Use as a context manager."""

    is_host = False

    def __init__(self, device: torch.device, timeline: Timeline | None, *, limit_bytes: int | None = None) -> None:
        """`timeline` None: nothing is recorded. `limit_bytes`: the most that torch may allocate on the GPU while this
        is open; None sets no limit."""
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self.torch_device = torch.device(device.type, index)
        self._module = torch.get_device_module(self.torch_device)
        self._timeline = timeline
        self._is_limited = limit_bytes is not None
        if limit_bytes is not None:
            total_bytes = self._module.get_device_properties(self.torch_device).total_memory
            self._module.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), self.torch_device)
        self._compute: torch.Stream = self._module.current_stream(self.torch_device)
        self._up: dict[UploadLane, torch.Stream] = {
            "weights": self._module.Stream(self.torch_device),
            "activations": self._module.Stream(self.torch_device),
        }
        self._down: torch.Stream = self._module.Stream(self.torch_device)
        self._downloading: deque[_Leaving] = deque()
        """Tensors that are being downloaded, the oldest copies first."""
        self._open_span: tuple[SpanLabel, torch.Event] | None = None
        """The span of computing that is open, and where it begins or goes on."""
        self._measured: list[_Measured] = []
        """Not in the timeline yet."""
        self._clock = self._set_clock()

    def reserve(self, num_bytes: int) -> DeviceBuffer:
        values = torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)
        return _GpuBuffer(values, _record(self._compute))

    def upload(
        self,
        memory: memoryview,
        buffer: DeviceBuffer,
        label: SpanLabel,
        *,
        lane: UploadLane = "weights",
        after: Download | None = None,
    ) -> _GpuUpload:
        assert isinstance(buffer, _GpuBuffer)
        stream = self._free_for(buffer, lane)
        if after is not None:
            assert isinstance(after, _GpuDownload)
            stream.wait_event(after.end)
        start = _record(stream)
        with self._module.stream(stream):
            copy_in_pieces(buffer.values, view(memory, torch.uint8))
        return _GpuUpload(self, buffer.values, self._measure("up", label, start, stream))

    def mapped(self, memory: memoryview) -> torch.Tensor | None:
        return mapped(memory, self.torch_device)

    def upload_rows(
        self, table: torch.Tensor, rows: torch.Tensor, buffer: DeviceBuffer, label: SpanLabel
    ) -> _GpuUpload:
        assert isinstance(buffer, _GpuBuffer)
        stream = self._free_for(buffer, "weights")
        start = _record(stream)
        with self._module.stream(stream), torch.no_grad():
            torch.index_select(table, 0, rows, out=buffer.values.view(table.dtype).view(len(rows), -1))
        return _GpuUpload(self, buffer.values, self._measure("up", label, start, stream))

    def download(
        self, pieces: Sequence[tuple[torch.Tensor, memoryview]], label: SpanLabel, *, beside_bytes: int = 0
    ) -> _GpuDownload:
        self.free_downloads(beside_bytes)
        self._down.wait_event(_record(self._compute))
        start = _record(self._down)
        ends = []
        with self._module.stream(self._down):
            for tensor, memory in pieces:
                copy_in_pieces(view(memory, torch.uint8), tensor)
                ends.append(_record(self._down))
        download = _GpuDownload(self._measure("down", label, start, self._down), len(ends))
        leaving = [_Leaving(end, tensor, download) for end, (tensor, _) in zip(ends, pieces, strict=True)]
        self._downloading.extend(leaving)
        return download

    def free_downloads(self, beside_bytes: int = 0) -> None:
        while sum(leaving.tensor.nbytes for leaving in self._downloading) > beside_bytes:
            self.wait_in_stream("down", self._downloading[0].end)
            self._drop_oldest()

    @contextmanager
    def computing(self, label: SpanLabel) -> Iterator[None]:
        self._open_span = label, _record(self._compute)
        try:
            yield
        finally:
            self._interrupt_span()

    def joined(self) -> AbstractContextManager[object]:
        use_device(self.torch_device)
        joined: AbstractContextManager[object] = self._module.stream(self._compute)
        return joined

    def mark(self) -> Moment:
        clock, event = self._clock, _record(self._compute)

        def moment() -> float:
            _wait(event)
            seconds = clock.at(event)
            if seconds > self._clock.seconds + _MOST_CLOCK_SECONDS:
                self._clock = _Clock(event, seconds)
            return seconds

        return moment

    def translate_errors(self) -> AbstractContextManager[None]:
        return translate_errors("a step needs more than was planned")

    def collect(self) -> None:
        self._compute.synchronize()
        running = []
        for measured in self._measured:
            if measured.end.query():
                assert self._timeline is not None
                measured.record_in(self._timeline)
            else:
                running.append(measured)
        self._measured = running
        while self._downloading and self._downloading[0].end.query():
            self._drop_oldest()
        self._clock = self._set_clock()

    def wait_in_stream(self, cause: Resource, end: torch.Event) -> None:
        """Make everything that is computed from now on wait for the end of a transfer; the host does not wait."""
        if end.query():
            return
        interrupted = self._interrupt_span()
        start = _record(self._compute)
        self._compute.wait_event(end)
        self._measure(cause, None, start, self._compute)
        if interrupted is not None:
            self._open_span = interrupted, _record(self._compute)

    def close(self) -> None:
        """Wait for what is queued, and lift the memory limit. Idempotent."""
        torch.accelerator.synchronize(self.torch_device)
        self._measured.clear()
        self._downloading.clear()
        if self._is_limited:
            self._is_limited = False
            self._module.set_per_process_memory_fraction(1.0, self.torch_device)

    def _free_for(self, buffer: _GpuBuffer, lane: UploadLane) -> torch.Stream:
        """The lane's stream, on which nothing more begins before the buffer is free."""
        stream = self._up[lane]
        stream.wait_event(buffer.free)
        return stream

    def _drop_oldest(self) -> None:
        self._downloading.popleft().download.num_held -= 1

    def _interrupt_span(self) -> SpanLabel | None:
        """End the open span of computing here. Returns its label; None if none is open."""
        if self._open_span is None:
            return None
        label, start = self._open_span
        self._open_span = None
        self._measure("compute", label, start, self._compute)
        return label

    def _measure(
        self, resource: Resource, label: SpanLabel | None, start: torch.Event, stream: torch.Stream
    ) -> torch.Event:
        """Note what the stream does from `start` to here, for `collect`. Returns the event at its end."""
        end = _record(stream)
        if self._timeline is not None:
            self._measured.append(_Measured(resource, label, self._clock, start, end))
        return end

    def _set_clock(self) -> _Clock:
        event = _record(self._compute)
        _wait(event)
        return _Clock(event, perf_counter())


@contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Turn torch's errors that the user can correct into ours. `what` opens the message if GPU memory runs out.

    Raises DoesNotFit, BadInput.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _does_not_fit(what, error) from error
    except RuntimeError as error:
        if not any(words in str(error) for words in _NOT_DETERMINISTIC):
            raise
        operator = first_line(error).partition(f" {_NOT_DETERMINISTIC[0]}")[0]  # the whole line if it names none
        failure = BadInput(
            f"this model uses an operator that is not deterministic on GPUs: {operator}",
            "set deterministic: false; two runs may then differ in their last bits",
        )
        failure.key = ("deterministic",)
        raise failure from error


def _record(stream: torch.Stream) -> torch.Event:
    # Blocking: a thread that waits sleeps, and leaves its core to AdamW. Only CUDA's own events offer it.
    event: torch.Event = (
        torch.cuda.Event(enable_timing=True, blocking=True)
        if stream.device.type == "cuda"
        else torch.Event(stream.device, enable_timing=True)
    )
    event.record(stream)
    return event


def _is_over(event: torch.Event) -> bool:
    use_device(event.device)
    return bool(event.query())


def _wait(event: torch.Event) -> None:
    """From any thread."""
    if not _is_over(event):
        event.synchronize()


def _does_not_fit(what: str, error: BaseException) -> DoesNotFit:
    """Our error for torch's, with the number of bytes that could not be allocated."""
    asked = re.search(r"Tried to allocate ([0-9.]+ [KMGT]iB)", str(error))
    how_much = f"{asked[1]} could not be allocated" if asked else first_line(error)
    return DoesNotFit(
        f"GPU memory: {what}: {how_much}",
        "raise limits.gpu_memory, or lower micro_batch_size or sequence_len",
        shortfall_bytes=parse_bytes(asked[1]) if asked else 0,
        is_gpu_memory=True,
    )
