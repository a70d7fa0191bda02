"""The diffusion transformer that a config names, before training.

Invariant: an export has what diffusers' `save_pretrained` writes, and the base model's scheduler beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from ratel_cli.config.schema import DatasetConfig, RunConfig
from ratel_cli.console import RunLog
from ratel_cli.data.latents import (
    SCHEDULER_NAME,
    LatentFiles,
    LatentSettings,
    NoisyLatents,
    latent_paths,
    open_latents,
    scheduler_file,
    scheduler_of,
)
from ratel_cli.data.sample_batch import SampleBatch
from ratel_cli.io.buffers import BufferPool
from ratel_cli.model.card import CARD_NAME, PICTURE_NAME, Card, card_text, plain_card
from ratel_cli.model.cut_model import AnyModel
from ratel_cli.model.denoiser import DenoiserWeights, denoiser_model
from ratel_cli.model.denoiser_config import DenoiserConfig, read_denoiser_config
from ratel_cli.model.directory import DENOISER_WEIGHTS_NAME, resolve_base_model
from ratel_cli.model.export_layout import ExportLayout, layout_of_module
from ratel_cli.model.export_weights import write_weights
from ratel_cli.model.initialise import SelfDrawn
from ratel_cli.model.marker import check_output
from ratel_cli.model.publishing import renamed_notice
from ratel_cli.model.skeleton import DTYPES
from ratel_cli.model.stack import StackModel
from ratel_cli.model.staging import Staging, require_space
from ratel_cli.run.files.output import own_output
from ratel_cli.run.inputs.base_model import build_base, read_base
from ratel_cli.run.inputs.model_base import ModelBase, Weights
from ratel_cli.store.generation import Generation
from ratel_cli.units import MIB

_CONFIG_NAME = "config.json"
_WRITTEN_BYTES = 2 * MIB
"""Space for configuration, scheduler, card and curves together."""


@dataclass(frozen=True, kw_only=True)
class DenoiserBase(ModelBase):
    """A diffusion transformer without its weights."""

    loader = "diffusers"
    outputs = "predictions"
    directory: Path
    config: DenoiserConfig
    model: StackModel

    def open_weights(self, config: RunConfig, resources: ExitStack) -> Weights:
        """See ModelBase."""
        if config.random_init:
            layout = layout_of_module(
                self.model.root, self.model.spec, dtype=config.dtype, weights_name=DENOISER_WEIGHTS_NAME
            )
            return SelfDrawn(self.model.root, config.seed), layout
        source = resources.enter_context(DenoiserWeights(self.directory, self.model.spec))
        return source, source.layout(config.dtype)

    def export(
        self,
        config: RunConfig,
        generation: Generation,
        pool: BufferPool,
        output_dir: Path,
        *,
        layout: ExportLayout,
        card: Card | None = None,
        overwrite: bool,
        option: str,
        progress: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """See ModelBase."""
        spec, scheduler = self.model.spec, scheduler_file(self.directory)
        card = card or plain_card(spec)
        check_output(output_dir, overwrite=overwrite, option=option)
        require_space(output_dir, self.export_bytes(layout), option=option)
        with Staging(output_dir, run=own_output(config), overwrite=overwrite, option=option) as staging:
            staging.reject_files_of_others(self.export_names(layout))
            write_weights(staging, layout, spec, generation, pool, dtype=config.dtype, progress=progress)
            staging.write_text(_CONFIG_NAME, json.dumps(dict(self.config.values), indent=2, sort_keys=True) + "\n")
            staging.write_text(
                CARD_NAME, card_text(card, spec, dtype=config.dtype, num_updates=generation.progress.updates)
            )
            if card.picture is not None:
                staging.write_bytes(PICTURE_NAME, card.picture)
            if scheduler is not None:
                staging.copy(scheduler, SCHEDULER_NAME)
            renamed = [*staging.renamed, *staging.publish(step=generation.progress.step)]
        return [renamed_notice(path, spare) for path, spare in renamed]

    def export_names(self, layout: ExportLayout) -> list[str]:
        """See ModelBase."""
        return [*layout.file_names, _CONFIG_NAME, CARD_NAME, PICTURE_NAME, SCHEDULER_NAME]

    def export_bytes(self, layout: ExportLayout) -> int:
        """See ModelBase."""
        return layout.num_bytes + _WRITTEN_BYTES

    def open_export(self, directory: Path, resources: ExitStack) -> DenoiserWeights:
        """See ModelBase."""
        return resources.enter_context(DenoiserWeights(directory, self.model.spec))

    def tried(self, loaded: nn.Module) -> tuple[SampleBatch, torch.Tensor]:
        """See ModelBase."""
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
    directory = resolve_base_model(config.base_model)
    found = read_denoiser_config(directory)
    model = denoiser_model(
        found,
        name=Path(config.base_model).name,
        dtype=config.dtype,
        gradient_dtype=config.resolved_gradient_dtype,
    )
    return DenoiserBase(directory=directory, config=found, model=model)


def read_model_base(config: RunConfig, log: RunLog) -> ModelBase:
    """The config's base model, of whatever kind it is. Raises BadInput, EnvironmentFailure."""
    return build_denoiser_base(config) if config.task == "denoising" else read_base(config, log)


def build_model(config: RunConfig) -> AnyModel:
    """The config's model, without weights. Raises BadInput."""
    return build_denoiser_base(config).model if config.task == "denoising" else build_base(config).model


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
