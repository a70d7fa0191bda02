"""An exported directory, read back as its users will read it: value by value from its files, and by transformers.

`run.verify` calls it for `ratel verify`. Pickles and remote code are never loaded, and nothing is downloaded.
Invariant: what is returned was read whole; whatever is wrong with the directory is raised, naming file and tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ratel_cli.errors import IntegrityFailure
from ratel_cli.model.directory import INDEX_NAME, WEIGHTS_NAME
from ratel_cli.model.shards import ShardReader, escaped
from ratel_cli.units import MIB

_READ_BYTES = 32 * MIB


def holds_export(directory: Path) -> bool:
    """Whether there are weights that transformers would load."""
    return any((directory / name).is_file() for name in (WEIGHTS_NAME, INDEX_NAME))


def check_values(reader: ShardReader, *, progress: Callable[[int], None]) -> None:
    """Read every tensor of an open file. Raises IntegrityFailure, naming the tensor, at a value that is not finite.

    `progress` is told the bytes of each part.
    """
    for name, entry in reader.tensors.items():
        size = entry.dtype.itemsize
        for start in range(0, entry.num_elements, _READ_BYTES // size):
            values = reader.read(name, start, min(start + _READ_BYTES // size, entry.num_elements))
            if values.is_floating_point() and not _is_finite(values):
                raise IntegrityFailure(f"{reader.path.name}: tensor {escaped(name)} holds values that are not finite")
            progress(len(values) * size)


def load_export(directory: Path, *, dtype: torch.dtype | None, attention: str | None) -> PreTrainedModel:
    """The model as `from_pretrained` gives it, for inference. `dtype` None: as config.json says.

    Raises IntegrityFailure if transformers cannot load it, misses a tensor or finds one too many.
    """
    options: dict[str, object] = {} if attention is None else {"attn_implementation": attention}
    try:
        loaded: object = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype or "auto",
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    except Exception as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise IntegrityFailure(f"{directory}: transformers cannot load it: {first_line}") from error
    model, findings = cast(tuple[PreTrainedModel, Mapping[str, Iterable[object]]], loaded)
    for finding, words in (
        ("missing_keys", "is missing"),
        ("unexpected_keys", "has no place in the model"),
    ):
        names = sorted(str(name) for name in findings.get(finding, ()))
        if names:
            others = f" ({len(names)} in all)" if len(names) > 1 else ""
            raise IntegrityFailure(f"{directory}: tensor {escaped(names[0])} {words}{others}")
    return cast(PreTrainedModel, model.eval())


def read_parameter(model: PreTrainedModel, name: str, start: int, num_elements: int) -> torch.Tensor:
    """Elements of a loaded model's parameter, flattened. Raises IntegrityFailure if the model has none of that name."""
    try:
        parameter = model.get_parameter(name)
    except AttributeError as error:
        raise IntegrityFailure(f"tensor {escaped(name)} is not in the model that was loaded") from error
    return parameter.detach().reshape(-1)[start : start + num_elements]


def _is_finite(values: torch.Tensor) -> bool:
    # Of 8 bits torch has no isfinite.
    wide = values.to(torch.float32) if values.dtype.itemsize == 1 else values
    return bool(torch.isfinite(wide).all())
