"""Leased memory as torch tensors. Nothing is copied here."""

from __future__ import annotations

import torch

from ratel_cli.sizes import ValueType

VALUE_DTYPES: dict[ValueType, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int16": torch.int16,
    "uint8": torch.uint8,
}


def view(memory: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """A buffer as a flat tensor `[len(memory) // itemsize]`. It may be empty, which torch.frombuffer rejects."""
    return torch.frombuffer(memory, dtype=dtype) if len(memory) else torch.empty(0, dtype=dtype, device="cpu")
