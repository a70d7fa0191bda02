"""Tells CUDA of the pool's memory, so that copies between it and a GPU run by themselves (`io.buffers`).

torch's own pinned memory has sizes that are powers of two, and no huge pages; registering what the pool maps has
neither fault. It locks every page into memory, so that a buffer takes all of its size at once, and takes as
long as filling it: pinned buffers are to be kept. Where CUDA refuses, copies are as correct, but the
thread that asks for one stands still for it; that is told once.

Invariant: what was registered is unregistered before it is unmapped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

_PORTABLE = 1
"""cudaHostRegisterPortable: good for every context of this process."""


class CudaPinning:
    """To be handed to a `BufferPool`, which calls it with the address and the size of each mapping."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice = notice
        self._is_refused = False

    def __call__(self, address: int, num_bytes: int) -> Callable[[], None] | None:
        """Register a mapping: what undoes it, or None where CUDA refuses. After a refusal it is not asked again."""
        if self._is_refused:
            return None
        code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE))
        if code:
            self._is_refused = True
            _clear_error()
            self._notice(f"CUDA cannot pin host memory (error {code}); copies to and from the GPU will be slower")
            return None
        return lambda: _unregister(address)


def _unregister(address: int) -> None:
    if int(torch.cuda.cudart().cudaHostUnregister(address)):
        _clear_error()


def _clear_error() -> None:
    """A refusal stays CUDA's last error, which torch would report for its next kernel."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)
