"""What the files of an export hold: the tensors of each, and where the content of each tensor comes from.

A layout is made before anything is written: from the base model's files, whose names, shapes and order the export
keeps, or for a model without files as transformers' `save_pretrained` would lay it out. Invariant: a layout is values
and open files only, so its size is known to the byte, and writing it can fail only on an I/O error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ratel_cli.model.directory import INDEX_NAME, WEIGHTS_NAME
from ratel_cli.model.shards import TensorSpec, file_bytes
from ratel_cli.model.skeleton import DTYPES
from ratel_cli.model.spec import ModelSpec
from ratel_cli.sizes import DtypeName

DEFAULT_SHARD_BYTES = 5_000_000_000
_HEADER_BYTES = 192
"""The most bytes of a header that one tensor takes, without its name; and that the file itself takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedContent:
    """The content is a parameter, from its first element to its last."""

    parameter: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferContent:
    """The content is a tensor in memory: a buffer of the model."""

    values: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOutTensor(TensorSpec):
    """A tensor of a file that will be written."""

    content: TrainedContent | BufferContent


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file of weights of the export, and its tensors in order."""

    file_name: str
    tensors: tuple[LaidOutTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportLayout:
    """All files of weights of an export."""

    shards: tuple[Shard, ...]

    @property
    def file_names(self) -> list[str]:
        """The names of the files of weights, and of their index if there is one."""
        index = [INDEX_NAME] if self.index is not None else []
        return [*index, *(shard.file_name for shard in self.shards)]

    @property
    def num_bytes(self) -> int:
        """The exact size of these files."""
        return sum(file_bytes(shard.tensors) for shard in self.shards) + len((self.index or "").encode())

    @property
    def index(self) -> str | None:
        """The content of the index: which file has each tensor. None for a single file, which needs none."""
        if [shard.file_name for shard in self.shards] == [WEIGHTS_NAME]:
            return None
        tensors = [tensor for shard in self.shards for tensor in shard.tensors]
        num_elements, num_bytes = sum(each.num_elements for each in tensors), sum(each.num_bytes for each in tensors)
        weight_map = {tensor.name: shard.file_name for shard in self.shards for tensor in shard.tensors}
        index = {"metadata": {"total_parameters": num_elements, "total_size": num_bytes}, "weight_map": weight_map}
        return json.dumps(index, indent=2, sort_keys=True) + "\n"


def layout_of_model(
    spec: ModelSpec,
    buffers: Mapping[str, torch.Tensor],
    dtype: DtypeName,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> ExportLayout:
    """The layout with the model's own names, in the order of its blocks, and then the `buffers`."""
    parameters = (parameter for block in spec.blocks for parameter in block.parameters)
    tensors = [
        *(
            LaidOutTensor(
                name=each.name, dtype=DTYPES[dtype], shape=each.shape, content=TrainedContent(parameter=each.name)
            )
            for each in parameters
        ),
        *(
            LaidOutTensor(
                name=name, dtype=each.dtype, shape=tuple(each.shape), content=BufferContent(values=each.contiguous())
            )
            for name, each in buffers.items()
        ),
    ]
    return ExportLayout(shards=split_into_shards(tensors, max_shard_bytes))


def split_into_shards(tensors: Sequence[LaidOutTensor], max_shard_bytes: int) -> tuple[Shard, ...]:
    """Distribute tensors over files, in order. A file is at most `max_shard_bytes` long, or holds only one tensor."""
    files: list[list[LaidOutTensor]] = [[]]
    filled_bytes = _HEADER_BYTES
    for tensor in tensors:
        num_bytes = tensor.num_bytes + len(tensor.name) + _HEADER_BYTES
        if files[-1] and filled_bytes + num_bytes > max_shard_bytes:
            files.append([])
            filled_bytes = _HEADER_BYTES
        files[-1].append(tensor)
        filled_bytes += num_bytes
    names = [f"model-{index:05d}-of-{len(files):05d}.safetensors" for index in range(1, len(files) + 1)]
    if len(files) == 1:
        names = [WEIGHTS_NAME]
    return tuple(Shard(file_name=name, tensors=tuple(file)) for name, file in zip(names, files, strict=True))
