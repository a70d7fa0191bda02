"""What the files of an export hold: the tensors of each, and where the content of each tensor comes from.

A layout is made before anything is written: from the base model's files, whose names, shapes and order the export
keeps, or for a model without files as transformers' `save_pretrained` would lay it out. Invariant: a layout is values
and open files only, so its size is known to the byte, and writing it can fail only on an I/O error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import nn
from transformers import PreTrainedModel

from ratel_cli.io.views import VALUE_DTYPES
from ratel_cli.model.files.classes import class_settings
from ratel_cli.model.files.directory import WEIGHTS_NAME, index_name_of
from ratel_cli.model.files.kind import text_config
from ratel_cli.model.files.renaming import Conversion, Reversal, plan_renaming, reverse, saved_names, targets_of, twins
from ratel_cli.model.files.shards import TensorFile, TensorSpec, file_bytes
from ratel_cli.model.files.skeleton import DTYPES
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.sizes import DtypeName, WeightDtype

DEFAULT_SHARD_BYTES = 5_000_000_000
_HEADER_BYTES = 192
"""The most bytes of a header that one tensor takes, without its name; and that the file itself takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedContent:
    """The content is a strided view of a flattened parameter: all of it, or an expert's matrix, perhaps transposed."""

    parameter: str
    offset: int
    """The index of the view's first element."""
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedContent:
    """The content is computed from whole parameters, because no view of one parameter is the same."""

    convert: Callable[[Callable[[str], torch.Tensor]], Mapping[str, torch.Tensor]]
    """Computes tensors by their names in the files, given what reads a parameter."""
    parameters: tuple[str, ...]
    """What it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseContent:
    """The content is that of the tensor with the same name in a file of the base model, byte for byte."""

    reader: TensorFile


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferContent:
    """The content is a tensor in memory: a buffer of the model."""

    values: torch.Tensor


Content = TrainedContent | ConvertedContent | BaseContent | BufferContent


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOutTensor(TensorSpec):
    """A tensor of a file that will be written."""

    content: Content


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file of weights of the export, and its tensors in order."""

    file_name: str
    tensors: tuple[LaidOutTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportLayout:
    """All files of weights of an export."""

    shards: tuple[Shard, ...]
    architecture: str
    """The class in transformers that loads them; config.json names it."""
    dtype: DtypeName
    """Dtype of what is trained, but for what needs another one; config.json names it."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """What config.json says besides, in place of the base model's: the names of classes."""
    num_rows: int | None = None
    """Rows of the embedding, which config.json names; None: it names those that it has."""
    weights_name: str = WEIGHTS_NAME
    """Name of the file of weights, if there is only one."""

    @property
    def file_names(self) -> list[str]:
        """The names of the files of weights, and of their index if there is one."""
        index = [self.index_name] if self.index is not None else []
        return [*index, *(shard.file_name for shard in self.shards)]

    @property
    def index_name(self) -> str:
        """The name of the index, which says which file has each tensor."""
        return index_name_of(self.weights_name)

    @property
    def num_bytes(self) -> int:
        """The exact size of these files."""
        return sum(file_bytes(shard.tensors) for shard in self.shards) + len((self.index or "").encode())

    @property
    def index(self) -> str | None:
        """The content of the index: which file has each tensor. None for a single file, which needs none."""
        if [shard.file_name for shard in self.shards] == [self.weights_name]:
            return None
        tensors = [tensor for shard in self.shards for tensor in shard.tensors]
        num_elements, num_bytes = sum(each.num_elements for each in tensors), sum(each.num_bytes for each in tensors)
        weight_map = {tensor.name: shard.file_name for shard in self.shards for tensor in shard.tensors}
        index = {"metadata": {"total_parameters": num_elements, "total_size": num_bytes}, "weight_map": weight_map}
        return json.dumps(index, indent=2, sort_keys=True) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origins:
    """Where the tensors of files come from that training changes."""

    model: PreTrainedModel
    """The model whose conversions lead from these files to parameters."""
    own_names: Mapping[str, str]
    """The spec's name of each trained parameter, by all its names in `model`."""
    direct: Mapping[str, str]
    """Name in the model -> name in the files, for tensors that need no conversion."""
    conversions: Sequence[tuple[Conversion, Sequence[str]]]
    """Each with the names of its results in the model."""
    frozen: frozenset[str] = frozenset()
    """The spec's names of parameters that the files have already as they are."""

    def contents(self, tensors: Mapping[str, TensorSpec]) -> dict[str, TrainedContent | ConvertedContent]:
        """The content of each of the files' `tensors` that is trained, by its name.

        A conversion that has no way back is left out: see `irreversible`.
        """
        contents: dict[str, TrainedContent | ConvertedContent] = {
            name: whole_parameter(self.own_names[target], tensors[name].shape)
            for target, name in self.direct.items()
            if self._is_trained(target)
        }
        for conversion, targets in self._trained():
            reversal = self._reverse(conversion, targets, tensors)
            if reversal is not None:
                contents |= self._reversed(reversal, targets)
        return contents

    def irreversible(self, tensors: Mapping[str, TensorSpec]) -> list[tuple[Conversion, Sequence[str]]]:
        """The conversions that transformers cannot undo. An export has their results instead of their sources."""
        return [each for each in self._trained() if self._reverse(*each, tensors) is None]

    def _trained(self) -> list[tuple[Conversion, Sequence[str]]]:
        return [
            each
            for each in self.conversions
            if all(target in self.own_names for target in each[1]) and any(map(self._is_trained, each[1]))
        ]

    def _is_trained(self, target: str) -> bool:
        return target in self.own_names and self.own_names[target] not in self.frozen

    def _reverse(
        self, conversion: Conversion, targets: Sequence[str], tensors: Mapping[str, TensorSpec]
    ) -> Reversal | None:
        shapes = {name: tensors[name].shape for name in conversion.source_names}
        return reverse(conversion, self.model, targets, shapes)

    def _reversed(self, reversal: Reversal, targets: Iterable[str]) -> dict[str, TrainedContent | ConvertedContent]:
        state = self.model.state_dict()
        parameters = {name: torch.empty(state[name].shape, device="meta") for name in targets}
        storages = {each.untyped_storage()._cdata: self.own_names[name] for name, each in parameters.items()}

        def convert(read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
            return reversal.run(self.model, lambda name: read(self.own_names[name]))

        contents: dict[str, TrainedContent | ConvertedContent] = {}
        for name, view in reversal.views(self.model, parameters).items():
            parameter = storages.get(view.untyped_storage()._cdata)
            contents[name] = (
                ConvertedContent(convert=convert, parameters=tuple(self.own_names[each] for each in targets))
                if parameter is None
                else TrainedContent(parameter=parameter, offset=int(view.storage_offset()), strides=view.stride())
            )
        return contents


def layout_of_files(
    readers: Mapping[str, TensorFile],
    origins: Origins,
    dtypes: Mapping[str, WeightDtype],
    *,
    dtype: DtypeName,
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> ExportLayout:
    """The layout of the base model's files, by their names: what is trained in `dtypes`, by parameter, most of it in
    `dtype`; all others as they are. `shapes`: of tensors that have more rows than in the files."""
    tensors = {
        name: replace(entry, shape=shapes.get(name, entry.shape))
        for reader in readers.values()
        for name, entry in reader.tensors.items()
    }
    contents = origins.contents(tensors)
    instead = _results_instead(origins, tensors, dtypes)
    shards = []
    for file_name, reader in readers.items():
        placed: list[LaidOutTensor] = []
        for entry in sorted((tensors[name] for name in reader.tensors), key=lambda entry: entry.offset):
            content = contents.get(entry.name)
            if content is not None:
                placed.append(trained_tensor(entry.name, entry.shape, content, dtypes))
            elif entry.name in instead:
                placed += instead[entry.name]
            else:
                base = BaseContent(reader=reader)
                placed.append(LaidOutTensor(name=entry.name, dtype=entry.dtype, shape=entry.shape, content=base))
        shards.append(Shard(file_name=file_name, tensors=tuple(placed)))
    return ExportLayout(
        shards=tuple(shards),
        architecture=type(origins.model).__name__,
        dtype=dtype,
        settings=class_settings(origins.model.config),
        num_rows=_num_rows(origins.model),
    )


def layout_of_model(
    model: PreTrainedModel, spec: ModelSpec, dtype: DtypeName, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> ExportLayout:
    """The layout of a model that no files were read for: what `save_pretrained` would write, in files of this size."""
    shapes, buffers = saved_names(model), dict(model.named_buffers())
    dtypes = spec.exported_dtypes(dtype)
    tensors = {name: TensorSpec(name=name, dtype=DTYPES[dtype], shape=shape) for name, shape in shapes.items()}
    renaming = plan_renaming(model, tensors)
    conversions = [(each, list(targets_of(each, model, shapes))) for each in renaming.conversions]
    origins = Origins(model=model, own_names=own_names(model, spec), direct=renaming.direct, conversions=conversions)
    contents = origins.contents(tensors)
    held = {
        name: BufferContent(values=buffers[target].contiguous())
        for target, name in renaming.direct.items()
        if target in buffers
    }
    placed = [
        *(trained_tensor(name, shapes[name], contents[name], dtypes) for name in shapes if name in contents),
        *(
            LaidOutTensor(name=name, dtype=each.values.dtype, shape=shapes[name], content=each)
            for name, each in held.items()
        ),
    ]
    return ExportLayout(
        shards=split_into_shards(placed, max_shard_bytes),
        architecture=spec.architecture,
        dtype=dtype,
        settings=class_settings(model.config),
        num_rows=_num_rows(model),
    )


def layout_of_module(
    module: nn.Module,
    spec: ModelSpec,
    *,
    dtype: DtypeName | None = None,
    weights_name: str = WEIGHTS_NAME,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> ExportLayout:
    """The layout of a module of any kind: its parameters and persistent buffers under their own names, each once."""
    dtypes = spec.exported_dtypes(dtype or spec.dtype)
    shapes = {each.name: each.shape for each in spec.parameters}
    placed = [trained_tensor(name, shape, whole_parameter(name, shape), dtypes) for name, shape in shapes.items()]
    for module_name, each in module.named_modules():
        for name, buffer in each._buffers.items():
            if buffer is not None and name not in each._non_persistent_buffers_set:
                held = buffer.detach().cpu().contiguous()
                full_name = f"{module_name}.{name}".lstrip(".")
                content = BufferContent(values=held)
                placed.append(LaidOutTensor(name=full_name, dtype=held.dtype, shape=tuple(held.shape), content=content))
    shards = split_into_shards(placed, max_shard_bytes, weights_name)
    return ExportLayout(
        shards=shards, architecture=spec.architecture, dtype=dtype or spec.dtype, weights_name=weights_name
    )


def _num_rows(model: PreTrainedModel) -> int | None:
    found = getattr(text_config(model.config), "vocab_size", None)
    return found if isinstance(found, int) else None


def own_names(model: PreTrainedModel, spec: ModelSpec) -> dict[str, str]:
    """The spec's name of each parameter, by all names that the parameter has in the model."""
    names_of = twins(model)
    return {name: each.name for each in spec.parameters for name in names_of[each.name]}


def whole_parameter(parameter: str, shape: Sequence[int]) -> TrainedContent:
    """The content that is all of a parameter of this shape."""
    return TrainedContent(parameter=parameter, offset=0, strides=contiguous_strides(shape))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor whose elements lie one after another."""
    return torch.empty(shape, device="meta").stride()


def split_into_shards(
    tensors: Sequence[LaidOutTensor], max_shard_bytes: int, weights_name: str = WEIGHTS_NAME
) -> tuple[Shard, ...]:
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
    stem = weights_name.removesuffix(".safetensors")
    names = [f"{stem}-{index:05d}-of-{len(files):05d}.safetensors" for index in range(1, len(files) + 1)]
    if len(files) == 1:
        names = [weights_name]
    return tuple(Shard(file_name=name, tensors=tuple(file)) for name, file in zip(names, files, strict=True))


def _results_instead(
    origins: Origins, tensors: Mapping[str, TensorSpec], dtypes: Mapping[str, WeightDtype]
) -> dict[str, list[LaidOutTensor]]:
    """What takes the place of each source of a conversion that cannot be undone: its results, and then nothing."""
    state = origins.model.state_dict()
    instead: dict[str, list[LaidOutTensor]] = {}
    for conversion, targets in origins.irreversible(tensors):
        first, *others = conversion.source_names
        instead[first] = [
            trained_tensor(name, shape, whole_parameter(origins.own_names[name], shape), dtypes)
            for name, shape in ((target, tuple(state[target].shape)) for target in targets)
        ]
        instead |= {name: [] for name in others}
    return instead


def trained_tensor(
    name: str, shape: tuple[int, ...], content: TrainedContent | ConvertedContent, dtypes: Mapping[str, WeightDtype]
) -> LaidOutTensor:
    """A tensor in the dtype of the parameters that it is made of; in fp32 if they have different ones."""
    made_of = content.parameters if isinstance(content, ConvertedContent) else (content.parameter,)
    found = {dtypes[each] for each in made_of}
    dtype = next(iter(found)) if len(found) == 1 else "float32"
    return LaidOutTensor(name=name, dtype=VALUE_DTYPES[dtype], shape=shape, content=content)
