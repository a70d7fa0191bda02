"""The model that a config names, before training: its skeleton, its weights, its name.

Invariant: a store that passes `check_model` has this model's parameters, in this order.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from ratel_cli.config.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.data.packing import MicroBatch
from ratel_cli.errors import BadInput
from ratel_cli.hardware.host import return_large_buffers
from ratel_cli.json_fields import hash_of
from ratel_cli.model.checkpoint import CheckpointSource, install_buffers, persistent_buffers
from ratel_cli.model.classes import classes_of, name_classes
from ratel_cli.model.decoder import DecoderModel
from ratel_cli.model.directory import resolve_base_model
from ratel_cli.model.export_layout import ExportLayout, layout_of_model
from ratel_cli.model.find_blocks import find_blocks
from ratel_cli.model.initialise import RandomSource
from ratel_cli.model.sidecars import BaseSidecars
from ratel_cli.model.skeleton import (
    build_skeleton,
    read_model_config,
    supported_attention,
    why_unsupported,
)
from ratel_cli.model.spec import ModelSpec
from ratel_cli.run.files.run_directory import as_recorded_by_run
from ratel_cli.run.inputs.model_base import ModelBase, Weights
from ratel_cli.run.inputs.tokenizer import tokenizer_files
from ratel_cli.sizes import Task
from ratel_cli.store.store import Store

_NUM_TOKENS = 16
_TOKEN_STRIDE = 7919
"""A prime, so that the tokens come from the whole vocabulary. They are the same ones each time."""


@dataclass(frozen=True, kw_only=True)
class Base(ModelBase):
    """A language model without its weights."""

    loader = "transformers"
    outputs = "logits"
    directory: Path
    config: PretrainedConfig
    """What config.json describes: a language model, or a model with more parts."""
    attention: str
    """The attention kernel that is used."""
    model: DecoderModel
    labels: tuple[str, ...] = ()
    """The names of a classifier's classes."""

    def open_weights(self, config: RunConfig, resources: ExitStack) -> Weights:
        """See ModelBase. The skeleton gets the buffers."""
        return open_weights(config, self, resources)

    def sidecars(self, config: RunConfig) -> BaseSidecars:
        """See ModelBase."""
        return BaseSidecars(base_dir=self.directory, replaced=partial(tokenizer_files, config, self.directory))

    def open_export(self, directory: Path, resources: ExitStack) -> CheckpointSource:
        """See ModelBase."""
        return resources.enter_context(CheckpointSource(directory, self.model.skeleton, self.model.spec))

    def tried(self, loaded: nn.Module) -> tuple[MicroBatch, torch.Tensor]:
        """See ModelBase. The skeleton gets the buffers."""
        model = self.model
        assert isinstance(loaded, PreTrainedModel)
        install_buffers(model.skeleton, persistent_buffers(loaded))
        longest = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        num_tokens = min(_NUM_TOKENS, longest) if isinstance(longest, int) else _NUM_TOKENS
        positions = torch.arange(num_tokens).unsqueeze(0)
        tokens = positions * _TOKEN_STRIDE % model.spec.vocab_size
        if model.task == "classification":
            # Two rows: the product of a single one with the head's matrix depends on where in memory the matrix is.
            tokens, positions = torch.cat([tokens, tokens.flip(1)]), positions.repeat(2, 1)
        batch = MicroBatch.of_tokens(tokens, positions)
        if model.task == "seq2seq":
            batch = replace(batch, decoder_ids=tokens)
        inputs = batch.inputs
        if not model.layer_runner.takes_positions:
            del inputs["position_ids"]
        with torch.no_grad():
            logits: torch.Tensor = loaded(**inputs, use_cache=False).logits
        return batch, logits


def prepare_process() -> None:
    """Let freed memory go back to the system, and turn off what transformers would show."""
    return_large_buffers()
    silence_transformers()


def silence_transformers() -> None:
    """Turn off the messages and progress bars of transformers."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def read_base(config: RunConfig, log: RunLog, task: Task | None = None) -> Base:
    """Find the config's base model and build its skeleton. `task`: instead of that of its datasets. Raises BadInput,
    EnvironmentFailure."""
    base = build_base(config, task)
    if base.attention != config.attn_implementation:
        why = why_unsupported(base.config, config.attn_implementation, base.model.task)
        log.notice(f"{why}; using {base.attention}")
    return base


def build_base(config: RunConfig, task: Task | None = None) -> Base:
    """Like `read_base`, but without the notice about another attention kernel."""
    assert config.base_model is not None
    task = task or config.task
    if task == "denoising":
        raise BadInput("datasets of type: latents train a diffusion transformer; this is for language models")
    directory = resolve_base_model(config.base_model)
    model_config = read_model_config(directory, task)
    labels = classes_of(model_config, config.labels) if task == "classification" else ()
    if labels:
        name_classes(model_config, labels)
    attention = supported_attention(model_config, config.attn_implementation, task)
    skeleton = build_skeleton(model_config, dtype=config.dtype, attn_implementation=attention, task=task)
    name, gradient_dtype = Path(config.base_model).name, config.resolved_gradient_dtype
    model = find_blocks(skeleton, name=name, gradient_dtype=gradient_dtype, task=task)
    if task == "seq2seq":
        _check_decoder_ids(model, model_config)
    if task == "causal_lm" and model.looks_ahead:
        raise BadInput(
            f"{model.spec.architecture}: its tokens see those behind them, so it cannot learn to predict the next",
            "set is_decoder: true in the model's config.json" if hasattr(model_config, "is_decoder") else None,
        )
    return Base(
        directory=directory,
        config=model_config,
        attention=attention,
        model=model,
        labels=labels,
    )


def _check_decoder_ids(model: DecoderModel, config: PretrainedConfig) -> None:
    """Raise BadInput if the config does not say what a decoder begins with."""
    missing = [key for key in ("decoder_start_token_id", "pad_token_id") if getattr(config, key, None) is None]
    try:
        model.decoder_ids(torch.full((1, 2), model.spec.vocab_size - 1))
    except Exception as error:
        raise BadInput(
            f"config.json: what the decoder begins with is not known: {' and '.join(missing) or 'its tokens'} missing",
            "add it to the model's config.json",
        ) from error


def open_weights(
    config: RunConfig, base: Base, resources: ExitStack
) -> tuple[CheckpointSource | RandomSource, ExportLayout]:
    """The source of the weights, whose files are checked, and the layout of an export. The skeleton gets the buffers.

    Raises BadInput if the files do not match the model.
    """
    skeleton, spec = base.model.skeleton, base.model.spec
    if config.random_init:
        if base.model.has_other_parts:
            raise BadInput(
                f"random_init: the other parts of {spec.architecture} would have no weights",
                "set base_model to a directory with a language model's config.json, or remove random_init",
            )
        return RandomSource(skeleton, config.seed, base.model.task), layout_of_model(skeleton, spec, config.dtype)
    new_head = None if base.model.task == "causal_lm" else RandomSource(skeleton, config.seed, base.model.task)
    source = resources.enter_context(CheckpointSource(base.directory, skeleton, spec, new_head=new_head))
    install_buffers(skeleton, source.read_buffers())
    return source, source.layout(config.dtype)


def hub_id(config: RunConfig) -> str | None:
    """The hub id of the base model; None if the base model is a directory."""
    return None if Path(config.base_model or "").exists() else config.base_model


def model_hash(config: RunConfig, spec: ModelSpec) -> str:
    """The hash of a store's model: of its architecture, dtype, origin, and the place of each parameter.

    The origin is the base model as the run has recorded it, whatever its path is from here.
    """
    origin = as_recorded_by_run(config).base_model
    blocks = [
        (each.dtype, each.rule.name, [(p.name, p.shape, p.start) for p in each.parameters]) for each in spec.blocks
    ]
    return hash_of([spec.architecture, blocks, config.dtype, str(origin), config.random_init])


def check_model(store: Store, config: RunConfig, spec: ModelSpec, directory: Path) -> None:
    """Raise BadInput if the store in `directory` was made for another model."""
    if store.identity.model_hash != model_hash(config, spec):
        raise BadInput(
            f"the store in {directory} was made for another model, not for {config.base_model} in {config.dtype}",
            "give the config of the run that the store belongs to",
        )
