"""Safetensors files, read and written by ranges of elements, so that memory stays flat.

`model.checkpoint` reads base models through `ShardReader`; `model.export_weights` writes shards through
`ShardWriter`. A header is checked whole before anything is allocated, so a damaged or hostile file
ends in BadInput with the file and the reason. Files are never mapped: mapped pages count as resident
memory, and a truncated file would kill the process with SIGBUS.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from ratel_cli.errors import BadInput, EnvironmentFailure, IntegrityFailure, RatelError
from ratel_cli.units import align_up

MAX_HEADER_BYTES = 100_000_000
"""The limit of the reference implementation."""

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16,
    "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32,
    "I64": torch.int64, "U64": torch.uint64, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MAX_DIMENSIONS = 64
_MAX_TENSOR_BYTES = (1 << 63) - 1
"""Both are torch's."""

_SHOWN_CHARACTERS = 200
"""Of a name in a message: names may be as long as a header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a file: what it is, and where its bytes lie behind the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


class ShardReader:
    """An open safetensors file. Raises BadInput when it is anything else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        self._fd = _open_regular(path)
        try:
            self._data_start, self.tensors = _read_header(path, self._fd)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements ``start`` to ``stop`` of the flattened tensor, in the file's dtype."""
        entry = self.tensors[name]
        assert 0 <= start <= stop <= entry.num_elements, (name, start, stop)
        raw = torch.empty((stop - start) * entry.dtype.itemsize, dtype=torch.uint8)
        offset = self._data_start + entry.offset + start * entry.dtype.itemsize
        _read_exactly(self.path, self._fd, raw.numpy().data, offset)
        return raw.view(entry.dtype)

    def read_whole(self, name: str) -> torch.Tensor:
        """The tensor in its shape."""
        entry = self.tensors[name]
        return self.read(name, 0, entry.num_elements).reshape(entry.shape)


class ShardWriter:
    """One safetensors file, written front to back under a temporary name.

    The header is known beforehand, so tensors may arrive in pieces of any size, in the order of
    `tensors`. Only `finish` gives the file its name; leaving the context before removes it.
    """

    def __init__(self, path: Path, tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> None:
        self.path = path
        self._partial = path.with_name(f".{path.name}.partial")
        self._fd = -1
        header, self._data_bytes = _header_of(tensors)
        self._written_bytes = -len(header)
        try:
            self._partial.unlink(missing_ok=True)
            self._fd = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise write_failure(path, error) from error
        try:
            self._write_all(memoryview(header))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, elements: torch.Tensor) -> None:
        """Append contiguous elements, already in the dtype that the header promised."""
        assert elements.is_contiguous() and elements.device.type == "cpu"
        if elements.numel():
            self._write_all(elements.detach().reshape(-1).view(torch.uint8).numpy().data)

    def finish(self) -> None:
        """Make the file durable and give it its name."""
        assert self._written_bytes == self._data_bytes, (self.path, self._written_bytes, self._data_bytes)
        try:
            os.fsync(self._fd)
            os.rename(self._partial, self.path)
        except OSError as error:
            raise write_failure(self.path, error) from error
        os.close(self._fd)
        self._fd = -1

    def close(self) -> None:
        """Without `finish` before it: the file is given up and removed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            with contextlib.suppress(OSError):
                self._partial.unlink(missing_ok=True)

    def _write_all(self, memory: memoryview) -> None:
        assert self._written_bytes + len(memory) <= self._data_bytes, f"{self.path}: more bytes than the header says"
        position = 0
        while position < len(memory):
            try:
                position += os.write(self._fd, memory[position:])
            except OSError as error:
                raise write_failure(self.path, error) from error
        self._written_bytes += len(memory)


def file_bytes(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> int:
    """The exact size of the file that `ShardWriter` makes of these tensors."""
    header, data_bytes = _header_of(tensors)
    return len(header) + data_bytes


def write_failure(path: Path, error: OSError) -> RatelError:
    """What an OSError while writing a file of the export means to the user."""
    if error.errno in _NO_SPACE:
        return EnvironmentFailure(
            f"{path}: no space left while writing: {error.strerror}", "free space there, or give another output_dir"
        )
    if error.errno == errno.EIO:
        return IntegrityFailure(f"{path}: input/output error while writing")
    return EnvironmentFailure(f"{path}: cannot be written: {error.strerror}")


def escaped(text: str) -> str:
    """Text from a file, fit for a message: control characters and the like are spelled out, what is long is cut."""
    spelled = text[:_SHOWN_CHARACTERS].encode("unicode_escape").decode("ascii")
    return spelled if len(text) <= _SHOWN_CHARACTERS else f"{spelled}..."


def _open_regular(path: Path) -> int:
    """Open without following a link or waiting on a FIFO that took the file's place after the checks."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise BadInput(f"{path}: not a regular file")
    return fd


def _read_exactly(path: Path, fd: int, memory: memoryview, offset: int) -> None:
    position = 0
    while position < len(memory):
        try:
            num_bytes = os.preadv(fd, [memory[position:]], offset + position)
        except OSError as error:
            raise IntegrityFailure(f"{path}: cannot be read at byte {offset + position}: {error.strerror}") from error
        if num_bytes == 0:
            raise BadInput(f"{path}: ends at byte {offset + position}; it was cut while being read")
        position += num_bytes


def _read_header(path: Path, fd: int) -> tuple[int, dict[str, TensorEntry]]:
    total_bytes = os.fstat(fd).st_size
    if total_bytes < 8:
        raise BadInput(f"{path}: {total_bytes} bytes are too few for a safetensors file")
    length = bytearray(8)
    _read_exactly(path, fd, memoryview(length), 0)
    header_bytes = int.from_bytes(length, "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise BadInput(f"{path}: not a safetensors file: its header would have {header_bytes} bytes")
    if 8 + header_bytes > total_bytes:
        raise BadInput(f"{path}: truncated: the header has {header_bytes} bytes, the file {total_bytes}")
    raw = bytearray(header_bytes)
    _read_exactly(path, fd, memoryview(raw), 8)
    return 8 + header_bytes, _parse_header(path, bytes(raw), total_bytes - 8 - header_bytes)


def _parse_header(path: Path, raw: bytes, data_bytes: int) -> dict[str, TensorEntry]:
    if not raw.startswith(b"{"):
        raise BadInput(f"{path}: not a safetensors file: the header does not begin with '{{'")
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: the header cannot be parsed: {escaped(str(error))}") from error
    if not isinstance(header, dict):
        raise BadInput(f"{path}: the header is not an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadInput(f"{path}: __metadata__ must map text to text")
    entries = [_parse_entry(path, name, fields, data_bytes) for name, fields in header.items()]
    _check_coverage(path, entries, data_bytes)
    return {entry.name: entry for entry in entries}


def _parse_entry(path: Path, name: str, fields: object, data_bytes: int) -> TensorEntry:
    where = f"{path}: tensor {escaped(name)}"
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise BadInput(f"{where}: must have exactly dtype, shape and data_offsets")
    dtype = DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
    if dtype is None:
        raise BadInput(f"{where}: dtype {escaped(str(fields['dtype'])[:40])} is not supported")
    shape, offsets = fields["shape"], fields["data_offsets"]
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise BadInput(f"{where}: shape and data_offsets must be lists of whole numbers")
    begin, end = offsets
    if not begin <= end <= data_bytes:
        raise BadInput(f"{where}: bytes {begin} to {end} lie beyond the end of the file's {data_bytes} bytes of data")
    if _num_bytes(shape, dtype) != end - begin:
        raise BadInput(f"{where}: its shape and dtype do not match its {end - begin} bytes")
    return TensorEntry(name=name, dtype=dtype, shape=tuple(shape), offset=begin)


def _num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int | None:
    """None for a shape that no tensor can have, even where it is empty.

    Multiplied step by step: a hostile shape must not build a number of a million digits.
    """
    if len(shape) > _MAX_DIMENSIONS:
        return None
    num_bytes = dtype.itemsize
    for extent in shape:
        num_bytes *= max(extent, 1)
        if num_bytes > _MAX_TENSOR_BYTES:
            return None
    return 0 if 0 in shape else num_bytes


def _check_coverage(path: Path, entries: Sequence[TensorEntry], data_bytes: int) -> None:
    """The tensors tile the data: no overlap, no hole, nothing behind the last."""
    position = 0
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.num_bytes)):
        if entry.offset != position:
            fault = "overlaps the tensor before it" if entry.offset < position else "leaves a hole before it"
            raise BadInput(f"{path}: tensor {escaped(entry.name)} {fault}")
        position += entry.num_bytes
    if position != data_bytes:
        raise BadInput(f"{path}: {data_bytes - position} trailing bytes behind the last tensor")


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        seen: set[str] = set()
        doubled = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{doubled} appears twice")
    return unique


def _header_of(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[bytes, int]:
    """The header with its length, and the number of data bytes behind it."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, dtype, shape in tensors:
        stop = position + math.prod(shape) * dtype.itemsize
        fields[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(fields, separators=(",", ":")).encode("ascii")
    text = text.ljust(align_up(len(text), 8))
    return len(text).to_bytes(8, "little") + text, position
