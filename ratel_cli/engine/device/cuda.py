"""A CUDA device for the engine: one stream computes, one copies up, one copies down.

`engine.device.device` opens it and says what is asked of it. What orders the streams:

    1. all memory is allocated for the stream that computes, and freed in its order: so the allocator may give it out
       anew as soon as Python lets go of it, however far the GPU is behind
    2. a copy up waits for what was queued when its room was reserved, which is all that may still use that memory
    3. computing waits for a copy up where it is opened
    4. a copy down waits for what was queued before it; its tensors are held until computing has waited for its end.
       That is when the next copy down is asked for, so that one leaves beneath the computing of the next

Host memory that CUDA knows (io/pinning.py) is copied while the host goes on; from other memory copies
are as correct, but the host stands still for them. Times are those of events on the streams, told by `collect`.

Invariants: those of `engine.device.device`. Beside its opening and closing, the host waits for the GPU only in `wait`
and in `collect`, and in copies of memory that is not pinned.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Self

import torch

from ratel_cli.engine.device.device import DeviceBuffer, Download, Mark, SpanLabel
from ratel_cli.engine.telemetry import Resource, Timeline
from ratel_cli.errors import BadInput, DoesNotFit
from ratel_cli.io.views import view
from ratel_cli.units import parse_bytes

_NOT_DETERMINISTIC = ("does not have a deterministic implementation", "this operation is not deterministic")


@dataclass(frozen=True, slots=True)
class _Clock:
    """Relates the times of events to the host's, from a moment on when both were known."""

    event: torch.cuda.Event
    seconds: float

    def at(self, event: torch.cuda.Event) -> float:
        """When an event that is over happened, by `perf_counter`."""
        return self.seconds + float(self.event.elapsed_time(event)) / 1e3


@dataclass(frozen=True, slots=True)
class _Noted:
    """Work, or a stretch in which the computing stream stood still, between two events."""

    resource: Resource
    about: SpanLabel | None
    """None: computing stood still for the resource."""
    clock: _Clock
    start: torch.cuda.Event
    end: torch.cuda.Event

    def tell(self, timeline: Timeline) -> None:
        start, end = self.clock.at(self.start), self.clock.at(self.end)
        if self.about is None:
            timeline.record_stall(self.resource, start, end)
        else:
            timeline.record(self.resource, self.about.label, start, end, block=self.about.block, stage=self.about.stage)


@dataclass(frozen=True, slots=True)
class _CudaRoom:
    values: torch.Tensor
    free: torch.cuda.Event
    """Over when nothing queued before uses the memory any more."""


class _CudaArrival:
    def __init__(self, device: CudaDevice, values: torch.Tensor, end: torch.cuda.Event) -> None:
        self._device = device
        self._values = values
        self._end = end

    def open(self) -> torch.Tensor:
        self._device.stand_still("up", self._end)
        return self._values

    def wait(self) -> None:
        _wait(self._end)


class _CudaDeparture:
    def __init__(self, end: torch.cuda.Event) -> None:
        self.end = end

    @property
    def done(self) -> bool:
        return bool(self.end.query())

    def wait(self) -> None:
        _wait(self.end)


class CudaDevice:
    """One GPU. Use as a context manager."""

    is_host = False

    def __init__(self, device: torch.device, timeline: Timeline, *, limit_bytes: int | None = None) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.torch_device = torch.device("cuda", index)
        self._timeline = timeline
        self._is_limited = limit_bytes is not None
        if limit_bytes is not None:
            total_bytes = torch.cuda.get_device_properties(self.torch_device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), self.torch_device)
        self._compute = torch.cuda.current_stream(self.torch_device)
        self._up = torch.cuda.Stream(self.torch_device)
        self._down = torch.cuda.Stream(self.torch_device)
        self._leaving: tuple[torch.cuda.Event, list[torch.Tensor]] | None = None
        """The end of the last copy down, and what is held for it."""
        self._noted: list[_Noted] = []
        self._clock = self._set_clock()

    def reserve(self, num_bytes: int) -> DeviceBuffer:
        values = torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)
        return _CudaRoom(values, _record(self._compute))

    def upload(
        self, memory: memoryview, room: DeviceBuffer, about: SpanLabel, *, after: Download | None = None
    ) -> _CudaArrival:
        assert isinstance(room, _CudaRoom)
        self._up.wait_event(room.free)
        if after is not None:
            assert isinstance(after, _CudaDeparture)
            self._up.wait_event(after.end)
        start = _record(self._up)
        with torch.cuda.stream(self._up):
            room.values.copy_(view(memory, torch.uint8), non_blocking=True)
        end = self._note("up", about, start, self._up)
        return _CudaArrival(self, room.values, end)

    def download(self, pieces: Sequence[tuple[torch.Tensor, memoryview]], about: SpanLabel) -> _CudaDeparture:
        if self._leaving is not None:
            self.stand_still("down", self._leaving[0])
            self._leaving = None
        self._down.wait_event(_record(self._compute))
        start = _record(self._down)
        with torch.cuda.stream(self._down):
            for tensor, memory in pieces:
                view(memory, torch.uint8).copy_(tensor, non_blocking=True)
        end = self._note("down", about, start, self._down)
        self._leaving = end, [tensor for tensor, _ in pieces]
        return _CudaDeparture(end)

    @contextmanager
    def computing(self, about: SpanLabel) -> Iterator[None]:
        start = _record(self._compute)
        try:
            yield
        finally:
            self._note("compute", about, start, self._compute)

    def mark(self) -> Mark:
        clock, event = self._clock, _record(self._compute)
        return lambda: clock.at(event)

    def translate_errors(self) -> AbstractContextManager[None]:
        return translate_errors("a step takes more than was planned")

    def collect(self) -> None:
        self._compute.synchronize()
        later = []
        for noted in self._noted:
            if noted.end.query():
                noted.tell(self._timeline)
            else:
                later.append(noted)
        self._noted = later
        if self._leaving is not None and self._leaving[0].query():
            self._leaving = None
        self._clock = self._set_clock()

    def stand_still(self, cause: Resource, end: torch.cuda.Event) -> None:
        """Let what is computed from here on wait for the end of a transfer."""
        if end.query():
            return
        start = _record(self._compute)
        self._compute.wait_event(end)
        self._note(cause, None, start, self._compute)

    def close(self) -> None:
        """Wait for what is queued. Idempotent."""
        torch.cuda.synchronize(self.torch_device)
        self._noted.clear()
        self._leaving = None
        if self._is_limited:
            self._is_limited = False
            torch.cuda.set_per_process_memory_fraction(1.0, self.torch_device)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _note(
        self, resource: Resource, about: SpanLabel | None, start: torch.cuda.Event, stream: torch.cuda.Stream
    ) -> torch.cuda.Event:
        """The work from `start` to here on a stream; its end."""
        end = _record(stream)
        self._noted.append(_Noted(resource, about, self._clock, start, end))
        return end

    def _set_clock(self) -> _Clock:
        event = _record(self._compute)
        _wait(event)
        return _Clock(event, perf_counter())


@contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Turn torch's errors into ours where they are the user's to mend; `what` is said if memory runs out.

    Raises DoesNotFit, BadInput.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _does_not_fit(what, error) from error
    except RuntimeError as error:
        if not any(words in str(error) for words in _NOT_DETERMINISTIC):
            raise
        raise BadInput(
            f"this model computes with an operator that is not deterministic on GPUs: {_first_line(error)}",
            "set deterministic: false; two runs may then differ in their last bits",
        ) from error


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    # Blocking: a thread that waits sleeps, and leaves its core to AdamW.
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record(stream)
    return event


def _wait(event: torch.cuda.Event) -> None:
    if not event.query():
        event.synchronize()


def _does_not_fit(what: str, error: BaseException) -> DoesNotFit:
    """What torch says when memory runs out, with the bytes that it was asked for last."""
    asked = re.search(r"Tried to allocate ([0-9.]+ [KMGT]iB)", str(error))
    how_much = f"{asked[1]} more do not fit" if asked else _first_line(error)
    return DoesNotFit(
        f"gpu memory: {what}: {how_much}",
        "raise limits.gpu_memory, or lower micro_batch_size or sequence_len",
        shortfall_bytes=parse_bytes(asked[1]) if asked else 0,
        is_gpu_memory=True,
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
