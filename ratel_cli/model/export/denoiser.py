"""A diffusion transformer of diffusers as a program, its files as a source of weights, and the layout of its export.

It learns to predict the noise that was added to a latent, or a velocity, as its scheduler has it.

Invariant: the parameters of the skeleton are those of `from_pretrained`, under the names of the files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ratel_cli.closing import Closing
from ratel_cli.commands import install_extras
from ratel_cli.data.samples.sample_batch import SampleBatch
from ratel_cli.errors import BadInput, EnvironmentFailure, IntegrityFailure, excerpt, first_line
from ratel_cli.model.cut.find_layers import find_layers
from ratel_cli.model.cut.stack import StackModel
from ratel_cli.model.export.checkpoint import readers_of
from ratel_cli.model.export.export_layout import (
    ExportLayout,
    Shard,
    trained_tensor,
    whole_parameter,
)
from ratel_cli.model.files.denoiser_config import CLASS_NAME, DenoiserConfig
from ratel_cli.model.files.directory import DENOISER_WEIGHTS_NAME, find_weight_files
from ratel_cli.model.files.shards import ShardReader
from ratel_cli.model.files.skeleton import DTYPES, NAMES_OF_DTYPES, parameters_on_meta
from ratel_cli.model.values.fetched_code import no_fetched_code
from ratel_cli.model.values.spec import LayerTraits, ModelSpec
from ratel_cli.schedule.rules import ALL_ADAMW, RuleChoice
from ratel_cli.sizes import DtypeName

_BLOCKS = "transformer_blocks"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def denoiser_class() -> Any:  # noqa: ANN401 (diffusers has no types)
    """The class of diffusers. Raises EnvironmentFailure if the package is not there."""
    try:
        with no_fetched_code():  # it imports PEFT
            import diffusers

            return getattr(diffusers, CLASS_NAME)
    except ImportError as error:
        message = "datasets of type: latents need the package diffusers"
        raise EnvironmentFailure(message, install_extras("diffusion")) from error


def build_denoiser(config: DenoiserConfig, *, dtype: DtypeName) -> nn.Module:
    """The module, with meta parameters in `dtype` and real buffers in that of `from_pretrained`. Raises BadInput."""
    made = denoiser_class()
    try:
        with parameters_on_meta():
            module: nn.Module = made.from_config(dict(config.values))
    except Exception as error:
        raise BadInput(
            f"config.json: diffusers cannot build a {CLASS_NAME} from it: {type(error).__name__}: {first_line(error)}",
            "check the values in the model's config.json",
        ) from error
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                each._parameters[name] = nn.Parameter(parameter.to(DTYPES[dtype]))
    return module.train()


def denoiser_model(
    config: DenoiserConfig,
    *,
    name: str,
    dtype: DtypeName,
    gradient_dtype: DtypeName | None = None,
    prepare: Callable[[nn.Module], None] = lambda model: None,
    rules: RuleChoice = ALL_ADAMW,
) -> StackModel:
    """The program of a denoiser of this configuration. `prepare` gets the module before its layers are found. Raises
    BadInput."""
    example = SampleBatch(
        inputs={
            "hidden_states": torch.zeros(1, *config.latent_shape, dtype=DTYPES[dtype]),
            "timestep": torch.zeros(1, dtype=torch.long),
            "class_labels": torch.zeros(1, dtype=torch.long),
        }
    )
    denoiser = build_denoiser(config, dtype=dtype)
    prepare(denoiser)
    return find_layers(
        denoiser,
        example,
        blocks=_BLOCKS,
        name=name,
        gradient_dtype=gradient_dtype,
        traits=LayerTraits(num_heads=config.num_heads, head_dim=config.head_dim),
        loss=denoising_loss,
        rules=rules,
    )


def denoising_loss(output: object, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The squared error of each sample's prediction, in the mean over its elements, summed over the samples. What a
    model returns besides, the variances that some learn, has no loss."""
    target = batch["target"]
    prediction = output.sample[:, : target.shape[1]]  # type: ignore[attr-defined]
    errors: torch.Tensor = (prediction.float() - target.float()).square()
    return errors.sum() / target[0].numel()


class DenoiserWeights(Closing):
    """The open files of a denoiser, whose tensors fit the model."""

    def __init__(self, directory: Path, spec: ModelSpec) -> None:
        """Open and check all files of weights. Raises BadInput if they do not fit the model."""
        files = find_weight_files(directory, weights_name=DENOISER_WEIGHTS_NAME)
        self._resources = ExitStack()
        with ExitStack() as opened:
            shards = [opened.enter_context(ShardReader(path)) for path in files.paths]
            self._files = dict(zip(files.names, shards, strict=True))
            self._readers = readers_of(shards, files)
            self._check(directory, spec)
            self._resources = opened.pop_all()
        self._spec = spec

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See WeightSource."""
        return self._readers[name].read(name, start, stop).float()

    def layout(self, dtype: DtypeName) -> ExportLayout:
        """What an export holds: the tensors of these files, in their order, in `dtype`."""
        dtypes = self._spec.exported_dtypes(dtype)
        return ExportLayout(
            shards=tuple(
                Shard(
                    file_name=file_name,
                    tensors=tuple(
                        trained_tensor(each.name, each.shape, whole_parameter(each.name, each.shape), dtypes)
                        for each in sorted(reader.tensors.values(), key=lambda each: each.offset)
                    ),
                )
                for file_name, reader in self._files.items()
            ),
            architecture=CLASS_NAME,
            dtype=dtype,
            weights_name=DENOISER_WEIGHTS_NAME,
        )

    def close(self) -> None:
        """Close all files. Idempotent."""
        self._resources.close()

    def _check(self, directory: Path, spec: ModelSpec) -> None:
        known = {each.name for each in spec.parameters}
        unexpected = min(self._readers.keys() - known, default=None)
        if unexpected is not None:
            raise BadInput(
                f"{directory}: tensor {excerpt(unexpected)} does not belong to the model of config.json",
                "use the config.json that was saved with these files",
            )
        for block in spec.blocks:
            for each in block.parameters:
                reader = self._readers.get(each.name)
                if reader is None:
                    raise BadInput(f"{directory}: tensor {each.name} is missing", "use a whole model of diffusers")
                entry = reader.tensors[each.name]
                if entry.shape != each.shape:
                    raise BadInput(
                        f"{reader.path}: tensor {each.name} is {list(entry.shape)}, but the config's model has"
                        f" {list(each.shape)}"
                    )
                if entry.dtype not in _DTYPES:
                    raise BadInput(
                        f"{reader.path}: tensor {each.name} is {entry.dtype}; weights must be floating-point"
                    )


def stored_dtype(directory: Path) -> DtypeName | None:
    """The data type of most of the weights in a denoiser's files; None if a model cannot have it. Raises BadInput."""
    counts = Counter[torch.dtype]()
    for path in find_weight_files(directory, weights_name=DENOISER_WEIGHTS_NAME).paths:
        with ShardReader(path) as reader:
            for each in reader.tensors.values():
                counts[each.dtype] += each.num_elements
    return NAMES_OF_DTYPES.get(max(counts, key=lambda dtype: counts[dtype])) if counts else None


def load_denoiser(directory: Path, dtype: torch.dtype | None) -> nn.Module:
    """The model that `from_pretrained` of diffusers returns, ready for inference. `dtype`: None: that of the files.

    Raises IntegrityFailure if diffusers cannot load it.
    """
    try:
        loaded: nn.Module = denoiser_class().from_pretrained(
            directory, torch_dtype=dtype, local_files_only=True, use_safetensors=True, low_cpu_mem_usage=False
        )
    except Exception as error:
        raise IntegrityFailure(f"{directory}: diffusers cannot load the model: {first_line(error)}") from error
    return loaded.eval()
