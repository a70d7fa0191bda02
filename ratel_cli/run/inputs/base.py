"""What a run trains, whatever its kind: a model without its weights, where these come from, and how it is exported.

Invariant: a store that passes `check_model` has this model's parameters, in this order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar, TypeAlias

import torch
from torch import nn

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.data.batches.latents import AnyData
from ratel_cli.data.samples.sample_batch import AnyModelBatch
from ratel_cli.errors import BadInput, ErrorList
from ratel_cli.io.buffers import BufferPool
from ratel_cli.json_fields import hash_of
from ratel_cli.model.cut.cut_model import AnyModel
from ratel_cli.model.export.card import Card, plain_card
from ratel_cli.model.export.export_layout import ExportLayout
from ratel_cli.model.export.export_weights import ExportFiles, export_model
from ratel_cli.model.export.merged_weights import MergedWeights
from ratel_cli.model.export.reload import loaded_bytes
from ratel_cli.model.export.sidecars import Sidecars
from ratel_cli.model.export.staging import Destination
from ratel_cli.model.files.directory import WEIGHTS_NAME
from ratel_cli.model.files.import_weights import WeightSource
from ratel_cli.model.files.stored_weights import StoredWeights
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.run.files.output import own_output
from ratel_cli.run.files.run_directory import as_recorded_by_run
from ratel_cli.run.inputs.settings import adapter_of
from ratel_cli.store.joined import Readable
from ratel_cli.store.store import Store

ReadData: TypeAlias = Callable[[ExitStack, bool], AnyData]
"""Reads the data of a run, or of a dry run. Raises BadInput, EnvironmentFailure."""
Weights: TypeAlias = tuple[WeightSource, ExportLayout]
"""A source of weights, whose files are checked, and what the files of an export hold."""


class Base(ABC):
    """A base model."""

    outputs: ClassVar[str]
    """What the model returns, in words."""
    library: ClassVar[str]
    """What loads an export."""
    weights_name: ClassVar[str] = WEIGHTS_NAME
    """Name of an export's file of weights, if there is only one."""
    directory: Path
    """Directory of the base model."""
    model: AnyModel
    """Without weights."""

    @property
    def how_to_load(self) -> str:
        """What a user does with an export, for messages."""
        return load_with(self.library)

    @abstractmethod
    def open_weights(self, config: RunConfig, resources: ExitStack) -> Weights:
        """Open and check the weights. Raises BadInput if the files do not match the model."""

    @abstractmethod
    def layout(self, config: RunConfig) -> ExportLayout:
        """What the files of an export hold if the weights are drawn."""

    @abstractmethod
    def sidecars(self, config: RunConfig) -> Sidecars:
        """The files of an export next to its weights."""

    def check(  # noqa: B027 (a kind may have nothing to check)
        self, config: RunConfig, weights: Weights | None, errors: ErrorList, log: RunLog
    ) -> None:
        """Check what else must hold before a run of this kind; what is wrong goes to `errors`. `weights`: None: they
        cannot be used."""

    @abstractmethod
    def open_export(self, directory: Path, resources: ExitStack) -> WeightSource:
        """Open the weights of an export of this model, checked as its library would. Raises BadInput."""

    @abstractmethod
    def load(self, directory: Path, dtype: torch.dtype) -> nn.Module:
        """An export, loaded by its library. Raises BadInput, or IntegrityFailure if it cannot be."""

    def loaded_bytes(self, directory: Path) -> int:
        """What loading an export takes."""
        return loaded_bytes(directory)

    @abstractmethod
    def tried(self, loaded: nn.Module) -> tuple[AnyModelBatch, torch.Tensor]:
        """A micro-batch, and what an export of this model, loaded by its library, makes of it."""

    def export(
        self,
        config: RunConfig,
        generation: Readable,
        pool: BufferPool,
        output_dir: Path,
        files: ExportFiles,
        *,
        card: Card | None = None,
        overwrite: bool,
        option: str,
        merged: Callable[[StoredWeights], MergedWeights] | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """Replace the model in `output_dir`, which `option` has named, by the weights of a generation. `merged`: as
        in `export_model`. Returns notices. Raises as `export_model`."""
        return export_model(
            self.model.spec,
            generation,
            pool,
            files,
            Destination(directory=output_dir, run=own_output(config), option=option, overwrite=overwrite),
            dtype=config.dtype,
            card=card or plain_card(self.model.spec),
            merged=merged,
            progress=progress,
        )


def load_with(library: str) -> str:
    """What a user does with what a library loads."""
    whose = f"{library}'" if library.endswith("s") else f"{library}'s"
    return f"load it with {whose} from_pretrained"


def hub_id(config: RunConfig) -> str | None:
    """The hub id of the base model; None if the base model is a directory."""
    return None if Path(config.base_model or "").exists() else config.base_model


def model_hash(config: RunConfig, spec: ModelSpec) -> str:
    """The hash of a store's model: of its architecture, dtype, origin, the place of each parameter, and its adapter.

    The origin is the base model as the run has recorded it, whatever its path is from here.
    """
    origin = as_recorded_by_run(config).base_model
    blocks = [
        (each.dtype, each.rule.name, [(p.name, p.shape, p.start) for p in each.parameters]) for each in spec.blocks
    ]
    content = [spec.architecture, blocks, config.dtype, str(origin), config.random_init]
    if config.revision_of_model is not None:
        content.append(config.revision_of_model)
    if in_files := [block.index for block in spec.blocks if block.is_in_files]:
        content.append(in_files)
    if config.adapter is not None:
        settings = asdict(adapter_of(config, config.task))
        # What older adapters have not is no part of the hash; tokens are those of the vocabulary.
        content.append({key: value for key, value in settings.items() if value or key not in ("ties_saved", "tokens")})
    return hash_of(content)


def check_model(store: Store, config: RunConfig, spec: ModelSpec, directory: Path) -> None:
    """Raise BadInput if the store in `directory` was made for another model."""
    if store.identity.model_hash != model_hash(config, spec):
        raise BadInput(
            f"the store in {directory} was made for another model, not for {config.base_model} in {config.dtype}",
            "give the config of the run that the store belongs to",
        )
