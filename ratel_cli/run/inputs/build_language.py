"""Builds the language model that a config names: its skeleton, with what the config freezes or puts beside it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.data.text.tokenizer import num_ids
from ratel_cli.errors import BadInput
from ratel_cli.model.cut.decoder import DecoderModel
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.files.classes import classes_of, name_classes
from ratel_cli.model.files.directory import has_weights, resolve_base_model
from ratel_cli.model.files.in_place import placed_in_files
from ratel_cli.model.files.kind import text_config
from ratel_cli.model.files.new_rows import NewRows
from ratel_cli.model.files.skeleton import build_skeleton, read_model_config, supported_attention, why_unsupported
from ratel_cli.model.values.freezing import freeze
from ratel_cli.model.values.rate_groups import RateGroups
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.run.inputs.language_base import LanguageBase
from ratel_cli.run.inputs.settings import rules_in
from ratel_cli.run.inputs.tokenizer import RunTokenizer, read_tokenizer
from ratel_cli.sizes import Task
from ratel_cli.units import align_up


def read_language_base(config: RunConfig, log: RunLog, task: Task | None = None) -> LanguageBase:
    """Find the config's base model and build its skeleton. `task`: instead of that of its datasets. Raises BadInput,
    EnvironmentFailure."""
    base = build_language_base(config, task)
    if base.attention != config.attn_implementation:
        why = why_unsupported(base.config, config.attn_implementation, base.model.task)
        log.notice(f"{why}; using {base.attention}")
    return base


def build_language_base(config: RunConfig, task: Task | None = None) -> LanguageBase:
    """Like `read_language_base`, but without the notice about another attention kernel."""
    assert config.base_model is not None
    task = task or config.task
    if task == "denoising":
        raise BadInput("datasets of type: latents train a diffusion transformer; this is for language models")
    directory = resolve_base_model(config.base_model, revision=config.revision_of_model)
    model_config = read_model_config(directory, task)
    labels = classes_of(model_config, config.labels) if task == "classification" else ()
    if labels:
        name_classes(model_config, labels)
    tokenizer = cache(partial(read_tokenizer, config, directory, model_config))
    new_rows, tokens = _grown(config, tokenizer, model_config, task) if config.can_grow else (None, ())
    if new_rows is not None:
        model_config = new_rows.config
    attention = supported_attention(model_config, config.attn_implementation, task)
    skeleton = build_skeleton(model_config, dtype=config.dtype, attn_implementation=attention, task=task)
    if config.task == "classification":
        # A classifier does not look behind the padding of the run. As transformers' Trainer does it, it is named when
        # the model is made: so an embedding learns the row of a padding token that the model's files do not name.
        text = text_config(skeleton.config)
        known = (tokenizer().tokenizer.pad_token_id, getattr(text, "pad_token_id", None), 0)  # 0: without a tokenizer
        text.pad_token_id = next(each for each in known if each is not None)
    name, gradient_dtype = Path(config.base_model).name, config.resolved_gradient_dtype
    make: Callable[..., LanguageBase] = LanguageBase
    if config.adapter is None:
        freeze(skeleton, unfrozen=config.unfrozen_parameters, frozen=config.frozen_parameters)
    else:
        from ratel_cli.run.inputs.adapted_base import adapt  # PEFT is needed here alone

        make = adapt(skeleton, config, task, directory, tokens=tokens)
    model = find_blocks(
        skeleton,
        name=name,
        gradient_dtype=gradient_dtype,
        task=task,
        rates=_rate_groups(config, skeleton),
        rules=rules_in(config),
    )
    if not model.spec.num_trained:
        raise BadInput(
            f"{model.spec.architecture}: all parameters to train are in parts that text does not use",
            "name modules or parameters of the language model",
        )
    if task == "seq2seq":
        _check_decoder_ids(model, model_config)
    if task == "causal_lm" and model.looks_ahead:
        raise BadInput(
            f"{model.spec.architecture}: its attention is bidirectional, so it cannot learn to predict the next token",
            "set is_decoder: true in the model's config.json" if hasattr(model_config, "is_decoder") else None,
        )
    base = make(
        directory=directory,
        config=model_config,
        attention=attention,
        model=model,
        labels=labels,
        new_rows=new_rows,
        read_tokenizer=tokenizer,
    )
    if config.base_storage == "in_place":
        model.spec = _left_in_files(base, config)
    return base


def _grown(
    config: RunConfig, read: Callable[[], RunTokenizer], model_config: PretrainedConfig, task: Task
) -> tuple[NewRows | None, tuple[int, ...]]:
    """The rows that the vocabulary of the run has beyond the base model's, if it has some, and the tokens that the run
    names or that read one of these rows. Raises BadInput."""
    tokenizer = read().tokenizer
    known = tokenizer.get_vocab()
    num_before = getattr(text_config(model_config), "vocab_size", num_ids(tokenizer))
    named = {known[each] for each in (*config.tokens, *config.new_special_tokens)}
    tokens = tuple(sorted(named.union(each for each in known.values() if each >= num_before)))
    num_rows = align_up(num_ids(tokenizer), config.pad_vocab_to_multiple_of or 1)
    if num_rows <= num_before:
        return None, tokens
    new = NewRows(base_config=model_config, num_rows=num_rows, init=config.new_tokens_init, seed=config.seed, task=task)
    return new, tokens


def _left_in_files(base: LanguageBase, config: RunConfig) -> ModelSpec:
    """The model with what stays in the base model's files. If these are not here, all that is frozen: a plan needs
    config.json alone. Raises BadInput if there is nothing."""
    spec = base.model.spec
    if has_weights(base.directory):
        with ExitStack() as resources:
            placed = placed_in_files(spec, base.open_weights(config, resources)[0])
    else:
        frozen = [block for block in spec.blocks if not block.is_trained and block.dtype != "uint8"]
        placed = spec.in_files({block.index: block.compute_bytes for block in frozen})
    if not any(block.is_in_files for block in placed.blocks):
        raise BadInput(
            f"base_storage: in_place: nothing that is frozen lies in the files of {base.directory} in {config.dtype}",
            "its weights are quantised, or in another dtype; set `dtype` to that of the files, or base_storage: store",
        )
    return placed


def _rate_groups(config: RunConfig, skeleton: PreTrainedModel) -> RateGroups:
    """What has a learning rate of its own."""
    ends = set[str]()
    if config.embedding_lr is not None or config.embedding_lr_scale is not None:
        modules = skeleton.get_input_embeddings(), skeleton.get_output_embeddings()
        matrices = [module.weight for module in modules if module is not None]
        for name, parameter in skeleton.named_parameters():
            is_saved = config.adapter is not None and parameter.requires_grad and "lora_" not in name
            if any(parameter is each for each in matrices) or (is_saved and name.endswith(".weight")):
                ends.add(name)
        if config.adapter is None and not any(skeleton.get_parameter(name).requires_grad for name in ends):
            key = "embedding_lr" if config.embedding_lr is not None else "embedding_lr_scale"
            raise BadInput(f"{key}: embedding and head are frozen", "remove it, or train one of them")
    return RateGroups(has_second=config.loraplus_lr_ratio is not None, ends=frozenset(ends))


def _check_decoder_ids(model: DecoderModel, config: PretrainedConfig) -> None:
    """Raise BadInput if the config does not say what a decoder begins with."""
    missing = [key for key in ("decoder_start_token_id", "pad_token_id") if getattr(config, key, None) is None]
    try:
        model.decoder_ids(torch.full((1, 2), model.spec.vocab_size - 1))
    except Exception as error:
        raise BadInput(
            f"config.json: the decoder's first tokens are not known: {' and '.join(missing) or 'its tokens'} missing",
            "add it to the model's config.json",
        ) from error
