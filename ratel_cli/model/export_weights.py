"""Export: from the store to a directory that transformers loads.

Memory is one group of elements, whatever the model's size. All sizes are known before the first byte is written, so a
drive without enough space is rejected at once. Invariant: the weights written are those of `model.stored_weights`; the
store is only read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from ratel_cli.io.buffers import BufferPool
from ratel_cli.model.card import Card, plain_card
from ratel_cli.model.directory import INDEX_NAME, WEIGHTS_NAME
from ratel_cli.model.import_weights import WEIGHT_GROUP_ELEMENTS
from ratel_cli.model.marker import check_output
from ratel_cli.model.publishing import renamed_notice
from ratel_cli.model.shards import ShardWriter, TensorSpec, file_bytes
from ratel_cli.model.sidecars import add_sidecars, sidecar_bytes, sidecar_names
from ratel_cli.model.skeleton import DTYPES
from ratel_cli.model.spec import ModelSpec
from ratel_cli.model.staging import Staging, require_space
from ratel_cli.model.stored_weights import ParameterSlice, stored_weights
from ratel_cli.sizes import DtypeName
from ratel_cli.store.generation import Generation

DEFAULT_SHARD_BYTES = 5_000_000_000
_HEADER_BYTES = 192
"""The most bytes of a header that one tensor takes, without its name; and that the file itself takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file of weights of the export, and its tensors in order."""

    file_name: str
    tensors: tuple[TensorSpec, ...]


def export_model(
    spec: ModelSpec,
    generation: Generation,
    pool: BufferPool,
    *,
    base_dir: Path,
    output_dir: Path,
    run: str,
    dtype: DtypeName,
    buffers: Mapping[str, torch.Tensor],
    card: Card | None = None,
    replaced_sidecars: Mapping[str, str] | None = None,
    overwrite: bool = False,
    option: str = "output_dir",
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    group_elements: int = WEIGHT_GROUP_ELEMENTS,
    progress: Callable[[], None] = lambda: None,
) -> list[str]:
    """Replace the model in `output_dir` by the weights of `generation`. Other files there stay.

    Returns a sentence about each file of the user's that got another name, because with it the directory would load
    other weights: only with `overwrite`.

    `run` is the output directory of the run that the weights come from; the marker of `output_dir` names it. A file
    that Ratel did not write is replaced only with `overwrite`. `option` is what named `output_dir`, for messages.

    `buffers` are the model's persistent buffers, which the store does not hold. A tied weight is written once, as the
    embedding's. `card` is the content of the model card. `replaced_sidecars`: by name, the text of the base model's
    small files that the run has changed. `progress` is called before each group.

    Raises BadInput if the base model's small files cannot be used, or if a file of the user's would be replaced;
    EnvironmentFailure if the files cannot be written,
    IntegrityFailure if a record is damaged. After any exception before the last phase, and whatever `progress` raises,
    `output_dir` is unchanged; see `staging` for the last phase.
    """
    shards = _shards(spec, buffers, dtype, max_shard_bytes)
    check_output(output_dir, overwrite=overwrite, option=option)
    require_space(output_dir, _total_bytes(shards, base_dir), option=option)
    with Staging(output_dir, run=run, overwrite=overwrite, option=option) as staging:
        staging.reject_files_of_others(export_names(spec, buffers, dtype, base_dir, max_shard_bytes=max_shard_bytes))
        weights = stored_weights(spec, generation, pool, dtype, group_elements=group_elements, progress=progress)
        with closing(weights):
            parts = _parts(weights, buffers)
            for shard in shards:
                _write_shard(staging, shard, parts)
        if len(shards) > 1:
            staging.write_text(INDEX_NAME, _index(shards))
        add_sidecars(
            staging,
            base_dir=base_dir,
            spec=spec,
            dtype=dtype,
            card=card or plain_card(spec),
            num_updates=generation.progress.updates,
            replaced=replaced_sidecars or {},
        )
        renamed = [*staging.renamed, *staging.publish(step=generation.progress.step)]
    return [renamed_notice(path, spare) for path, spare in renamed]


def export_names(
    spec: ModelSpec,
    buffers: Mapping[str, torch.Tensor],
    dtype: DtypeName,
    base_dir: Path,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> list[str]:
    """The names of all files that an export may have."""
    shards = _shards(spec, buffers, dtype, max_shard_bytes)
    index = [INDEX_NAME] if len(shards) > 1 else []
    return [*index, *(shard.file_name for shard in shards), *sidecar_names(base_dir)]


def export_bytes(
    spec: ModelSpec,
    buffers: Mapping[str, torch.Tensor],
    dtype: DtypeName,
    base_dir: Path,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> int:
    """The space that an export takes. An earlier one stays until all of it is written, so its space does not count."""
    return _total_bytes(_shards(spec, buffers, dtype, max_shard_bytes), base_dir)


def split_into_shards(tensors: Sequence[TensorSpec], max_shard_bytes: int) -> list[Shard]:
    """Distribute tensors over files, in order. A file is at most `max_shard_bytes` long, or holds only one tensor."""
    files: list[list[TensorSpec]] = [[]]
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
    return [Shard(file_name=name, tensors=tuple(file)) for name, file in zip(names, files, strict=True)]


def _parts(
    weights: Iterable[ParameterSlice], buffers: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """All elements of the export, in the order of its tensors: the name of a tensor, and its next elements."""
    for part in weights:
        yield part.name, part.values
    for name, buffer in buffers.items():
        yield name, buffer.contiguous()


def _shards(
    spec: ModelSpec, buffers: Mapping[str, torch.Tensor], dtype: DtypeName, max_shard_bytes: int
) -> list[Shard]:
    """The export's files of weights."""
    parameters = (parameter for block in spec.blocks for parameter in block.parameters)
    tensors = [
        *(TensorSpec(name=each.name, dtype=DTYPES[dtype], shape=each.shape) for each in parameters),
        *(TensorSpec(name=name, dtype=each.dtype, shape=tuple(each.shape)) for name, each in buffers.items()),
    ]
    return split_into_shards(tensors, max_shard_bytes)


def _total_bytes(shards: Sequence[Shard], base_dir: Path) -> int:
    index_bytes = len(_index(shards)) if len(shards) > 1 else 0
    return sum(file_bytes(shard.tensors) for shard in shards) + index_bytes + sidecar_bytes(base_dir)


def _write_shard(staging: Staging, shard: Shard, parts: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Write one file of weights: take parts until its tensors are complete."""
    with ShardWriter(staging.path / shard.file_name, shard.tensors) as writer:
        for tensor in shard.tensors:
            num_left = tensor.num_elements
            while num_left:
                name, elements = next(parts)
                assert name == tensor.name or not elements.numel(), f"{name} is out of order"
                writer.write(elements)
                num_left -= elements.numel()
        writer.finish()
        staging.add(shard.file_name, xxh3_128=writer.xxh3_128)


def _index(shards: Sequence[Shard]) -> str:
    tensors = [tensor for shard in shards for tensor in shard.tensors]
    num_elements, num_bytes = sum(each.num_elements for each in tensors), sum(each.num_bytes for each in tensors)
    weight_map = {tensor.name: shard.file_name for shard in shards for tensor in shard.tensors}
    index = {"metadata": {"total_parameters": num_elements, "total_size": num_bytes}, "weight_map": weight_map}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"
