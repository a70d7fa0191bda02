"""The kernel that quantises to NF4, against bitsandbytes' for the CPU."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import pytest
import torch

from ratel_cli import _native


def quantised(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.zeros(-(-len(values) // 2), dtype=torch.uint8)
    magnitudes = torch.zeros(-(-len(values) // 64))
    _native.quantise_nf4(values, codes, magnitudes)
    return codes, magnitudes


@pytest.mark.parametrize("number", [1, 2, 63, 64, 65, 127, 128, 129, 4096, 5001])
@pytest.mark.parametrize("scale", [1e-42, 1e-38, 1.0, 3e38])
def test_codes_and_magnitudes_are_those_of_bitsandbytes(number: int, scale: float) -> None:
    values = torch.rand(number, generator=torch.Generator().manual_seed(number)).mul_(2).sub_(1) * scale
    codes, magnitudes = quantised(values)
    packed, state = bnb.quantize_4bit(values, blocksize=64, quant_type="nf4", compress_statistics=False)
    assert torch.equal(codes, packed.view(-1))
    assert torch.equal(magnitudes, state.absmax)


def test_groups_of_zeros_and_values_between_two_codes() -> None:
    values = torch.zeros(192)
    middles = (bnb.get_4bit_type("nf4", device="cpu")[:-1] + bnb.get_4bit_type("nf4", device="cpu")[1:]) / 2
    values[64:79] = middles
    values[79] = 1.0
    values[128] = -0.0
    codes, magnitudes = quantised(values)
    packed, state = bnb.quantize_4bit(values, blocksize=64, quant_type="nf4", compress_statistics=False)
    assert torch.equal(codes, packed.view(-1)) and torch.equal(magnitudes, state.absmax)


def test_nothing() -> None:
    assert [len(each) for each in quantised(torch.empty(0))] == [0, 0]


@pytest.mark.parametrize(
    ("values", "codes", "magnitudes", "error", "message"),
    [
        (torch.zeros(9), torch.zeros(4).byte(), torch.zeros(1), ValueError, "codes: has 4 values, needs 5"),
        (torch.zeros(65), torch.zeros(33).byte(), torch.zeros(1), ValueError, "magnitudes: has 1 values, needs 2"),
        (torch.zeros(9).half(), torch.zeros(5).byte(), torch.zeros(1), TypeError, "values: must be float32"),
        (torch.zeros(9), torch.zeros(5), torch.zeros(1), TypeError, "codes: must be uint8"),
        (torch.zeros(3, 3), torch.zeros(5).byte(), torch.zeros(1), ValueError, "values: must have 1 dimension"),
    ],
)
def test_arrays_that_do_not_fit(
    values: torch.Tensor, codes: torch.Tensor, magnitudes: torch.Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        _native.quantise_nf4(values, codes, magnitudes)


def test_arrays_that_overlap() -> None:
    values = torch.zeros(64)
    with pytest.raises(ValueError, match="overlap"):
        _native.quantise_nf4(values, values.view(torch.uint8)[:32], torch.zeros(1))
