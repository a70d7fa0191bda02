"""What torch computes of an update, and what it takes for that. A rule without any of it has a kernel for all.

Functions here, and those of rules in torch, call methods of tensors alone, so who plans by rules loads no torch.
`ratel_cli/engine/optimizer/torch_update.py` runs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_BF16_BYTES, _FP32_BYTES = 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What torch computes with in one update of one parameter."""

    number: int
    """Counts applied updates, from 1."""
    learning_rate: float
    weight_decay: float
    """0 for a parameter that does not decay."""
    options: Mapping[str, Any]
    """Settings of the rule for a whole run, by name."""


@dataclass(frozen=True, slots=True)
class InTorch:
    """An update in torch, on the CPU, without a kernel."""

    function: Callable[[torch.Tensor, torch.Tensor, Mapping[str, torch.Tensor], Numbers], None]
    """Updates the master weights and the state of a parameter in place: `(weight, gradient, state, numbers)`, all in
    fp32, the state by the names of fields. The gradient is a copy, which it may overwrite. Where the rule takes whole
    parameters they have their shapes; else they are some elements, flat."""
    num_temporaries: int
    """Tensors in fp32, as large as the weight, that the function has at its peak."""

    def buffer_bytes(self, num_elements: int) -> int:
        """Bytes of the masters and the gradients of a group, in fp32."""
        return 2 * _FP32_BYTES * num_elements

    def working_bytes(self, shape: tuple[int, ...], *, is_in_fp32: bool) -> int:  # noqa: ARG002
        """What torch takes at its peak besides. `shape`: of what it updates as one."""
        return self.num_temporaries * _FP32_BYTES * math.prod(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Directed:
    """A kernel moves the weights of a matrix along a direction, which torch makes of the whole matrix, in bf16: first
    on the CPU, where the state is, then on the device that the model is on."""

    on_cpu: Callable[[torch.Tensor, Mapping[str, torch.Tensor], Numbers], torch.Tensor]
    """What the direction is made of, for some elements: `(gradient, state, numbers)`. The state stays as it is."""
    on_device: Callable[[torch.Tensor, torch.dtype], torch.Tensor]
    """The direction, bf16 `[rows, columns]`, of that and the dtype of matrix products, each of which is rounded to
    bf16. What is given is overwritten."""
    num_values: Callable[[int, int], int]
    """Values that this takes at its peak besides the direction, by the longer and the shorter side of the matrix."""
    num_flops: Callable[[int, int], int]

    def buffer_bytes(self, num_elements: int) -> int:
        """Bytes of the direction."""
        return _BF16_BYTES * num_elements

    def working_bytes(self, shape: tuple[int, ...], *, is_in_fp32: bool) -> int:
        """What torch takes at its peak besides. `is_in_fp32`: a CPU without bf16 multiplies so."""
        short, long = sorted(shape)
        return (_FP32_BYTES if is_in_fp32 else _BF16_BYTES) * self.num_values(long, short)

    def flops(self, shape: tuple[int, ...]) -> int:
        """FLOPs of its matrix products."""
        short, long = sorted(shape)
        return self.num_flops(long, short)
