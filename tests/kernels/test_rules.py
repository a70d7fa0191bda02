"""Every rule has the bits of its reference in plain PyTorch, in every layout, on every instruction set."""

from __future__ import annotations

import importlib
import random
from array import array
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
import torch
import xxhash

from ratel_cli import _native
from tests.kernels.native_rules import Native, assert_equal_states, assert_same, kernel, scalars_of
from tests.kernels.oracle import GRADIENT_DTYPES, ISAS, SIZES, assert_same_bits, needs_fused_torch
from tests.kernels.rules import (
    LAYOUTS,
    LEARNING_RATE,
    RULES,
    UNIT,
    Layout,
    Numbers,
    Reference,
    RuleName,
    fields_of,
    quantised,
    random_halves,
    restored,
    rounded_stochastically,
    signed_map,
    unsigned_map,
)

needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


def native_maps() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(_native.dynamic_map(signed=True)), torch.tensor(_native.dynamic_map(signed=False))


def gradients(size: int, dtype: torch.dtype, generator: torch.Generator, scale: float) -> torch.Tensor:
    """Of many magnitudes; some are zero, and the first 300 all are."""
    found = torch.randn(size, generator=generator) * torch.rand(size, generator=generator) ** 6 * scale
    found[torch.rand(size, generator=generator) < 0.05] = 0.0
    if size > 600:
        found[:300] = 0.0
    return found.to(dtype)


def check(
    rule: RuleName,
    layout: Layout,
    isa: str,
    *,
    size: int,
    numbers: Numbers,
    gradient_dtype: torch.dtype = torch.bfloat16,
    scale: float = 1e-3,
    num_steps: int = 4,
) -> None:
    generator = torch.Generator().manual_seed(size)
    weight = torch.randn(size, generator=generator) * 0.02
    if layout == "stochastic":
        weight = weight.bfloat16().float()
    native, reference = Native(rule, layout, weight, isa=isa), Reference(rule, weight, numbers)
    for step in range(1, num_steps + 1):
        gradient = gradients(size, gradient_dtype, generator, scale)
        rounding = (0x9E3779B97F4A7C15 * step % 2**64, 2**32 - 700 + 13 * step)  # the element's number exceeds 32 bits
        native.step(gradient, scalars_of(rule, numbers, step), rounding=rounding)
        reference.step(gradient)
        if layout == "stochastic":
            random = random_halves(rounding[0], rounding[1] + torch.arange(size))
            reference.weight.copy_(rounded_stochastically(reference.weight, random))
        what = f"{rule}, {layout}, {isa}, {size} elements, step {step}"
        assert_equal_states(native, reference, what)


@needs_fused_torch
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_has_the_bits_of_its_reference(rule: RuleName, layout: Layout, isa: str) -> None:
    numbers = Numbers(weight_decay=0.1)
    for size in (*SIZES, 255, 256, 257, 511, 513, 10_001):
        check(rule, layout, isa, size=size, numbers=numbers)
    for dtype in GRADIENT_DTYPES:
        check(rule, layout, isa, size=1000, numbers=numbers, gradient_dtype=dtype)


@needs_fused_torch
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("numbers", "scale"),
    [
        (Numbers(), 1e-3),
        (Numbers(weight_decay=0.3, beta1=0.4, beta2=0.95, momentum=0.5, nesterov=True), 1e-3),
        (Numbers(), 1e-18),
        (Numbers(), 1e-30),
        (Numbers(), 1e12),
    ],
)
def test_other_settings_and_magnitudes(rule: RuleName, isa: str, numbers: Numbers, scale: float) -> None:
    check(rule, "bfloat16", isa, size=3001, numbers=numbers, scale=scale, gradient_dtype=torch.float32)


@needs_fused_torch
@pytest.mark.parametrize("scale", [0.3, 1 / 65536, 1e-30])
@pytest.mark.parametrize("rule", RULES)
def test_gradients_are_scaled_first(rule: RuleName, scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, gradient = (torch.randn(500, generator=generator) for _ in range(2))
    numbers = Numbers()
    native, reference = Native(rule, "float32", weight, isa=ISAS[-1]), Reference(rule, weight, numbers)
    native.step(gradient, scalars_of(rule, numbers, 1, gradient_scale=scale))
    reference.step(gradient * torch.tensor(scale))
    if rule == "muon":  # the direction is not made of the gradient here
        assert_same(native.fields["m32"], reference.moments["m32"], rule)
        return
    assert_same(native.master, reference.weight, rule)


def test_the_maps_are_those_of_their_definition() -> None:
    for found, wanted in zip(native_maps(), (signed_map(), unsigned_map()), strict=True):
        assert_same_bits(found, wanted, "map")
        assert bool((found[1:] > found[:-1]).all())


@needs_fused_torch
@pytest.mark.parametrize("isa", ISAS)
def test_every_number_next_to_a_bound_gets_the_nearest_code(isa: str) -> None:
    """With beta1 of 0, m is the gradient; v is half its square. The largest gradient of a block is 1."""
    of_m, of_v = native_maps()
    bounds = (of_m[:-1] + of_m[1:]) / 2
    near = bounds.view(torch.int32)[:, None] + torch.arange(-4, 5, dtype=torch.int32)
    roots = ((of_v[:-1] + of_v[1:]) / 2).sqrt().view(torch.int32)[:, None] + torch.arange(-4, 5, dtype=torch.int32)
    values = torch.cat([near.flatten().view(torch.float32), roots.flatten().view(torch.float32)])
    random_ones = torch.randn(100_000, generator=torch.Generator().manual_seed(1)).tanh() ** 7
    values = torch.cat([values, random_ones, torch.tensor([0.0, -0.0, 1.0, -1.0])])
    gradient = torch.cat([values, torch.zeros(-values.numel() % (UNIT - 1))]).view(-1, UNIT - 1)
    gradient = torch.nn.functional.pad(gradient, (0, 1), value=1.0).flatten()
    native = Native("adamw_8bit", "float32", torch.zeros(gradient.numel()), isa=isa)
    native.step(gradient, scalars_of("adamw_8bit", Numbers(beta1=0.0, beta2=0.5), 1))
    expected, scales = quantised(gradient, of_m)
    assert torch.equal(native.fields["m8"], expected)
    assert torch.equal(native.fields["m_scale"], scales)
    assert len(expected.unique()) == 256
    squares, scales_of_squares = quantised((gradient * 0.5) * gradient, of_v)
    assert torch.equal(native.fields["v8"], squares)
    assert torch.equal(native.fields["v_scale"], scales_of_squares)
    assert len(squares.unique()) == 256
    distance = (restored(expected, scales, of_m) - gradient).abs()
    for step in (-1, 1):
        other = (expected.int() + step).clamp(0, 255)
        assert bool((distance <= (of_m[other] - gradient).abs() + 1e-7).all())


@pytest.mark.parametrize("isa", ISAS)
def test_numbers_that_are_none_are_the_same_on_every_instruction_set(isa: str) -> None:
    """They make all of their block NaN, or infinite and then NaN. Other blocks are not touched by them."""
    gradient = torch.randn(4 * UNIT, generator=torch.Generator().manual_seed(1))
    gradient[3], gradient[UNIT + 7], gradient[2 * UNIT] = torch.nan, torch.inf, 3e38
    found = {}
    for each in ("baseline", isa):
        native = Native("adamw_8bit", "bfloat16", torch.ones(4 * UNIT), isa=each)
        for step in (1, 2):
            native.step(gradient, scalars_of("adamw_8bit", Numbers(), step))
        found[each] = {name: values.view(torch.uint8) for name, values in native.fields.items()}
    assert all(torch.equal(values, found[isa][name]) for name, values in found["baseline"].items())
    scales = native.fields["m_scale"]
    assert scales.isnan().tolist() == [True, True, False, False]
    assert native.fields["v_scale"].isnan().tolist() == [True, True, True, False]
    assert bool(native.master[3 * UNIT :].isfinite().all())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", RULES)
def test_stream_twice_restores(rule: RuleName, layout: Layout, isa: str) -> None:
    generator = torch.Generator().manual_seed(7)
    for size in SIZES:
        fields = [
            torch.randint(256, (each.num_values(size) * each.dtype.itemsize,), generator=generator, dtype=torch.uint8)
            for each in fields_of(rule, layout)
        ]
        arrays = [values.view(each.dtype) for values, each in zip(fields, fields_of(rule, layout), strict=True)]
        gradient = torch.randn(size, generator=generator)
        before = [each.clone() for each in fields]
        for _ in range(2):
            given = (torch.zeros(size, dtype=torch.bfloat16), gradient) if rule == "muon" else (gradient,)
            kernel(rule, layout, prefix="stream_")(*arrays, *given, isa=isa)
            if size > 100 and _ == 0:
                assert not any(torch.equal(a, b) for a, b in zip(fields, before, strict=True))
        first = 1 if layout == "float16" else 0  # w16 is overwritten
        assert all(torch.equal(a, b) for a, b in zip(fields[first:], before[first:], strict=True))


def arrays_of(rule: RuleName, layout: Layout, count: int, seed: int) -> list[torch.Tensor]:
    """The record's fields up to the end of their pages, and then a gradient, behind Muon's direction."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for each in fields_of(rule, layout):
        number = each.num_values(count, whole_pages=True)
        if each.dtype.is_floating_point:
            found.append(torch.randn(number, generator=generator).abs().to(each.dtype))
        else:
            least, most = (0, 256) if each.dtype == torch.uint8 else (-(2**15), 2**15)
            found.append(torch.randint(least, most, (number,), generator=generator, dtype=each.dtype))
    given = 2 if rule == "muon" else 1
    return [*found, *(torch.randn(count, generator=generator).bfloat16() for _ in range(given))]


def checksum_of(memory: torch.Tensor, place: bytes) -> int:
    found: int = xxhash.xxh3_64_intdigest(memory.view(torch.uint8).numpy(), seed=xxhash.xxh3_64_intdigest(place))
    return found


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("rule", "layout"), [(rule, layout) for rule in RULES for layout in LAYOUTS])
def test_chunks_have_the_bits_of_the_plain_kernel_and_the_checksums_of_the_library(
    rule: RuleName, layout: Layout, isa: str
) -> None:
    """Two chunks of 256 Ki elements, the last one shorter, in segments that begin at multiples of 256."""
    choice, chunk_elements = random.Random(5), 1 << 18
    count = chunk_elements + 2048 * choice.choice([1, 2, 3])
    fields, numbers = fields_of(rule, layout), Numbers(weight_decay=0.1)
    found = arrays_of(rule, layout, count, seed=3)
    expected = [each.clone() for each in found]
    edges = sorted(choice.sample(range(0, count, UNIT), 7))
    segments = [
        (first, last - choice.choice([0, 3, 100]), choice.random() < 0.5)
        for first, last in zip(edges[::2], edges[1::2], strict=False)
    ]
    store_id, ends = bytes(range(16)), [0, chunk_elements, count]

    def checksums(arrays: list[torch.Tensor], step: int) -> list[int]:
        entries = []
        for number, each in enumerate(fields):
            for chunk, (first, last) in enumerate(pairwise(ends)):
                place = (
                    store_id
                    + step.to_bytes(8, "little")
                    + b"".join(n.to_bytes(4, "little") for n in (6, number, chunk))
                )
                begins = first // each.per
                values = each.num_values(last - first, whole_pages=True)
                entries.append(checksum_of(arrays[number][begins : begins + values], place))
        return entries

    def native_checksums(table: list[int], step: int) -> tuple[array[int], _native.ChunkChecksums]:
        entries = array("Q", table)
        return entries, _native.ChunkChecksums(
            table=entries,
            is_set=bytearray(b"\1") * len(entries),
            store_id=store_id,
            step=step,
            block=6,
            entries=range(0, len(entries), 2),
        )

    before = checksums(expected, 1)
    for first, last, decays in segments:
        scalars = scalars_of(rule, numbers if decays else Numbers(weight_decay=0.0), 3)
        parts = [
            values[first // each.per : -(-last // each.per)] for values, each in zip(expected, fields, strict=False)
        ]
        given = [each[first:last] for each in expected[len(fields) :]]
        roundings = [(first**7 % 2**64, last)] if layout == "stochastic" else []
        kernel(rule, layout)(*parts, *given, scalars=scalars, roundings=roundings, isa=isa)
    entered, after = native_checksums([0] * len(before), 2)
    mismatches = kernel(rule, layout, prefix="update_")(
        *found,
        scalars=scalars_of(rule, numbers, 3),
        segments=segments,
        chunk_elements=chunk_elements,
        before=native_checksums(before, 1)[1],
        after=after,
        roundings=[(first**7 % 2**64, last) for first, last, _ in segments] if layout == "stochastic" else [],
        isa=isa,
    )
    assert mismatches == []
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, expected, strict=True))
    assert entered.tolist() == checksums(expected, 2)


def test_a_segment_must_not_cut_a_unit() -> None:
    for rule, unit in (("adamw_8bit", 256), ("lion", 8), ("sgd", 8)):
        arrays = arrays_of(rule, "bfloat16", 1024, seed=1)
        originals = [each.clone() for each in arrays]
        with pytest.raises(
            ValueError, match=rf"segments: must begin at multiples of {unit} elements, \[4, 1024\) does"
        ):
            kernel(rule, "bfloat16", prefix="update_")(
                *arrays, scalars=scalars_of(rule, Numbers(), 1), segments=[(4, 1024, True)], chunk_elements=512
            )
        assert all(torch.equal(a, b) for a, b in zip(arrays, originals, strict=True))


@pytest.mark.parametrize(("count", "chunk_elements"), [(2048, 4096), (8192, 4096)])
def test_chunks_of_parts_of_pages_are_rejected(count: int, chunk_elements: int) -> None:
    """Either a field ends before its page, or a chunk is no whole page."""
    arrays = arrays_of("adamw_8bit", "bfloat16", count, seed=1)
    if count < chunk_elements:
        arrays[3] = arrays[3][:count]
    checksums = _native.ChunkChecksums(
        table=array("Q", [0]) * 14, is_set=bytearray(14), store_id=bytes(16), step=1, block=0, entries=range(0, 14, 2)
    )
    with pytest.raises(ValueError, match=r"after: chunks of field [23] must be whole pages; the field has"):
        _native.update_adamw_8bit_bfloat16(
            *arrays,
            scalars=scalars_of("adamw_8bit", Numbers(), 1),  # type: ignore[arg-type]
            segments=[],
            chunk_elements=chunk_elements,
            after=checksums,
        )


@pytest.mark.parametrize(
    ("name", "size", "needed"), [("tie8", 4, 5), ("m8", 32, 33), ("v8", 0, 33), ("m_scale", 0, 1), ("v_scale", 0, 1)]
)
def test_fields_that_are_too_short_are_rejected(name: str, size: int, needed: int) -> None:
    native = Native("adamw_8bit", "bfloat16", torch.zeros(33), isa=ISAS[-1])
    native.fields[name] = native.fields[name][:size]
    with pytest.raises(ValueError, match=rf"^{name}: has {size} values, needs {needed} for 33 elements$"):
        native.step(torch.zeros(33), scalars_of("adamw_8bit", Numbers(), 1))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", SIZES)
def test_ties_are_kept_bit_by_bit(isa: str, size: int) -> None:
    """Half of all masters are ties. The bits of the last byte that belong to no element stay."""
    upper = torch.randint(-(2**15), 2**15, (size,), generator=torch.Generator().manual_seed(size), dtype=torch.int32)
    lower = torch.where(torch.arange(size) % 2 == 0, 0x8000, 0x1234).int()
    word = upper << 16 | lower
    hi16, lo16 = torch.empty(size, dtype=torch.bfloat16), torch.empty(size, dtype=torch.int16)
    tie8, joined = torch.full((-(-size // 8),), 255, dtype=torch.uint8), torch.empty(size)
    _native.split_tied_bfloat16(word.view(torch.float32), hi16, lo16, tie8, isa=isa)
    _native.join_tied_bfloat16(hi16, lo16, tie8, joined, isa=isa)
    assert torch.equal(joined.view(torch.int32), word)
    bits = (tie8[:, None] >> torch.arange(8)) & 1
    rounded_up = (word & 0x1FFFF) == 0x18000
    assert torch.equal(bits.flatten()[:size].bool(), rounded_up)
    assert bool(bits.flatten()[size:].all())


def test_random_bits_are_spread_evenly_and_unlike_those_of_other_steps_and_elements() -> None:
    """Of 2**20 elements: no value of the upper or lower 8 bits is too frequent (chi-squared of 255 degrees of freedom,
    whose mean is 255, and standard deviation 22.6). At no distance of elements is there a correlation, with themselves
    or with those of the next step, of more than six standard deviations."""
    number = 1 << 20
    keys = [xxhash.xxh3_64_intdigest(f"42/{step}/model.norm.weight".encode()) for step in (1, 2)]
    spectra = []
    for key, first in ((keys[0], 0), (keys[1], 0), (keys[0], 2**32)):
        drawn = random_halves(key, first + torch.arange(number))
        for part in (drawn >> 8, drawn & 255):
            counts = torch.bincount(part, minlength=256).double()
            assert float(((counts - number / 256) ** 2 / (number / 256)).sum()) < 255 + 5 * 22.6
        spectra.append(torch.fft.rfft((drawn.double() - drawn.double().mean()) / drawn.double().std()))
    for other in spectra:
        correlation = torch.fft.irfft(spectra[0].conj() * other) / number
        if other is spectra[0]:
            correlation[0] = 0.0
        assert float(correlation.abs().max()) < 6 / number**0.5


@pytest.mark.parametrize("isa", ISAS)
def test_stochastic_rounding_is_right_on_average(isa: str) -> None:
    """Where rounding to the nearest would leave every weight as it is: 1,000 updates by a hundredth of what lies
    between two bf16 numbers."""
    size, step = 4096, 2**-7 / 100
    native = Native("sgd", "stochastic", torch.ones(size), isa=isa)
    gradient = torch.full((size,), -step / LEARNING_RATE)
    for number in range(1, 1001):
        native.step(gradient, scalars_of("sgd", Numbers(), number), rounding=(number * 0x9E3779B97F4A7C15 % 2**64, 0))
    moved = native.master - 1
    assert abs(float(moved.mean()) / (1000 * step) - 1) < 0.01
    assert float(moved.std()) > 2**-8


@pytest.mark.parametrize("isa", ISAS)
def test_what_stochastic_rounding_leaves_as_it_is(isa: str) -> None:
    """Numbers that bf16 has, infinities and zeros of both signs; and NaN is the canonical one."""
    values = torch.tensor([0.0, -0.0, 1.0, -1.5, torch.inf, -torch.inf, 2.0**-133, -(2.0**-126), 1e38, torch.nan])
    values = values.bfloat16().float().repeat(7)
    native = Native("sgd", "stochastic", values, isa=isa)
    native.step(torch.zeros(values.numel()), scalars_of("sgd", Numbers(), 1), rounding=(2**64 - 1, 2**64 - 5))
    expected = torch.where(values.isnan(), 0x7FC0, values.bfloat16().view(torch.int16).int()).to(torch.int16)
    assert torch.equal(native.fields["p16"].view(torch.int16), expected)
    largest = torch.full((64,), 3.39e38)  # the largest that bf16 has
    native = Native("sgd", "stochastic", largest, isa=isa)
    native.step(torch.full((64,), -1e35 / LEARNING_RATE), scalars_of("sgd", Numbers(), 1), rounding=(3, 0))
    assert set(native.master.tolist()) <= {float(largest[0].bfloat16()), torch.inf}


def test_roundings_belong_to_the_stochastic_layout_alone() -> None:
    gradient, scalars = torch.zeros(8), scalars_of("sgd", Numbers(), 1)
    update, p16, w32 = kernel("sgd", "stochastic"), torch.ones(8).bfloat16(), torch.ones(8)
    for given in ([], [(1, 0), (2, 0)]):
        with pytest.raises(ValueError, match=rf"^roundings: needs 1, has {len(given)}$"):
            update(p16, gradient, scalars=scalars, roundings=given)
    with pytest.raises(ValueError, match=r"^roundings: needs 0, has 1$"):
        kernel("sgd", "float32")(w32, gradient, scalars=scalars, roundings=[(1, 0)])
    with pytest.raises(ValueError, match=r"^roundings: needs 2, has 1$"):
        kernel("sgd", "stochastic", prefix="update_")(
            p16,
            gradient,
            scalars=scalars,
            segments=[(0, 4, True), (4, 8, True)],
            chunk_elements=512,
            roundings=[(1, 0)],
        )
    assert torch.equal(p16, torch.ones(8).bfloat16())


@needs_bitsandbytes
def test_the_maps_are_those_of_bitsandbytes() -> None:
    functional = importlib.import_module("bitsandbytes.functional")
    for signed, found in zip((True, False), native_maps(), strict=True):
        assert_same_bits(found, functional.create_dynamic_map(signed=signed), "map")


@needs_fused_torch
@needs_bitsandbytes
def test_a_run_of_updates_is_that_of_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its AdamW8bit on the CPU, with the quantiser that it has for all devices: its own one for CPUs searches a table
    of too few entries, and misses the nearest code by up to 7. Blocks are whole: it divides in a last part alone."""
    bitsandbytes: Any = importlib.import_module("bitsandbytes")
    backend: Any = importlib.import_module("bitsandbytes.backends.cpu.ops")

    def quantise(values: torch.Tensor, code: torch.Tensor, absmax: torch.Tensor, out: torch.Tensor, size: int) -> None:
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
        found, scales = torch.ops.bitsandbytes.quantize_blockwise.default.redispatch(keys, values, code, size)
        out.copy_(found)
        absmax.copy_(scales)

    monkeypatch.setattr(backend, "_quant_blockwise_fp32_direct", quantise)
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(64 * UNIT, generator=generator) * 0.02
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = bitsandbytes.optim.AdamW8bit([parameter], lr=LEARNING_RATE, weight_decay=0.1)
    native = Native("adamw_8bit", "bfloat16", weight, isa=ISAS[-1])
    for step in range(1, 9):
        gradient = torch.randn(64 * UNIT, generator=generator) * torch.rand(64 * UNIT, generator=generator) ** 4
        parameter.grad = gradient.clone()
        optimizer.step()
        native.step(gradient, scalars_of("adamw_8bit", Numbers(weight_decay=0.1), step))
        state = optimizer.state[parameter]
        assert_same(native.master, parameter.detach(), f"weight, step {step}")
        for name, theirs in (("m8", "state1"), ("v8", "state2"), ("m_scale", "absmax1"), ("v_scale", "absmax2")):
            assert_same(native.fields[name], state[theirs], f"{name}, step {step}")
