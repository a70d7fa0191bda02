"""What a device module of torch offers (`torch.cuda` is one), for the simulated device: `torch.simulated`.

It has the functions that torch asks every device module for, and those that Ratel asks for. Importing it compiles the
device; `install` registers both.
"""

from __future__ import annotations

import fcntl
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch import Event, Stream
from torch.utils import cpp_extension

__all__ = ["NAME", "Event", "Stream", "install"]

NAME = "simulated"
"""The device's type: `torch.device("simulated")`."""
INDEX = 1
"""Its number: there is another one, which nothing may touch. So every thread has to say which one it means."""

_HERE = Path(__file__).parent
_BUILD = _HERE.parents[1] / "build" / "simulated_gpu"
_BUILD.mkdir(parents=True, exist_ok=True)


def _compiled() -> ModuleType:
    """The compiled device. One process compiles it, and others wait for it.

    A process that was killed while it compiled has left torch's own lock, for which every later one would wait for
    ever. Whoever holds ours is alone, so that lock is a remainder.
    """
    with (_BUILD / "in_use").open("w") as alone:
        fcntl.flock(alone, fcntl.LOCK_EX)
        (_BUILD / "lock").unlink(missing_ok=True)
        compiled: ModuleType = cpp_extension.load(
            "simulated_gpu",
            [str(_HERE / "device.cpp")],
            build_directory=str(_BUILD),
            extra_cflags=["-O1", "-std=c++20"],
        )
    return compiled


_device = _compiled()

default_generators = (_device.default_generator(),) * 2
_runtime = SimpleNamespace(
    cudaHostRegister=lambda address, num_bytes, flags: _device.pin(address, num_bytes),
    cudaHostUnregister=_device.unpin,
)


def install() -> None:
    """Make the simulated device this process's accelerator."""
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, sys.modules[__name__])
    torch.accelerator.set_device_index(INDEX)


# --- What torch asks for ---------------------------------------------------------------------------------------------


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return 2


def current_device() -> int:
    return int(_device.current_device())


def _is_in_bad_fork() -> bool:
    return False


def manual_seed_all(seed: int) -> None:
    default_generators[INDEX].manual_seed(seed)


def get_rng_state(device: torch.device) -> torch.Tensor:
    return default_generators[INDEX].get_state()


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    default_generators[INDEX].set_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


# --- What Ratel asks for ---------------------------------------------------------------------------------------------


def current_stream(device: torch.device | None = None) -> Stream:
    return torch.accelerator.current_stream(device)


def stream(on: Stream) -> AbstractContextManager[object]:
    return on


def get_device_name(device: torch.device | None = None) -> str:
    return "simulated GPU"


def get_device_properties(device: torch.device | None = None) -> SimpleNamespace:
    return SimpleNamespace(total_memory=mem_get_info()[1])


def mem_get_info(device: torch.device | None = None) -> tuple[int, int]:
    free_bytes, total_bytes = torch.accelerator.get_memory_info(device)  # it knows nothing of torch's allocator
    return free_bytes - torch.accelerator.memory_reserved(device), total_bytes


def set_per_process_memory_fraction(share: float, device: torch.device | None = None) -> None:
    _device.set_limit(share)


def cudart() -> SimpleNamespace:
    """The functions that register host memory, by CUDA's names."""
    return _runtime


# --- What its tests ask for ------------------------------------------------------------------------------------------


def set_eagerness(share: float) -> None:
    """Set the share of calls that run everything queued on their stream at once."""
    _device.set_eagerness(share)


def num_stops() -> int:
    """How often the host waited for a computed number."""
    return int(_device.num_stops())


def set_pinning(refusals: int, most_bytes: int, seconds_per_byte: float) -> None:
    """Let the next registrations of host memory be refused, those of more bytes too, and let others take time."""
    _device.set_pinning(refusals, most_bytes, seconds_per_byte)


def set_rates(
    flops_per_second: float,
    memory_bytes_per_second: float,
    up_bytes_per_second: float,
    down_bytes_per_second: float,
    launch_seconds: float,
) -> None:
    """Let work take time (clock.h). What was queued before must be over."""
    _device.set_rates(
        flops_per_second, memory_bytes_per_second, up_bytes_per_second, down_bytes_per_second, launch_seconds
    )


def forget_rates() -> None:
    """Let work take no time."""
    _device.forget_rates()


def counts() -> tuple[float, float, float, float, float]:
    """Since the process began: FLOPs of matrix products, bytes that other operators read and wrote, bytes uploaded and
    downloaded, and seconds of computing while work took time."""
    counted: tuple[float, float, float, float, float] = _device.counts()
    return counted
