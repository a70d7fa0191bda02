"""Leased memory as torch tensors: as plain arrays, or as the fields of a record. Nothing is copied here."""

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
"""The dtype of each field of a record. The order is that of the native kernels: compute weights, master, m, v."""


def view(memory: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """A buffer as a flat tensor `[len(memory) // itemsize]`. It may be empty, which torch.frombuffer rejects."""
    return torch.frombuffer(memory, dtype=dtype) if len(memory) else torch.empty(0, dtype=dtype)


def view_field(memory: memoryview, name: str, num_elements: int) -> torch.Tensor:
    """The first elements of a buffer as a field of a record: a tensor `[num_elements]` of the field's dtype."""
    return view(memory, FIELD_DTYPES[name])[:num_elements]
