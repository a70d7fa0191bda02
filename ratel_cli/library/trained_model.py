"""What a loop of the caller's own trains, and what is of its kind: how a batch is read, and how the weights are saved.

    language   a directory with a language model, or a hub id
    module     a module of the caller's own, with samples of what it gets

Invariant: what a batch asks for is done or rejected by name, whatever the kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import nn
from transformers import PretrainedConfig

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.data.samples.sample_batch import AnyModelBatch
from ratel_cli.errors import BadInput
from ratel_cli.hardware.host import return_free_memory
from ratel_cli.library.batches import Tensors, example_of, micro_batches, sample_batches
from ratel_cli.model.cut.cut_model import AnyModel
from ratel_cli.model.cut.find_layers import find_layers
from ratel_cli.model.cut.hooked import identity_of
from ratel_cli.model.cut.module_weights import ModuleWeights
from ratel_cli.model.export.export_layout import layout_of_module
from ratel_cli.model.export.export_weights import ExportFiles, export_model
from ratel_cli.model.export.sidecars import GivenSidecars, TokenizerFiles
from ratel_cli.model.export.staging import Destination
from ratel_cli.model.files.directory import DENOISER_WEIGHTS_NAME, WEIGHTS_NAME
from ratel_cli.model.files.import_weights import WeightSource
from ratel_cli.model.files.quantised_model import QuantisedWeight, quantised_weights
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.profile.placement import Workload
from ratel_cli.run.context import RunContext
from ratel_cli.run.files.output import own_output, reject_overlap
from ratel_cli.run.inputs.base import model_hash
from ratel_cli.run.inputs.build_language import read_language_base
from ratel_cli.run.inputs.text_data import check_positions
from ratel_cli.sizes import Task
from ratel_cli.store.store import Store

Save = Callable[[RunContext, Store, Path, bool], list[str]]
"""Writes the current weights into a directory, and replaces files of others if it may. Returns notices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A model and what is of its kind."""

    model: AnyModel
    identity: str
    """A hash of what its state has."""
    weights: WeightSource
    """Before the first step."""
    batches: Callable[[Tensors | Sequence[Tensors]], list[AnyModelBatch]]
    """The micro-batches of a step. Raises BadInput."""
    quantised: Mapping[str, QuantisedWeight]
    """How parameters are quantised, by name."""
    check: Callable[[Workload, RunLog], None]
    """Raises BadInput if the model cannot take such a step."""
    save: Save

    @property
    def weight_bytes(self) -> int:
        """What the weights take in main memory until they are forgotten."""
        return self.weights.num_bytes if isinstance(self.weights, ModuleWeights) else 0

    def forget_weights(self) -> None:
        """The training state has them: give the memory back."""
        if isinstance(self.weights, ModuleWeights):
            self.weights.forget()
            return_free_memory()


def language_model(config: RunConfig, log: RunLog, task: Task, resources: ExitStack) -> TrainedModel:
    """The language model that the config names, for a task. Raises RatelError."""
    base = read_language_base(config, log, task)
    source, layout = base.open_weights(config, resources)
    _ = base.model.row_multiple  # found by a trial on the CPU, before anything is on another device

    def save(context: RunContext, store: Store, output: Path, overwrite: bool) -> list[str]:
        reject_overlap(output, base.directory, option="directory")
        return base.export(
            config,
            store.current(),
            context.pool,
            output,
            # A loop of the caller's own has no tokenizer that we know.
            ExportFiles(layout, replace(base.sidecars(config), tokenizer=TokenizerFiles)),
            overwrite=overwrite,
            option="directory",
        )

    return TrainedModel(
        model=base.model,
        identity=model_hash(config, base.model.spec),
        weights=source,
        batches=partial(micro_batches, model=base.model),
        check=lambda workload, log: check_positions(workload.sequence_len, base.model, base.config, log),
        save=save,
        quantised=quantised_weights(base.model.skeleton),
    )


def module_model(
    module: nn.Module, sample: Tensors | None, blocks: str | Sequence[str] | None, resources: ExitStack
) -> TrainedModel:
    """The caller's own module, which becomes a program. Raises BadInput."""
    if sample is None:
        raise BadInput(
            f"a {type(module).__name__} needs a sample of what it gets",
            "sample={'pixels': torch.zeros(1, 3, 32, 32)}, for instance",
        )
    if any("_orig_mod" in name or each._compiled_call_impl is not None for name, each in module.named_modules()):
        raise BadInput(
            f"{type(module).__name__} is compiled by torch.compile, and an open module is run operator by operator",
            "open it before torch.compile; or use ratel.hook, which takes compiled blocks",
        )
    weights = ModuleWeights(module)
    model = find_layers(module, example_of(sample), blocks=blocks)
    resources.callback(model.leave)

    def save(context: RunContext, store: Store, output: Path, overwrite: bool) -> list[str]:
        return save_module(module, model.spec, context, store, output, overwrite=overwrite)

    return TrainedModel(
        model=model,
        identity=identity_of(model.spec),
        weights=weights,
        batches=partial(sample_batches, model=model),
        check=lambda workload, log: None,
        save=save,
        quantised={},
    )


def save_module(
    module: nn.Module, spec: ModelSpec, context: RunContext, store: Store, directory: Path, *, overwrite: bool
) -> list[str]:
    """Write a module's weights as safetensors files with its own names, and the config of a model of transformers or
    diffusers, whose `from_pretrained` then loads it. Returns notices. Raises as `export_model`."""
    is_of_diffusers = hasattr(module, "register_to_config")
    described = module if is_of_diffusers else getattr(module, "config", None)
    has_config = is_of_diffusers or isinstance(described, PretrainedConfig)
    texts = {"config.json": described.to_json_string()} if has_config else {}  # type: ignore[union-attr, operator]
    weights_name = DENOISER_WEIGHTS_NAME if is_of_diffusers else WEIGHTS_NAME
    return export_model(
        spec,
        store.current(),
        context.pool,
        ExportFiles(layout_of_module(module, spec, weights_name=weights_name), GivenSidecars(texts=texts)),
        Destination(directory=directory, run=own_output(context.config), option="directory", overwrite=overwrite),
        dtype=spec.dtype,
        card=None,
    )
