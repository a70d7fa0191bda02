"""Everything that a run reads before it writes: model, weights, tokenizer, data.

Invariant: when `read_inputs` returns, every file of the base model and every row of the data has been checked.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from transformers import PretrainedConfig

from ratel_cli import _native
from ratel_cli.config.describe import changed_value
from ratel_cli.config.load import load_config
from ratel_cli.config.schema import DatasetConfig, RunConfig
from ratel_cli.console import RunLog
from ratel_cli.data.dataset import DataSettings, TrainingData, load_training_data
from ratel_cli.data.file_names import REJECTS_NAME
from ratel_cli.data.latents import AnyData
from ratel_cli.data.row_check import check_rows
from ratel_cli.data.rows import DatasetSource, open_source
from ratel_cli.data.shared_tokens import SharedTokens
from ratel_cli.data.token_cache import TokenCache
from ratel_cli.data.tokenizer import Tokenizer
from ratel_cli.errors import BadInput, ErrorList, RatelError
from ratel_cli.hardware.gpu import compute_device
from ratel_cli.model.checkpoint import CheckpointSource
from ratel_cli.model.cut_model import AnyModel
from ratel_cli.model.decoder import DecoderModel
from ratel_cli.model.directory import INDEX_NAME, WEIGHTS_NAME
from ratel_cli.model.export_layout import ExportLayout
from ratel_cli.model.export_weights import export_names
from ratel_cli.model.flash_attention import require_deterministic
from ratel_cli.model.import_weights import WeightSource
from ratel_cli.model.initialise import RandomSource
from ratel_cli.model.marker import reject_files_of_others, reject_folders
from ratel_cli.model.sidecars import check_sidecars
from ratel_cli.planning.head_chunk import CHUNK_BYTES
from ratel_cli.run.context import bars_of
from ratel_cli.run.files.output import claim_output, is_claimed, may_claim_at_once, reject_overlap
from ratel_cli.run.files.run_directory import TOKENS_NAME, as_recorded_by_run, run_directory
from ratel_cli.run.files.run_files import names_of_rejects, note_rejects
from ratel_cli.run.files.user_cache import ratel_version, user_cache_directory
from ratel_cli.run.inputs.base_model import Base, model_hash, open_weights, read_base
from ratel_cli.run.inputs.denoiser_base import build_denoiser_base, load_latents
from ratel_cli.run.inputs.length import num_steps
from ratel_cli.run.inputs.model_base import ModelBase
from ratel_cli.run.inputs.settings import (
    DECIDES_THE_BITS,
    settings_hash,
    warn_of_host_limit,
)
from ratel_cli.run.inputs.tokenizer import read_tokenizer, tokenizer_files
from ratel_cli.run.inputs.unused_parts import unused_parts
from ratel_cli.sizes import SPLIT_KEYS
from ratel_cli.store.store import StoreIdentity
from ratel_cli.training.facts import RunFacts
from ratel_cli.units import align_up

SHOWS_REJECTS = "`ratel data CONFIG --bad`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a run has read and checked."""

    base: ModelBase
    source: WeightSource
    layout: ExportLayout
    """What the files of the export hold."""
    data: AnyData
    num_steps: int
    device: torch.device

    @property
    def model(self) -> AnyModel:
        """The base model, without weights."""
        return self.base.model


def read_inputs(
    config: RunConfig, resources: ExitStack, log: RunLog, *, dry_run: bool = False, overwrite: bool = False
) -> Inputs:
    """Read and check all inputs. `resources` closes the files that stay open.

    Raises BadInput or EnvironmentFailure with all that is wrong. After an error only a dry run reads the whole data,
    because any other run is over then.

    The tokens go to `run/` of the output directory; with `dry_run` into a temporary directory, which `resources`
    removes. They are removed, too, if `run/` is in a folder of the user's which the run has not claimed in the end.
    `overwrite`: the export may replace files of the output directory that Ratel did not write.

    The data of a step that the plan has still to split comes in micro-batches of one sequence.
    """
    warn_of_host_limit(config, log)
    if config.task == "denoising":
        return _read_latents(config, resources, log, overwrite=overwrite)
    errors, data = ErrorList(), None
    model = read_model(config, resources, log, errors, overwrite=overwrite)
    base, tokenizer = model.base, model.tokenizer
    if base is None or tokenizer is None or (errors and not dry_run):
        find_data(config, errors, log, reads_rows=dry_run)
    else:
        data = errors.attempt(
            ("datasets",), lambda: _read_data(config, base, tokenizer, resources, log, dry_run=dry_run)
        )
    errors.raise_all()
    assert base is not None and model.weights is not None and model.device is not None and data is not None
    source, layout = model.weights
    return Inputs(
        base=base,
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
    weights: tuple[CheckpointSource | RandomSource, ExportLayout] | None = None
    """The source of the weights, and what the files of the export hold."""
    tokenizer: Tokenizer | None = None


def read_model(
    config: RunConfig, resources: ExitStack, log: RunLog, errors: ErrorList, *, overwrite: bool = False
) -> ModelInputs:
    """Read and check the model, its tokenizer, and the device. What is wrong goes to `errors`."""
    device = errors.attempt(("device",), lambda: compute_device(config.device))
    base = errors.attempt(("base_model",), lambda: read_base(config, log))
    if base is None:
        return ModelInputs(device=device, base=None)
    if config.deterministic:
        errors.attempt(("attn_implementation",), lambda: require_deterministic(base.attention))
    errors.attempt(("output_dir",), lambda: reject_overlap(config.output_dir, base.directory))
    weights = errors.attempt(("base_model",), lambda: open_weights(config, base, resources))
    for text in [] if weights is None else unused_parts(base.directory, weights[0]):
        log.notice(text)
    if weights is not None:
        names = export_names(weights[1], base.sidecars(config))
        errors.attempt(("output_dir",), lambda: _check_names(config, names, overwrite=overwrite))
    errors.attempt(("base_model",), lambda: check_sidecars(base.directory))
    tokenizer = errors.attempt(("base_model",), lambda: read_fitting_tokenizer(config, base, log))
    if tokenizer is not None:
        errors.attempt(("base_model",), lambda: tokenizer_files(config, base.directory))  # that the export will have
    errors.attempt(("sequence_len",), lambda: check_positions(config.sequence_len, base.model, base.config, log))
    errors.attempt(("sequence_len",), lambda: _check_row_length(config.sequence_len, base.model, base.config))
    return ModelInputs(device=device, base=base, weights=weights, tokenizer=tokenizer)


def _read_latents(config: RunConfig, resources: ExitStack, log: RunLog, *, overwrite: bool) -> Inputs:
    """The inputs of a run that learns to denoise latents."""
    errors = ErrorList()
    device = errors.attempt(("device",), lambda: compute_device(config.device))
    base = errors.attempt(("base_model",), lambda: build_denoiser_base(config))
    errors.raise_all()
    assert device is not None and base is not None
    errors.attempt(("output_dir",), lambda: reject_overlap(config.output_dir, base.directory))
    weights = errors.attempt(("base_model",), lambda: base.open_weights(config, resources))
    if weights is not None:
        names = export_names(weights[1], base.sidecars(config))
        errors.attempt(("output_dir",), lambda: _check_names(config, names, overwrite=overwrite))
    data = errors.attempt(("datasets",), lambda: load_latents(config, base, log))
    errors.raise_all()
    assert weights is not None and data is not None
    source, layout = weights
    steps = num_steps(config, data.steps_per_epoch)
    return Inputs(base=base, source=source, layout=layout, data=data, num_steps=steps, device=device)


def find_data(
    config: RunConfig, errors: ErrorList, log: RunLog, *, reads_rows: bool = False, knows_types: bool = True
) -> None:
    """Find the files of all datasets. What is wrong goes to `errors`.

    `reads_rows`: also what is wrong with local rows whatever the tokenizer is, and with `knows_types` by their types.
    """
    for key, datasets in (("datasets", config.datasets), ("test_datasets", config.test_datasets)):
        for number, source in enumerate(_sources(datasets)):
            find = partial(open_source, source, notice=lambda text: None, is_stream=True)
            found = errors.attempt((key, number, "path"), find)
            if found is not None and reads_rows and not config.streaming:
                check = partial(check_rows, found, knows_type=knows_types, open_bar=bars_of(log))
                errors.attempt((key, number, "path"), check)


def why_not_packed(model_type: str, attention: str) -> str:
    """What is reported if samples are to be packed and the model does not separate them.

    With flash attention, transformers (5.23) makes no mask. It finds the samples of a packed sequence by positions that
    begin again, but only in micro-batches of one row: in larger ones, samples would see each other.
    """
    if attention.startswith("flash"):
        return (
            f"packed samples are not separated with {attention}, so every sample gets a sequence of its own; "
            "attn_implementation: sdpa packs them"
        )
    return f"{model_type} cannot separate packed samples; every sample gets a sequence of its own"


def _read_data(
    config: RunConfig, base: Base, tokenizer: Tokenizer, resources: ExitStack, log: RunLog, *, dry_run: bool
) -> TrainingData:
    """The data of a run on this model. Raises BadInput, EnvironmentFailure."""
    if config.sample_packing and not base.model.packs and config.task == "causal_lm":
        log.notice(why_not_packed(base.config.model_type, base.attention))
    records = _records(config, resources, dry_run=dry_run)
    rejects = names_of_rejects(config) if is_claimed(config) and not dry_run else []
    try:
        return load_data(
            config,
            tokenizer,
            packing=config.sample_packing and base.model.packs,
            row_multiple=base.model.row_multiple,
            labels=base.labels,
            cache_dir=records / TOKENS_NAME,
            rejects_path=records / REJECTS_NAME if rejects else None,
            rejects_shown_by=None if rejects else SHOWS_REJECTS,
            shared=resources.enter_context(shared_tokens(log, copies=not dry_run)),
            log=log,
        )
    finally:
        if rejects:
            note_rejects(config.output_dir, rejects)


def load_data(
    config: RunConfig,
    tokenizer: Tokenizer,
    *,
    packing: bool,
    row_multiple: int = 1,
    labels: Sequence[str] = (),
    cache_dir: Path,
    rejects_path: Path | None,
    rejects_shown_by: str | None,
    shared: SharedTokens,
    log: RunLog,
) -> TrainingData:
    """The config's data, tokenised and packed. Raises BadInput, EnvironmentFailure.

    `labels`: the names of the classes. `log` shows how far reading is. `rejects_path` gets the rejected rows.
    `rejects_shown_by`: what shows them to the user, if it is not this file.
    """
    size, number = config.split or config.split_by(1).known_split
    return load_training_data(
        _sources(config.datasets, labels),
        DataSettings(
            sequence_len=config.sequence_len,
            micro_batch_size=size,
            gradient_accumulation_steps=number,
            packing=packing,
            shuffle=config.shuffle,
            seed=config.seed,
            val_set_size=config.val_set_size,
            task=config.task,
            mlm_probability=config.mlm_probability,
        ),
        tokenizer=tokenizer,
        train_on_inputs=config.train_on_inputs,
        excess_length_strategy=config.excess_length_strategy,
        cache_dir=cache_dir,
        rejects_path=rejects_path,
        rejects_shown_by=rejects_shown_by,
        notice=log.notice,
        shared=shared,
        open_bar=bars_of(log),
        row_multiple=row_multiple,
        test_sources=_sources(config.test_datasets, labels),
        stream_steps=config.max_steps if config.streaming else None,
    )


def shared_tokens(log: RunLog, *, copies: bool) -> SharedTokens:
    """The tokens that all commands share. `copies`: the command gets copies of those that it uses."""
    return SharedTokens(user_cache_directory() / TOKENS_NAME, copies=copies, notice=log.notice)


def temporary_records(config: RunConfig, resources: ExitStack) -> Path:
    """A directory for what the data becomes, which `resources` removes. It has the run's own tokens, to be read."""
    temporary = Path(resources.enter_context(TemporaryDirectory(prefix="ratel-data-")))
    (temporary / TOKENS_NAME).mkdir()
    for cache in (run_directory(config.output_dir) / TOKENS_NAME).glob("*"):
        if TokenCache.is_in(cache):  # else there may be files of the user's, and a new cache would go to them
            (temporary / TOKENS_NAME / cache.name).symlink_to(cache.resolve())
    return temporary


def _sources(datasets: Sequence[DatasetConfig], labels: Sequence[str] = ()) -> list[DatasetSource]:
    return [DatasetSource(**{**item.model_dump(), "labels": item.labels or tuple(labels) or None}) for item in datasets]


def _records(config: RunConfig, resources: ExitStack, *, dry_run: bool) -> Path:
    """The directory for what the data becomes: the run's own; for a dry run a temporary one that can read the run's."""
    if dry_run:
        return temporary_records(config, resources)
    if may_claim_at_once(config):
        claim_output(config)
    else:
        resources.callback(_remove_unclaimed, config, frozenset(_caches(config)))
    return run_directory(config.output_dir)


def _caches(config: RunConfig) -> list[Path]:
    return list((run_directory(config.output_dir) / TOKENS_NAME).glob("*"))


def _remove_unclaimed(config: RunConfig, earlier: Collection[Path]) -> None:
    """Remove the tokens that are new in a folder of the user's, unless the run has claimed it."""
    if is_claimed(config):
        return
    for cache in _caches(config):
        if cache not in earlier:
            shutil.rmtree(cache, ignore_errors=True)
    run = run_directory(config.output_dir)
    for folder in (run / TOKENS_NAME, run):
        with suppress(OSError):
            folder.rmdir()


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
    )


def changed_settings(config: RunConfig, started_with: Path) -> list[str]:
    """The keys that decide the bits and differ from the config that the run was started with, each with both values.

    A split, or a size of the head's chunks, that is left to the plan is no change, but the size of the step is.
    """
    try:
        before = load_config(started_with).config
    except RatelError:
        return []
    old, new = (each.model_dump(mode="json") for each in (before, as_recorded_by_run(config)))
    keys = {"base_model": None, "random_init": None, **dict.fromkeys(DECIDES_THE_BITS)}
    if config.is_chunk_planned and before.head_chunk in ("auto", *CHUNK_BYTES):
        del keys["head_chunk"]
    if config.split is None:
        for key in SPLIT_KEYS:
            del keys[key]
        keys["tokens_per_step"] = None
        old["tokens_per_step"] = before.sequences_per_step * before.sequence_len
    changed = [key for key in keys if old[key] != new[key]]
    return [f"{key} was {changed_value(old[key])}, is now {changed_value(new[key])}" for key in changed]


def read_fitting_tokenizer(config: RunConfig, base: Base, log: RunLog) -> Tokenizer:
    """The tokenizer of the run, whose tokens all have a row in the model's embedding. Raises BadInput."""
    rows = base.model.spec.vocab_size
    tokenizer = read_tokenizer(config, base.directory, base.config, num_embeddings=rows, notice=log.notice)
    _check_ids(len(tokenizer), base.model)
    return tokenizer


def _check_names(config: RunConfig, names: Sequence[str], *, overwrite: bool) -> None:
    """Raise BadInput if the export would replace a folder or, without `overwrite`, a file that Ratel did not write."""
    if not overwrite:
        reject_files_of_others(config.output_dir, names, option="output_dir", misleading=(INDEX_NAME, WEIGHTS_NAME))
    reject_folders(config.output_dir, names, option="output_dir")


def _check_ids(num_tokens: int, model: DecoderModel) -> None:
    """Raise BadInput unless every token of the tokenizer has a row in the embedding."""
    if num_tokens > model.spec.vocab_size:
        raise BadInput(
            f"the tokenizer has {num_tokens} tokens, but the model's embedding has only {model.spec.vocab_size} rows",
            "use the tokenizer that belongs to the model, or resize the model's embedding first",
        )


def check_positions(sequence_len: int, model: DecoderModel, model_config: PretrainedConfig, log: RunLog) -> None:
    """Raise BadInput if rows are longer than the model's table of positions; a model without a table gets a notice."""
    table = position_table(model, model_config)
    if table is not None and sequence_len > table[1]:
        raise BadInput(
            f"sequence_len is {sequence_len}, but {table[0]} has only {table[1]} positions",
            f"set sequence_len to {table[1]} or less",
        )
    trained = num_positions(model_config)
    if trained is not None and sequence_len > trained:
        log.notice(f"sequence_len is {sequence_len}; the model was trained with up to {trained} tokens")


def _check_row_length(sequence_len: int, model: DecoderModel, model_config: PretrainedConfig) -> None:
    """Raise BadInput if the longest rows are no multiple of the chunks that the model computes."""
    chunk = model.row_multiple
    if sequence_len % chunk:
        below, above = sequence_len // chunk * chunk, align_up(sequence_len, chunk)
        raise BadInput(
            f"sequence_len is {sequence_len}, but {model_config.model_type} computes rows in chunks of {chunk} tokens",
            f"set sequence_len to {f'{below} or ' if below else ''}{above}",
        )


def num_positions(model_config: PretrainedConfig) -> int | None:
    """The most tokens in a row that a model was trained with; None if its configuration does not say."""
    trained = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    return trained if isinstance(trained, int) else None


def position_table(model: DecoderModel, model_config: PretrainedConfig) -> tuple[str, int] | None:
    """The name of the model's table of positions, and how many it has; None if the model computes positions."""
    trained = num_positions(model_config)
    # A table of positions has a row for each position, and in some models a few more rows.
    for parameter in model.spec.embedding.parameters[1:]:
        if trained is not None and len(parameter.shape) == 2 and trained <= parameter.shape[0] <= trained + 8:
            module = model.skeleton.get_submodule(parameter.name.rpartition(".")[0])
            filling = getattr(module, "padding_idx", None)
            if filling is not None and not model.layer_runner.takes_positions:  # they begin behind it
                return parameter.name, min(trained, parameter.shape[0] - filling - 1)
            return parameter.name, trained
    return None


def _gpu_name(device: torch.device) -> str:
    """The GPU and the version of its libraries, for the identity; empty for the CPU."""
    if device.type == "cpu":
        return ""
    name = torch.get_device_module(device).get_device_name(device)
    return f", {name}, CUDA {torch.version.cuda}" if device.type == "cuda" else f", {name}"
