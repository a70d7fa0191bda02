"""Pins the pool's memory for CUDA, so that copies between it and a GPU run without a thread.

torch's own pinned memory has sizes that are powers of two, and no huge pages. Registering the pool's mappings has
neither drawback. Registration locks every page into memory, so a buffer takes all of its size at once, and it takes as
long as filling the buffer, so pinned buffers should be reused. Where CUDA cannot register memory, copies are just as
correct, but each one blocks the thread that asks for it. One notice says so.

Invariant: what was registered is unregistered before it is unmapped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

_PORTABLE = 1
"""cudaHostRegisterPortable: valid for every context of this process."""


class CudaPinning:
    """The `pin` argument of a `BufferPool` for a CUDA GPU."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice = notice
        self._has_failed = False

    def __call__(self, address: int, num_bytes: int) -> Callable[[], None] | None:
        """Register a mapping. Returns what unregisters it, or None if CUDA cannot, now or at an earlier call."""
        if self._has_failed:
            return None
        code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE))
        if code:
            self._has_failed = True
            _clear_error()
            self._notice(f"CUDA cannot pin host memory (error {code}); copies to and from the GPU will be slower")
            return None
        return lambda: _unregister(address)


def _unregister(address: int) -> None:
    if int(torch.cuda.cudart().cudaHostUnregister(address)):
        _clear_error()


def _clear_error() -> None:
    """Reset CUDA's last error, which torch would otherwise report for its next kernel."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)
