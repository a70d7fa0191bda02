"""The diffusion transformer that a config names, before training.

Invariant: an export has what diffusers' `save_pretrained` writes, and the base model's scheduler beside it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from ratel_cli.config.keys.schema import DatasetConfig, RunConfig
from ratel_cli.console import RunLog
from ratel_cli.data.batches.latent_files import LatentFiles, latent_paths, open_latents
from ratel_cli.data.batches.latents import (
    SCHEDULER_NAME,
    LatentSettings,
    NoisyLatents,
    scheduler_file,
    scheduler_of,
)
from ratel_cli.data.samples.sample_batch import SampleBatch
from ratel_cli.errors import ErrorList
from ratel_cli.model.cut.stack import StackModel
from ratel_cli.model.export.denoiser import DenoiserWeights, denoiser_model, load_denoiser
from ratel_cli.model.export.export_layout import ExportLayout, layout_of_module
from ratel_cli.model.export.sidecars import GivenSidecars
from ratel_cli.model.files.denoiser_config import DenoiserConfig, read_denoiser_config
from ratel_cli.model.files.directory import DENOISER_WEIGHTS_NAME, resolve_base_model
from ratel_cli.model.files.initialise import SelfDrawn
from ratel_cli.model.files.skeleton import DTYPES
from ratel_cli.model.values.freezing import freeze
from ratel_cli.run.inputs.base import Base, Weights
from ratel_cli.run.inputs.settings import rules_in


@dataclass(frozen=True, kw_only=True)
class DenoiserBase(Base):
    """A diffusion transformer without its weights."""

    outputs, library, weights_name = "predictions", "diffusers", DENOISER_WEIGHTS_NAME
    directory: Path
    config: DenoiserConfig
    model: StackModel

    def open_weights(self, config: RunConfig, resources: ExitStack) -> Weights:
        """See Base."""
        if config.random_init:
            return SelfDrawn(self.model.root, config.seed), self.layout(config)
        source = resources.enter_context(DenoiserWeights(self.directory, self.model.spec))
        return source, source.layout(config.dtype)

    def layout(self, config: RunConfig) -> ExportLayout:
        """See Base."""
        return layout_of_module(
            self.model.root, self.model.spec, dtype=config.dtype, weights_name=DENOISER_WEIGHTS_NAME
        )

    def sidecars(self, config: RunConfig) -> GivenSidecars:  # noqa: ARG002
        """See Base."""
        scheduler = scheduler_file(self.directory)
        return GivenSidecars(
            texts={"config.json": json.dumps(dict(self.config.values), indent=2, sort_keys=True) + "\n"},
            copies={} if scheduler is None else {SCHEDULER_NAME: scheduler},
            reserved=(SCHEDULER_NAME,),
        )

    def open_export(self, directory: Path, resources: ExitStack) -> DenoiserWeights:
        """See Base."""
        return resources.enter_context(DenoiserWeights(directory, self.model.spec))

    def load(self, directory: Path, dtype: torch.dtype) -> nn.Module:
        """See Base."""
        return load_denoiser(directory, dtype)

    def tried(self, loaded: nn.Module) -> tuple[SampleBatch, torch.Tensor]:
        """See Base."""
        batch = self.model.sample(2)
        drawn = torch.randn(batch.inputs["hidden_states"].shape, generator=torch.Generator().manual_seed(0))
        numbers = {"timestep": torch.tensor([1, 2]), "class_labels": torch.arange(2) % self.config.num_classes}
        latents = drawn.to(batch.inputs["hidden_states"].dtype)
        batch = replace(batch, inputs={**batch.inputs, "hidden_states": latents, **numbers})
        with torch.no_grad():
            predictions: torch.Tensor = loaded(**batch.inputs).sample
        return batch, predictions


def build_denoiser_base(config: RunConfig) -> DenoiserBase:
    """Find the config's base model and build its skeleton. Raises BadInput, EnvironmentFailure."""
    assert config.base_model is not None
    directory = resolve_base_model(config.base_model, revision=config.revision_of_model)
    found = read_denoiser_config(directory)
    model = denoiser_model(
        found,
        name=Path(config.base_model).name,
        dtype=config.dtype,
        gradient_dtype=config.resolved_gradient_dtype,
        prepare=partial(freeze, unfrozen=config.unfrozen_parameters, frozen=config.frozen_parameters),
        rules=rules_in(config),
    )
    return DenoiserBase(directory=directory, config=found, model=model)


def find_latents(config: RunConfig, errors: ErrorList) -> None:
    """Find the files of all datasets of latents. What is wrong goes to `errors`."""
    for key, datasets in (("datasets", config.datasets), ("test_datasets", config.test_datasets)):
        for number, each in enumerate(datasets):
            errors.attempt((key, number, "path"), partial(latent_paths, each.path))


def load_latents(config: RunConfig, base: DenoiserBase, log: RunLog) -> NoisyLatents:
    """The config's data. Raises BadInput, EnvironmentFailure."""
    size, number = config.known_split

    def opened(datasets: Sequence[DatasetConfig]) -> LatentFiles:
        paths = [path for each in datasets for path in latent_paths(each.path)]
        with log.bar("reading latents", sum(path.stat().st_size for path in paths)) as bar:
            return open_latents(
                paths,
                latent_shape=base.config.latent_shape,
                num_classes=base.config.num_classes,
                progress=bar.advance,
            )

    return NoisyLatents(
        opened(config.datasets),
        LatentSettings(
            micro_batch_size=size,
            gradient_accumulation_steps=number,
            shuffle=config.shuffle,
            seed=config.seed,
            val_set_size=config.val_set_size,
            sample_tokens=base.config.sample_tokens,
            dtype=DTYPES[config.dtype],
        ),
        scheduler_of(base.directory),
        eval_files=opened(config.test_datasets) if config.test_datasets else None,
    )
