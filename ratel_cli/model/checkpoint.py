"""A base model's safetensors files as a source of weights.

`run.inputs` opens one for the import. On opening, every file, name, shape and dtype is checked
against the skeleton and the spec, so that reading cannot meet a surprise. Invariant: what `read` gives
equals, bit for bit, the parameter that `AutoModelForCausalLM.from_pretrained(..., dtype=float32)`
would hold. Memory: the elements asked for; for parameters that transformers makes out of several
tensors, those tensors and the result, until another parameter is read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import torch
from transformers import PreTrainedModel
from transformers.utils.loading_report import LoadStateDictInfo

from ratel_cli.errors import BadInput
from ratel_cli.model.directory import WeightFiles, find_weight_files
from ratel_cli.model.renaming import Conversion, Renaming, plan_renaming
from ratel_cli.model.shards import ShardReader, escaped
from ratel_cli.model.spec import ModelSpec

_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_COMPARED_ELEMENTS = 1 << 23
_NAMED_AT_MOST = 5
_CONSTANT = re.compile(r"(^|\.)(inv_freq|masked_bias|position_ids)$")


class CheckpointSource:
    """An open checkpoint. Raises BadInput when it does not fit the model."""

    def __init__(self, directory: Path, skeleton: PreTrainedModel, spec: ModelSpec) -> None:
        self._directory = directory
        self._skeleton = skeleton
        self._resources = ExitStack()
        self._realised: Mapping[str, torch.Tensor] = {}
        if getattr(skeleton.config, "quantization_config", None) is not None:
            raise BadInput(
                f"{directory}: the weights are quantised; fine-tuning needs them in floating point",
                "use the model that it was made from, or dequantise it first",
            )
        files = find_weight_files(directory)
        with ExitStack() as opened:
            self._readers = open_shards(opened, files)
            renaming = plan_renaming(skeleton, self._readers)
            self._direct = dict(renaming.direct)
            self._converted: dict[str, Conversion] = {}
            self._check_names(renaming, spec)
            self._check_direct()
            self._check_conversions(renaming.conversions)
            self._sources = self._choose_sources(spec)
            self._resources = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._realised = {}
        self._resources.close()

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements of a parameter, flattened, as fp32."""
        return self._read(self._sources[name], start, stop).to(torch.float32)

    def read_buffers(self) -> dict[str, torch.Tensor]:
        """Tensors of the files that belong into the model's persistent buffers, in the file's dtype."""
        buffers = persistent_buffers(self._skeleton)
        return {
            name: self._read(name, 0, buffer.numel()).reshape(buffer.shape)
            for name, buffer in buffers.items()
            if name in self._direct or name in self._converted
        }

    def _read(self, target: str, start: int, stop: int) -> torch.Tensor:
        if target in self._direct:
            self._realised = {}
            name = self._direct[target]
            return self._readers[name].read(name, start, stop)
        if target not in self._realised:
            # Let go of the last result before the next is made: never two of them at once.
            self._realised = {}
            self._realised = self._convert(self._converted[target])
        return self._realised[target].reshape(-1)[start:stop]

    def _convert(self, conversion: Conversion) -> dict[str, torch.Tensor]:
        dtypes = {self._readers[name].tensors[name].dtype for name in conversion.source_names}
        # Conversions only move elements, so they run in the file's dtype, which is half the memory.
        dtype = next(iter(dtypes)) if len(dtypes) == 1 else torch.float32
        with torch.no_grad():
            return conversion.run(self._skeleton, lambda name: self._readers[name].read_whole(name).to(dtype))

    def _check_names(self, renaming: Renaming, spec: ModelSpec) -> None:
        """Every tensor of the files has one place, but for those that transformers ignores as well."""
        for first, second in renaming.doubled:
            raise BadInput(f"{self._where(second)} is also there as {escaped(first)}")
        names = {target: name for name, target in renaming.unexpected if not self._is_constant(name)}
        findings = _Findings(missing_keys=set(), unexpected_keys=set(names))
        self._skeleton._adjust_missing_and_unexpected_keys(cast(LoadStateDictInfo, findings))
        unexpected = sorted(names[target] for target in findings.unexpected_keys)
        if unexpected:
            raise BadInput(
                f"{self._where(unexpected[0])} has no place in {spec.architecture}{_and_more(unexpected)}",
                "the config.json beside it describes another model",
            )

    def _check_direct(self) -> None:
        state = self._skeleton.state_dict()
        for target, name in self._direct.items():
            entry, wanted = self._readers[name].tensors[name], tuple(state[target].shape)
            if entry.shape != wanted:
                raise BadInput(f"{self._where(name)} has shape {entry.shape}, the model needs {wanted}")
            if state[target].is_floating_point() and entry.dtype not in _WEIGHT_DTYPES:
                raise BadInput(f"{self._where(name)} has dtype {entry.dtype}; weights must be floating point")

    def _check_conversions(self, conversions: Sequence[Conversion]) -> None:
        """Run every conversion on meta tensors: what comes out, and in which shape, without reading a byte."""
        state = self._skeleton.state_dict()
        for conversion in conversions:
            first = conversion.source_names[0]
            entries = [self._readers[name].tensors[name] for name in conversion.source_names]
            if any(entry.dtype not in _WEIGHT_DTYPES for entry in entries):
                raise BadInput(f"{self._where(first)} has dtype {entries[0].dtype}; weights must be floating point")
            try:
                converted = conversion.run(self._skeleton, self._meta_tensor)
            except (RuntimeError, ValueError, IndexError, AttributeError) as error:
                raise BadInput(
                    f"{self._where(first)} and the {len(entries) - 1} that go with it do not make up"
                    f" {conversion.first_target}: one is missing or has the wrong shape"
                ) from error
            for target, value in converted.items():
                wanted = tuple(state[target].shape) if target in state else None
                if tuple(value.shape) != wanted:
                    raise BadInput(
                        f"{self._where(first)} and the {len(entries) - 1} that go with it give {target} the shape"
                        f" {tuple(value.shape)}, the model needs {wanted}: one is missing or has the wrong shape"
                    )
                self._converted[target] = conversion

    def _choose_sources(self, spec: ModelSpec) -> dict[str, str]:
        """For every parameter the name under which the files have it, a tied twin's where need be."""
        twins = _twins(self._skeleton)
        sources: dict[str, str] = {}
        missing: list[str] = []
        for parameter in (parameter for block in spec.blocks for parameter in block.parameters):
            names = [parameter.name, *(name for name in twins[parameter.name] if name != parameter.name)]
            present = [name for name in names if name in self._direct or name in self._converted]
            if not present:
                missing.append(parameter.name)
                continue
            sources[parameter.name] = present[0]
            for twin in present[1:]:
                self._check_equal(present[0], twin, parameter.num_elements)
        if missing:
            raise BadInput(
                f"{self._directory}: tensor {missing[0]} is missing{_and_more(missing)}",
                "config.json does not describe these weights, or a file is missing from the index",
            )
        return sources

    def _check_equal(self, name: str, twin: str, num_elements: int) -> None:
        for start in range(0, num_elements, _COMPARED_ELEMENTS):
            stop = min(start + _COMPARED_ELEMENTS, num_elements)
            if not torch.equal(self._read(name, start, stop), self._read(twin, start, stop)):
                raise BadInput(
                    f"{self._directory}: config.json ties {twin} to {name}, but their values in the files differ",
                    "set tie_word_embeddings: false in config.json to train both",
                )

    def _meta_tensor(self, name: str) -> torch.Tensor:
        entry = self._readers[name].tensors[name]
        return torch.empty(entry.shape, dtype=torch.float32, device="meta")

    def _is_constant(self, name: str) -> bool:
        """Whether this is a buffer that older versions of transformers saved: frequencies, positions, masks."""
        entry = self._readers[name].tensors[name]
        is_mask = len(entry.shape) == 4 and entry.shape[:2] == (1, 1)
        return _CONSTANT.search(name) is not None or is_mask or not entry.dtype.is_floating_point

    def _where(self, name: str) -> str:
        return f"{self._readers[name].path}: tensor {escaped(name)}"


def persistent_buffers(skeleton: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Buffers that a checkpoint of this model holds beside its parameters; they are not trained."""
    parameters = {name for name, _ in skeleton.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in skeleton.state_dict().items() if name not in parameters}


def install_buffers(skeleton: PreTrainedModel, buffers: Mapping[str, torch.Tensor]) -> None:
    """Put what `read_buffers` gave into the skeleton that computes."""
    state = persistent_buffers(skeleton)
    for name, values in buffers.items():
        state[name].copy_(values)


@dataclass(slots=True, kw_only=True)
class _Findings:
    """What `PreTrainedModel._adjust_missing_and_unexpected_keys` works on, in every version of it."""

    missing_keys: set[str]
    unexpected_keys: set[str]


def open_shards(resources: ExitStack, files: WeightFiles) -> dict[str, ShardReader]:
    """Which open file holds each tensor. The index must tell the truth."""
    readers: dict[str, ShardReader] = {}
    for path in files.paths:
        reader = resources.enter_context(ShardReader(path))
        for name in reader.tensors:
            if name in readers:
                raise BadInput(f"{path}: tensor {escaped(name)} is also in {readers[name].path.name}")
            readers[name] = reader
    for name, path in files.listed:
        if name not in readers or readers[name].path != path:
            raise BadInput(f"{path}: tensor {escaped(name)} is missing, though the index says that it is here")
    return readers


def _twins(skeleton: PreTrainedModel) -> dict[str, list[str]]:
    """For every parameter name all names of the same tensor, its own among them."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name, parameter in skeleton.named_parameters(remove_duplicate=False):
        groups[id(parameter)].append(name)
    return {name: group for group in groups.values() for name in group}


def _and_more(names: Sequence[str]) -> str:
    others = ", ".join(escaped(name) for name in names[1:_NAMED_AT_MOST])
    return f" ({len(names)} in all: also {others})" if others else ""
