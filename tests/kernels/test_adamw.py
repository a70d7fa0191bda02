"""AdamW has the bits of torch's optimizer, in every layout, on every instruction set."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from ratel_cli import _native
from tests.kernels.oracle import (
    GRADIENT_DTYPES,
    ISAS,
    LAYOUTS,
    SIZES,
    SQUARE_ROOTS,
    Layout,
    Ratel,
    TorchAdamW,
    assert_equal_states,
    assert_same_bits,
    needs_fused_torch,
    scalars,
)

NUM_STEPS = 20


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def any_scale(size: int, dtype: torch.dtype, source: torch.Generator) -> torch.Tensor:
    """Normally distributed numbers times powers of ten over the dtype's range, with zeros and subnormals."""
    lowest, highest = {torch.float16: (-8, 4), torch.bfloat16: (-40, 12), torch.float32: (-44, 12)}[dtype]
    powers = torch.randint(lowest, highest, (size,), generator=source).double()
    values = torch.randn(size, generator=source, dtype=torch.float64) * 10**powers
    values[torch.rand(size, generator=source) < 0.05] = 0.0
    return values.to(dtype)


@needs_fused_torch
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", GRADIENT_DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_torch(layout: Layout, dtype: torch.dtype, isa: str) -> None:
    source = generator(1)
    for size in SIZES:
        weight = torch.randn(size, generator=source)
        oracle = TorchAdamW(weight, weight_decay=0.1)
        ratel = Ratel(layout, weight, isa=isa)
        for step in range(1, NUM_STEPS + 1 if size <= 33 else 6):
            gradient = torch.randn(size, generator=source).to(dtype)
            oracle.step(gradient)
            ratel.step(gradient, scalars(step, weight_decay=0.1))
            assert_equal_states(ratel, oracle, f"size {size}, step {step}")


@needs_fused_torch
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("beta1", "beta2", "weight_decay"), [(0.9, 0.999, 0.0), (0.3, 0.95, 0.01), (0.5, 0.5, 1.0), (0.95, 0.9999, 0.5)]
)
def test_equals_torch_at_every_scale(layout: Layout, isa: str, beta1: float, beta2: float, weight_decay: float) -> None:
    source = generator(2)
    weight = any_scale(20_011, torch.float32, source)
    oracle = TorchAdamW(weight, beta1=beta1, beta2=beta2, weight_decay=weight_decay)
    ratel = Ratel(layout, weight, isa=isa)
    for step in range(1, 9):
        gradient = any_scale(weight.numel(), torch.float32, source)
        oracle.step(gradient)
        ratel.step(gradient, scalars(step, beta1=beta1, beta2=beta2, weight_decay=weight_decay))
        assert_equal_states(ratel, oracle, f"step {step}")


@needs_fused_torch
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_infinite_second_moment_does_not_move_the_weight(layout: Layout, isa: str) -> None:
    weight = torch.linspace(-1.0, 1.0, 37)
    oracle, ratel = TorchAdamW(weight), Ratel(layout, weight, isa=isa)
    gradient = torch.full((37,), 1e-3)
    gradient[::5] = 3e38
    for step in range(1, 4):
        oracle.step(gradient)
        ratel.step(gradient, scalars(step))
        assert_equal_states(ratel, oracle, f"step {step}")
    assert oracle.expected()[2].isinf().any()
    assert torch.equal(ratel.master()[::5], weight[::5])


@needs_fused_torch
@pytest.mark.parametrize("scale", [1.0, 0.5, 1 / 3, 1 / 65536, 1e-30])
def test_gradient_scale_is_torch_mul(scale: float) -> None:
    source = generator(3)
    weight = torch.randn(999, generator=source)
    oracle, ratel = TorchAdamW(weight), Ratel("float32", weight, isa=_native.active_isa())
    for step in range(1, 4):
        gradient = torch.randn(999, generator=source)
        oracle.step(gradient.clone().mul_(scale))
        ratel.step(gradient, scalars(step, gradient_scale=scale))
        assert_equal_states(ratel, oracle, f"step {step}")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_gradient_spoils_its_own_weight_only(layout: Layout, bad: float) -> None:
    for isa in ISAS:
        weight = torch.linspace(-1.0, 1.0, 40)
        ratel = Ratel(layout, weight, isa=isa)
        good = Ratel(layout, weight, isa=isa)
        gradient = torch.full((40,), 0.25)
        good.step(gradient, scalars(1))
        gradient[21] = bad
        ratel.step(gradient, scalars(1))
        others = torch.arange(40) != 21
        assert ratel.master()[21].isnan()
        assert layout == "float32" or ratel.compute[21].isnan()
        for actual, wanted in zip(ratel.tensors(), good.tensors(), strict=True):
            assert_same_bits(actual[others], wanted[others], isa)


@pytest.mark.parametrize("square_root", SQUARE_ROOTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_bits_give_the_same_bits_on_every_isa(layout: Layout, square_root: _native._SquareRoot) -> None:
    """Random bit patterns: NaN payloads, infinities and subnormals everywhere."""
    size = 50_021
    for dtype in GRADIENT_DTYPES:
        results = []
        for isa in ISAS:
            source = generator(4)
            pattern = torch.randint(-(2**31), 2**31, (4, size), generator=source, dtype=torch.int64).int()
            ratel = Ratel(layout, pattern[0].view(torch.float32), isa=isa)
            ratel.m32.copy_(pattern[1].view(torch.float32))
            bits_of_v = (pattern[2] & 0x7FFFFFFF) | (ratel.v32.view(torch.int32) & -(2**31))
            ratel.v32.copy_(bits_of_v.view(torch.float32))
            gradient = pattern[3].view(torch.float32) if dtype == torch.float32 else pattern[3].short().view(dtype)
            for step in (1, 1000):
                ratel.step(gradient, scalars(step, weight_decay=0.1, gradient_scale=1 / 3), square_root)
            results.append((*ratel.tensors(), ratel.v32, ratel.compute if layout != "float32" else ratel.m32))
        for isa, result in zip(ISAS[1:], results[1:], strict=True):
            for actual, wanted in zip(result, results[0], strict=True):
                assert_same_bits(actual, wanted, f"{isa} against {ISAS[0]}")


def test_division_is_exact_for_every_bias_correction() -> None:
    """Compare the fused division with the baseline's divider, by weight = 0 - m / (sqrt(v) / divisor)."""
    source = generator(5)
    v = torch.rand(65_537, generator=source) + 1.0
    near_two = [1.0 - 2.0**-24 * k for k in range(1, 6)]
    for divisor in [*torch.rand(40, generator=source, dtype=torch.float64).tolist(), *near_two, 1.0, 2.0**-30]:
        weights = []
        for isa in ISAS:
            ratel = Ratel("float32", torch.zeros_like(v), isa=isa)
            ratel.m32.fill_(1.0)
            ratel.v32.copy_(v)
            arguments = scalars(1) | {"bias_correction2_sqrt": divisor, "epsilon": 0.0, "beta2": 1.0}
            ratel.step(torch.zeros_like(v), arguments, "correct")
            weights.append(ratel.w32)
        for isa, weight in zip(ISAS[1:], weights[1:], strict=True):
            assert_same_bits(weight, weights[0], f"{isa}, divisor {divisor}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_give_the_same_bits_as_the_whole(layout: Layout) -> None:
    source = generator(6)
    weight, gradient = torch.randn(1003, generator=source), torch.randn(1003, generator=source)
    whole, parts = (Ratel(layout, weight, isa=_native.active_isa()) for _ in range(2))
    whole.step(gradient, scalars(1))
    for part in torch.arange(1003).tensor_split(7):
        share = slice(int(part[0]), int(part[-1]) + 1)
        piece = Ratel(layout, weight[share], isa=_native.active_isa())
        piece.compute, piece.lo16 = parts.compute[share], parts.lo16[share]
        piece.w32, piece.m32, piece.v32 = parts.w32[share], parts.m32[share], parts.v32[share]
        piece.step(gradient[share], scalars(1))
    for actual, wanted in zip(parts.tensors(), whole.tensors(), strict=True):
        assert_same_bits(actual, wanted, "parts")


def test_releases_the_gil() -> None:
    size = 1 << 20
    ratel = Ratel("float32", torch.zeros(size), isa="baseline")
    gradient = torch.ones(size)

    def work() -> None:
        for _ in range(10):
            ratel.step(gradient, scalars(1))

    worker = threading.Thread(target=work)
    worker.start()
    turns = 0
    while worker.is_alive():
        turns += 1
    worker.join()
    assert turns > 1000  # with the GIL held: about one turn for each call


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("isa", ISAS)
def test_stream_twice_restores(layout: Layout, isa: str) -> None:
    streams: dict[Layout, tuple[Callable[..., None], tuple[torch.dtype, ...]]] = {
        "bfloat16": (_native.stream_adamw_bfloat16, (torch.bfloat16, torch.int16, torch.float32, torch.float32)),
        "float32": (_native.stream_adamw_float32, (torch.float32, torch.float32, torch.float32)),
        "float16": (_native.stream_adamw_float16, (torch.float16, torch.float32, torch.float32, torch.float32)),
    }
    kernel, dtypes = streams[layout]
    for size in SIZES:
        tensors = [torch.arange(size).to(dtype) for dtype in dtypes]
        before = [tensor.clone() for tensor in tensors]
        gradient = torch.full((size,), 0.1)  # both halves of its bits are set
        kernel(*tensors, gradient, isa=isa)
        changed = [not torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True)]
        assert all(changed) or size == 0
        kernel(*tensors, gradient, isa=isa)
        for tensor, old in list(zip(tensors, before, strict=True))[layout == "float16" :]:
            assert_same_bits(tensor, old, f"size {size}")
