"""How leased memory looks to torch: as bytes, or as the fields of a record.

The engine computes, copies and updates through these views (engine/device/device.py). Invariant: nothing is copied
here.
"""

from __future__ import annotations

import torch

FIELD_DTYPES = {
    "hi16": torch.bfloat16,
    "lo16": torch.int16,
    "w16": torch.float16,
    "w32": torch.float32,
    "m32": torch.float32,
    "v32": torch.float32,
}
"""In the order in which the native kernels take them: compute weights, master, m, v."""


def view(memory: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """A leased buffer as a flat tensor; torch.frombuffer refuses the buffer of an empty block."""
    return torch.frombuffer(memory, dtype=dtype) if len(memory) else torch.empty(0, dtype=dtype)


def view_field(memory: memoryview, name: str, num_elements: int) -> torch.Tensor:
    """The first elements of a leased buffer, as the tensor that a field of a record is."""
    return view(memory, FIELD_DTYPES[name])[:num_elements]
