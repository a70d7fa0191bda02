"""Safetensors files, read and written by ranges of elements, so that memory stays flat.

Invariant: a header is checked as a whole before anything is allocated, so a damaged or hostile file ends in BadInput
with the file's name and the reason. Files are never mapped: mapped pages count as resident memory, and a file that is
truncated while it is mapped would kill the process with SIGBUS.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from ratel_cli.closing import Closing
from ratel_cli.errors import BadInput, EnvironmentFailure, IntegrityFailure, NotEnoughSpace, RatelError, excerpt
from ratel_cli.units import align_up

MAX_HEADER_BYTES = 100_000_000
"""A header has at most this many bytes, as in the safetensors library."""

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16,
    "F8_E8M0": torch.float8_e8m0fnu, "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32,
    "F32": torch.float32, "I64": torch.int64, "U64": torch.uint64, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MAX_DIMENSIONS = 64
"""Dimensions that a torch tensor has at most."""
_MAX_TENSOR_BYTES = (1 << 63) - 1
"""Bytes that a torch tensor has at most."""
_COPY_AGAIN = "the file is damaged or incomplete: download or copy it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, dtype and shape of one tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of its data in the file."""
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry(TensorSpec):
    """A tensor of a file that exists, and where its data is."""

    offset: int
    """Bytes between the end of the header and the tensor's first byte."""


class TensorFile(ABC):
    """A file of tensors that are read by ranges of elements."""

    path: Path
    tensors: Mapping[str, TensorEntry]
    """By name."""

    @abstractmethod
    def file_of(self, name: str) -> ShardReader | None:
        """The file that has this tensor as it is read here; None if it is made of others."""

    @abstractmethod
    def read_into(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill `out`, flat and in the tensor's dtype, with elements of the flattened tensor from `start` on.

        Raises what `read` raises.
        """

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of the flattened tensor, `[stop - start]` in its dtype.

        Raises IntegrityFailure on an I/O error, BadInput if the file has become shorter.
        """
        entry = self.tensors[name]
        assert 0 <= start <= stop <= entry.num_elements, (name, start, stop)
        values = torch.empty(stop - start, dtype=entry.dtype)
        self.read_into(name, start, values)
        return values

    def read_whole(self, name: str) -> torch.Tensor:
        """The whole tensor, in its own shape and dtype. Raises what `read` raises."""
        entry = self.tensors[name]
        return self.read(name, 0, entry.num_elements).reshape(entry.shape)


class ShardReader(TensorFile, Closing):
    """An open safetensors file. `tensors` holds what its header says, by name."""

    def __init__(self, path: Path) -> None:
        """Open the file and check its header. Raises BadInput if it is no regular, complete safetensors file."""
        self.path = path
        self._fd = -1
        self._fd = _open_regular(path)
        try:
            self._data_start, self.tensors = _read_header(path, self._fd)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read_header(self) -> bytes:
        """The bytes of the file before its first tensor. Raises what `read` raises."""
        header = bytearray(self._data_start)
        _read_exactly(self.path, self._fd, memoryview(header), 0)
        return bytes(header)

    def file_of(self, name: str) -> ShardReader:  # noqa: ARG002
        """See TensorFile."""
        return self

    def offset_of(self, entry: TensorEntry) -> int:
        """Where a tensor's data begins in the file."""
        return self._data_start + entry.offset

    def read_into(self, name: str, start: int, out: torch.Tensor) -> None:
        """See TensorFile."""
        entry = self.tensors[name]
        assert out.dtype == entry.dtype and 0 <= start <= start + len(out) <= entry.num_elements, (name, start)
        if len(out):
            offset = self.offset_of(entry) + start * entry.dtype.itemsize
            _read_exactly(self.path, self._fd, out.view(torch.uint8).numpy().data, offset)


class ShardWriter(Closing):
    """One safetensors file, written from front to back under a temporary name.

    The header comes first, so elements may arrive in parts of any size, in the order of `tensors`. Only `finish`
    gives the file its name; `close` without `finish` removes it. Every method raises EnvironmentFailure if the file
    cannot be written and IntegrityFailure on an I/O error.
    """

    def __init__(self, path: Path, tensors: Sequence[TensorSpec]) -> None:
        self.path = path
        self._partial = path.with_name(f".{path.name}.partial")
        self._fd = -1
        header, self._data_bytes = _header_of(tensors)
        self._written_bytes = -len(header)
        self._digest = xxhash.xxh3_128()
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

    def write(self, elements: torch.Tensor) -> None:
        """Append contiguous elements of any shape, in the dtype that the header names."""
        assert elements.is_contiguous() and elements.device.type == "cpu"
        if elements.numel():
            self._write_all(elements.detach().reshape(-1).view(torch.uint8).numpy().data)

    @property
    def xxh3_128(self) -> str:
        """The hash of what was written so far."""
        return self._digest.hexdigest()

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
        """Remove the file, unless `finish` has given it its name. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            with contextlib.suppress(OSError):
                self._partial.unlink(missing_ok=True)

    def _write_all(self, memory: memoryview) -> None:
        assert self._written_bytes + len(memory) <= self._data_bytes, f"{self.path}: more bytes than the header says"
        self._digest.update(memory)
        position = 0
        while position < len(memory):
            try:
                position += os.write(self._fd, memory[position:])
            except OSError as error:
                raise write_failure(self.path, error) from error
        self._written_bytes += len(memory)


def file_bytes(tensors: Sequence[TensorSpec]) -> int:
    """The exact size in bytes of a file that holds these tensors."""
    header, data_bytes = _header_of(tensors)
    return len(header) + data_bytes


def write_failure(path: Path, error: OSError) -> RatelError:
    """The error to raise for an OSError while a file of the export was written."""
    if error.errno in _NO_SPACE:
        return NotEnoughSpace(
            f"{path}: no space left while writing: {error.strerror}", "free space there, or choose another directory"
        )
    if error.errno == errno.EIO:
        return IntegrityFailure(f"{path}: input/output error while writing", "check the drive")
    return EnvironmentFailure(f"{path}: cannot be written: {error.strerror}")


def _open_regular(path: Path) -> int:
    """Open a file. A link or a FIFO that has taken its place since it was checked is not followed or waited for."""
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
            message = f"{path}: cannot be read at byte {offset + position}: {error.strerror}"
            raise IntegrityFailure(message, "check the drive") from error
        if num_bytes == 0:
            raise BadInput(
                f"{path}: ends at byte {offset + position}: it was truncated while it was being read", _COPY_AGAIN
            )
        position += num_bytes


def _read_header(path: Path, fd: int) -> tuple[int, dict[str, TensorEntry]]:
    total_bytes = os.fstat(fd).st_size
    if total_bytes < 8:
        raise BadInput(f"{path}: not a safetensors file: it has only {total_bytes} bytes", _COPY_AGAIN)
    length = bytearray(8)
    _read_exactly(path, fd, memoryview(length), 0)
    header_bytes = int.from_bytes(length, "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise BadInput(
            f"{path}: not a safetensors file: its header would have {header_bytes} bytes, and at most"
            f" {MAX_HEADER_BYTES} are allowed"
        )
    if 8 + header_bytes > total_bytes:
        message = f"{path}: truncated: the header needs {8 + header_bytes} bytes, the file has {total_bytes}"
        raise BadInput(message, _COPY_AGAIN)
    raw = bytearray(header_bytes)
    _read_exactly(path, fd, memoryview(raw), 8)
    return 8 + header_bytes, _parse_header(path, bytes(raw), total_bytes - 8 - header_bytes)


def _parse_header(path: Path, raw: bytes, data_bytes: int) -> dict[str, TensorEntry]:
    if not raw.startswith(b"{"):
        raise BadInput(f"{path}: not a safetensors file: the header does not begin with '{{'")
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: the header is not valid JSON: {excerpt(str(error))}") from error
    if not isinstance(header, dict):
        raise BadInput(f"{path}: the header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadInput(f"{path}: __metadata__ in the header must map text to text")
    entries = [_parse_entry(path, name, fields, data_bytes) for name, fields in header.items()]
    _check_coverage(path, entries, data_bytes)
    return {entry.name: entry for entry in entries}


def _parse_entry(path: Path, name: str, fields: object, data_bytes: int) -> TensorEntry:
    where = f"{path}: tensor {excerpt(name)}"
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise BadInput(f"{where}: its entry in the header must have exactly dtype, shape and data_offsets")
    dtype = DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
    if dtype is None:
        raise BadInput(f"{where}: dtype {excerpt(str(fields['dtype']), 40)} is not supported")
    shape, offsets = fields["shape"], fields["data_offsets"]
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise BadInput(f"{where}: shape and data_offsets must be lists of whole numbers")
    begin, end = offsets
    if not begin <= end <= data_bytes:
        message = f"{where}: bytes {begin} to {end} are outside the {data_bytes} bytes of data in the file"
        raise BadInput(message, _COPY_AGAIN)
    if _num_bytes(shape, dtype) != end - begin:
        raise BadInput(f"{where}: its shape and dtype do not match its {end - begin} bytes of data")
    return TensorEntry(name=name, dtype=dtype, shape=tuple(shape), offset=begin)


def _num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int | None:
    """The bytes of a tensor; None for a shape that torch cannot have, even if the tensor is empty.

    Multiplied step by step, because the product over a hostile shape could have a million digits.
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
    """The tensors must cover the data: no overlap, no gap, nothing after the last."""
    position = 0
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.num_bytes)):
        if entry.offset != position:
            fault = "overlaps the tensor before it" if entry.offset < position else "has a gap before it"
            raise BadInput(f"{path}: tensor {excerpt(entry.name)} {fault}")
        position += entry.num_bytes
    if position != data_bytes:
        raise BadInput(f"{path}: {data_bytes - position} bytes after the last tensor belong to no tensor")


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An `object_pairs_hook` for `json.loads` that raises ValueError if a key appears twice in an object."""
    unique = dict(pairs)
    if len(unique) != len(pairs):
        seen: set[str] = set()
        doubled = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{doubled} appears twice")
    return unique


def _header_of(tensors: Sequence[TensorSpec]) -> tuple[bytes, int]:
    """The header with the 8 bytes of its length, and the number of data bytes that follow it."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        stop = position + tensor.num_bytes
        fields[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, stop],
        }
        position = stop
    text = json.dumps(fields, separators=(",", ":")).encode("ascii")
    text = text.ljust(align_up(len(text), 8))
    return len(text).to_bytes(8, "little") + text, position
