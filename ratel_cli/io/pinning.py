"""Pins the pool's memory for a GPU, so that copies between it and the GPU run without a thread.

torch's own pinned memory has sizes that are powers of two, and no huge pages. Registering the pool's mappings has
neither drawback. Registration locks every page into memory, so a buffer takes all of its size at once, and it takes as
long as filling the buffer, so pinned buffers should be reused. Where memory cannot be registered, copies are just as
correct, but each one blocks the thread that asks for it. One notice says so; the pool tries again (io/buffers.py).

Memory is registered in pieces that end where an address is a multiple of `PIECE_BYTES`: there are systems that refuse
longer ones (some end at 2 GiB; Linux 6.11 to 6.13 fail with long pins). A copy must not go beyond a piece, so whoever
copies splits at these addresses, too (`copy_in_pieces`), and needs to know nothing of the buffer around them.

torch has no function of its own to register memory, so this asks the GPU's device module for the CUDA runtime
(`torch.cuda.cudart`, which is HIP's on an AMD GPU).

Invariant: of a buffer all pieces are registered or none is; what was registered is unregistered before it is unmapped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType

import torch

from ratel_cli.units import GIB, format_bytes

PIECE_BYTES = GIB
_PORTABLE = 1
"""cudaHostRegisterPortable: valid for every context of this process."""


class GpuPinning:
    """The `pin` argument of a `BufferPool` for a GPU. May be called from any thread."""

    def __init__(self, device: torch.device, notice: Callable[[str], None]) -> None:
        """`notice` gets the message the first time that memory cannot be registered."""
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self._device = torch.device(device.type, index)
        self._notice = notice
        self._has_failed = False

    def __call__(self, address: int, num_bytes: int) -> Callable[[], None] | None:
        """Register a mapping. Returns what unregisters it, or None if that is not possible now."""
        use_device(self._device)
        registered: list[int] = []
        for start, size in pieces(address, num_bytes):
            code = int(_runtime(self._device).cudaHostRegister(start, size, _PORTABLE))
            if code:
                _clear_error(self._device)
                _unregister(self._device, registered)
                if not self._has_failed:
                    self._has_failed = True
                    self._notice(
                        f"CUDA cannot pin {format_bytes(num_bytes)} of host memory now (error {code}); until it can, "
                        "copies of this memory to and from the GPU are slower; `ratel doctor` looks for the cause"
                    )
                return None
            registered.append(start)
        return lambda: _unregister(self._device, registered)


def use_device(device: torch.device) -> None:
    """Make a GPU the current device of this thread. What is called in a thread whose current device is another GPU, as
    the first one is at the beginning, would make a context there, which takes hundreds of MiB."""
    if device.index not in (None, torch.accelerator.current_device_index()):
        torch.accelerator.set_device_index(device)


def pieces(address: int, num_bytes: int) -> Iterator[tuple[int, int]]:
    """Address and size of each piece of a range of memory."""
    end = address + num_bytes
    while address < end:
        piece_end = min(end, (address // PIECE_BYTES + 1) * PIECE_BYTES)
        yield address, piece_end - address
        address = piece_end


def copy_in_pieces(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between a GPU and host memory on the current stream, flat uint8 `[bytes]` both, without waiting if that
    memory is pinned."""
    host = to if to.device.type == "cpu" else source
    start = host.data_ptr()
    for address, size in pieces(start, host.nbytes):
        piece = slice(address - start, address - start + size)
        to[piece].copy_(source[piece], non_blocking=True)


def _runtime(device: torch.device) -> ModuleType:
    runtime: ModuleType = torch.get_device_module(device).cudart()
    return runtime


def _unregister(device: torch.device, addresses: list[int]) -> None:
    use_device(device)
    for address in addresses:
        if int(_runtime(device).cudaHostUnregister(address)):
            _clear_error(device)


def _clear_error(device: torch.device) -> None:
    """Reset CUDA's last error, which torch would otherwise report for its next kernel."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)
