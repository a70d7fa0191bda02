"""Export: from the store to a directory that transformers loads.

`run.finetune` calls `export_model` at the end of a run, `cli.export` whenever it is asked to. Memory is one
group of elements, whatever the model's size; sizes are known before the first byte, so a disk that is too small is
refused at once.
Invariant: the weights written are those that `model.stored_weights` gives; the store is only read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from ratel_cli.io.buffers import BufferPool
from ratel_cli.model.directory import INDEX_NAME, WEIGHTS_NAME
from ratel_cli.model.import_weights import PIECE_ELEMENTS
from ratel_cli.model.shards import ShardWriter, file_bytes
from ratel_cli.model.sidecars import add_companions
from ratel_cli.model.skeleton import DTYPES
from ratel_cli.model.spec import ModelSpec
from ratel_cli.model.staging import Staging
from ratel_cli.model.stored_weights import StoredGeneration, stored_weights
from ratel_cli.sizes import DtypeName
from ratel_cli.units import MIB

DEFAULT_SHARD_BYTES = 5_000_000_000
_COMPANION_BYTES = 64 * MIB
"""DeviceBuffer for tokenizer and the like; the largest tokenizers take 35 MB."""

_HEADER_BYTES = 192
"""At most so much of a header belongs to a tensor, beside its name, and to the file as a whole."""

Tensor = tuple[str, torch.dtype, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file of the export and what it holds, in order."""

    file_name: str
    tensors: tuple[Tensor, ...]


def export_model(
    spec: ModelSpec,
    generation: StoredGeneration,
    pool: BufferPool,
    *,
    base_dir: Path,
    output_dir: Path,
    dtype: DtypeName,
    buffers: Mapping[str, torch.Tensor],
    base_model: str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    group_elements: int = PIECE_ELEMENTS,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Replace the model in `output_dir` by the weights of a generation. Other files there stay.

    `buffers` are the model's persistent buffers, which are not in the store; a tied weight is written
    once, as the embedding's. `progress` is called for every group; what it raises leaves `output_dir` as
    it was. `base_model` is the hub id for the model card, where there is one.
    """
    tensors = [
        *((parameter.name, DTYPES[dtype], parameter.shape) for block in spec.blocks for parameter in block.parameters),
        *((name, buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()),
    ]
    shards = split_into_shards(tensors, max_shard_bytes)
    with Staging(output_dir) as staging:
        staging.require_space(sum(file_bytes(shard.tensors) for shard in shards) + _COMPANION_BYTES)
        with _ShardSequence(staging.path, shards) as sequence:
            weights = stored_weights(spec, generation, pool, dtype, group_elements=group_elements, progress=progress)
            with closing(weights):
                for piece in weights:
                    sequence.write(piece.name, piece.values)
            for name, buffer in buffers.items():
                sequence.write(name, buffer.contiguous())
            sequence.finish()
        if len(shards) > 1:
            staging.write_text(INDEX_NAME, _index(shards))
        add_companions(
            staging,
            base_dir=base_dir,
            spec=spec,
            dtype=dtype,
            base_model=base_model,
            num_updates=generation.progress.updates,
        )
        staging.publish()


def split_into_shards(tensors: Sequence[Tensor], max_shard_bytes: int) -> list[Shard]:
    """Fill files in order up to the limit; a tensor above it has a file for itself."""
    groups: list[list[Tensor]] = [[]]
    filled_bytes = _HEADER_BYTES
    for name, dtype, shape in tensors:
        num_bytes = math.prod(shape) * dtype.itemsize + len(name) + _HEADER_BYTES
        if groups[-1] and filled_bytes + num_bytes > max_shard_bytes:
            groups.append([])
            filled_bytes = _HEADER_BYTES
        groups[-1].append((name, dtype, shape))
        filled_bytes += num_bytes
    names = [f"model-{index:05d}-of-{len(groups):05d}.safetensors" for index in range(1, len(groups) + 1)]
    if len(groups) == 1:
        names = [WEIGHTS_NAME]
    return [Shard(file_name=name, tensors=tuple(group)) for name, group in zip(names, groups, strict=True)]


class _ShardSequence:
    """Writes tensors that arrive in the shards' order, with one file open at a time."""

    def __init__(self, directory: Path, shards: Sequence[Shard]) -> None:
        self._directory = directory
        self._shards = shards
        self._shard_of = {name: index for index, shard in enumerate(shards) for name, _, _ in shard.tensors}
        self._index = -1
        self._writer: ShardWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()

    def write(self, name: str, elements: torch.Tensor) -> None:
        while self._index < self._shard_of[name]:
            self._open_next()
        assert self._writer is not None and self._index == self._shard_of[name], f"{name} came out of order"
        self._writer.write(elements)

    def finish(self) -> None:
        while self._index + 1 < len(self._shards):
            self._open_next()
        if self._writer is not None:
            self._writer.finish()

    def _open_next(self) -> None:
        if self._writer is not None:
            self._writer.finish()
        self._index += 1
        shard = self._shards[self._index]
        self._writer = ShardWriter(self._directory / shard.file_name, shard.tensors)


def _index(shards: Sequence[Shard]) -> str:
    num_elements = sum(math.prod(shape) for shard in shards for _, _, shape in shard.tensors)
    num_bytes = sum(math.prod(shape) * dtype.itemsize for shard in shards for _, dtype, shape in shard.tensors)
    weight_map = {name: shard.file_name for shard in shards for name, _, _ in shard.tensors}
    index = {"metadata": {"total_parameters": num_elements, "total_size": num_bytes}, "weight_map": weight_map}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"
