"""Quantised matrices: their bytes, as bitsandbytes defines them, and the matrices that these stand for.

A quantised matrix is one flat array of bytes, so that store, link and plan carry it as they carry any frozen parameter.
It holds what bitsandbytes has in several tensors:

    nf4     two elements in a byte, the first one in its upper half; then the largest magnitude of each 64 elements.
            Either in fp32, or as double quantisation has it: a code for each, the largest magnitude of each 256 of
            these in fp32, and their mean in fp32 (QLoRA, arXiv:2305.14314, sections 2 and 3)
    int8    an element in a byte; then the largest magnitude of each row in fp32 (LLM.int8(), arXiv:2208.07339,
            section 2.1)
    mxfp4   two elements in a byte, the first one in its lower half; then an exponent for each 32 elements (OCP
            Microscaling Formats 1.0). Of experts alone, whose files have them transposed: `[outputs, inputs]` for
            `[inputs, outputs]`
    int4    two elements in a byte, the first one in its lower half; then a scale in fp16 for each group of inputs and
            each output, and a zero point in a byte; then, if groups are not in order, that of each input in 16 bit.
            What GPTQ and AWQ have in words of 32 bits (arXiv:2210.17323, arXiv:2306.00978)

Each part begins at a multiple of `_PART_ALIGNMENT` bytes, and the bytes between are zero. A stack of matrices, such as
that of experts, is quantised as one matrix with all their rows, which is how bitsandbytes sees it.

Invariant: the bytes are those that bitsandbytes makes on the CPU of the matrix in the model's dtype, and the matrix
that is computed with is the one that it makes of them, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Final, get_args

import torch

from ratel_cli import _native
from ratel_cli.model.values.fetched_code import no_fetched_code
from ratel_cli.sizes import EXPANDED_ELEMENTS, QuantisedForm, StoredForm
from ratel_cli.units import align_up

QUANTISED_FORMS: Final[tuple[QuantisedForm, ...]] = get_args(QuantisedForm)
_NF4_ELEMENTS = 64
"""Elements that share a magnitude in NF4."""
_DOUBLE_ELEMENTS = 256
"""Magnitudes that share one in double quantisation."""
_MXFP4_ELEMENTS = 32
"""Elements that share an exponent in MXFP4."""
_PART_ALIGNMENT = 256
_TABLE_PLACES = 1 << 16
_CODED_ELEMENTS = 1 << 20
"""Elements that are quantised at once, in fp32."""
_NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""What the codes stand for: quantiles of the normal distribution (QLoRA, appendix E)."""


E2M1_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What the codes of MXFP4 stand for (OCP Microscaling Formats 1.0, section 5.3.3)."""


@dataclass(frozen=True, slots=True)
class QuantisedLayout:
    """Where the parts of a quantised matrix lie among its bytes."""

    form: StoredForm
    rows: int
    """Rows of all matrices of a stack together, as they are stored."""
    columns: int
    num_stacked: int = 0
    """How many matrices it is; 0: one that is no stack."""
    num_groups: int = 0
    """Groups of columns that share a scale in a row: of int4."""
    has_order: bool = False
    """Whether groups are columns in any order, which is stored: of int4."""

    @classmethod
    def of(cls, form: StoredForm, shape: Sequence[int]) -> QuantisedLayout:
        """Make the layout of a matrix `[rows, columns]` or of a stack `[matrices, rows, columns]`."""
        *stacked, rows, columns = shape
        if form == "mxfp4":
            rows, columns = columns, rows
        return cls(form, math.prod(stacked) * rows, columns, num_stacked=stacked[0] if stacked else 0)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix, or of the stack."""
        if not self.num_stacked:
            return self.rows, self.columns
        rows, columns = self.rows // self.num_stacked, self.columns
        return (self.num_stacked, columns, rows) if self.form == "mxfp4" else (self.num_stacked, rows, columns)

    @property
    def num_elements(self) -> int:
        """Elements of the matrix."""
        return self.rows * self.columns

    @property
    def code_bytes(self) -> int:
        """Size of the elements' codes, which come first."""
        return self.num_elements if self.form == "int8" else -(-self.num_elements // 2)

    @property
    def num_magnitudes(self) -> int:
        """Groups of elements that share a magnitude, or an exponent."""
        if self.form == "mxfp4":
            return self.num_elements // _MXFP4_ELEMENTS
        return self.rows if self.form == "int8" else -(-self.num_elements // _NF4_ELEMENTS)

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each part begins, and where the last one ends."""
        found = [0]
        for size in self._part_bytes:
            found.append(align_up(found[-1] + size, _PART_ALIGNMENT))
        return tuple(found)

    @property
    def num_bytes(self) -> int:
        """Size of the quantised matrix."""
        return self.starts[-1]

    def of_matrices(self, data: torch.Tensor, first: int, last: int) -> tuple[torch.Tensor, QuantisedLayout] | None:
        """The bytes of the matrices `[first, last)` of a stack alone, and their layout; None if they share a magnitude
        with others."""
        number = self.rows // self.num_stacked
        part = QuantisedLayout(self.form, (last - first) * number, self.columns, num_stacked=last - first)
        begin, end = first * number * self.columns, last * number * self.columns
        of_group = {"int8": 1, "nf4": _NF4_ELEMENTS, "nf4 double": _NF4_ELEMENTS * _DOUBLE_ELEMENTS, "mxfp4": 1}
        if begin % of_group[self.form] or (last != self.num_stacked and end % of_group[self.form]):
            return None
        groups = begin // _NF4_ELEMENTS
        starts = {
            "int8": (begin, 4 * first * number),
            "nf4": (begin // 2, 4 * groups),
            "nf4 double": (begin // 2, groups, 4 * (groups // _DOUBLE_ELEMENTS), 0),
            "mxfp4": (begin // 2, begin // _MXFP4_ELEMENTS),
        }[self.form]
        found = data.new_zeros(part.num_bytes)
        for target, source, start in zip(part.parts(found), self.parts(data), starts, strict=True):
            target.copy_(source[start : start + len(target)])
        return found, part

    def matrices(self, data: torch.Tensor) -> Iterator[tuple[torch.Tensor, QuantisedLayout]]:
        """The bytes and the layout of each matrix of a stack; of all at once if they share magnitudes."""
        for number in range(max(1, self.num_stacked)):
            part = self.of_matrices(data, number, number + 1) if self.num_stacked else None
            yield part or (data, self)
            if part is None:
                return

    def parts(self, data: torch.Tensor) -> list[torch.Tensor]:
        """Views of the bytes of each part."""
        return [data[start : start + size] for start, size in zip(self.starts[:-1], self._part_bytes, strict=True)]

    @property
    def _part_bytes(self) -> tuple[int, ...]:
        if self.form == "mxfp4":
            return self.code_bytes, self.num_magnitudes
        if self.form == "int4":
            number = self.rows * self.num_groups
            return (self.code_bytes, 2 * number, number, *([2 * self.columns] if self.has_order else []))
        if self.form != "nf4 double":
            return self.code_bytes, 4 * self.num_magnitudes
        return self.code_bytes, self.num_magnitudes, 4 * -(-self.num_magnitudes // _DOUBLE_ELEMENTS), 4


def quantise(matrix: torch.Tensor, form: QuantisedForm) -> torch.Tensor:
    """The bytes of a matrix, or of a stack, that is in the model's dtype, on the CPU."""
    values = matrix.reshape(-1)
    return quantise_from(lambda start, stop: values[start:stop], QuantisedLayout.of(form, matrix.shape))


def quantise_from(read: Callable[[int, int], torch.Tensor], layout: QuantisedLayout) -> torch.Tensor:
    """The bytes of a matrix, or of a stack, whose elements `read` gives, from one to another, in the model's dtype."""
    data = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    codes, *others = layout.parts(data)
    form, number = layout.form, layout.num_elements
    if form == "int8":
        _quantise_rows(read, codes.view(torch.int8).view(layout.rows, layout.columns), others[0].view(torch.float32))
        return data
    magnitudes = torch.empty(layout.num_magnitudes)
    for start in range(0, number, _CODED_ELEMENTS):
        part = read(start, min(start + _CODED_ELEMENTS, number)).float()
        of_groups = magnitudes[start // _NF4_ELEMENTS :][: -(-len(part) // _NF4_ELEMENTS)]
        _native.quantise_nf4(part, codes[start // 2 :][: -(-len(part) // 2)], of_groups)
    if form == "nf4":
        others[0].view(torch.float32).copy_(magnitudes)
        return data
    mean = _mean(magnitudes)
    others[2].view(torch.float32).copy_(mean)
    _quantise_magnitudes(magnitudes - mean, others[0], others[1].view(torch.float32))
    return data


def dequantised(data: torch.Tensor, layout: QuantisedLayout, dtype: torch.dtype) -> torch.Tensor:
    """The matrix or stack of these bytes, in `dtype`: one operator, whatever it is made of."""
    numbers = layout.rows, layout.columns, layout.num_stacked, layout.num_groups
    found: torch.Tensor = torch.ops.ratel.dequantise(data, layout.form, *numbers, layout.has_order, dtype)
    return found


def _mean(magnitudes: torch.Tensor) -> torch.Tensor:
    """Their mean as one thread sums it: with others the last bit could be another."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return magnitudes.mean()
    finally:
        torch.set_num_threads(number)


def _quantise_magnitudes(values: torch.Tensor, codes: torch.Tensor, magnitudes: torch.Tensor) -> None:
    """8-bit codes of values in groups of 256, and the magnitude of each group.

    The kernel on the CPU looks the code up by place: of 65,536 from -1 to 1, each has the code that is nearest to it.
    A group of zeros has the code zero.
    """
    padded = torch.zeros(len(magnitudes), _DOUBLE_ELEMENTS)
    padded.view(-1)[: len(values)] = values
    magnitudes.copy_(padded.abs().amax(dim=1))
    scaled = (padded * (1.0 / magnitudes).unsqueeze(1)).clamp_(-1, 1) + 1.0
    # One rounding, as the fused multiply and add has.
    places = (scaled.double() * (0.5 * (_TABLE_PLACES - 1)) + 0.5).float().nan_to_num_(0.0).int()
    found = _nearest_codes()[places.view(-1)].view_as(places)
    found[magnitudes == 0] = 0
    codes.copy_(found.view(-1)[: len(values)])


def _quantise_rows(read: Callable[[int, int], torch.Tensor], codes: torch.Tensor, magnitudes: torch.Tensor) -> None:
    """8-bit codes of a matrix, and the magnitude of each row. It is rounded to fp16 first, as bitsandbytes does."""
    number, columns = codes.shape
    rows = max(1, EXPANDED_ELEMENTS // columns)
    for start in range(0, number, rows):
        stop = min(start + rows, number)
        values = read(start * columns, stop * columns).view(-1, columns).to(torch.float16)
        found = values.abs().amax(dim=1).float()
        magnitudes[start : start + rows] = found
        codes[start : start + rows] = torch.round(values * (127.0 / found.unsqueeze(1))).to(torch.int8)


@lru_cache(maxsize=1)
def _code_values() -> torch.Tensor:
    """What the 8-bit codes of magnitudes stand for, in ascending order: fp32 `[256]`.

    Zero, one, and for each of seven powers of ten the middles of equal parts of 0.1 to 1, with both signs: as many as
    the bits that the exponent leaves can tell apart (8-bit approximations, arXiv:1511.04561, section 2.1).
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1)
        middles = (edges[:-1] + edges[1:]) / 2.0
        scale = 10 ** (exponent - 6)
        values += (scale * middles).tolist() + (-scale * middles).tolist()
    return torch.tensor(sorted(values))


@lru_cache(maxsize=1)
def _nearest_codes() -> torch.Tensor:
    """The code that is nearest to each of the places from -1 to 1: uint8 `[65536]`."""
    values = _code_values().double()
    places = -1 + torch.arange(_TABLE_PLACES).double() * (2 / (_TABLE_PLACES - 1))
    return torch.bucketize(places, (values[:-1] + values[1:]) / 2).to(torch.uint8)


@lru_cache(maxsize=8)
def _pairs(device: torch.device) -> torch.Tensor:
    """The two elements that each byte of NF4 stands for: fp32 `[256, 2]`."""
    table = torch.tensor(_NF4_VALUES)
    return torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=1).to(device)


@lru_cache(maxsize=8)
def _e2m1_pairs(device: torch.device) -> torch.Tensor:
    """The two elements that each byte of MXFP4 stands for: fp32 `[256, 2]`."""
    table = torch.tensor(E2M1_VALUES)
    return torch.stack([table.repeat(16), table.repeat_interleave(16)], dim=1).to(device)


@lru_cache(maxsize=8)
def _code_values_on(device: torch.device) -> torch.Tensor:
    return _code_values().to(device)


def _dequantise(
    data: torch.Tensor,
    form: StoredForm,
    rows: int,
    columns: int,
    num_stacked: int,
    num_groups: int,
    has_order: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The kernel of the operator, for the CPU and a GPU."""
    layout = QuantisedLayout(form, rows, columns, num_stacked, num_groups, has_order)
    if form == "mxfp4":
        return _transposed_experts(data.contiguous(), layout, dtype)
    if form == "int4":
        return _of_groups(data.contiguous(), layout, dtype)
    return _expanded(data, layout, dtype).view(layout.shape)


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """fp32 of biased exponents (E8M0)."""
    return torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents.view(torch.uint8).int() - 127)


def _transposed_experts(data: torch.Tensor, layout: QuantisedLayout, dtype: torch.dtype) -> torch.Tensor:
    """A stack in MXFP4: products of values and powers of two in fp32, rounded once."""
    found = torch.empty(layout.shape, dtype=dtype, device=data.device)
    codes, exponents = (part.view(layout.num_stacked, -1) for part in layout.parts(data))
    for number in range(layout.num_stacked):
        values = _e2m1_pairs(data.device).index_select(0, codes[number].int()).view(-1, _MXFP4_ELEMENTS)
        found[number].copy_(values.mul_(power_of_two(exponents[number]).unsqueeze(1)).view(-1, layout.columns).T)
    return found


def _of_groups(data: torch.Tensor, layout: QuantisedLayout, dtype: torch.dtype) -> torch.Tensor:
    """A matrix of int4: `(code - zero point) * scale` in fp32, rounded to the scales' fp16 and then to `dtype`."""
    rows, columns, number = layout.rows, layout.columns, layout.num_groups
    codes, scales, zeros, *order = layout.parts(data)
    codes, zeros = codes.view(rows, -1), zeros.view(rows, number)
    scales = scales.view(torch.float16).view(rows, number)
    of_columns = order[0].view(torch.int16).int() if order else None
    matrix = torch.empty(rows, columns, dtype=dtype, device=data.device)
    at_once = max(1, EXPANDED_ELEMENTS // columns)
    for start in range(0, rows, at_once):
        packed, of_rows = codes[start : start + at_once], slice(start, start + at_once)
        values = torch.stack([packed & 15, packed >> 4], dim=2).view(len(packed), columns).to(torch.int16)
        zero, scale = zeros[of_rows].to(torch.int16), scales[of_rows].float()
        if of_columns is None:
            values, zero, scale = values.view(len(packed), number, -1), zero.unsqueeze(2), scale.unsqueeze(2)
        else:
            zero, scale = zero.index_select(1, of_columns), scale.index_select(1, of_columns)
        found = (values - zero).float().mul_(scale).to(torch.float16)
        matrix[of_rows] = found.view(len(packed), columns)
    return matrix


def _expanded(data: torch.Tensor, layout: QuantisedLayout, dtype: torch.dtype) -> torch.Tensor:
    """All rows of other forms: `[rows, columns]`."""
    form, rows, columns = layout.form, layout.rows, layout.columns
    codes, *others = layout.parts(data.contiguous())
    if form == "int8":
        # As bitsandbytes has it in training: the product of code and scale in fp32, rounded once.
        scales = others[0].view(torch.float32).unsqueeze(1).mul(1.0 / 127.0)
        matrix = torch.empty(rows, columns, dtype=dtype, device=data.device)
        number, of_rows = max(1, EXPANDED_ELEMENTS // columns), codes.view(torch.int8).view(rows, columns)
        for start in range(0, rows, number):
            stop = start + number
            torch.mul(of_rows[start:stop], scales[start:stop], out=matrix[start:stop])
        return matrix
    magnitudes = others[0].view(torch.float32) if form == "nf4" else _magnitudes(*others)
    fused = _fused_kernel(data.device)
    if fused is not None:
        found: torch.Tensor = fused(codes.view(-1, 1), magnitudes, _NF4_ELEMENTS, "nf4", (rows, columns), dtype)
        return found
    matrix = torch.empty(rows, columns, dtype=dtype, device=data.device)
    flat = matrix.view(-1)
    for start in range(0, len(flat), EXPANDED_ELEMENTS):
        out = flat[start : start + EXPANDED_ELEMENTS]
        packed = codes[start // 2 : -(-(start + len(out)) // 2)]
        scales = magnitudes[start // _NF4_ELEMENTS :][: -(-len(out) // _NF4_ELEMENTS)]
        values = _pairs(data.device).index_select(0, packed.int()).view(-1)
        out.copy_(_scaled(values, scales, _NF4_ELEMENTS)[: len(out)])
    return matrix


@lru_cache(maxsize=8)
def _fused_kernel(device: torch.device) -> Callable[..., torch.Tensor] | None:
    """The kernel of bitsandbytes for an NVIDIA GPU, which moves a sixth of the bytes; None on other devices, or where
    that package is not installed."""
    if device.type != "cuda" or find_spec("bitsandbytes") is None:
        return None
    with no_fetched_code():
        import bitsandbytes  # noqa: F401  (it registers its operators)

    kernel: Callable[..., torch.Tensor] = torch.ops.bitsandbytes.dequantize_4bit.default
    return kernel


def _magnitudes(codes: torch.Tensor, magnitudes: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """The magnitudes of elements, in fp32, from what double quantisation has of them."""
    values = _code_values_on(codes.device).index_select(0, codes.int())
    return _scaled(values, magnitudes.view(torch.float32), _DOUBLE_ELEMENTS).add_(mean.view(torch.float32))


def _scaled(values: torch.Tensor, scales: torch.Tensor, number: int) -> torch.Tensor:
    """The values, each `number` of which are multiplied by one scale, in place."""
    num_whole = len(values) - len(values) % number
    values[:num_whole].view(-1, number).mul_(scales[: num_whole // number].unsqueeze(1))
    values[num_whole:].mul_(scales[-1:])
    return values


def _shape_alone(
    data: torch.Tensor,
    form: StoredForm,
    rows: int,
    columns: int,
    num_stacked: int,
    num_groups: int,
    has_order: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    layout = QuantisedLayout(form, rows, columns, num_stacked, num_groups, has_order)
    return data.new_empty(layout.shape, dtype=dtype)


_LIBRARY = torch.library.Library("ratel", "DEF")
_LIBRARY.define(
    "dequantise(Tensor data, str form, int rows, int columns, int num_stacked, int num_groups, bool has_order,"
    " ScalarType dtype) -> Tensor"
)
_LIBRARY.impl("dequantise", _dequantise, "CompositeExplicitAutograd")
torch.library.register_fake("ratel::dequantise", _shape_alone, lib=_LIBRARY)
