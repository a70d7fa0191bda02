"""Which frozen blocks of a model lie in its files just as the device computes with them, and where.

Such a block need not be copied into the store (`base_storage: in_place`, store/base_files.py). Its parameters are whole
tensors of safetensors files, or parts of them, or several of them one after another, such as experts that the model
stacks, in the dtype of the block. What is converted, quantised or drawn is not there, and its block is copied.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from ratel_cli.io.views import VALUE_DTYPES
from ratel_cli.model.files.import_weights import WeightSource
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.store.base_files import BaseFile, BaseFiles, Piece


class FileRange(NamedTuple):
    """Bytes of a file that are elements of a flattened parameter."""

    path: Path
    offset: int
    """In bytes."""
    num_elements: int


class FileRanges(NamedTuple):
    """Where the files have a parameter."""

    dtype: torch.dtype
    ranges: tuple[FileRange, ...]
    """One after another they are the flattened parameter."""


@runtime_checkable
class LocatedSource(Protocol):
    """A source of weights that are in files."""

    def located(self, name: str) -> FileRanges | None:
        """Where the files have a parameter just as `read` gives it, but for the dtype; None if they do not."""


def located_in(source: WeightSource, name: str) -> FileRanges | None:
    """Where the files have a parameter, for a source of any kind; None if it cannot say, or they do not."""
    return source.located(name) if isinstance(source, LocatedSource) else None


def placed_in_files(spec: ModelSpec, source: WeightSource) -> ModelSpec:
    """The model with those frozen blocks in the source's files that lie there as the device computes with them."""

    def lies_there(block: BlockSpec) -> bool:
        found = [located_in(source, each.name) for each in block.parameters]
        return bool(found) and all(each is not None and each.dtype == VALUE_DTYPES[block.dtype] for each in found)

    blocks = [block for block in spec.blocks if not block.is_trained and lies_there(block)]
    listed = base_files_of(spec.in_files({block.index: block.compute_bytes for block in blocks}), source)
    if listed is None:
        return spec
    return spec.in_files({block.index: listed.read_bytes(block.index, block.compute_bytes) for block in blocks})


def base_files_of(spec: ModelSpec, source: WeightSource) -> BaseFiles | None:
    """The list for a store of these blocks, or of a rank's slices; None if all of them lie in the store."""
    blocks = [block for block in spec.blocks if block.is_in_files]
    if not blocks:
        return None
    numbers: dict[Path, int] = {}
    pieces: dict[int, tuple[Piece, ...]] = {}
    for block in blocks:
        of_block: list[Piece] = []
        for parameter in block.parameters:
            found = located_in(source, parameter.name)
            assert found is not None, parameter.name
            start, stop = 0, parameter.first + parameter.num_elements  # in the flattened parameter
            for path, offset, num_elements in found.ranges:
                first, last = max(start, parameter.first), min(start + num_elements, stop)
                if first < last:
                    number = numbers.setdefault(path, len(numbers))
                    place = parameter.start + first - parameter.first
                    of_block.append(
                        Piece(
                            start=place * block.dtype_bytes,
                            num_bytes=(last - first) * block.dtype_bytes,
                            file=number,
                            offset=offset + (first - start) * block.dtype_bytes,
                        )
                    )
                start += num_elements
        pieces[block.index] = tuple(of_block)
    files = tuple(BaseFile(str(path.resolve()), path.stat().st_size) for path in numbers)
    return BaseFiles(files=files, pieces=pieces)
