"""Everything that a run reads before it writes: model, weights, tokenizer, data.

Invariant: when `read_inputs` returns, every file of the base model and every row of the data has been checked.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
import transformers

from ratel_cli import _native
from ratel_cli.config.describe import changed_value
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.load import load_config
from ratel_cli.console import RunLog
from ratel_cli.data.batches.dataset import TrainingData
from ratel_cli.data.batches.latents import AnyData
from ratel_cli.engine.ranks.launched import num_launched_ranks
from ratel_cli.errors import ErrorList, RatelError
from ratel_cli.hardware.gpu import compute_device
from ratel_cli.model.cut.cut_model import AnyModel
from ratel_cli.model.cut.decoder import DecoderModel
from ratel_cli.model.cut.losses import token_loss
from ratel_cli.model.cut.preferences import PreferenceLoss
from ratel_cli.model.export.export_layout import ExportLayout
from ratel_cli.model.export.export_weights import ExportFiles
from ratel_cli.model.files.directory import INDEX_NAME, WEIGHTS_NAME
from ratel_cli.model.files.import_weights import WeightSource
from ratel_cli.model.files.marker import reject_files_of_others, reject_folders
from ratel_cli.planning.search.head_chunk import CHUNK_BYTES
from ratel_cli.run.files.output import reject_overlap
from ratel_cli.run.files.run_directory import as_recorded_by_run
from ratel_cli.run.files.user_cache import ratel_version
from ratel_cli.run.inputs.base import Base, ReadData, Weights, model_hash
from ratel_cli.run.inputs.base_kinds import find_data, prepare_data, read_base
from ratel_cli.run.inputs.length import num_steps
from ratel_cli.run.inputs.settings import (
    CHOOSES_BITS,
    DECIDES_THE_BITS,
    DECIDES_THE_STATE,
    settings_hash,
    warn_of_host_limit,
    warn_of_learning_rate,
)
from ratel_cli.sizes import SPLIT_KEYS
from ratel_cli.store.store import StoreIdentity
from ratel_cli.training.facts import RunFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a run has read and checked."""

    base: Base
    source: WeightSource
    layout: ExportLayout
    """What the files of the export hold."""
    data: AnyData
    num_steps: int
    device: torch.device
    rounds_up: bool = True
    """Whether a part of a step counts as a step: see RunFacts."""

    @property
    def model(self) -> AnyModel:
        """The base model, without weights."""
        return self.base.model


def read_inputs(
    config: RunConfig,
    resources: ExitStack,
    log: RunLog,
    *,
    num_ranks: int = 1,
    dry_run: bool = False,
    overwrite: bool = False,
) -> Inputs:
    """Read and check all inputs. `resources` closes the files that stay open. A step has the micro-batches of all
    ranks.

    Raises BadInput or EnvironmentFailure with all that is wrong. After an error only a dry run reads the whole data,
    because any other run is over then.

    The tokens go to `run/` of the output directory; with `dry_run` into a temporary directory, which `resources`
    removes. They are removed, too, if `run/` is in a folder of the user's which the run has not claimed in the end.
    `overwrite`: the export may replace files of the output directory that Ratel did not write.

    The data of a step that the plan has still to split comes in micro-batches of one sequence.
    """
    warn_of_host_limit(config, log)
    errors, data = ErrorList(), None
    model = read_model(config, resources, log, errors, num_ranks=num_ranks, overwrite=overwrite)
    read_data = model.read_data
    if read_data is None or (errors and not dry_run):
        find_data(config, errors, log, reads_rows=dry_run)
    else:
        data = errors.attempt(("datasets",), lambda: read_data(resources, dry_run))
    errors.raise_all()
    assert model.base is not None and model.weights is not None and model.device is not None and data is not None
    source, layout = model.weights
    return Inputs(
        base=model.base,
        source=source,
        layout=layout,
        data=data,
        num_steps=num_steps(config, data.steps_per_epoch),
        device=model.device,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """What a run reads besides its data. None: it cannot be used, and there is an error about it."""

    device: torch.device | None
    base: Base | None
    weights: Weights | None = None
    read_data: ReadData | None = None


def read_model(
    config: RunConfig,
    resources: ExitStack,
    log: RunLog,
    errors: ErrorList,
    *,
    num_ranks: int = 1,
    overwrite: bool = False,
) -> ModelInputs:
    """Read and check the model, what its data is read with, and the device. What is wrong goes to `errors`."""
    device = errors.attempt(("device",), lambda: compute_device(config.device))
    base = errors.attempt(("base_model",), lambda: read_base(config, log))
    if base is None:
        return ModelInputs(device=device, base=None)
    warn_of_learning_rate(config, base.model.spec, log)
    if isinstance(base.model, DecoderModel):
        smoothing = config.label_smoothing_factor
        base.model.loss = token_loss(label_smoothing=smoothing, is_dft=config.use_dft_loss)
        base.model.preference = _preference_loss(config)
        if not config.has_dropout:
            base.model.disable_dropout()
        if config.neftune_noise_alpha is not None:
            add_noise = partial(base.model.add_noise, config.neftune_noise_alpha)
            errors.attempt(("neftune_noise_alpha",), add_noise)
    errors.attempt(("output_dir",), lambda: reject_overlap(config.output_dir, base.directory))
    weights = errors.attempt(("base_model",), lambda: base.open_weights(config, resources))
    if weights is not None:
        names = ExportFiles(weights[1], base.sidecars(config)).names()
        errors.attempt(("output_dir",), lambda: _check_names(config, names, overwrite=overwrite))
    base.check(config, weights, errors, log)
    of_all = config if num_ranks == 1 else config.of_ranks(num_ranks)
    read_data = prepare_data(of_all, base, errors, log)
    return ModelInputs(device=device, base=base, weights=weights, read_data=read_data)


def _preference_loss(config: RunConfig) -> PreferenceLoss | None:
    """The loss of answers that are compared; None if they are imitated."""
    if config.rl is None:
        return None
    return PreferenceLoss(
        method=config.rl,
        beta=config.rl_beta,
        simpo_gamma=config.simpo_gamma,
        cpo_alpha=config.cpo_alpha,
        desirable_weight=config.kto_desirable_weight,
        undesirable_weight=config.kto_undesirable_weight,
    )


def identity_of(config: RunConfig, inputs: Inputs) -> StoreIdentity:
    """The identity of the run's store. A run resumes only from a store with the same identity."""
    return StoreIdentity(
        model_hash=model_hash(config, inputs.model.spec),
        config_hash=settings_hash(config),
        data_hash=inputs.data.fingerprint,
        seed=config.seed,
        software=(
            f"ratel {ratel_version()}, torch {torch.__version__}, transformers {transformers.__version__}, "
            f"{platform.machine()} {_native.active_isa()}{_gpu_name(inputs.device)}"
        ),
    )


def facts_of(inputs: Inputs, identity: StoreIdentity, *, first_step: int) -> RunFacts:
    """The facts of the command that trains now, from the step after `first_step` on."""
    return RunFacts(
        num_steps=inputs.num_steps,
        first_step=first_step,
        num_samples=inputs.data.num_samples,
        num_tokens=inputs.data.num_tokens,
        software=identity.software,
        started=datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        pid=os.getpid(),
        steps_per_epoch=inputs.data.steps_per_epoch,
        rounds_up=inputs.rounds_up,
        end_ids=inputs.data.cache.summary.end_ids if isinstance(inputs.data, TrainingData) else (),
    )


def changed_settings(config: RunConfig, started_with: Path, *, ranks_before: int) -> list[str]:
    """The keys that decide the bits and differ from the config that the run was started with, each with both values.

    A split, or a size of the head's chunks, that is left to the plan is no change, but the size of the step is: that of
    all ranks. The configs are those of each, of which there were `ranks_before`.
    """
    try:
        before = load_config(started_with).config
    except RatelError:
        return []
    old, new = (each.model_dump(mode="json") for each in (before, as_recorded_by_run(config)))
    keys = dict.fromkeys((*DECIDES_THE_STATE, *DECIDES_THE_BITS, *CHOOSES_BITS))
    if config.is_chunk_planned and before.head_chunk in ("auto", *CHUNK_BYTES):
        del keys["head_chunk"]
    if config.split is None:
        for key in SPLIT_KEYS:
            del keys[key]
        keys["tokens_per_step"] = None
        for content, each, number in ((old, before, ranks_before), (new, config, num_launched_ranks())):
            content["tokens_per_step"] = number * each.sequences_per_step * each.sequence_len
    changed = [key for key in keys if old[key] != new[key]]
    return [f"{key} was {changed_value(old[key])}, is now {changed_value(new[key])}" for key in changed]


def _check_names(config: RunConfig, names: Sequence[str], *, overwrite: bool) -> None:
    """Raise BadInput if the export would replace a folder or, without `overwrite`, a file that Ratel did not write."""
    if not overwrite:
        reject_files_of_others(config.output_dir, names, option="output_dir", misleading=(INDEX_NAME, WEIGHTS_NAME))
    reject_folders(config.output_dir, names, option="output_dir")


def _gpu_name(device: torch.device) -> str:
    """The GPU and the version of its libraries, for the identity; empty for the CPU."""
    if device.type == "cpu":
        return ""
    name = torch.get_device_module(device).get_device_name(device)
    return f", {name}, CUDA {torch.version.cuda}" if device.type == "cuda" else f", {name}"
