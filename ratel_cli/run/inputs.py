"""Everything that a run reads before it writes: model, weights, tokenizer, data.

Invariant: when `read_inputs` returns, every file of the base model and every row of the data has been checked.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import cast

import torch
import transformers
from transformers import AutoTokenizer, PretrainedConfig

from ratel_cli import _native
from ratel_cli.config.load import load_config
from ratel_cli.config.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.data.dataset import DataSettings, TrainingData, load_training_data
from ratel_cli.data.encode import Tokenizer
from ratel_cli.data.rows import DatasetSource
from ratel_cli.errors import BadInput, RatelError, first_line
from ratel_cli.hardware.gpu import compute_device
from ratel_cli.json_fields import hash_of
from ratel_cli.model.blocks import DecoderModel
from ratel_cli.model.checkpoint import CheckpointSource
from ratel_cli.model.initialise import RandomSource
from ratel_cli.run.base_model import model_hash, open_weights, read_base, reject_as_output
from ratel_cli.run.run_directory import run_directory
from ratel_cli.store.store import StoreIdentity

_DECIDES_THE_BITS = (
    "train_on_inputs", "sequence_len", "sample_packing", "shuffle", "micro_batch_size",
    "gradient_accumulation_steps", "num_epochs", "max_steps", "learning_rate", "lr_scheduler", "warmup_steps",
    "warmup_ratio", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm", "dtype",
    "gradient_dtype", "attn_implementation", "deterministic", "seed", "val_set_size",
)  # fmt: skip
"""Keys that must be the same when a run resumes. All other keys may change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a run has read and checked."""

    base_dir: Path
    model: DecoderModel
    source: CheckpointSource | RandomSource
    buffers: Mapping[str, torch.Tensor]
    """Tensors of the model that are not trained, by name."""
    data: TrainingData
    num_steps: int
    device: torch.device


def read_inputs(config: RunConfig, resources: ExitStack, log: RunLog) -> Inputs:
    """Read and check all inputs. `resources` closes the files that stay open. Raises BadInput, EnvironmentFailure."""
    base = read_base(config, log)
    reject_as_output(config.output_dir, base.directory)
    device = compute_device(config.device)
    source, buffers = open_weights(config, base, resources)
    model, model_config = base.model, base.config
    tokenizer = _tokenizer(base.directory, model_config)
    _check_ids(len(tokenizer), model)
    _check_positions(config.sequence_len, model, model_config, log)
    packing = config.sample_packing and model.packs
    if config.sample_packing and not model.packs:
        log.notice(f"{model_config.model_type} cannot separate packed samples; every sample gets a sequence of its own")
    data = load_training_data(
        [DatasetSource(**item.model_dump()) for item in config.datasets],
        DataSettings(
            sequence_len=config.sequence_len,
            micro_batch_size=config.micro_batch_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            packing=packing,
            shuffle=config.shuffle,
            seed=config.seed,
            val_set_size=config.val_set_size,
        ),
        tokenizer=tokenizer,
        train_on_inputs=config.train_on_inputs,
        cache_dir=run_directory(config.output_dir) / "tokens",
        rejects_path=run_directory(config.output_dir) / "rejects.jsonl",
        notice=log.notice,
    )
    num_steps = config.max_steps or max(1, round(config.num_epochs * data.steps_per_epoch))
    return Inputs(
        base_dir=base.directory,
        model=model,
        source=source,
        buffers=buffers,
        data=data,
        num_steps=num_steps,
        device=device,
    )


def identity_of(config: RunConfig, inputs: Inputs) -> StoreIdentity:
    """The identity of the run's store. A run resumes only from a store with the same identity."""
    return StoreIdentity(
        model_hash=model_hash(config, inputs.model.spec),
        config_hash=hash_of(config.model_dump(mode="json", include=set(_DECIDES_THE_BITS))),
        data_hash=inputs.data.fingerprint,
        seed=config.seed,
        software=(
            f"ratel {version('ratel-cli')}, torch {torch.__version__}, transformers {transformers.__version__}, "
            f"{platform.machine()} {_native.active_isa()}{_gpu_name(inputs.device)}"
        ),
    )


def changed_settings(config: RunConfig, started_with: Path) -> list[str]:
    """The keys that decide the bits and differ from the config that the run was started with, each with both values."""
    try:
        before = load_config(started_with).config
    except RatelError:
        return []
    old, new = (each.model_dump(mode="json") for each in (before, config))
    keys = ("base_model", "random_init", *_DECIDES_THE_BITS)
    return [f"{key} was {old[key]}, is now {new[key]}" for key in keys if old[key] != new[key]]


def _tokenizer(base_dir: Path, model_config: PretrainedConfig) -> Tokenizer:
    try:
        return cast(Tokenizer, AutoTokenizer.from_pretrained(base_dir, config=model_config, trust_remote_code=False))
    except Exception as error:
        raise BadInput(f"{base_dir}: no usable tokenizer: {first_line(error)}") from error


def _check_ids(num_tokens: int, model: DecoderModel) -> None:
    """Raise BadInput unless every token of the tokenizer has a row in the embedding."""
    if num_tokens > model.spec.vocab_size:
        raise BadInput(
            f"the tokenizer has {num_tokens} tokens, but the model's embedding has only {model.spec.vocab_size} rows",
            "use the tokenizer that belongs to the model, or resize the model's embedding first",
        )


def _check_positions(sequence_len: int, model: DecoderModel, model_config: PretrainedConfig, log: RunLog) -> None:
    """Raise BadInput if rows are longer than the model's table of positions; a model without a table gets a notice."""
    trained = getattr(model_config, "max_position_embeddings", None)
    if not isinstance(trained, int) or sequence_len <= trained:
        return
    # A table of positions has a row for each position, and in some models a few more rows.
    for parameter in model.spec.blocks[0].parameters[1:]:
        if trained <= parameter.shape[0] <= trained + 8:
            raise BadInput(
                f"sequence_len is {sequence_len}, but {parameter.name} has only {trained} positions",
                f"set sequence_len to {trained} or less",
            )
    log.notice(f"sequence_len is {sequence_len}; the model was trained with up to {trained} tokens")


def _gpu_name(device: torch.device) -> str:
    """The GPU and its CUDA version, for the identity; empty for the CPU."""
    if device.type == "cpu":
        return ""
    return f", {torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
