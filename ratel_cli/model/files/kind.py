"""Which kind of model a configuration describes, so that one that cannot be trained for a task is rejected by name.

Invariant: what is known here about models comes from transformers' own tables of classes, and no family is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto import modeling_auto

from ratel_cli.errors import BadInput, excerpt
from ratel_cli.sizes import TASKS, Task

_CAUSAL, _BARE, _MASKED = "FOR_CAUSAL_LM", "", "FOR_MASKED_LM"
_CLASSIFIES = "FOR_SEQUENCE_CLASSIFICATION"
_PAIRS = "FOR_SEQ_TO_SEQ_CAUSAL_LM"
_OF_TASKS: Mapping[Task, tuple[str, type[Any], str]] = {
    "causal_lm": (_CAUSAL, AutoModelForCausalLM, "causal language model"),
    "seq2seq": (_PAIRS, AutoModelForSeq2SeqLM, "encoder-decoder"),
    "masked_lm": (_MASKED, AutoModelForMaskedLM, "masked language model"),
    "classification": (_CLASSIFIES, AutoModelForSequenceClassification, "sequence classifier"),
}
"""For a task: its table of transformers, the class that loads its models, and what these are. A class may be in several
tables, as that of BART is: the first one counts."""
_NOT_NEXT = "it does not learn to predict the next token"
_ENCODER_DECODER = "an encoder-decoder"
_MULTIMODAL = ("a vision-language model", "a multimodal language model")
_WORDS: Mapping[str, str] = {
    "FOR_IMAGE_TEXT_TO_TEXT": _MULTIMODAL[0],
    "FOR_MULTIMODAL_LM": _MULTIMODAL[1],
    _PAIRS: _ENCODER_DECODER,
    _MASKED: "a masked language model, whose tokens see the tokens after them",
    _CLASSIFIES: "a sequence classifier",
    "FOR_TOKEN_CLASSIFICATION": "a token classifier",
    "FOR_SPEECH_SEQ_2_SEQ": "a speech recogniser",
    "FOR_CTC": "a speech recogniser",
    "FOR_IMAGE": "an image encoder",
}
"""For a table of transformers: what its models are. The first one counts. Other tables speak for themselves."""
_PAST_TABLES = ("FOR_PRETRAINING", "FOR_TEXT_ENCODING")
"""Tables with models of every kind."""


def reject_other_kinds(config: PretrainedConfig, task: Task = "causal_lm") -> None:
    """Raise BadInput unless transformers has a model of `config` for the task, a causal language model say, and the
    weights are such a model's. Classifiers are made from models of any kind.

    The class that made the weights is the first of `architectures`. A class that transformers does not know, and a bare
    model without a head, are left to the check of the weights.
    """
    declared = declared_class(config)
    if task != "causal_lm":
        table, _, words = _OF_TASKS[task]
        if config.model_type not in _table(table):
            raise BadInput(f"config.json: transformers has no {words} for the model type {config.model_type}")
        return
    is_causal_type = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if is_causal_type and declared in _classes(_CAUSAL):
        return
    kind = _words([table for table in _tables() if declared in _classes(table)])
    if kind is None and is_causal_type:
        return
    if kind is None:
        kind, declared = _kind_of_type(config.model_type)
    if config.is_encoder_decoder:
        kind = _ENCODER_DECODER
    shown = config.model_type if declared is None else f"{excerpt(declared)} ({config.model_type})"
    if kind in _MULTIMODAL and class_of(config) is not None:
        return  # its language part is trained
    if kind is None:
        raise BadInput(
            f"config.json: transformers has no causal language model for the model type {config.model_type}",
            "use a model that AutoModelForCausalLM of transformers can load",
        )
    is_decoder = is_causal_type and kind != _ENCODER_DECODER and config.model_type not in _table(_MASKED)
    other = None if is_decoder else _other_tasks(config)
    rest = "only causal language models can be fine-tuned" if other is None else _NOT_NEXT
    raise BadInput(
        f"config.json: {shown} is {kind}; {rest}",
        f"use the language model that it was made from, a {_names(_table(_CAUSAL)[config.model_type])[0]}"
        if is_decoder
        else other or "use a decoder model; its config.json names a causal language model in architectures",
    )


def _other_tasks(config: PretrainedConfig) -> str | None:
    """What the model can be trained for instead; None if it can for nothing."""
    tasks = [task for task, (table, *_) in _OF_TASKS.items() if config.model_type in _table(table)]
    types = [name for name, task in TASKS.items() if task in tasks and config.is_encoder_decoder == (task == "seq2seq")]
    return f"it trains on datasets of type: {' or '.join(types)}" if types else None


def declared_task(config: PretrainedConfig) -> Task:
    """What the class that the configuration names is made for."""
    declared = declared_class(config)
    return next((task for task, (table, *_) in _OF_TASKS.items() if declared in _classes(table)), "causal_lm")


def declared_class(config: PretrainedConfig) -> str | None:
    """The class that the configuration names as that of the weights; None if it names none."""
    declared = config.architectures
    first = declared[0] if isinstance(declared, list) and declared else None
    return first if isinstance(first, str) else None


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the language model; `config` itself if it describes nothing else, or several."""
    try:
        found: PretrainedConfig = config.get_text_config()
    except ValueError:  # it has several
        return config
    return found


def class_of(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class that loads the weights if a language model is only a part of it; None if AutoModelForCausalLM does.

    It is the class that the configuration names, else transformers' for this type of model.
    """
    text = text_config(config)
    if not any(getattr(config, key, None) is text for key in config.sub_configs):
        return None
    name = declared_class(config)
    if name is None and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        name = _names(_table(_CAUSAL)[config.model_type])[0]
    found = getattr(transformers, name or _kind_of_type(config.model_type)[1] or "", None)
    if not isinstance(found, type) or not issubclass(found, PreTrainedModel) or found.config_class is type(text):
        return None
    return found


def loading_class(config: PretrainedConfig, task: Task) -> type[Any]:
    """The class that loads the weights of such a model for a task."""
    return (class_of(config) if task == "causal_lm" else None) or _OF_TASKS[task][1]


def _kind_of_type(model_type: str) -> tuple[str | None, str | None]:
    """What most models of this type are, in words, and their class."""
    tables = [table for table in _tables() if model_type in _table(table)]
    kind = _words(tables)
    first = next((table for table in (*_WORDS, *tables) if table in tables and _words([table]) == kind), None)
    if first is None:
        return None, None
    return kind, _names(_table(first)[model_type])[0]


def _words(tables: list[str]) -> str | None:
    if not tables:
        return None
    known = next((words for table, words in _WORDS.items() if table in tables), None)
    return known or f"a model {tables[0].lower().replace('_', ' ')}"


def _tables() -> Iterator[str]:
    """Names of transformers' tables of models that are no causal language models: `FOR_MASKED_LM`."""
    for name in vars(modeling_auto):
        table = name.removeprefix("MODEL_").removesuffix("_MAPPING_NAMES").removesuffix("MAPPING_NAMES")
        if name == f"MODEL_{table}_MAPPING_NAMES" and table not in (_CAUSAL, _BARE, *_PAST_TABLES):
            yield table


def _classes(table: str) -> set[str]:
    return {name for value in _table(table).values() for name in _names(value)}


def _table(table: str) -> Mapping[str, object]:
    found: Mapping[str, object] = getattr(modeling_auto, f"MODEL_{table}_MAPPING_NAMES")
    return found


def _names(value: object) -> tuple[str, ...]:
    """The classes of one type: most types have one."""
    return (value,) if isinstance(value, str) else tuple(value)  # type: ignore[arg-type]
