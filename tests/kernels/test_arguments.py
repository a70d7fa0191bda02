"""What the kernels reject, with which message, and that a rejected call changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from ratel_cli import _native
from tests.kernels.native_rules import kernel
from tests.kernels.oracle import scalars
from tests.kernels.rules import fields_of

SIZE = 33
ONE = _native.AdamWScalars(**scalars(1))


def state() -> dict[str, torch.Tensor]:
    """The arrays of adamw_bfloat16, in their order."""
    fields = {each.name: torch.zeros(SIZE, dtype=each.dtype) for each in fields_of("adamw", "bfloat16")}
    return {**fields, "gradient": torch.ones(SIZE, dtype=torch.bfloat16)}


def update(arrays: dict[str, torch.Tensor]) -> None:
    kernel("adamw", "bfloat16")(*arrays.values(), scalars=ONE)


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("hi16", lambda t: t.half(), TypeError, r"^hi16: must be bfloat16, is float16$"),
        ("lo16", lambda t: t.int(), TypeError, r"^lo16: must be int16 or uint16, is int32$"),
        ("m32", lambda t: t.double(), TypeError, r"^m32: must be float32, is float64$"),
        ("gradient", lambda t: t.long(), TypeError, r"^gradient: must be bfloat16, float16 or float32, is int64$"),
        ("v32", lambda t: t[:-1], ValueError, r"^v32: has 32 elements, hi16 has 33$"),
        ("m32", lambda t: t.reshape(3, 11), ValueError, r"^m32: must have 1 dimension, has 2$"),
        ("m32", lambda t: torch.zeros(2 * SIZE)[::2], ValueError, r"^m32: must be contiguous, has stride 2$"),
        ("m32", lambda t: t.requires_grad_(), TypeError, r"^m32: not a usable array; .* detached$"),
        ("gradient", lambda t: None, TypeError, r"incompatible function arguments"),
        ("gradient", lambda t: [1.0] * SIZE, TypeError, r"^gradient: not a usable array"),
        ("gradient", lambda t: t.to("meta"), TypeError, r"^gradient: not a usable array"),
    ],
)
def test_rejects_an_array(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], error: type[Exception], message: str
) -> None:
    good = state()
    with pytest.raises(error, match=message):
        update({**good, name: change(good[name])})
    assert not any(tensor.any() for field, tensor in good.items() if field != "gradient")


def test_rejects_overlap() -> None:
    arrays = state()
    with pytest.raises(ValueError, match=r"^v32 and m32 overlap in memory$"):
        update({**arrays, "v32": arrays["m32"]})
    memory = torch.zeros(2 * SIZE)
    first, last = memory[:SIZE], memory[SIZE:]
    with pytest.raises(ValueError, match=r"^v32 and m32 overlap in memory$"):
        update({**arrays, "m32": first, "v32": memory[SIZE - 1 : -1]})
    update({**arrays, "m32": first, "v32": last})


def test_rejects_a_read_only_state_and_takes_a_read_only_gradient() -> None:
    weight, m32, v32, gradient = (np.ones(SIZE, dtype=np.float32) for _ in range(4))
    gradient.setflags(write=False)
    _native.adamw_float32(weight, m32, v32, gradient, scalars=ONE)
    m32.setflags(write=False)
    with pytest.raises(TypeError, match=r"^m32: not a usable array; .* writable"):
        _native.adamw_float32(weight, m32, v32, gradient, scalars=ONE)


@pytest.mark.parametrize("divisor", [0.0, -1.0, float("nan"), 2.0**-31, 2.0**31])
def test_rejects_an_impossible_bias_correction(divisor: float) -> None:
    with pytest.raises(ValueError, match=r"^bias_correction2_sqrt: must lie between"):
        _native.AdamWScalars(**(scalars(1) | {"bias_correction2_sqrt": divisor}))


def test_rejects_an_unknown_square_root() -> None:
    with pytest.raises(
        ValueError, match=r"^square_root: must be 'correct', 'mkl_avx512' or, on x86, 'mkl_sse', is 'fast'$"
    ):
        _native.AdamWScalars(**scalars(1), square_root="fast")  # type: ignore[arg-type]


def test_every_kernel_checks_its_arrays() -> None:
    w32, m32, gradient = (torch.zeros(4) for _ in range(3))
    hi16, w16 = torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.float16)
    lo16 = torch.zeros(4, dtype=torch.int16)
    wrong = torch.zeros(4, dtype=torch.float64)
    calls: list[Callable[[], None]] = [
        lambda: _native.adamw_float16(w16, w32, m32, wrong, gradient, scalars=ONE),
        lambda: _native.adamw_float32(w32, m32, wrong, gradient, scalars=ONE),
        lambda: _native.stream_adamw_bfloat16(hi16, lo16, m32, wrong, gradient),
        lambda: _native.stream_adamw_float16(w16, w32, m32, wrong, gradient),
        lambda: _native.stream_adamw_float32(w32, m32, wrong, gradient),
        lambda: _native.split_bfloat16(w32, hi16, lo16, wrong),
        lambda: _native.join_bfloat16(hi16, lo16, wrong, w32),
        lambda: _native.square_root(wrong),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"^(v32|values): must be float32, is float64$"):
            call()
