"""AdamW has the bits of torch's optimizer at every scale, and the same ones on every instruction set and in parts."""

from __future__ import annotations

import threading

import pytest
import torch

from ratel_cli import _native
from tests.kernels.native_rules import Native, assert_equal_states, scalars_of
from tests.kernels.oracle import GRADIENT_DTYPES, ISAS, SQUARE_ROOTS, assert_same_bits, needs_fused_torch, scalars
from tests.kernels.rules import Layout, Numbers, Reference

LAYOUTS: tuple[Layout, ...] = ("bfloat16", "float32", "float16")


def adamw(layout: Layout, weight: torch.Tensor, *, isa: str | None = None) -> Native:
    return Native("adamw", layout, weight, isa=isa or _native.active_isa())


def first_step(native: Native, gradient: torch.Tensor) -> None:
    native.step(gradient, scalars_of("adamw", Numbers(), 1))


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
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("beta1", "beta2", "weight_decay"), [(0.9, 0.999, 0.0), (0.3, 0.95, 0.01), (0.5, 0.5, 1.0), (0.95, 0.9999, 0.5)]
)
def test_equals_torch_at_every_scale(layout: Layout, isa: str, beta1: float, beta2: float, weight_decay: float) -> None:
    source = generator(2)
    weight = any_scale(20_011, torch.float32, source)
    numbers = Numbers(beta1=beta1, beta2=beta2, weight_decay=weight_decay)
    oracle, ratel = Reference("adamw", weight, numbers), adamw(layout, weight, isa=isa)
    for step in range(1, 9):
        gradient = any_scale(weight.numel(), torch.float32, source)
        oracle.step(gradient)
        ratel.step(gradient, scalars_of("adamw", numbers, step))
        assert_equal_states(ratel, oracle, f"step {step}")


@needs_fused_torch
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_infinite_second_moment_does_not_move_the_weight(layout: Layout, isa: str) -> None:
    weight = torch.linspace(-1.0, 1.0, 37)
    oracle, ratel = Reference("adamw", weight, Numbers()), adamw(layout, weight, isa=isa)
    gradient = torch.full((37,), 1e-3)
    gradient[::5] = 3e38
    for step in range(1, 4):
        oracle.step(gradient)
        ratel.step(gradient, scalars_of("adamw", Numbers(), step))
        assert_equal_states(ratel, oracle, f"step {step}")
    assert oracle.moments["v32"].isinf().any()
    assert torch.equal(ratel.master[::5], weight[::5])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_gradient_spoils_its_own_weight_only(layout: Layout, bad: float) -> None:
    for isa in ISAS:
        weight = torch.linspace(-1.0, 1.0, 40)
        ratel, good = (adamw(layout, weight, isa=isa) for _ in range(2))
        gradient = torch.full((40,), 0.25)
        first_step(good, gradient)
        gradient[21] = bad
        first_step(ratel, gradient)
        others = torch.arange(40) != 21
        assert ratel.master[21].isnan() and ratel.compute[21].isnan()
        for name, wanted in good.fields.items():
            assert_same_bits(ratel.fields[name][others], wanted[others], f"{isa}, {name}")


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
            ratel = adamw(layout, pattern[0].view(torch.float32), isa=isa)
            m32, v32 = ratel.fields["m32"], ratel.fields["v32"]
            m32.copy_(pattern[1].view(torch.float32))
            bits_of_v = (pattern[2] & 0x7FFFFFFF) | (v32.view(torch.int32) & -(2**31))
            v32.copy_(bits_of_v.view(torch.float32))
            gradient = pattern[3].view(torch.float32) if dtype == torch.float32 else pattern[3].short().view(dtype)
            for step in (1, 1000):
                numbers = scalars(step, weight_decay=0.1, gradient_scale=1 / 3)
                ratel.step(gradient, _native.AdamWScalars(**numbers, square_root=square_root))
            results.append((ratel.master, *ratel.fields.values()))
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
            ratel = adamw("float32", torch.zeros_like(v), isa=isa)
            ratel.fields["m32"].fill_(1.0)
            ratel.fields["v32"].copy_(v)
            arguments = scalars(1) | {"bias_correction2_sqrt": divisor, "epsilon": 0.0, "beta2": 1.0}
            ratel.step(torch.zeros_like(v), _native.AdamWScalars(**arguments, square_root="correct"))
            weights.append(ratel.master)
        for isa, weight in zip(ISAS[1:], weights[1:], strict=True):
            assert_same_bits(weight, weights[0], f"{isa}, divisor {divisor}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_give_the_same_bits_as_the_whole(layout: Layout) -> None:
    source = generator(6)
    weight, gradient = torch.randn(1003, generator=source), torch.randn(1003, generator=source)
    whole, parts = (adamw(layout, weight) for _ in range(2))
    first_step(whole, gradient)
    for part in torch.arange(1003).tensor_split(7):
        share = slice(int(part[0]), int(part[-1]) + 1)
        piece = adamw(layout, weight[share])
        piece.fields = {name: each[share] for name, each in parts.fields.items()}
        first_step(piece, gradient[share])
    for name, wanted in whole.fields.items():
        assert_same_bits(parts.fields[name], wanted, name)


def test_releases_the_gil() -> None:
    size = 1 << 20
    ratel = adamw("float32", torch.zeros(size), isa="baseline")
    gradient = torch.ones(size)

    def work() -> None:
        for _ in range(10):
            first_step(ratel, gradient)

    worker = threading.Thread(target=work)
    worker.start()
    turns = 0
    while worker.is_alive():
        turns += 1
    worker.join()
    assert turns > 1000  # with the GIL held: about one turn for each call
