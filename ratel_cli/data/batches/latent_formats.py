"""The formats of files with latents: safetensors and parquet.

A file has `latents` `[samples, channels, height, width]` and `labels` `[samples]`, integers. In parquet a sample is a
row: its latent is a list of lists of lists, or one list of all its numbers.

Invariant: the same numbers in either format are the same latents, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ratel_cli.data.samples.packing import Integers
from ratel_cli.errors import BadInput, EnvironmentFailure, first_line
from ratel_cli.units import counted

LATENTS, LABELS = "latents", "labels"
LatentShape: TypeAlias = tuple[int, int, int]
"""Shape of one latent: channels, height and width."""
_SAVE = "save_file({'latents': [N, C, H, W], 'labels': [N]}, path)"
_COLUMNS = "a row each: `latents`, lists of floating-point numbers, and `labels`, an integer"
_DECODED_BYTES = 1 << 24
"""Latents of a parquet file that are in memory at once."""
_READ_BYTES = 1 << 20
"""Bytes of a column that are read at a time. Without this limit pyarrow reads a whole row group."""


class LatentReader(Protocol):
    """One file with latents."""

    path: Path

    def labels(self) -> torch.Tensor:
        """int64 `[samples]`, once all of the file was checked but the labels' range. Raises BadInput."""

    def read(self, places: Integers) -> torch.Tensor:
        """The latents in these rows, which ascend: `[places, channels, height, width]` in fp32. Raises
        EnvironmentFailure."""


class SafetensorsLatents:
    """A file of safetensors, which is read where the rows lie."""

    def __init__(self, path: Path, shape: LatentShape) -> None:
        self.path, self._shape = path, shape

    def labels(self) -> torch.Tensor:
        """See LatentReader."""
        try:
            with safe_open(self.path, "pt") as file:
                names = set(file.keys())
                missing = next((name for name in (LATENTS, LABELS) if name not in names), None)
                if missing is not None:
                    raise BadInput(f"{self.path}: no tensor {missing}", _SAVE)
                shape = tuple(file.get_slice(LATENTS).get_shape())
                labels: torch.Tensor = file.get_tensor(LABELS)
        except (OSError, SafetensorError) as error:
            raise BadInput(f"{self.path}: not a safetensors file: {first_line(error)}", _SAVE) from error
        if shape[1:] != self._shape:
            wanted = ", ".join(map(str, self._shape))
            raise BadInput(
                f"{self.path}: latents is {list(shape)}, but the model's are [samples, {wanted}]",
                _made_for(self._shape),
            )
        if labels.is_floating_point() or tuple(labels.shape) != shape[:1]:
            raise BadInput(
                f"{self.path}: labels is {labels.dtype} {list(labels.shape)}, not {counted(shape[0], 'integer')}, "
                "one a latent",
                _SAVE,
            )
        return labels.long()

    def read(self, places: Integers) -> torch.Tensor:
        """See LatentReader."""
        try:
            with safe_open(self.path, "pt") as file:
                rows = file.get_slice(LATENTS)
                found: torch.Tensor = torch.cat([rows[int(place) : int(place) + 1].float() for place in places])
        except (OSError, SafetensorError) as error:
            raise EnvironmentFailure(f"{self.path}: cannot be read: {first_line(error)}") from error
        return found


class ParquetLatents:
    """A parquet file. A row is found by decoding its row group up to it, a part at a time.

    So a step reads each row group that has one of its samples, and memory is that of a part, whatever a row group's
    size is.
    """

    def __init__(self, path: Path, shape: LatentShape) -> None:
        self.path, self._shape = path, shape

    def labels(self) -> torch.Tensor:
        """See LatentReader."""
        import pyarrow  # type: ignore[import-untyped]

        try:
            with self._opened() as file:
                self._check_columns(file.schema_arrow)
                labels = self._checked_labels(file.read(columns=[LABELS], use_threads=False).column(LABELS))
                for group, start in enumerate(_group_starts(file)[:-1]):
                    for first, part in self._parts(file, group):
                        self._numbers(part, first_row=start + first)
        except (pyarrow.ArrowException, OSError) as error:
            raise BadInput(f"{self.path}: not a usable parquet file: {first_line(error)}", _COLUMNS) from error
        return labels

    def read(self, places: Integers) -> torch.Tensor:
        """See LatentReader."""
        import pyarrow

        found = torch.empty((len(places), *self._shape))
        try:
            with self._opened() as file:
                starts = _group_starts(file)
                bounds = np.searchsorted(places, starts)
                for group, start in enumerate(starts[:-1]):
                    here = slice(bounds[group], bounds[group + 1])
                    if bounds[group] < bounds[group + 1]:
                        self._read_group(file, group, places[here] - start, found[here])
        except (pyarrow.ArrowException, OSError, BadInput) as error:  # BadInput: it has changed since it was opened
            raise EnvironmentFailure(f"{self.path}: cannot be read: {first_line(error)}") from error
        return found

    def _read_group(self, file: Any, group: int, places: Integers, found: torch.Tensor) -> None:  # noqa: ANN401
        """Fill `found` with these rows of a row group, which ascend."""
        done = 0
        for first, part in self._parts(file, group):
            stop = int(np.searchsorted(places, first + len(part)))
            if stop > done:
                numbers = self._numbers(part, first_row=first)[places[done:stop] - first]
                found[done:stop] = torch.from_numpy(numbers).float()
            if (done := stop) == len(places):
                return

    def _opened(self) -> Any:  # noqa: ANN401 (pyarrow has no types)
        import pyarrow.parquet  # type: ignore[import-untyped]

        return pyarrow.parquet.ParquetFile(
            self.path, buffer_size=_READ_BYTES, pre_buffer=False, page_checksum_verification=True
        )

    def _check_columns(self, schema: Any) -> None:  # noqa: ANN401 (pyarrow has no types)
        missing = next((name for name in (LATENTS, LABELS) if name not in schema.names), None)
        if missing is not None:
            raise BadInput(f"{self.path}: no column {missing}", _COLUMNS)
        kind = schema.field(LATENTS).type
        shape, order = getattr(kind, "shape", self._shape), getattr(kind, "permutation", None)
        if tuple(shape) != self._shape or (order is not None and list(order) != sorted(order)):
            raise BadInput(
                f"{self.path}: latents is {kind}, but the model's are {list(self._shape)}", _made_for(self._shape)
            )

    def _parts(self, file: Any, group: int) -> Iterator[tuple[int, Any]]:  # noqa: ANN401 (pyarrow has no types)
        """The latents of a row group, in parts: the row in it that each begins with, and an array of pyarrow."""
        first, size = 0, max(1, _DECODED_BYTES // (8 * math.prod(self._shape)))
        for batch in file.iter_batches(size, row_groups=[group], columns=[LATENTS], use_threads=False):
            part = batch.column(0)
            yield first, getattr(part, "storage", part)  # of an extension type, such as Array3D of `datasets`
            first += len(batch)

    def _checked_labels(self, column: Any) -> torch.Tensor:  # noqa: ANN401 (pyarrow has no types)
        from pyarrow import types

        if not types.is_integer(column.type):
            raise BadInput(f"{self.path}: labels is {column.type}, not integers", _COLUMNS)
        if column.null_count:
            raise BadInput(f"{self.path}: row {_first_null(column)}: labels is null", _COLUMNS)
        return torch.from_numpy(column.to_numpy().astype(np.int64))

    def _numbers(self, part: Any, *, first_row: int) -> NDArray[Any]:  # noqa: ANN401 (pyarrow has no types)
        """A part as numbers, `[rows, channels, height, width]`. `first_row`: its number in the file, from 0 on.

        Raises BadInput if a row has another shape, or a null.
        """
        import pyarrow.compute  # type: ignore[import-untyped]
        from pyarrow import types

        num_rows, depth, inner = len(part), 0, part.type
        while types.is_list(inner) or types.is_large_list(inner) or types.is_fixed_size_list(inner):
            depth, inner = depth + 1, inner.value_type
        wanted = {3: self._shape, 1: (math.prod(self._shape),)}.get(depth)
        if wanted is None or not types.is_floating(inner):
            raise BadInput(f"{self.path}: latents is {part.type}, no lists of latents", _made_for(self._shape))
        per_row = 1
        for size in wanted:
            self._reject_nulls(part, per_row, first_row)
            lengths = pyarrow.compute.list_value_length(part).to_numpy(zero_copy_only=False)
            wrong = np.flatnonzero(lengths != size)
            if len(wrong):
                row = first_row + int(wrong[0]) // per_row + 1
                raise BadInput(
                    f"{self.path}: row {row}: latents has {lengths[wrong[0]]} in a list, but the model's are "
                    f"{list(wanted)}",
                    _made_for(self._shape),
                )
            part, per_row = part.flatten(), per_row * size
        self._reject_nulls(part, per_row, first_row)
        numbers: NDArray[Any] = part.to_numpy(zero_copy_only=False)
        return numbers.reshape(num_rows, *self._shape)

    def _reject_nulls(self, part: Any, per_row: int, first_row: int) -> None:  # noqa: ANN401 (pyarrow has no types)
        if part.null_count:
            row = first_row + (_first_null(part) - 1) // per_row + 1
            raise BadInput(f"{self.path}: row {row}: latents has a null", _COLUMNS)


def _group_starts(file: Any) -> list[int]:  # noqa: ANN401 (pyarrow has no types)
    """The number of each row group's first row, and of all rows."""
    sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    return [0, *accumulate(sizes)]


def _first_null(array: Any) -> int:  # noqa: ANN401 (pyarrow has no types)
    """Which value is the first null, counted from 1."""
    return int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0]) + 1


def _made_for(shape: LatentShape) -> str:
    channels, height, width = shape
    return f"use latents that were made for this model: {counted(channels, 'channel')}, {height} x {width}"


_READERS: dict[str, type[SafetensorsLatents | ParquetLatents]] = {
    ".safetensors": SafetensorsLatents,
    ".parquet": ParquetLatents,
}
FORMATS = tuple(_READERS)
"""The endings of files with latents."""


def reader_of(path: Path, shape: LatentShape) -> LatentReader:
    """The reader of a file with latents of this shape. A file with another ending is one of safetensors."""
    return _READERS.get(path.suffix.lower(), SafetensorsLatents)(path, shape)
