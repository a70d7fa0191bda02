"""What a run trains, whatever its kind: a model without its weights, where these come from, and how it is exported."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar, TypeAlias

import torch
from torch import nn

from ratel_cli.config.schema import RunConfig
from ratel_cli.data.sample_batch import AnyModelBatch
from ratel_cli.io.buffers import BufferPool
from ratel_cli.model.card import Card, plain_card
from ratel_cli.model.cut_model import AnyModel
from ratel_cli.model.export_layout import ExportLayout
from ratel_cli.model.export_weights import export_model
from ratel_cli.model.import_weights import WeightSource
from ratel_cli.model.sidecars import Sidecars
from ratel_cli.run.files.output import own_output
from ratel_cli.store.generation import Generation

Weights: TypeAlias = tuple[WeightSource, ExportLayout]
"""A source of weights, whose files are checked, and what the files of an export hold."""


class ModelBase(ABC):
    """A base model."""

    loader: ClassVar[str]
    """The library whose `from_pretrained` loads an export."""
    outputs: ClassVar[str]
    """What the model returns, in words."""
    directory: Path
    """Of the base model."""
    model: AnyModel
    """Without weights."""

    @abstractmethod
    def open_weights(self, config: RunConfig, resources: ExitStack) -> Weights:
        """Open and check the weights. Raises BadInput if the files do not match the model."""

    @abstractmethod
    def sidecars(self, config: RunConfig) -> Sidecars:
        """The files of an export next to its weights."""

    @abstractmethod
    def open_export(self, directory: Path, resources: ExitStack) -> WeightSource:
        """Open the weights of an export of this model, checked as its library would. Raises BadInput."""

    @abstractmethod
    def tried(self, loaded: nn.Module) -> tuple[AnyModelBatch, torch.Tensor]:
        """A micro-batch, and what an export of this model, loaded by its library, makes of it."""

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
        """Replace the model in `output_dir`, which `option` has named, by the weights of a generation. Returns notices.
        Raises as `export_model`."""
        return export_model(
            self.model.spec,
            generation,
            pool,
            sidecars=self.sidecars(config),
            output_dir=output_dir,
            run=own_output(config),
            dtype=config.dtype,
            layout=layout,
            card=card or plain_card(self.model.spec),
            overwrite=overwrite,
            option=option,
            progress=progress,
        )
