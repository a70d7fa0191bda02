"""The part of `torch.cuda` that Ratel and its tests call, on the simulated device. Importing it compiles the device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace, TracebackType

import torch
from torch.utils import cpp_extension

_HERE = Path(__file__).parent
_BUILD = _HERE.parents[1] / "build" / "simulated_gpu"
_BUILD.mkdir(parents=True, exist_ok=True)
_device = cpp_extension.load(
    "simulated_gpu",
    [str(_HERE / "device.cpp")],
    build_directory=str(_BUILD),
    extra_cflags=["-O1", "-std=c++20"],
)

_TOTAL_BYTES = 64 << 30
_COMPUTES = 0
"""Number of the computing stream."""


class Stream:
    """A queue of copies. The computing stream is never behind."""

    def __init__(self, device: object = None, *, number: int | None = None) -> None:
        self.number = _device.make_stream() if number is None else number

    def wait_event(self, event: Event) -> None:
        _device.wait(event.recorded, self.number)

    def wait_stream(self, other: Stream) -> None:
        _device.wait(_device.record(other.number), self.number)

    def synchronize(self) -> None:
        _device.synchronize(_device.record(self.number))


class Event:
    """A place in a stream."""

    def __init__(self, *, enable_timing: bool = False, blocking: bool = False) -> None:
        self._is_timed = enable_timing
        self.recorded: object = None

    def record(self, stream: Stream | None = None) -> None:
        self.recorded = _device.record(_device.current_stream() if stream is None else stream.number)

    def query(self) -> bool:
        return bool(_device.query(self.recorded))

    def synchronize(self) -> None:
        _device.synchronize(self.recorded)

    def elapsed_time(self, later: Event) -> float:
        assert self._is_timed and later._is_timed, "events without times"
        return 1e3 * float(_device.seconds_of(later.recorded) - _device.seconds_of(self.recorded))


class OnStream:
    """Replaces `torch.cuda.stream`: copies made inside are queued on the given stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before = _device.exchange_stream(self._stream.number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _device.exchange_stream(self._before)


_computing = Stream(number=_COMPUTES)
_runtime = SimpleNamespace(
    cudaHostRegister=lambda address, num_bytes, flags: _device.pin(address, num_bytes),
    cudaHostUnregister=_device.unpin,
)
_properties = SimpleNamespace(major=9, minor=0, total_memory=_TOTAL_BYTES)

FUNCTIONS = {
    "Stream": Stream,
    "Event": Event,
    "stream": OnStream,
    "current_stream": lambda device=None: _computing,
    "synchronize": lambda device=None: _device.synchronize_device(),
    "default_generators": (torch.default_generator,),
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "_lazy_init": lambda: None,
    "init": lambda: None,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_name": lambda device=None: "simulated GPU",
    "get_device_properties": lambda device=None: _properties,
    "mem_get_info": lambda device=None: (_TOTAL_BYTES - _device.allocated_bytes(), _TOTAL_BYTES),
    "memory_allocated": lambda device=None: _device.allocated_bytes(),
    "memory_reserved": lambda device=None: _device.allocated_bytes(),
    "max_memory_allocated": lambda device=None: _device.peak_bytes(),
    "reset_peak_memory_stats": lambda device=None: _device.reset_peak(),
    "empty_cache": lambda: None,
    "set_per_process_memory_fraction": lambda share, device=None: _device.set_limit(int(share * _TOTAL_BYTES)),
    "cudart": lambda: _runtime,
}
"""By name in `torch.cuda`."""


def install() -> None:
    """Replace the functions of `torch.cuda` for the rest of this process."""
    for name, function in FUNCTIONS.items():
        setattr(torch.cuda, name, function)


def set_eagerness(share: float) -> None:
    """Set the share of calls that run everything queued on their stream at once."""
    _device.set_eagerness(share)


def num_stops() -> int:
    """How often the host waited for a computed number."""
    return int(_device.num_stops())
