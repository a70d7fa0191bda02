"""torch.optim.AdamW as the oracle of the kernels, and states for both.

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
BETA1 = 0.9
BETA2 = 0.999
EPSILON = 1e-8
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
    step: int, *, beta1: float = BETA1, beta2: float = BETA2, weight_decay: float = 0.0, gradient_scale: float = 1.0
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
        "epsilon": EPSILON,
        "gradient_scale": gradient_scale,
    }


class TorchAdamW:
    """torch's optimizer with one fp32 parameter."""

    def __init__(
        self, weight: torch.Tensor, *, beta1: float = BETA1, beta2: float = BETA2, weight_decay: float = 0.0
    ) -> None:
        self.weight = torch.nn.Parameter(weight.clone())
        self._optimizer = torch.optim.AdamW(
            [self.weight],
            lr=LEARNING_RATE,
            betas=(beta1, beta2),
            eps=EPSILON,
            weight_decay=weight_decay,
            foreach=False,
            fused=False,
        )

    def step(self, gradient: torch.Tensor) -> None:
        self.weight.grad = gradient.float()
        self._optimizer.step()

    def expected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weight, m and v."""
        state = self._optimizer.state[self.weight]
        return self.weight.detach(), state["exp_avg"], state["exp_avg_sq"]


Layout = Literal["bfloat16", "float32", "float16"]
LAYOUTS: tuple[Layout, ...] = ("bfloat16", "float32", "float16")


class Ratel:
    """One layout's state, updated by the kernel."""

    def __init__(self, layout: Layout, weight: torch.Tensor, *, isa: str) -> None:
        self.layout = layout
        self.isa = isa
        size = weight.numel()
        self.m32, self.v32 = torch.zeros(size), torch.zeros(size)
        self.w32 = weight.clone()
        self.compute = torch.empty(size, dtype=torch.float16 if layout == "float16" else torch.bfloat16)
        self.lo16 = torch.empty(size, dtype=torch.int16)
        if layout == "bfloat16":
            _native.split_bfloat16(self.w32, self.compute, self.lo16, self.v32, isa=isa)

    def step(self, gradient: torch.Tensor, arguments: Scalars, square_root: _SquareRoot | None = None) -> None:
        keywords = {"scalars": _native.AdamWScalars(**arguments, square_root=square_root), "isa": self.isa}
        if self.layout == "bfloat16":
            _native.adamw_bfloat16(self.compute, self.lo16, self.m32, self.v32, gradient, **keywords)
        elif self.layout == "float32":
            _native.adamw_float32(self.w32, self.m32, self.v32, gradient, **keywords)
        else:
            _native.adamw_float16(self.compute, self.w32, self.m32, self.v32, gradient, **keywords)

    def master(self) -> torch.Tensor:
        if self.layout == "bfloat16":
            _native.join_bfloat16(self.compute, self.lo16, self.v32, self.w32, isa=self.isa)
        return self.w32

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weight, m and v, in the oracle's format."""
        v = self.v32.abs() if self.layout == "bfloat16" else self.v32
        return self.master(), self.m32, v


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


def assert_equal_states(ratel: Ratel, oracle: TorchAdamW, what: str) -> None:
    expected = oracle.expected()
    for name, actual, wanted in zip(("weight", "m", "v"), ratel.tensors(), expected, strict=True):
        assert_same_bits(actual, wanted, f"{what}, {name}")
    if ratel.layout != "float32":
        assert_same_bits(ratel.compute, expected[0].to(ratel.compute.dtype), f"{what}, compute copy")
