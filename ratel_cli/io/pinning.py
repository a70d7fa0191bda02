"""Pins the pool's memory for a GPU, so that copies between it and the GPU run without a thread.

torch's own pinned memory has sizes that are powers of two, and no huge pages. Registering the pool's mappings has
neither drawback. Registration locks every page into memory, so a buffer takes all of its size at once, and it takes as
long as filling the buffer, so pinned buffers should be reused. Where memory cannot be registered, copies are just as
correct, but each one blocks the thread that asks for it. One notice says so.

torch has no function of its own to register memory, so this asks the GPU's device module for the CUDA runtime
(`torch.cuda.cudart`, which is HIP's on an AMD GPU).

Invariant: what was registered is unregistered before it is unmapped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

_PORTABLE = 1
"""cudaHostRegisterPortable: valid for every context of this process."""


class GpuPinning:
    """The `pin` argument of a `BufferPool` for a GPU."""

    def __init__(self, device: torch.device, notice: Callable[[str], None]) -> None:
        """`notice` gets the message if memory cannot be registered."""
        self._device = device
        self._notice = notice
        self._has_failed = False

    def __call__(self, address: int, num_bytes: int) -> Callable[[], None] | None:
        """Register a mapping. Returns what unregisters it, or None if that is not possible, now or at an earlier
        call."""
        if self._has_failed:
            return None
        code = int(torch.get_device_module(self._device).cudart().cudaHostRegister(address, num_bytes, _PORTABLE))
        if code:
            self._has_failed = True
            _clear_error(self._device)
            self._notice(f"CUDA cannot pin host memory (error {code}); copies to and from the GPU will be slower")
            return None
        return lambda: _unregister(self._device, address)


def _unregister(device: torch.device, address: int) -> None:
    if int(torch.get_device_module(device).cudart().cudaHostUnregister(address)):
        _clear_error(device)


def _clear_error(device: torch.device) -> None:
    """Reset CUDA's last error, which torch would otherwise report for its next kernel."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)
