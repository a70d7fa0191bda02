"""Host memory that a GPU reads where it is (MemFerry, section III-B: direct host access).

Memory that is registered with the GPU (io/pinning.py) has an address there, by which kernels read it over the link.
With CUDA on x86-64 that is the address it has for the host; elsewhere nothing is mapped. A tensor over that address
makes any operator such a reader: nothing is copied, and nothing is allocated.

The tensor does not hold the memory. Whoever reads in place waits until computing has passed the last reader, before the
host changes the memory or gives it back.
"""

from __future__ import annotations

import platform

import torch

from ratel_cli.io.views import view

_HAS_SAME_ADDRESSES = platform.machine() == "x86_64" and torch.version.hip is None


def mapped(memory: memoryview, device: torch.device) -> torch.Tensor | None:
    """The bytes as a tensor on the GPU, flat uint8 `[bytes]`; None if it cannot read them, as where they are not
    registered with it."""
    in_host = view(memory, torch.uint8)
    if not _HAS_SAME_ADDRESSES or (len(in_host) and not in_host.is_pinned()):
        return None
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    if not len(in_host):
        return empty
    storage = torch._C._construct_storage_from_data_pointer(in_host.data_ptr(), device, len(in_host))
    return empty.set_(storage)
