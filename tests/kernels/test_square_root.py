"""Square roots are IEEE's or those of torch's MKL, bit for bit, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ratel_cli import _native
from tests.kernels.oracle import ISAS, SQUARE_ROOTS, assert_same_bits

MKL_ROOTS = SQUARE_ROOTS[1:]
SPECIAL = torch.tensor([0.0, -0.0, float("inf"), 1e-45, 1.1754944e-38, 3.4028235e38, 4.0, 2.0**-100])


def every_fraction() -> torch.Tensor:
    """All floats in [1, 4): all fractions, with both parities of the exponent. Other exponents only scale the root."""
    return torch.arange(0x3F800000, 0x40800000, dtype=torch.int32).view(torch.float32)


def every_scale() -> torch.Tensor:
    """Every 4001st positive bit pattern."""
    return torch.arange(0, 0x7F800000, 4001, dtype=torch.int32).view(torch.float32)


def native(values: torch.Tensor, square_root: _native._SquareRoot | None, isa: str) -> torch.Tensor:
    roots = values.clone()
    _native.square_root(roots, square_root=square_root, isa=isa)
    return roots


@pytest.mark.parametrize("isa", ISAS)
def test_correct_is_rounded_once(isa: str) -> None:
    for values in (every_fraction(), every_scale(), SPECIAL):
        expected = torch.from_numpy(np.sqrt(values.double().numpy()).astype(np.float32))
        assert_same_bits(native(values, "correct", isa), expected, isa)


@pytest.mark.parametrize("isa", ISAS)
def test_native_is_torch(isa: str) -> None:
    """If this fails, torch's MKL runs other code on this processor than native_square_root() expects."""
    for values in (every_fraction(), every_scale(), SPECIAL):
        assert_same_bits(native(values, None, isa), values.sqrt(), isa)


@pytest.mark.parametrize("square_root", MKL_ROOTS)
@pytest.mark.parametrize("isa", ISAS[1:])
def test_mkl_root_is_the_same_everywhere(isa: str, square_root: _native._SquareRoot) -> None:
    for values in (every_fraction(), every_scale(), SPECIAL):
        assert_same_bits(native(values, square_root, isa), native(values, square_root, "baseline"), isa)


@pytest.mark.parametrize(("square_root", "highest"), [("mkl_avx512", 0), ("mkl_sse", 1)][: len(MKL_ROOTS)])
def test_mkl_root_is_at_most_one_ulp_off(square_root: _native._SquareRoot, highest: int) -> None:
    values = every_scale()[1:]
    roots, correct = native(values, square_root, ISAS[-1]), native(values, "correct", ISAS[-1])
    error = roots.view(torch.int32) - correct.view(torch.int32)
    assert (int(error.min()), int(error.max())) == (-1, highest)


@pytest.mark.parametrize("square_root", SQUARE_ROOTS)
def test_no_root(square_root: _native._SquareRoot) -> None:
    for isa in ISAS:
        roots = native(torch.tensor([-1.0, float("nan"), float("-inf"), -1e-45]), square_root, isa)
        assert roots.isnan().all()
