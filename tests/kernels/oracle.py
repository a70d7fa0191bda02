"""What the tests of all kernels share: instruction sets, sizes, the scalars of AdamW, and equality of bits.

Every kernel must equal torch's default path on the CPU (single-tensor, fp32) bit for bit. That path uses fused
multiply-adds if torch runs on AVX2 or better; `needs_fused_torch` skips tests where it does not.
"""

from __future__ import annotations

import platform
from typing import Literal, TypedDict

import pytest
import torch

from ratel_cli import _native

LEARNING_RATE = 1e-3
_SquareRoot = Literal["correct", "mkl_avx512", "mkl_sse"]
ISAS = _native.supported_isas()
SQUARE_ROOTS: tuple[_SquareRoot, ...] = ("correct", "mkl_avx512", "mkl_sse")
if platform.machine() not in ("x86_64", "AMD64"):
    SQUARE_ROOTS = SQUARE_ROOTS[:-1]
GRADIENT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = (0, 1, 3, 15, 16, 17, 31, 33, 1000, 4096, 4097)

needs_fused_torch = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="torch runs without fused multiply-adds on this processor, so its bits differ",
)


class Scalars(TypedDict):
    """The keyword arguments of `AdamWScalars`."""

    decay_factor: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    step_size: float
    bias_correction2_sqrt: float
    epsilon: float
    gradient_scale: float


def scalars(
    step: int,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
    gradient_scale: float = 1.0,
) -> Scalars:
    """The scalars that AdamW computes from its settings before update number `step`, which counts from 1."""
    return {
        "decay_factor": 1 - LEARNING_RATE * weight_decay,
        "beta1": beta1,
        "one_minus_beta1": 1 - beta1,
        "beta2": beta2,
        "one_minus_beta2": 1 - beta2,
        "step_size": LEARNING_RATE / (1 - beta1**step),
        "bias_correction2_sqrt": (1 - beta2**step) ** 0.5,
        "epsilon": epsilon,
        "gradient_scale": gradient_scale,
    }


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bit patterns: NaN equals itself, 0.0 differs from -0.0."""
    return tensor.view(torch.int32 if tensor.dtype.itemsize == 4 else torch.int16)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    different = (bits(actual) != bits(expected)).nonzero().flatten()
    if different.numel():
        first = int(different[0])
        raise AssertionError(
            f"{what}: {different.numel()} of {actual.numel()} differ, first at {first}: "
            f"{actual[first].item()!r} instead of {expected[first].item()!r}"
        )
