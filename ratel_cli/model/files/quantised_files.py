"""Quantised checkpoints, read as the floating-point tensors that their codes stand for.

A quantised matrix is several tensors in the files. Here they are one, under the name that it has in a checkpoint that
is not quantised, so that nothing else knows of it. `quantised_formats.py` finds what belongs together,
`coded_tensors.py` makes numbers of it. Memory: what one tensor keeps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from ratel_cli.errors import BadInput, excerpt
from ratel_cli.model.files.coded_tensors import CodedTensor
from ratel_cli.model.files.directory import find_weight_files, trusted_file
from ratel_cli.model.files.quantised import QuantisedLayout
from ratel_cli.model.files.quantised_formats import FORMATS, FormatFiles, method_of
from ratel_cli.model.files.shards import ShardReader, TensorEntry, TensorFile

_OF_ACTIVATIONS = re.compile(
    r"[._](activation_scale|activation_scale_inv|input_scale|input_global_scale|input_zero_point|output_scale|qscale_act"
    r"|weight_format|k_scale|v_scale|q_scale)$"
)
"""Names of tensors that say how inputs of layers are quantised, or a cache; training quantises neither."""


class DequantisedFile(TensorFile):
    """A file whose quantised tensors are read as floating-point ones."""

    def __init__(self, file: ShardReader, tensors: Mapping[str, TensorEntry], coded: Coded) -> None:
        self.path, self.tensors = file.path, tensors
        self._file, self._coded = file, coded

    def file_of(self, name: str) -> ShardReader | None:
        """See TensorFile."""
        return None if self._coded.has(name) else self._file

    def read_into(self, name: str, start: int, out: torch.Tensor) -> None:
        """See TensorFile."""
        coded = self._coded.take(name)
        if coded is None:
            self._file.read_into(name, start, out)
        else:
            coded.read_into(start, out)


class Coded:
    """The quantised tensors of a checkpoint by name, of which the one that was read last has memory."""

    def __init__(self, tensors: Iterable[CodedTensor]) -> None:
        self._tensors = {each.entry.name: each for each in tensors}
        self._last: CodedTensor | None = None

    def take(self, name: str) -> CodedTensor | None:
        """The tensor of this name, and no memory for any other; None if that is not quantised."""
        found = self._tensors.get(name)
        if self._last is not None and self._last is not found:
            self._last.forget()
        self._last = found
        return found

    def has(self, name: str) -> bool:
        """Whether a tensor is quantised."""
        return name in self._tensors

    def forget(self) -> None:
        """Give back all memory."""
        self.take("")

    @property
    def kept_bytes(self) -> int:
        """The most bytes of a part that is kept, and of as much again while it is made."""
        sizes = (min(each.part_elements, each.entry.num_elements) for each in self._tensors.values())
        return 8 * max(sizes, default=0)

    def tensors(self) -> Sequence[CodedTensor]:
        """All tensors that have codes."""
        return list(self._tensors.values())


def quantisation_of(directory: Path) -> Mapping[str, object] | None:
    """The `quantization_config` of a model's config.json, `compression_config` in early ones; None if its weights are
    not quantised."""
    path = directory / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(trusted_file(directory, path.name).read_bytes())
    except ValueError:  # said where the model's configuration is read
        return None
    found = config.get("quantization_config", config.get("compression_config")) if isinstance(config, dict) else None
    return found if isinstance(found, dict) else None


def dequantised_files(
    shards: Sequence[ShardReader], settings: Mapping[str, object] | None, dtype: torch.dtype
) -> tuple[Sequence[TensorFile], Coded]:
    """The files as they are read for a model in `dtype`, and what of them is quantised.

    `settings`: see `quantisation_of`. Raises BadInput for a format that cannot be read, and where the tensors of a
    matrix do not fit together.
    """
    if settings is None:
        return shards, Coded(())
    files = {name: shard for shard in shards for name in shard.tensors}
    method, where = method_of(settings), shards[0].path.parent / "config.json"
    find = FORMATS.get(method)
    if find is None:
        raise BadInput(
            f"{where}: quantization_config: the weights are quantised by {excerpt(method)}, which Ratel does not read",
            f"use the model from before quantisation, or one in {', '.join(FORMATS)}",
        )
    coded = Coded(find(FormatFiles(files, settings, dtype)))
    if not coded.tensors():
        raise BadInput(
            f"{where}: quantization_config: the weights are quantised by {method}, but no file has the tensors of that"
            " format",
            "check that config.json and the weights are of the same model",
        )
    by_codes = {each.sources[0]: each for each in coded.tensors()}
    used = {name for each in coded.tensors() for name in each.sources}
    opened = []
    for shard in shards:
        tensors = dict[str, TensorEntry]()
        for name, entry in shard.tensors.items():
            if name in by_codes:
                tensors[by_codes[name].entry.name] = by_codes[name].entry
            elif name not in used and not _OF_ACTIVATIONS.search(name):
                tensors[name] = entry
        opened.append(DequantisedFile(shard, tensors, coded))
    return opened, coded


def packed_layouts(directory: Path, dtype: torch.dtype) -> dict[str, QuantisedLayout]:
    """The layouts of matrices that can stay as the files have them, by the names of their weights there. Raises
    BadInput."""
    settings = quantisation_of(directory)
    if settings is None:
        return {}
    with ExitStack() as resources:
        shards = [resources.enter_context(ShardReader(path)) for path in find_weight_files(directory).paths]
        _, coded = dequantised_files(shards, settings, dtype)
        found = {each.entry.name: each.layout for each in coded.tensors()}
    return {name: layout for name, layout in found.items() if layout is not None}
