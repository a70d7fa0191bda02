"""The bytes of the tensors of an export, read from a generation and from the base model's files.

Memory is one group of elements; for a tensor whose elements are not in the order of a parameter, the part of the
parameter that they come from; for one that transformers computes from whole parameters, these and the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from ratel_cli.model.export.export_layout import (
    BaseContent,
    BufferContent,
    ConvertedContent,
    LaidOutTensor,
    TrainedContent,
    contiguous_strides,
)
from ratel_cli.model.export.merged_weights import MergedWeights
from ratel_cli.model.files.import_weights import WEIGHT_GROUP_ELEMENTS
from ratel_cli.model.files.shards import TensorFile
from ratel_cli.model.files.stored_weights import StoredWeights


class ContentReader:
    """Reads what the tensors of a layout hold, with the weights of one generation."""

    def __init__(
        self,
        weights: StoredWeights | MergedWeights,
        *,
        group_elements: int = WEIGHT_GROUP_ELEMENTS,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`progress` is called before each group that is not read from the generation."""
        self._weights, self._group_elements, self._progress = weights, group_elements, progress
        self._converted: tuple[object, Mapping[str, torch.Tensor]] = (None, {})
        """The conversion that was run last, and its results."""

    def read(self, tensor: LaidOutTensor) -> Iterator[torch.Tensor]:
        """All elements of a tensor in their order, in contiguous parts. Each is valid until the next is requested.

        Raises IntegrityFailure if a record is damaged or on an I/O error, BadInput if a file has become shorter.
        """
        match tensor.content:
            case TrainedContent(parameter=parameter, offset=offset, strides=strides):
                view = self._view(parameter, tensor.shape, strides, offset)
                yield from (elements.to(tensor.dtype) for elements in view)
            case ConvertedContent(convert=convert):
                if self._converted[0] is not convert:
                    self._converted = (None, {})  # before the next results are made
                    self._converted = (convert, convert(self._weights.whole))
                yield self._converted[1][tensor.name].to(tensor.dtype).contiguous()
            case BaseContent(reader=reader):
                yield from self._base(reader, tensor)
            case BufferContent(values=values):
                yield values

    def _base(self, reader: TensorFile, tensor: LaidOutTensor) -> Iterator[torch.Tensor]:
        for start in range(0, tensor.num_elements, self._group_elements):
            self._progress()
            yield reader.read(tensor.name, start, min(start + self._group_elements, tensor.num_elements))

    def _view(
        self, parameter: str, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
    ) -> Iterator[torch.Tensor]:
        """The elements of a view of a flattened parameter.

        If they are out of order, all from the first to the last that the view touches are read; but row by row, if
        the rows of its first dimension lie one after another.
        """
        extent = 1 + sum((number - 1) * stride for number, stride in zip(shape, strides, strict=True))
        if 0 in shape:
            return
        if strides == contiguous_strides(shape):
            yield from self._weights.slices(parameter, offset, offset + extent)
        elif extent > self._group_elements and len(shape) > 1 and strides[0] >= max(strides[1:]):
            for row in range(shape[0]):
                yield from self._view(parameter, shape[1:], strides[1:], offset + row * strides[0])
        else:
            yield self._weights.range(parameter, offset, offset + extent).as_strided(shape, strides).contiguous()
