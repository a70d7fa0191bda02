"""The formats of quantised checkpoints: which tensors belong together, by their names, shapes and dtypes.

    fp8, fbgemm_fp8      codes in 8 bit, a scale for each block, row or matrix (DeepSeek-V3, arXiv:2412.19437, 3.3)
    compressed-tensors   codes of 1 to 8 bits or in fp8, a scale for each group, channel or matrix; NVFP4 and MXFP4
    mxfp4                experts in 4 bit, an exponent for each 32 elements (OCP Microscaling Formats 1.0)
    bitsandbytes         NF4, FP4 and int8, as `quantised.py` has them
    gptq, awq            codes of 2, 4 or 8 bits of a transposed matrix, scales and zero points for each group of inputs

Invariant: what does not fit together raises BadInput here, before anything is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from ratel_cli.errors import BadInput, excerpt
from ratel_cli.model.files.coded_tensors import (
    PART_ELEMENTS,
    BitsandbytesTensor,
    CodedTensor,
    DenseCodes,
    ExpertsTensor,
    Int8Tensor,
    ScaledTensor,
    TransposedTensor,
    WordCodes,
    fp4_codes,
    plain_codes,
)
from ratel_cli.model.files.quantised import power_of_two
from ratel_cli.model.files.shards import ShardReader, TensorEntry

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which of a word's eight codes belongs to each column."""
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALE_NAMES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
"""Names of the scales beside a `weight`."""
_CODES = ("weight", "weight_packed")
Decode = Callable[[torch.Tensor, int], torch.Tensor]
"""Makes fp32 `[rows, columns]` of rows of codes and the number of columns."""


@dataclass(frozen=True, slots=True)
class FormatFiles:
    """What the finder of a format gets."""

    files: Mapping[str, ShardReader]
    options: Mapping[str, object]
    dtype: torch.dtype

    def entry(self, name: str) -> TensorEntry:
        """The entry of a tensor, which must be there."""
        if name not in self.files:
            raise BadInput(
                f"tensor {excerpt(name)} is missing, which belongs to a quantised one",
                "check that config.json and the weights are of the same model, and that no file is missing",
            )
        return self.files[name].tensors[name]

    def optional(self, name: str) -> TensorEntry | None:
        """The entry of a tensor; None if no file has it."""
        return self.files[name].tensors[name] if name in self.files else None

    def read(self, entry: TensorEntry) -> torch.Tensor:
        """A whole tensor of the files."""
        return self.files[entry.name].read_whole(entry.name)

    def result(self, codes: TensorEntry, name: str, shape: Sequence[int]) -> TensorEntry:
        """What a tensor is as floating-point numbers."""
        return TensorEntry(name=name, dtype=self.dtype, shape=tuple(shape), offset=codes.offset)

    def unread(self, fact: str) -> BadInput:
        """The error about settings that Ratel does not read."""
        return BadInput(f"config.json: quantization_config: {fact}", "use the model from before quantisation")

    def reject(self, entry: TensorEntry, fact: str) -> BadInput:
        """The error about a tensor that does not fit."""
        return BadInput(
            f"{self.files[entry.name].path}: tensor {excerpt(entry.name)} {fact}",
            "check that config.json and the weights are of the same model",
        )


def _find_scaled(found: FormatFiles) -> Iterator[CodedTensor]:
    """fp8 and compressed-tensors: a `weight` or `weight_packed` with scales beside it; experts with `_scale_inv`."""
    for name, file in found.files.items():
        codes = file.tensors[name]
        stem, _, last = name.rpartition(".")
        scale = None
        if last in _CODES:
            scale = next((each for each in _SCALE_NAMES if f"{stem}.{each}" in found.files), None)
            scale = None if scale is None else f"{stem}.{scale}"
        elif f"{name}_scale_inv" in found.files:
            scale = f"{name}_scale_inv"
        if scale is None or (last == "weight" and codes.dtype.itemsize > 1):
            continue
        target = f"{stem}.weight" if last in _CODES else name
        yield _scaled(found, codes, found.entry(scale), target)


def _scaled(found: FormatFiles, codes: TensorEntry, scale: TensorEntry, target: str) -> CodedTensor:
    stem = target.rpartition(".")[0]
    others = [f"{stem}.{each}" for each in ("weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale")]
    shape_name, zero_name, groups_name, global_name = others
    decode, columns = _decoder(found, codes, shape_name)
    entry = found.result(codes, target, (*codes.shape[:-1], columns))
    block = _block_of(found, entry, scale)
    grid = _grid(entry, block)
    if scale.num_elements not in (1, math.prod(grid)):
        raise found.reject(scale, f"has shape {scale.shape}, which does not fit the matrix of shape {entry.shape}")
    groups, whole = found.optional(groups_name), found.optional(global_name)
    if groups is not None:
        _check_groups(found, groups, columns, range(-1, grid[2]))
    if whole is not None and whole.num_elements != 1:
        raise found.reject(whole, f"has shape {whole.shape}; it must be one number")
    return ScaledTensor(
        entry=entry,
        files=found.files,
        sources=(codes.name, scale.name, *(each for each in others if each in found.files)),
        part_elements=max(1, PART_ELEMENTS // columns) * columns,
        decode=decode,
        scales=lambda: _on_grid(_scale_values(found, scale, whole), grid),
        block=block,
        zeros=_zeros(found, entry, grid, found.optional(zero_name), decode),
        # -1 says that columns are in no groups of their own.
        groups=groups_name if groups is not None and bool((found.read(groups) >= 0).all()) else None,
        computed_in=_computed_in(found, codes, scale),
    )


def _decoder(found: FormatFiles, codes: TensorEntry, shape_name: str) -> tuple[Decode, int]:
    """What makes numbers of rows of codes, and how many numbers a row has."""
    columns = codes.shape[-1] if len(codes.shape) > 1 else 0
    if not codes.num_elements or not columns:
        raise found.reject(codes, f"has shape {codes.shape}; quantised weights are matrices")
    if codes.dtype == torch.int32:
        shape = _shape_of(found, codes, shape_name)
        return DenseCodes(_bits_of(found, codes, shape[-1])), shape[-1]
    if codes.dtype == torch.uint8 or (codes.dtype == torch.int8 and not _is_of_compressed_tensors(found)):
        return fp4_codes, 2 * columns
    if codes.dtype not in (torch.int8, *_FLOAT8):
        raise found.reject(codes, f"has dtype {codes.dtype}; the codes of weights have another one")
    return plain_codes, columns


def _zeros(
    found: FormatFiles, entry: TensorEntry, grid: tuple[int, int, int], zero: TensorEntry | None, decode: Decode
) -> Callable[[], torch.Tensor] | None:
    """What reads the zero points of a matrix; None if it has none."""
    if zero is None:
        return None
    rows, dense = entry.shape[-2], decode if isinstance(decode, DenseCodes) and zero.dtype == torch.int32 else None
    number = math.prod(grid) if dense is None else -(-rows * dense.bits // 32) * grid[2]
    if zero.num_elements not in (1, number):
        raise found.reject(zero, f"has shape {zero.shape}, which does not fit the matrix of shape {entry.shape}")

    def read() -> torch.Tensor:
        values = found.read(zero)
        if dense is not None:  # packed along the rows
            values = dense(values.T.contiguous(), rows).T
        return _on_grid(values.float(), grid)

    return read


def _find_experts(found: FormatFiles) -> Iterator[CodedTensor]:
    """mxfp4: `NAME_blocks` and `NAME_scales`."""
    for name, file in found.files.items():
        if not name.endswith("_blocks"):
            continue
        codes, target = file.tensors[name], name.removesuffix("_blocks")
        scales = found.entry(f"{target}_scales")
        if len(codes.shape) != 4 or codes.dtype != torch.uint8 or not codes.num_elements:
            raise found.reject(
                codes, f"has dtype {codes.dtype} and shape {codes.shape}; it must be bytes of 4 dimensions"
            )
        if scales.shape != codes.shape[:-1] or scales.dtype != torch.uint8:
            raise found.reject(scales, f"has shape {scales.shape}; it must be bytes {codes.shape[:-1]}")
        experts, outputs, groups, num_bytes = codes.shape
        inputs = groups * num_bytes * 2
        yield ExpertsTensor(
            entry=found.result(codes, target, (experts, inputs, outputs)),
            files=found.files,
            sources=(name, scales.name),
            part_elements=inputs * outputs,
        )


def _find_bitsandbytes(found: FormatFiles) -> Iterator[CodedTensor]:
    """bitsandbytes: 4 bit with a `quant_state` beside the weight, 8 bit with `SCB`."""
    for name, file in found.files.items():
        codes, stem = file.tensors[name], name.removesuffix("weight")
        states = {kind: f"{name}.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")}
        for kind in (each for each, state in states.items() if state in found.files):
            yield _four_bit(found, codes, states[kind], is_nf4=kind == "nf4")
        if name.endswith(".weight") and f"{stem}SCB" in found.files:
            scale = found.entry(f"{stem}SCB")
            if codes.dtype != torch.int8 or len(codes.shape) != 2 or scale.num_elements != codes.shape[0]:
                raise found.reject(codes, f"has dtype {codes.dtype} and shape {codes.shape}, which do not fit its SCB")
            columns = codes.shape[1]
            yield Int8Tensor(
                entry=found.result(codes, name, codes.shape),
                files=found.files,
                sources=(name, scale.name),
                part_elements=max(1, PART_ELEMENTS // columns) * columns,
                decode=plain_codes,
                scales=partial(_row_scales, found.files[scale.name], scale.name),
                block=(1, columns),
            )


def _row_scales(file: ShardReader, name: str) -> torch.Tensor:
    return file.read_whole(name).float().view(1, -1, 1).mul(1.0 / 127.0)


def _four_bit(found: FormatFiles, codes: TensorEntry, state: str, *, is_nf4: bool) -> CodedTensor:
    try:
        options = json.loads(bytes(found.files[state].read_whole(state).view(torch.uint8).tolist()).decode("utf-8"))
        shape, block = tuple(int(each) for each in options["shape"]), int(options["blocksize"])
        computed_in = getattr(torch, options["dtype"])
        nested_block, offset = int(options.get("nested_blocksize", 0)), float(options.get("nested_offset", 0.0))
        is_valid = isinstance(computed_in, torch.dtype) and block > 0 and min(shape) > 0 and block % 2 == 0
        is_nested = f"{codes.name}.nested_absmax" in found.files
        is_valid &= nested_block > 0 if is_nested else nested_block == 0
    except (ValueError, KeyError, TypeError, AttributeError):
        is_valid = False
    if not is_valid:
        raise found.reject(found.entry(state), "is not the state of a quantised matrix")
    num_elements = math.prod(shape)
    name = codes.name
    parts = ["absmax", "quant_map", *(["nested_absmax", "nested_quant_map"] if is_nested else [])]
    entries = [found.entry(f"{name}.{part}") for part in parts]
    num_magnitudes = -(-num_elements // block)
    wanted = [num_magnitudes, 16, -(-num_magnitudes // max(1, nested_block)), 256]
    for entry, number in zip(entries, wanted, strict=False):
        if entry.num_elements != number:
            raise found.reject(entry, f"has {entry.num_elements} elements; the matrix of shape {shape} needs {number}")
    if codes.num_bytes < -(-num_elements // 2):
        raise found.reject(codes, f"has {codes.num_bytes} bytes; the matrix of shape {shape} needs more")
    return BitsandbytesTensor(
        entry=found.result(codes, name, shape),
        files=found.files,
        sources=(name, *(entry.name for entry in entries), state),
        part_elements=max(1, PART_ELEMENTS // (8 * block)) * 8 * block,
        block=block,
        magnitudes=entries[0].name,
        values=entries[1].name,
        nested=(entries[2].name, entries[3].name) if is_nested else None,
        is_nf4=is_nf4,
        nested_block=nested_block,
        offset=offset,
        computed_in=computed_in,
    )


def _find_gptq(found: FormatFiles) -> Iterator[CodedTensor]:
    """GPTQ: `qweight`, `qzeros`, `scales`, `g_idx`. Its first version has zero points less one."""
    bits = found.options.get("bits")
    if bits not in (2, 4, 8):
        raise found.unread(f"bits is {excerpt(str(bits))}; Ratel reads 2, 4 and 8")
    is_less_one = found.options.get("checkpoint_format") != "gptq_v2"
    word = WordCodes(int(bits))
    for codes, parts in _transposed(found, ("qzeros", "scales", "g_idx")):
        inputs = codes.shape[0] * word.number
        outputs = codes.shape[1]
        unpack_zeros = partial(word.across, is_less_one=is_less_one)
        num_zero_words = -(-outputs // word.number)
        yield _transposed_tensor(found, codes, parts, (outputs, inputs), num_zero_words, word, word.down, unpack_zeros)


def _find_awq(found: FormatFiles) -> Iterator[CodedTensor]:
    """AWQ: `qweight`, `qzeros`, `scales`, with the columns of a word in an order of their own."""
    version, bits = str(found.options.get("version") or "gemm").lower(), found.options.get("bits", 4)
    if not version.endswith("gemm") or bits != 4:
        raise found.unread(f"AWQ's version {excerpt(version)} in {bits} bit is not read")
    word = WordCodes(4, _AWQ_ORDER)
    for codes, parts in _transposed(found, ("qzeros", "scales")):
        shape = (codes.shape[1] * word.number, codes.shape[0])
        yield _transposed_tensor(found, codes, parts, shape, codes.shape[1], word, word.across, word.across)


def _transposed(found: FormatFiles, parts: Sequence[str]) -> Iterator[tuple[TensorEntry, list[TensorEntry]]]:
    for name, file in found.files.items():
        if name.endswith(".qweight"):
            codes, stem = file.tensors[name], name.removesuffix("qweight")
            if codes.dtype != torch.int32 or len(codes.shape) != 2 or not codes.num_elements:
                raise found.reject(
                    codes, f"has dtype {codes.dtype} and shape {codes.shape}; it must be words of 32 bits"
                )
            yield codes, [found.entry(stem + part) for part in parts]


def _transposed_tensor(
    found: FormatFiles,
    codes: TensorEntry,
    parts: Sequence[TensorEntry],
    shape: tuple[int, int],
    num_zero_words: int,
    word: WordCodes,
    unpack_codes: Callable[[torch.Tensor], torch.Tensor],
    unpack_zeros: Callable[[torch.Tensor], torch.Tensor],
) -> CodedTensor:
    zeros, scales, *groups = parts
    num_groups = scales.shape[0] if len(scales.shape) == 2 else 0
    fits = scales.shape == (num_groups, shape[0]) and num_groups
    if not fits or not scales.dtype.is_floating_point or (not groups and shape[1] % num_groups):
        raise found.reject(scales, f"has shape {scales.shape}, which does not fit the matrix of shape {shape}")
    if zeros.dtype != torch.int32 or zeros.shape != (num_groups, num_zero_words):
        raise found.reject(
            zeros, f"has shape {zeros.shape}; it must be {(num_groups, num_zero_words)}, of 32 bits each"
        )
    for each in groups:
        _check_groups(found, each, shape[1], range(num_groups))
    return TransposedTensor(
        entry=found.result(codes, codes.name.removesuffix("qweight") + "weight", shape),
        files=found.files,
        sources=(codes.name, *(each.name for each in parts)),
        part_elements=math.prod(shape),
        unpack_codes=unpack_codes,
        unpack_zeros=unpack_zeros,
        bits=word.bits,
    )


def _scale_values(found: FormatFiles, scale: TensorEntry, whole: TensorEntry | None) -> torch.Tensor:
    """Scales as fp32. Bytes are exponents; those of NVFP4 are parts of a scale of the whole matrix."""
    scales = found.read(scale)
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return power_of_two(scales)
    return scales.float() if whole is None else scales.float() / found.read(whole).float()


def _on_grid(values: torch.Tensor, grid: Sequence[int]) -> torch.Tensor:
    return values.expand(*grid) if values.numel() == 1 else values.reshape(*grid)


def _grid(entry: TensorEntry, block: tuple[int, int]) -> tuple[int, int, int]:
    """How many matrices there are, and blocks in their rows and columns."""
    *matrices, rows, columns = entry.shape
    return math.prod(matrices), -(-rows // block[0]), -(-columns // block[1])


def _block_of(found: FormatFiles, entry: TensorEntry, scale: TensorEntry) -> tuple[int, int]:
    """Rows and columns that share a scale, from the shape of the scales, or from config.json where they do not divide
    the matrix evenly."""
    rows, columns = entry.shape[-2:]
    if scale.num_elements == 1:
        return rows, columns
    shape = scale.shape if len(scale.shape) > 1 else (*scale.shape, 1)
    across, along = (max(1, each) for each in shape[-2:])
    block = _configured_block(found)
    if block is not None and (across, along) == (-(-rows // block[0]), -(-columns // block[1])):
        return block
    if rows % across or columns % along:
        raise found.reject(scale, f"has shape {scale.shape}, which does not fit the matrix of shape {entry.shape}")
    return rows // across, columns // along


def _configured_block(found: FormatFiles) -> tuple[int, int] | None:
    given = found.options.get("weight_block_size")
    for group in _groups(found):
        given = given or group.get("block_structure")
    try:
        rows, columns = (int(cast(int, each)) for each in cast(Sequence[object], given))
    except (TypeError, ValueError):
        return None
    return (rows, columns) if rows > 0 and columns > 0 else None


def _groups(found: FormatFiles) -> Iterator[Mapping[str, object]]:
    """How compressed-tensors quantises the weights of each group of layers."""
    groups = found.options.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            yield weights


def _bits_of(found: FormatFiles, codes: TensorEntry, columns: int) -> int:
    """Bits of a code in words of 32: the fewest words that hold a row tell it."""
    possible = {each.get("num_bits") for each in _groups(found)} or set(range(1, 9))
    for bits in sorted(each for each in possible if isinstance(each, int) and 1 <= each <= 8):
        if codes.shape[-1] == -(-columns * bits // 32):
            return bits
    raise found.reject(codes, f"has rows of {codes.shape[-1]} words, which do not fit {columns} columns")


def _shape_of(found: FormatFiles, codes: TensorEntry, name: str) -> tuple[int, ...]:
    """The shape that a packed matrix has, from the tensor that says so."""
    entry = found.entry(name)
    if entry.num_elements > 8 or entry.dtype not in (torch.int64, torch.int32):
        raise found.reject(entry, "is not the shape of a matrix")
    shape = tuple(found.read(entry).reshape(-1).tolist())
    if len(shape) != len(codes.shape) or shape[:-1] != codes.shape[:-1] or shape[-1] < 1:
        raise found.reject(entry, f"says {shape}, which does not fit codes of shape {codes.shape}")
    return shape


def _computed_in(found: FormatFiles, codes: TensorEntry, scale: TensorEntry) -> torch.dtype:
    """The dtype that the format's library rounds to first: compressed-tensors' bf16 for FP4, or that of the scales."""
    if not _is_of_compressed_tensors(found):
        return torch.float32
    if codes.dtype == torch.uint8:
        return torch.bfloat16
    return scale.dtype if scale.dtype in (torch.bfloat16, torch.float16) else torch.float32


def method_of(settings: Mapping[str, object]) -> str:
    """The format's name. Configs of bitsandbytes from before it had one say what was loaded."""
    is_older = settings.get("load_in_4bit") or settings.get("load_in_8bit")
    return str(settings.get("quant_method") or ("bitsandbytes" if is_older else "an unnamed format"))


def _check_groups(found: FormatFiles, groups: TensorEntry, columns: int, numbers: range) -> None:
    """Raise BadInput unless each column has one of these groups."""
    if groups.shape != (columns,) or groups.dtype not in (torch.int32, torch.int64):
        raise found.reject(groups, f"has shape {groups.shape}; it must be ({columns},), of whole numbers")
    values = found.read(groups)
    if values.min() not in numbers or values.max() not in numbers:
        raise found.reject(groups, f"names groups that are not there; there are {numbers.stop}")


def _is_of_compressed_tensors(found: FormatFiles) -> bool:
    return method_of(found.options) == "compressed-tensors"


FORMATS: Mapping[str, Callable[[FormatFiles], Iterator[CodedTensor]]] = {
    "fp8": _find_scaled,
    "fbgemm_fp8": _find_scaled,
    "compressed-tensors": _find_scaled,
    "mxfp4": _find_experts,
    "bitsandbytes": _find_bitsandbytes,
    "gptq": _find_gptq,
    "awq": _find_awq,
}
