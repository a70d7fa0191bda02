"""Tensors of which a checkpoint has codes: how the codes of each kind become floating-point numbers.

Invariants: (1) a value is the product of code and scale, computed in fp32 and rounded once to the dtype that the
format's own library computes in, then to the model's; (2) memory is one part of a tensor: some rows, or one matrix
where the files have it transposed, and the scales.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ratel_cli.model.files.quantised import E2M1_VALUES, QuantisedLayout, power_of_two
from ratel_cli.model.files.shards import ShardReader, TensorEntry
from ratel_cli.model.values.finite import rounded
from ratel_cli.units import align_up

_INT4_BITS = 4
_MOST_GROUPS = 1 << 15
"""Whose numbers 16 bits have."""
_OTHER_BASE = "set dtype: bfloat16 if it is float16; else use the model from before quantisation"
PART_ELEMENTS = 1 << 20
"""Elements that are decoded at once, if the files have them in their order."""


@dataclass(kw_only=True)
class CodedTensor(ABC):
    """A tensor of which the files have codes. `entry` is what it is as floating-point numbers."""

    entry: TensorEntry
    files: Mapping[str, ShardReader]
    """The file of each tensor."""
    sources: tuple[str, ...]
    """All tensors that it is made of, the codes first."""
    part_elements: int
    """Elements of each part but the last."""
    _last: tuple[int, torch.Tensor] | None = field(default=None, init=False)
    _kept: dict[str, torch.Tensor] = field(default_factory=dict, init=False)

    @abstractmethod
    def part(self, number: int) -> torch.Tensor:
        """The elements of a part, in any shape, not yet in the dtype of `entry`."""

    @property
    def layout(self) -> QuantisedLayout | None:
        """The layout in which the matrix may stay as small as it is in the files, where no key asks for another one;
        None if there is none."""
        return None

    def layout_bytes(self, layout: QuantisedLayout) -> torch.Tensor | None:  # noqa: ARG002
        """The bytes of this matrix in a layout, if the files have the same codes; None if they do not."""
        return None

    def forget(self) -> None:
        """Give back the memory of the part that was read last, and of the scales."""
        self._last = None
        self._kept.clear()

    def kept(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `make` returns, made once until it is forgotten."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def read_into(self, start: int, out: torch.Tensor) -> None:
        """Fill `out` with elements from `start` on. The part that was read last is kept."""
        position = 0
        while position < len(out):
            number, offset = divmod(start + position, self.part_elements)
            if self._last is None or self._last[0] != number:
                self._last = None  # before the next one is made
                values = self.part(number).reshape(-1)
                self._last = number, rounded(self.entry.name, values, self.entry.dtype, hint=_OTHER_BASE)
            values = self._last[1][offset : offset + len(out) - position]
            out[position : position + len(values)] = values
            position += len(values)

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor of the files."""
        return self.files[name].read_whole(name)

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Rows of a tensor of the files, all but whose last dimension are rows: `[last - first, columns]`."""
        columns = self.files[name].tensors[name].shape[-1]
        return self.files[name].read(name, first * columns, last * columns).view(last - first, columns)


@dataclass(kw_only=True)
class ScaledTensor(CodedTensor):
    """Codes in rows, each block of which has a scale: `(code - zero point) * scale`.

    `[..., rows, columns]`: what is before the last two dimensions are matrices, one after another.
    """

    decode: Callable[[torch.Tensor, int], torch.Tensor]
    """The codes of rows as fp32 `[rows, columns]`, from what the files have of them and the number of columns."""
    scales: Callable[[], torch.Tensor]
    """fp32 `[matrices, rows of blocks, columns of blocks]`."""
    block: tuple[int, int]
    zeros: Callable[[], torch.Tensor] | None = None
    """Zero points in the shape of `scales`; None: there are none."""
    groups: str | None = None
    """The tensor with the column of blocks that each column belongs to; None: in order."""
    computed_in: torch.dtype = torch.float32
    """The dtype that the products are rounded to first."""

    def part(self, number: int) -> torch.Tensor:
        """See CodedTensor."""
        *_, rows, columns = self.entry.shape
        num_rows = self.part_elements // columns
        first = number * num_rows
        last = min(first + num_rows, self.entry.num_elements // columns)
        values = self.decode(self.rows(self.sources[0], first, last), columns)
        numbers = torch.arange(first, last)
        of_rows = numbers // rows, numbers % rows // self.block[0]
        in_order = torch.arange(columns) // self.block[1]
        of_columns = in_order if self.groups is None else self.whole(self.groups).long()
        if self.zeros is not None:
            values -= self.kept("zeros", self.zeros)[of_rows].index_select(1, of_columns)
        values *= self.kept("scales", self.scales)[of_rows].index_select(1, of_columns)
        return values.to(self.computed_in)


@dataclass(kw_only=True)
class Int8Tensor(ScaledTensor):
    """bitsandbytes' int8: the largest magnitude of each row stands for 127."""

    def layout_bytes(self, layout: QuantisedLayout) -> torch.Tensor | None:
        """See CodedTensor."""
        if layout.form != "int8" or self.entry.shape != (layout.rows, layout.columns):
            return None
        return _joined(layout, [self.whole(name) for name in self.sources])


@dataclass(kw_only=True)
class ExpertsTensor(CodedTensor):
    """Experts in MXFP4, transposed: `[experts, outputs, groups, 16]` bytes become `[experts, inputs, outputs]`."""

    def layout_bytes(self, layout: QuantisedLayout) -> torch.Tensor | None:
        """See CodedTensor."""
        if layout.form != "mxfp4" or self.entry.shape != layout.shape:
            return None
        return _joined(layout, [self.whole(name) for name in self.sources])

    def part(self, number: int) -> torch.Tensor:
        """See CodedTensor. A part is an expert."""
        _, outputs, groups, num_bytes = self.files[self.sources[0]].tensors[self.sources[0]].shape
        of_expert = outputs * groups
        codes = self.files[self.sources[0]].read(
            self.sources[0], number * of_expert * num_bytes, (number + 1) * of_expert * num_bytes
        )
        exponents = self.files[self.sources[1]].read(self.sources[1], number * of_expert, (number + 1) * of_expert)
        values = fp4_codes(codes.view(of_expert, num_bytes), 2 * num_bytes)
        values *= power_of_two(exponents).unsqueeze(1)
        return values.view(outputs, -1).T


@dataclass(kw_only=True)
class BitsandbytesTensor(CodedTensor):
    """NF4 or FP4: two elements in a byte, the first one in its upper half, and the magnitude of each block.

    With double quantisation (`nested`) these are codes, too: what they stand for is scaled, and `offset` added.
    """

    block: int
    magnitudes: str
    """The tensor of magnitudes, or of their codes."""
    values: str
    """The tensor of what the 16 codes stand for."""
    nested: tuple[str, str] | None
    """The tensors of the scales of magnitudes, and of what their 256 codes stand for."""
    nested_block: int
    offset: float
    is_nf4: bool
    computed_in: torch.dtype

    def part(self, number: int) -> torch.Tensor:
        """See CodedTensor."""
        start, stop = number * self.part_elements, min((number + 1) * self.part_elements, self.entry.num_elements)
        item = self.files[self.sources[0]].tensors[self.sources[0]].dtype.itemsize
        first, last = start // 2 // item, align_up(stop, 2 * item) // 2 // item
        packed = self.files[self.sources[0]].read(self.sources[0], first, last).view(torch.uint8)
        codes = torch.stack([packed >> 4, packed & 15], dim=1).view(-1)[: stop - start]
        values = self.whole(self.values).float()[codes.int()]
        magnitudes = self.kept("magnitudes", self._magnitudes)[start // self.block : -(-stop // self.block)]
        return (values * magnitudes.repeat_interleave(self.block)[: stop - start]).to(self.computed_in)

    def layout_bytes(self, layout: QuantisedLayout) -> torch.Tensor | None:
        """See CodedTensor."""
        form, blocks = ("nf4", (64, 0)) if self.nested is None else ("nf4 double", (64, 256))
        is_same = self.is_nf4 and layout.form == form and (self.block, self.nested_block) == blocks
        if not is_same or self.entry.shape != (layout.rows, layout.columns):
            return None
        parts = [self.whole(self.sources[0]), self.whole(self.magnitudes)]
        if self.nested is not None:
            parts += [self.whole(self.nested[0]), torch.tensor([self.offset], dtype=torch.float32)]
        return _joined(layout, parts)

    def _magnitudes(self) -> torch.Tensor:
        found = self.whole(self.magnitudes)
        if self.nested is None:
            return found.float()
        scales, values = map(self.whole, self.nested)
        of_codes = values[found.int()]
        return of_codes * scales.repeat_interleave(self.nested_block)[: len(of_codes)] + self.offset


@dataclass(kw_only=True)
class TransposedTensor(CodedTensor):
    """GPTQ and AWQ: a matrix `[inputs, outputs]` in words of 32 bits, a scale and a zero point for groups of inputs."""

    unpack_codes: Callable[[torch.Tensor], torch.Tensor]
    """Codes `[inputs, outputs]`."""
    unpack_zeros: Callable[[torch.Tensor], torch.Tensor]
    """Zero points `[groups, outputs]`."""
    bits: int
    """Bits of a code."""

    @property
    def layout(self) -> QuantisedLayout | None:
        """See CodedTensor."""
        scales = self.files[self.sources[2]].tensors[self.sources[2]]
        if self.bits != _INT4_BITS or scales.dtype != torch.float16 or scales.shape[0] > _MOST_GROUPS:
            return None
        rows, columns = self.entry.shape
        return QuantisedLayout("int4", rows, columns, num_groups=scales.shape[0], has_order=len(self.sources) > 3)

    def layout_bytes(self, layout: QuantisedLayout) -> torch.Tensor | None:
        """See CodedTensor."""
        if layout != self.layout:
            return None
        words, zero_words, scales = (self.whole(name) for name in self.sources[:3])
        codes, zeros = self.unpack_codes(words).T.to(torch.uint8), self.unpack_zeros(zero_words).T.to(torch.uint8)
        parts = [codes[:, ::2] | codes[:, 1::2] << 4, scales.T, zeros[: layout.rows]]
        if layout.has_order:
            parts.append(self.whole(self.sources[3]).to(torch.int16))
        return _joined(layout, parts)

    def part(self, number: int) -> torch.Tensor:  # noqa: ARG002
        """See CodedTensor. A part is the matrix."""
        words, zero_words, scales = (self.whole(name) for name in self.sources[:3])
        codes, zeros = self.unpack_codes(words), self.unpack_zeros(zero_words)
        num_inputs = len(codes)
        if len(self.sources) > 3:
            groups = self.whole(self.sources[3]).long()
        else:
            groups = torch.arange(num_inputs) // (num_inputs // len(scales))
        matrix = torch.empty(codes.shape[1], num_inputs, dtype=scales.dtype)
        step = max(1, PART_ELEMENTS // codes.shape[1])
        for start in range(0, num_inputs, step):
            of_inputs = groups[start : start + step]
            values = (codes[start : start + step] - zeros[of_inputs]).float() * scales.float()[of_inputs]
            matrix[:, start : start + step] = values.T
        return matrix


@dataclass(frozen=True, slots=True)
class WordCodes:
    """Codes of 2, 4 or 8 bits in words of 32."""

    bits: int
    order: tuple[int, ...] = ()
    """Which code of a word each column has; none: in their order."""

    @property
    def number(self) -> int:
        """Codes in a word."""
        return 32 // self.bits

    def down(self, words: torch.Tensor) -> torch.Tensor:
        """`[words, columns]` to `[codes, columns]`."""
        return self._codes(words.unsqueeze(1), torch.arange(0, 32, self.bits).view(1, -1, 1)).reshape(
            -1, words.shape[1]
        )

    def across(self, words: torch.Tensor, is_less_one: bool = False) -> torch.Tensor:
        """`[rows, words]` to `[rows, codes]`. `is_less_one`: the files have each of them less one."""
        shifts = torch.arange(0, 32, self.bits)[list(self.order) or slice(None)]
        codes = self._codes(words.unsqueeze(2), shifts.view(1, 1, -1)).reshape(len(words), -1)
        return (codes + 1) & self._mask if is_less_one else codes

    @property
    def _mask(self) -> int:
        return (1 << self.bits) - 1

    def _codes(self, words: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
        return ((words >> shifts.int()) & self._mask).to(torch.int16)


@dataclass(frozen=True, slots=True)
class DenseCodes:
    """Codes of 1 to 8 bits, packed without gaps into words of 32, as compressed-tensors has them: signed, with an
    offset."""

    bits: int

    def __call__(self, words: torch.Tensor, columns: int) -> torch.Tensor:
        """`[rows, words]` to fp32 `[rows, columns]`."""
        starts = torch.arange(columns) * self.bits
        # Two words are enough for any code; behind the last one there is nothing.
        wide = torch.nn.functional.pad(words.long() & 0xFFFFFFFF, (0, 1))
        first = starts // 32
        joined = wide[:, first] >> (starts % 32) | wide[:, first + 1] << (32 - starts % 32)
        return ((joined & ((1 << self.bits) - 1)) - (1 << (self.bits - 1))).float()


def plain_codes(codes: torch.Tensor, columns: int) -> torch.Tensor:  # noqa: ARG001
    return codes.float()


def fp4_codes(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Two E2M1 codes of each byte, the first one in its lower half: fp32 `[rows, columns]`."""
    as_bytes = packed.view(torch.uint8)
    codes = torch.stack([as_bytes & 15, as_bytes >> 4], dim=-1).view(len(packed), columns)
    return torch.tensor(E2M1_VALUES)[codes.int()]


def _joined(layout: QuantisedLayout, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of a layout from its parts."""
    data = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for target, part in zip(layout.parts(data), parts, strict=True):
        target.copy_(part.contiguous().view(-1).view(torch.uint8)[: len(target)])
    return data
