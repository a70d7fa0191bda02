"""Reads an exported directory back: value by value from its files, and through transformers.

Invariants: pickles and remote code are never loaded, and nothing is downloaded. Every fault is raised as an
IntegrityFailure that names the file and the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.auto_factory import _get_model_class

from ratel_cli.errors import IntegrityFailure, excerpt, first_line
from ratel_cli.model.export.checkpoint import is_constant, open_shards
from ratel_cli.model.export.publishing import ENTRY_NAMES
from ratel_cli.model.files.directory import find_weight_files, weights_bytes
from ratel_cli.model.files.kind import declared_task, loading_class
from ratel_cli.model.files.quantised_files import dequantised_files, quantisation_of
from ratel_cli.model.files.shards import ShardReader, TensorFile
from ratel_cli.model.files.skeleton import read_any_config, read_model_config
from ratel_cli.sizes import Task
from ratel_cli.units import MIB

_READ_BYTES = 32 * MIB


def holds_export(directory: Path) -> bool:
    """Whether the directory has weights that transformers or diffusers would load."""
    return any((directory / name).is_file() for name in ENTRY_NAMES)


def check_values(reader: ShardReader, *, progress: Callable[[int], None]) -> str:
    """Read every byte of an open file. Returns its XXH3-128, as the marker of an export has it.

    Raises IntegrityFailure with the tensor's name if a value is not finite. `progress` is called with the bytes of each
    part that was read.
    """
    digest = xxhash.xxh3_128(reader.read_header())
    for entry in sorted(reader.tensors.values(), key=lambda entry: entry.offset):
        size = entry.dtype.itemsize
        for start in range(0, entry.num_elements, _READ_BYTES // size):
            values = reader.read(entry.name, start, min(start + _READ_BYTES // size, entry.num_elements))
            if values.is_floating_point() and not _is_finite(values):
                raise IntegrityFailure(
                    f"{reader.path.name}: tensor {excerpt(entry.name)} has values that are NaN or infinite"
                )
            digest.update(values.view(torch.uint8).numpy().data)
            progress(len(values) * size)
    return digest.hexdigest()


def load_language_model(
    directory: Path, task: Task | None = None, *, dtype: torch.dtype | None = None, attention: str | None = None
) -> PreTrainedModel:
    """The model for `task` that transformers loads, ready for inference. `task` None: that of the class that
    config.json names; `dtype` None: that in config.json. Raises BadInput, and what `load_export` raises."""
    with ExitStack() as resources:
        open_shards(resources, find_weight_files(directory))
    wanted = task or declared_task(read_any_config(directory))
    model_class = loading_class(read_model_config(directory, wanted), wanted)
    return load_export(directory, dtype=dtype, attention=attention, model_class=model_class)


def load_export(
    directory: Path,
    *,
    dtype: torch.dtype | None,
    attention: str | None,
    model_class: type[Any] = AutoModelForCausalLM,
) -> PreTrainedModel:
    """The model that `from_pretrained` returns, ready for inference. `dtype` None: the dtype in config.json.

    `model_class`: of transformers, loads it. Quantised weights are dequantised here, because transformers needs another
    package for each format. Raises BadInput if they do not fit together, IntegrityFailure if transformers cannot load
    the model, or if a tensor is missing or unexpected.
    """
    options: dict[str, object] = {} if attention is None else {"attn_implementation": attention}
    is_quantised = quantisation_of(directory) is not None
    if is_quantised:
        with ExitStack() as resources:
            files = _open_dequantised(directory, dtype, resources)
            config = read_any_config(directory)
            del config.quantization_config
            # An automatic class takes weights from a directory alone.
            mapping = getattr(model_class, "_model_mapping", None)
            model_class = model_class if mapping is None else _get_model_class(config, mapping)
            options["config"] = config
            options["state_dict"] = {name: each.read_whole(name) for each in files for name in each.tensors}
    try:
        loaded = cast(Callable[..., object], model_class.from_pretrained)(
            None if is_quantised else directory,
            dtype=dtype or "auto",
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    except Exception as error:
        raise IntegrityFailure(f"{directory}: transformers cannot load the model: {first_line(error)}") from error
    options.clear()
    with ExitStack() as resources:
        files = _open_dequantised(directory, dtype, resources)
        constants = {name for each in files for name, entry in each.tensors.items() if is_constant(entry)}
    model, findings = cast(tuple[PreTrainedModel, Mapping[str, Iterable[object]]], loaded)
    for finding, words, allowed in (
        ("missing_keys", "is missing", set[str]()),
        ("unexpected_keys", "does not belong to the model", constants),
    ):
        names = sorted({str(name) for name in findings.get(finding, ())} - allowed)
        if names:
            others = f" ({len(names)} in all)" if len(names) > 1 else ""
            raise IntegrityFailure(f"{directory}: tensor {excerpt(names[0])} {words}{others}")
    return cast(PreTrainedModel, model.eval())


def loaded_bytes(directory: Path) -> int:
    """What the weights in a directory take in memory, in their own dtype or dequantised. Raises BadInput."""
    if quantisation_of(directory) is None:
        return weights_bytes(directory)
    with ExitStack() as resources:
        files = _open_dequantised(directory, None, resources)
        return sum(entry.num_bytes for each in files for entry in each.tensors.values())


def _open_dequantised(directory: Path, dtype: torch.dtype | None, resources: ExitStack) -> Sequence[TensorFile]:
    """The files of a model's weights, to be read in `dtype` where they are quantised; None: as config.json has it."""
    readers = open_shards(resources, find_weight_files(directory))
    settings = quantisation_of(directory)
    if settings is not None and dtype is None:
        named = getattr(read_any_config(directory), "dtype", None)
        dtype = named if isinstance(named, torch.dtype) else torch.bfloat16
    return dequantised_files(list(dict.fromkeys(readers.values())), settings, dtype or torch.float32)[0]


def read_parameter(model: nn.Module, name: str, start: int, num_elements: int) -> torch.Tensor:
    """`num_elements` elements of a flattened parameter from `start` on, in the model's dtype.

    Raises IntegrityFailure if the model has no parameter of that name.
    """
    try:
        parameter = model.get_parameter(name)
    except AttributeError as error:
        raise IntegrityFailure(f"tensor {excerpt(name)} is not a parameter of the loaded model") from error
    return parameter.detach().reshape(-1)[start : start + num_elements]


def _is_finite(values: torch.Tensor) -> bool:
    # torch has no isfinite for dtypes of 8 bits.
    wide = values.to(torch.float32) if values.dtype.itemsize == 1 else values
    return bool(torch.isfinite(wide).all())
