"""A base model's safetensors files as a source of weights.

Opening checks every file, name, shape and dtype against the skeleton and the spec, so that a read can fail only on an
I/O error. Invariant: `read` returns, bit for bit, what the files hold for a parameter, under the name and in the layout
that transformers gives it. That is the parameter of `from_pretrained(..., dtype=float32)`, but for models whose own
code writes into weights after they were loaded: the embedding's row of the padding token, which some set to zero. Of
quantised files it is what transformers dequantises them to, in the model's dtype.
Memory: the requested elements; for a parameter that transformers computes from several tensors, those tensors and the
result, until another parameter is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedModel
from transformers.utils.loading_report import LoadStateDictInfo

from ratel_cli.closing import Closing
from ratel_cli.errors import BadInput, excerpt
from ratel_cli.model.export.export_layout import (
    ExportLayout,
    Origins,
    TrainedContent,
    contiguous_strides,
    layout_of_files,
    layout_of_model,
    own_names,
)
from ratel_cli.model.files.directory import WeightFiles, find_weight_files
from ratel_cli.model.files.in_place import FileRange, FileRanges
from ratel_cli.model.files.initialise import RandomSource
from ratel_cli.model.files.kind import declared_class
from ratel_cli.model.files.new_rows import NewRows
from ratel_cli.model.files.quantised import QuantisedLayout
from ratel_cli.model.files.quantised_files import dequantised_files, quantisation_of
from ratel_cli.model.files.renaming import CONVERSION_ERRORS, Conversion, Renaming, plan_renaming, targets_of, twins
from ratel_cli.model.files.shards import ShardReader, TensorEntry
from ratel_cli.model.files.skeleton import DTYPES, NAMES_OF_DTYPES
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.sizes import DTYPE_NAMES, DtypeName, WeightDtype
from ratel_cli.units import counted

_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_COMPARED_ELEMENTS = 1 << 23
"""Two copies of a tied weight are compared in parts of this many elements."""
_WITHOUT_MASTER_ELEMENTS = 1 << 20
"""A parameter that is rounded as it is read is read in parts of this many elements."""
_MAX_NAMES = 5
"""A message lists at most this many tensors."""
_CONSTANT = re.compile(r"(^|\.)(inv_freq|masked_bias|position_ids)$")
"""Names of tensors that older versions of transformers saved, and that the model computes itself."""


class CheckpointSource(Closing):
    """An open checkpoint, whose tensors fit the model."""

    def __init__(
        self,
        directory: Path,
        skeleton: PreTrainedModel,
        spec: ModelSpec,
        *,
        new_head: RandomSource | None = None,
        new_rows: NewRows | None = None,
    ) -> None:
        """Open and check all files of weights. Raises BadInput if they do not fit the model.

        `new_head`: draws what is behind the layers, if the files have another head or none; then other heads are left
        out. `new_rows`: draws the rows that the files lack of embedding and head.
        """
        self._directory = directory
        self._skeleton = skeleton
        of_spec = own_names(skeleton, spec)
        self._new_head, self._new_rows = new_head, new_rows
        self._shapes_in_files = {} if new_rows is None else new_rows.shapes_in_files(skeleton)
        """The shapes in the files of what has more rows in the skeleton, by its names there."""
        self.drawn: tuple[str, ...] = ()
        """Parameters of the head that the files do not have, and that are drawn."""
        self._missing: frozenset[str] = frozenset()
        """These, and frozen parameters that no file has, because the model's own code computes them."""
        self._has_other_head = False
        """Whether the files have a head of another kind, which is left out."""
        self._read_targets = {*of_spec, *persistent_buffers(skeleton)}
        """Names in the skeleton of what is read: what a block has, by all its names, and buffers."""
        self._twins = twins(skeleton)
        self._resources = ExitStack()
        self._converted_tensors: Mapping[str, torch.Tensor] = {}
        files = find_weight_files(directory)
        with ExitStack() as opened:
            shards = [opened.enter_context(ShardReader(path)) for path in files.paths]
            readers_of(shards, files)
            opened_as, self._coded = dequantised_files(shards, quantisation_of(directory), DTYPES[spec.dtype])
            self._shards = dict(zip(files.names, opened_as, strict=True))
            self._readers = {name: each for each in opened_as for name in each.tensors}
            renaming = plan_renaming(skeleton, self._readers)
            self._direct = {target: name for target, name in renaming.direct.items() if target in self._read_targets}
            self._converted: dict[str, Conversion] = {}
            self._check_names(renaming)
            self._check_direct()
            conversions = self._check_conversions(renaming.conversions)
            self._spec = spec
            self._sources = self._choose_sources(spec)
            self._origins = Origins(
                model=skeleton,
                own_names=of_spec,
                direct=renaming.direct,
                conversions=conversions,
                frozen=spec.frozen_names - {of_spec[name] for name in self._shapes_in_files if name in of_spec},
            )
            self._resources = opened.pop_all()

    def close(self) -> None:
        """Close all files. Idempotent."""
        self._converted_tensors = {}
        self._resources.close()

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of the flattened parameter: shape `[stop - start]`, fp32.

        Raises IntegrityFailure on an I/O error, BadInput if a file has become shorter.
        """
        if name in self._missing:
            return self._drawn(name, start, stop)
        return self._read(self._sources[name], start, stop).to(torch.float32)

    def read_whole_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out`, flat, with the parameter, rounded once to its dtype. In the file's dtype that takes no memory.

        Raises what `read` raises.
        """
        if name in self._missing:
            out.copy_(self._drawn(name, 0, len(out)))
            return
        target = self._sources[name]
        shard = None if target in self._shapes_in_files else self._direct.get(target)
        if shard is not None and self._readers[shard].tensors[shard].dtype == out.dtype:
            self._readers[shard].read_into(shard, 0, out)
            return
        for start in range(0, len(out), _WITHOUT_MASTER_ELEMENTS):
            stop = min(start + _WITHOUT_MASTER_ELEMENTS, len(out))
            out[start:stop] = self._read(target, start, stop)

    def quantised(self, name: str, layout: QuantisedLayout) -> torch.Tensor | None:
        """The bytes of a quantised matrix, if the files have it in just this layout; None if they do not."""
        shard = self._direct.get(self._sources[name])
        coded = None if shard is None else self._coded.take(shard)
        return None if coded is None else coded.layout_bytes(layout)

    def located(self, name: str) -> FileRanges | None:
        """See LocatedSource."""
        return self._located.get(name)

    @cached_property
    def _located(self) -> Mapping[str, FileRanges]:
        """Where the files have the parameters that are tensors of them as they are, or several one after another."""
        tensors = {name: reader.tensors[name] for name, reader in self._readers.items()}
        found: dict[str, dict[int, tuple[ShardReader, TensorEntry]]] = {}
        for name, content in replace(self._origins, frozen=frozenset()).contents(tensors).items():
            reader, entry = self._readers[name].file_of(name), tensors[name]
            if not isinstance(content, TrainedContent) or reader is None:
                continue
            if content.strides == contiguous_strides(entry.shape):
                found.setdefault(content.parameter, {})[content.offset] = reader, entry
        sizes = {each.name: each.num_elements for each in self._spec.parameters}
        located = {}
        for parameter, parts in found.items():
            dtypes = {entry.dtype for _, entry in parts.values()}
            ranges, end = [], 0
            for offset, (reader, entry) in sorted(parts.items()):
                if offset == end:
                    ranges.append(FileRange(reader.path, reader.offset_of(entry), entry.num_elements))
                    end += entry.num_elements
            if len(dtypes) == 1 and len(ranges) == len(parts) and end == sizes[parameter]:
                located[parameter] = FileRanges(dtypes.pop(), tuple(ranges))
        return located

    def layout(self, dtype: DtypeName | None) -> ExportLayout:
        """What an export holds: the tensors of these files, the trained ones in `dtype`; None: as the files have them.
        It reads from this source. With another head than that of the files: what the model saves."""
        if dtype is not None and (self._missing or self._has_other_head):
            return layout_of_model(self._skeleton, self._spec, dtype)
        dtypes = self.dtypes if dtype is None else self._spec.exported_dtypes(dtype)
        found = list(dtypes.values())
        most = dtype or DTYPE_NAMES[max(set(found), key=found.count)]
        state = self._skeleton.state_dict()
        shapes = {
            self._direct[name]: tuple(state[name].shape) for name in self._shapes_in_files if name in self._direct
        }
        return layout_of_files(self._shards, self._origins, dtypes, dtype=most, shapes=shapes)

    @cached_property
    def dtypes(self) -> Mapping[str, WeightDtype]:
        """By name, the dtype in which the files have each parameter, or in which it must be."""
        return {
            each.name: self._spec.dtype_of(
                block, NAMES_OF_DTYPES.get(self._dtype_of(self._sources[each.name]), "float32")
            )
            for block in self._spec.blocks
            for each in block.parameters
        }

    def read_names(self) -> list[str]:
        """The names in the files of the tensors that parameters and buffers of the skeleton are read from."""
        converted = (name for each, _ in self._origins.conversions for name in each.source_names)
        return [*self._direct.values(), *converted]

    def kept_tensors(self) -> list[TensorEntry]:
        """The tensors of the files that are no part of the skeleton; an export has them too, byte for byte.

        They are of other parts of the model, such as a vision tower, or of what transformers does not load. Constants
        that the model computes itself are left out, and so are heads of another kind.
        """
        if self.drawn or self._has_other_head:
            return []
        read = set(self.read_names())
        entries = (reader.tensors[name] for name, reader in self._readers.items())
        return [entry for entry in entries if entry.name not in read and not is_constant(entry)]

    @property
    def conversion_bytes(self) -> int:
        """The most bytes that a parameter takes which is computed from several tensors: these, and the results; and
        what is kept of a quantised tensor."""
        return max(map(self._bytes_of, self._converted), default=0) + self._coded.kept_bytes

    def forget_converted(self) -> None:
        """Give back the memory of the parameters that were computed last. Reading them again computes them again."""
        self._converted_tensors = {}
        self._coded.forget()

    def read_buffers(self) -> dict[str, torch.Tensor]:
        """The persistent buffers that the files hold, by name: shapes of the model, dtypes of the files."""
        buffers = persistent_buffers(self._skeleton)
        return {
            name: self._read(name, 0, buffer.numel()).reshape(buffer.shape)
            for name, buffer in buffers.items()
            if name in self._direct or name in self._converted
        }

    def _drawn(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements of a parameter that the files do not have, as the model's own initialiser makes them."""
        assert self._new_head is not None
        return self._new_head.read(name, start, stop)

    def _read(self, target: str, start: int, stop: int) -> torch.Tensor:
        if target in self._direct:
            self._converted_tensors = {}
            name = self._direct[target]
            if target in self._shapes_in_files:
                return self._read_with_new_rows(target, start, stop)
            return self._readers[name].read(name, start, stop)
        if target not in self._converted_tensors:
            # Drop the last result before the next is made, so that there are never two of them.
            self._converted_tensors = {}
            conversion, dtype = self._converted[target], self._dtype_of(target)
            with torch.no_grad():
                self._converted_tensors = conversion.run(
                    self._skeleton, lambda name: self._readers[name].read_whole(name).to(dtype)
                )
        return self._converted_tensors[target].reshape(-1)[start:stop]

    def _read_with_new_rows(self, target: str, start: int, stop: int) -> torch.Tensor:
        """Elements of what has more rows than in the files: in fp32 if new ones are among them."""
        name, end = self._direct[target], math.prod(self._shapes_in_files[target])
        old = self._readers[name].read(name, start, max(start, min(stop, end))) if start < end else torch.empty(0)
        if stop <= end:
            return old
        new = self._drawn_rows[target].reshape(-1)
        return torch.cat([old.float(), new[max(start - end, 0) : stop - end]])

    @cached_property
    def _drawn_rows(self) -> Mapping[str, torch.Tensor]:
        """The new rows, by all names."""
        assert self._new_rows is not None

        def read(target: str) -> torch.Tensor:
            return self._read(self._present(target)[0], 0, math.prod(self._shapes_in_files[target]))

        return self._new_rows.draw(read)

    def _bytes_of(self, target: str) -> int:
        names = self._converted[target].source_names
        num_elements = sum(self._readers[name].tensors[name].num_elements for name in names)
        return 2 * self._dtype_of(target).itemsize * num_elements

    def _dtype_of(self, target: str) -> torch.dtype:
        """The dtype of what `_read` returns. Conversions only move elements, so they can run in the files' dtype, if it
        is one, which needs half the memory."""
        names = [self._direct[target]] if target in self._direct else self._converted[target].source_names
        dtypes = {self._readers[name].tensors[name].dtype for name in names}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    def _check_names(self, renaming: Renaming) -> None:
        """Every tensor of the files must have one place in the model, unless transformers ignores it as well."""
        for first, second in renaming.doubled:
            raise BadInput(
                f"{self._where(second)} and tensor {excerpt(first)} are the same parameter of the model",
                "remove one of the two",
            )
        names = {
            target: name for name, target in renaming.unexpected if not is_constant(self._readers[name].tensors[name])
        }
        findings = _Findings(missing_keys=set(), unexpected_keys=set(names))
        self._skeleton._adjust_missing_and_unexpected_keys(cast(LoadStateDictInfo, findings))
        unexpected = sorted(names[target] for target in findings.unexpected_keys)
        self._has_other_head = bool(unexpected)
        if unexpected and self._new_head is None:
            model_class = type(self._skeleton).__name__
            raise BadInput(
                f"{self._where(unexpected[0])} does not belong to {model_class}{_and_more(unexpected)}",
                self._other_class() or "check that config.json and the weights are of the same model",
            )

    def _check_direct(self) -> None:
        state = self._skeleton.state_dict()
        for target, name in self._direct.items():
            entry = self._readers[name].tensors[name]
            wanted = self._shapes_in_files.get(target, tuple(state[target].shape))
            if entry.shape != wanted:
                raise BadInput(f"{self._where(name)} has shape {entry.shape}, but the model needs {wanted}")
            if state[target].is_floating_point() and entry.dtype not in _WEIGHT_DTYPES:
                raise BadInput(f"{self._where(name)} has dtype {entry.dtype}; weights must be floating point")

    def _check_conversions(self, conversions: Sequence[Conversion]) -> list[tuple[Conversion, Sequence[str]]]:
        """Run every conversion on meta tensors to check the names and shapes of its results, without reading a byte.

        Returns each with the names of its results.
        """
        state, checked = self._skeleton.state_dict(), list[tuple[Conversion, Sequence[str]]]()
        for conversion in conversions:
            if conversion.first_target not in self._read_targets:
                continue  # of a part that is not read
            first = conversion.source_names[0]
            entries = [self._readers[name].tensors[name] for name in conversion.source_names]
            for entry in entries:
                if entry.dtype not in _WEIGHT_DTYPES:
                    where = self._where(entry.name)
                    raise BadInput(f"{where} has dtype {entry.dtype}; weights must be floating point")
            try:
                shapes = {entry.name: entry.shape for entry in entries}
                converted = targets_of(conversion, self._skeleton, shapes)
            except CONVERSION_ERRORS as error:
                raise BadInput(
                    f"{self._where(first)} and {counted(len(entries) - 1, 'other')} cannot be combined into"
                    f" {conversion.first_target}: one is missing or has a wrong shape"
                ) from error
            unread = [target for target in converted if target not in self._read_targets]
            if unread:
                raise BadInput(
                    f"{self._where(first)} is one of those that give {unread[0]}, which the model does not use on text,"
                    f" together with {conversion.first_target}; such a model cannot be exported"
                )
            for target, shape in converted.items():
                wanted = tuple(state[target].shape) if target in state else None
                if shape != wanted:
                    raise BadInput(
                        f"{self._where(first)} and {counted(len(entries) - 1, 'other')} give {target} with shape"
                        f" {shape}, but the model needs {wanted}: one is missing or has a wrong shape"
                    )
                self._converted[target] = conversion
            checked.append((conversion, list(converted)))
        return checked

    def _choose_sources(self, spec: ModelSpec) -> dict[str, str]:
        """For every parameter its name in the files; for a tied parameter that may be its twin's name."""
        sources: dict[str, str] = {}
        missing: list[str] = []
        for parameter in spec.parameters:
            present = self._present(parameter.name)
            if not present:
                missing.append(parameter.name)
                continue
            sources[parameter.name] = present[0]
            shape = self._shapes_in_files.get(parameter.name, parameter.shape)
            for twin in present[1:]:
                self._check_equal(present[0], twin, math.prod(shape))
        of_head = {each.name for block in spec.head.blocks for each in block.parameters}
        constants = self._skeleton._keys_to_ignore_on_save or ()
        computed = {name for name in spec.frozen_names if any(re.search(each, name) for each in constants)}
        if self._new_head is not None and (of_head | computed).issuperset(missing):
            self.drawn = tuple(name for name in missing if name not in computed)
            self._missing = frozenset(missing)
        elif missing:
            raise BadInput(
                f"{self._directory}: tensor {missing[0]} is missing{_and_more(missing)}",
                self._other_class()
                or "check that config.json describes these weights and that the index names every file",
            )
        return sources

    def _present(self, name: str) -> list[str]:
        """The names under which the files have a parameter, its own first."""
        names = [name, *(twin for twin in self._twins[name] if twin != name)]
        return [each for each in names if each in self._direct or each in self._converted]

    def _check_equal(self, name: str, twin: str, num_elements: int) -> None:
        for start in range(0, num_elements, _COMPARED_ELEMENTS):
            stop = min(start + _COMPARED_ELEMENTS, num_elements)
            if not torch.equal(self._read(name, start, stop), self._read(twin, start, stop)):
                raise BadInput(
                    f"{self._directory}: config.json ties {twin} to {name}, but their values in the files differ",
                    "set tie_word_embeddings: false in the model's config.json to train both",
                )

    def _other_class(self) -> str | None:
        """A hint, if config.json says that the weights are of another class than the model that is loaded."""
        declared, trained = declared_class(self._skeleton.config), type(self._skeleton).__name__
        if declared in (None, trained):
            return None
        return f"config.json says that the weights are a {excerpt(str(declared))}; use those of a {trained}"

    def _where(self, name: str) -> str:
        return f"{self._readers[name].path}: tensor {excerpt(name)}"


def is_constant(entry: TensorEntry) -> bool:
    """Whether a tensor is a constant that older versions of transformers saved: frequencies, positions, masks."""
    is_mask = len(entry.shape) == 4 and entry.shape[:2] == (1, 1)
    return _CONSTANT.search(entry.name) is not None or is_mask or not entry.dtype.is_floating_point


def persistent_buffers(skeleton: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The untrained buffers, by name, that a checkpoint of this model contains in addition to its parameters."""
    parameters = {name for name, _ in skeleton.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in skeleton.state_dict().items() if name not in parameters}


def install_buffers(
    skeleton: PreTrainedModel, buffers: Mapping[str, torch.Tensor], *, name_of: Callable[[str], str] = str
) -> None:
    """Copy buffers from `CheckpointSource.read_buffers` into a skeleton. `name_of`: what a checkpoint calls them."""
    into = {name_of(name): buffer for name, buffer in persistent_buffers(skeleton).items()}
    for name, values in buffers.items():
        into[name].copy_(values)


@dataclass(slots=True, kw_only=True)
class _Findings:
    """The argument of `PreTrainedModel._adjust_missing_and_unexpected_keys`, which it changes in place."""

    missing_keys: set[str]
    unexpected_keys: set[str]


def open_shards(resources: ExitStack, files: WeightFiles) -> dict[str, ShardReader]:
    """Open every file. Returns the open file of each tensor. Raises BadInput if the index and the files disagree."""
    return readers_of([resources.enter_context(ShardReader(path)) for path in files.paths], files)


def readers_of(shards: Iterable[ShardReader], files: WeightFiles) -> dict[str, ShardReader]:
    """The open file of each tensor. Raises BadInput if the index and the files disagree."""
    readers: dict[str, ShardReader] = {}
    for reader in shards:
        for name in reader.tensors:
            if name in readers:
                raise BadInput(f"{reader.path}: tensor {excerpt(name)} is in {readers[name].path.name} too")
            readers[name] = reader
    for name, path in files.listed:
        if name not in readers or readers[name].path != path:
            raise BadInput(f"{path}: tensor {excerpt(name)} is missing; the index says that it is in this file")
    return readers


def _and_more(names: Sequence[str]) -> str:
    others = ", ".join(excerpt(name) for name in names[1:_MAX_NAMES])
    return f" ({len(names)} in all: also {others})" if others else ""
