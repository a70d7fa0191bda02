"""Splitting the fp32 master into two halves and a sign is lossless for every pattern, and hi16 is torch's bf16."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ratel_cli import _native
from tests.kernels.oracle import ISAS, SIZES, assert_same_bits, bits

CHUNK = 1 << 20
NUM_CHUNKS = (1 << 32) // CHUNK


def round_trip(word: torch.Tensor, isa: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """hi16, lo16 and v32 as split wrote them (v32 was 1.5 before), and the master after join."""
    size = word.numel()
    hi16, lo16 = torch.empty(size, dtype=torch.bfloat16), torch.empty(size, dtype=torch.int16)
    v32, joined = torch.full((size,), 1.5), torch.empty(size)
    _native.split_bfloat16(word.view(torch.float32), hi16, lo16, v32, isa=isa)
    _native.join_bfloat16(hi16, lo16, v32, joined, isa=isa)
    return hi16, lo16, v32, joined


def check(word: torch.Tensor, isa: str) -> None:
    hi16, lo16, v32, joined = round_trip(word, isa)
    assert torch.equal(joined.view(torch.int32), word)
    assert torch.equal(lo16, word.short())
    value = word.view(torch.float32)
    number = ~value.isnan()
    assert torch.equal(bits(hi16)[number], bits(value.bfloat16())[number])
    tie_rounded_up = (word & 0x1FFFF) == 0x18000
    assert torch.equal(v32, torch.where(tie_rounded_up, -1.5, 1.5))


def interesting_words() -> torch.Tensor:
    """Every upper half, with the lower halves at which rounding changes."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    return (upper[:, None] | lower[None, :]).flatten().int()


@pytest.mark.parametrize("isa", ISAS)
def test_every_upper_half(isa: str) -> None:
    check(interesting_words(), isa)


@pytest.mark.parametrize("isa", ISAS)
def test_sizes(isa: str) -> None:
    words = interesting_words()[0x18000 * 3 :]
    for size in SIZES:
        check(words[:size].clone(), isa)


@pytest.mark.nightly
def test_lossless_for_all_patterns() -> None:
    words = np.arange(CHUNK, dtype=np.uint32)
    hi16, lo16 = torch.empty(CHUNK, dtype=torch.bfloat16), torch.empty(CHUNK, dtype=torch.int16)
    v32, joined = np.zeros(CHUNK, dtype=np.float32), np.empty(CHUNK, dtype=np.float32)
    for _ in range(NUM_CHUNKS):
        _native.split_bfloat16(words.view(np.float32), hi16, lo16, v32)
        _native.join_bfloat16(hi16, lo16, v32, joined)
        assert np.array_equal(joined.view(np.uint32), words)
        words += np.uint32(CHUNK)
    assert words[0] == 0  # wrapped around: all patterns were seen


def test_nothing_else_of_v_changes() -> None:
    words = interesting_words()
    v32 = torch.rand(words.numel())
    before = v32.clone()
    hi16, lo16 = torch.empty(words.numel(), dtype=torch.bfloat16), torch.empty(words.numel(), dtype=torch.uint16)
    _native.split_bfloat16(words.view(torch.float32), hi16, lo16, v32)
    assert_same_bits(v32.abs(), before, "magnitude of v")
    _native.split_bfloat16(torch.zeros(words.numel()), hi16, lo16, v32)
    assert_same_bits(v32, before, "v without ties")
