"""The files of an adapter, as PEFT loads and saves them, and the weights of a model that has one.

Invariant: an exported adapter has the names, the shapes and the configuration that PEFT gives it.
"""

from __future__ import annotations

import copy
import json
import math
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import torch
from transformers import PreTrainedModel

from ratel_cli.errors import BadInput, IntegrityFailure, excerpt, first_line
from ratel_cli.json_fields import JsonFields
from ratel_cli.model.export.export_layout import ExportLayout, split_into_shards, trained_tensor, whole_parameter
from ratel_cli.model.export.merged_weights import AdaptedMatrix, TrainedRows, output_lengths
from ratel_cli.model.files.directory import ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME, trusted_file
from ratel_cli.model.files.import_weights import WeightSource
from ratel_cli.model.files.in_place import FileRanges, located_in
from ratel_cli.model.files.renaming import twins
from ratel_cli.model.files.shards import ShardReader
from ratel_cli.model.values.adapter_settings import base_name
from ratel_cli.model.values.fetched_code import no_fetched_code
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.sizes import DtypeName

with no_fetched_code():
    from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from ratel_cli.model.export.adapters import MAGNITUDES, NAME, is_of_adapter, trained_parameters


class AdaptedSource:
    """Weights of a base model, and of an adapter."""

    def __init__(
        self,
        base: WeightSource,
        read_adapter: Callable[[], Mapping[str, torch.Tensor]],
        magnitudes: Mapping[str, AdaptedMatrix] = MappingProxyType({}),
        rows: Mapping[str, TrainedRows] = MappingProxyType({}),
    ) -> None:
        """`read_adapter`: gives its values in fp32, by name, when the first weight is read. `magnitudes`, `rows`: by
        name, those that it does not have: the lengths of the matrix's and the adapter's sum; rows of the base."""
        self._base = base
        self._read_adapter = read_adapter
        self._magnitudes, self._rows = magnitudes, rows

    @cached_property
    def _adapter(self) -> Mapping[str, torch.Tensor]:
        return self._read_adapter()

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See WeightSource."""
        if name in self._adapter:
            return self._adapter[name].reshape(-1)[start:stop]
        if name in self._magnitudes:
            return self._first_magnitudes(self._magnitudes[name])[start:stop]
        if name in self._rows:
            return self._rows[name].read(self._base).reshape(-1)[start:stop]
        return self._base.read(base_name(name), start, stop)

    def located(self, name: str) -> FileRanges | None:
        """See LocatedSource."""
        return None if is_of_adapter(name) else located_in(self._base, base_name(name))

    def _first_magnitudes(self, adapted: AdaptedMatrix) -> torch.Tensor:
        """Compute the first magnitudes as PEFT does: in the dtype of the base, then in fp32."""
        values = self._base.read(base_name(adapted.matrix), 0, math.prod(adapted.shape))
        matrix = values.to(adapted.dtype).view(adapted.shape)
        first, second = (self._adapter[name].to(adapted.dtype) for name in (adapted.first, adapted.second))
        product = second @ first * adapted.scaling
        return output_lengths(matrix, product.T if adapted.is_inputs_first else product, adapted).float()


def read_adapter(directory: Path, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """The values of an exported adapter, by the names of its parameters. Raises BadInput if it is another model's."""
    found = dict[str, torch.Tensor]()
    with ShardReader(trusted_file(directory, ADAPTER_WEIGHTS_NAME)) as reader:
        for each in trained_parameters(spec):
            entry = reader.tensors.get(_saved_name(each.name))
            if entry is None or entry.shape != each.shape:
                what = "is missing" if entry is None else f"has the shape {list(entry.shape)}, not {list(each.shape)}"
                raise BadInput(f"{reader.path}: tensor {_saved_name(each.name)} {what}")
            found[each.name] = reader.read(entry.name, 0, entry.num_elements).float()
    return found


def named_base(directory: Path) -> tuple[str, str | None]:
    """The base model that the adapter in a directory names, and its revision. Raises BadInput if it names none."""
    path = trusted_file(directory, ADAPTER_CONFIG_NAME)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        name = JsonFields(content).text("base_model_name_or_path")
        return name, None if content.get("revision") is None else JsonFields(content).text("revision")
    except ValueError as error:
        raise BadInput(f"{path}: it names no base model: {first_line(error)}") from error


def load_adapted(model: PreTrainedModel, directory: Path) -> PreTrainedModel:
    """A loaded base model with the adapter in a directory, as PEFT loads it. Raises IntegrityFailure if PEFT cannot, or
    if a tensor is missing or unexpected."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = PeftModel.from_pretrained(model, directory, local_files_only=True)
    except Exception as error:
        raise IntegrityFailure(f"{directory}: PEFT cannot load the adapter: {first_line(error)}") from error
    _check_tensors(loaded, directory)
    found = loaded.base_model.model
    assert isinstance(found, PreTrainedModel)
    found.eval()
    return found


def _check_tensors(loaded: PeftModel, directory: Path) -> None:
    """Raise IntegrityFailure if the adapter's file lacks a tensor, or has one that has no place. PEFT only warns of the
    first, and leaves what is missing as it draws it."""
    with ShardReader(trusted_file(directory, ADAPTER_WEIGHTS_NAME)) as reader:
        there = reader.tensors.keys()
    wanted = get_peft_model_state_dict(loaded, save_embedding_layers=False).keys()
    for names, problem in ((wanted - there, "is missing"), (there - wanted, "does not belong to the model")):
        if names:
            raise IntegrityFailure(f"{directory}: tensor {excerpt(min(names))} {problem}")


def adapter_layout(model: PreTrainedModel, spec: ModelSpec, dtype: DtypeName) -> ExportLayout:
    """The file of an adapter's weights, with the names that PEFT gives them: all names of one that is tied."""
    dtypes, names_of = spec.exported_dtypes(dtype), twins(model)
    tensors = [
        trained_tensor(_saved_name(name), each.shape, whole_parameter(each.name, each.shape), dtypes)
        for each in trained_parameters(spec)
        for name in ([each.name] if is_of_adapter(each.name) else names_of[each.name])
    ]
    return ExportLayout(
        shards=split_into_shards(sorted(tensors, key=lambda each: each.name), 1 << 62, ADAPTER_WEIGHTS_NAME),
        architecture=spec.architecture,
        dtype=dtype,
        weights_name=ADAPTER_WEIGHTS_NAME,
    )


def _saved_name(name: str) -> str:
    parts = [part for part in name.split(".") if part != NAME]
    return ".".join(("base_model", "model", *(parts[:-1] if MAGNITUDES in parts else parts)))


def adapter_config_text(config: LoraConfig, *, base_model: str, revision: str | None = None) -> str:
    """The content of adapter_config.json, as PEFT writes it. `revision`: of the base model."""
    own = copy.deepcopy(config)
    own.base_model_name_or_path, own.inference_mode, own.revision = base_model, True, revision
    if not isinstance(own.target_modules, str):
        own.target_modules = sorted(own.target_modules or ())  # PEFT has made sets of them
    own.target_parameters = sorted(own.target_parameters or ()) or None
    with tempfile.TemporaryDirectory() as directory:
        own.save_pretrained(directory)
        return (Path(directory) / ADAPTER_CONFIG_NAME).read_text(encoding="utf-8")
