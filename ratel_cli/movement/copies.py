"""Copies between host memory and the compute device; the only place that knows whether they are one.

On a machine without a GPU the compute device is the CPU and nothing is copied: the block's modules
compute straight from the buffer that the store was read into. Also the one place that knows how the
fields of a record look to torch.
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


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`host` itself on the CPU, a copy on any other device."""
    return host if device.type == "cpu" else host.to(device)


def to_host(tensor: torch.Tensor, into: torch.Tensor) -> None:
    """Copy `tensor` from wherever it is into host memory of the same number of elements, converting its dtype."""
    into.copy_(tensor.reshape(into.shape))
