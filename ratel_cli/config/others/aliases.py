"""The names of other trainers for our keys and values, and what to say about a key that nobody knows.

Invariant: an alias never changes what a value means, except the INVERSE ones, whose booleans become other values.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from ratel_cli.config.keys.base import Section
from ratel_cli.config.keys.schema import (
    DatasetConfig,
    LimitsConfig,
    ModelShape,
    OptimizerConfig,
    RunConfig,
    SchedulerConfig,
    SnapshotConfig,
    StorageConfig,
)
from ratel_cli.config.others.foreign import FOREIGN, foreign_key
from ratel_cli.config.others.torchtune import MOMENTS_IN_FP32
from ratel_cli.config.yaml.yaml_marks import Finding, Marked, Where

TOP = ""
SECTIONS: Mapping[str, type[Section]] = {
    TOP: RunConfig,
    "datasets": DatasetConfig,
    "lr_scheduler_kwargs": SchedulerConfig,
    "optim_args": OptimizerConfig,
    "storage": StorageConfig,
    "limits": LimitsConfig,
    "model_shape": ModelShape,
    "storage.snapshot": SnapshotConfig,
}
"""By name: the class of each section. The name of a nested section has a dot."""

ALIASES: Mapping[str, Mapping[str, str]] = {
    TOP: {
        "model_name_or_path": "base_model",
        "model": "base_model",
        "model_revision": "revision_of_model",
        "train_on_prompt": "train_on_inputs",
        "completion_only_loss": "train_on_inputs",
        "assistant_only_loss": "train_on_inputs",
        "cutoff_len": "sequence_len",
        "max_length": "sequence_len",
        "max_seq_length": "sequence_len",
        "packing": "sample_packing",
        "per_device_train_batch_size": "micro_batch_size",
        "num_train_epochs": "num_epochs",
        "epochs": "num_epochs",
        "lr": "learning_rate",
        "lr_scheduler_type": "lr_scheduler",
        "optim": "optimizer",
        "clip_grad_norm": "max_grad_norm",
        "gradient_clipping": "max_grad_norm",
        "torch_dtype": "dtype",
        "val_size": "val_set_size",
        "test_split_size": "val_set_size",
        "max_sequence_length": "sequence_len",
        "max_seq_len": "sequence_len",
        "gradient_accumulation": "gradient_accumulation_steps",
        "reinit_weights": "random_init",
        "train_from_scratch": "random_init",
        "use_dynamic_finetuning": "use_dft_loss",
        "noisy_embedding_alpha": "neftune_noise_alpha",
        "early_stopping_steps": "early_stopping_patience",
        "beta": "rl_beta",
        "dpo_beta": "rl_beta",
        "pref_beta": "rl_beta",
        "orpo_alpha": "rl_beta",
        "desirable_weight": "kto_desirable_weight",
        "kto_chosen_weight": "kto_desirable_weight",
        "undesirable_weight": "kto_undesirable_weight",
        "kto_rejected_weight": "kto_undesirable_weight",
    },
    "datasets": {
        "formatting": "type",
        "config": "name",
        "id": "path",
        "conversations": "field_messages",
        "message_field": "field_messages",
        "num_samples": "max_samples",
        "train_on_split": "split",
    },
}
"""By section: other names of our keys."""
INVERSE: Mapping[str, Mapping[bool, bool | str]] = {
    "completion_only_loss": {True: False, False: True},
    "assistant_only_loss": {True: False, False: "conversations"},
}
"""Aliases whose `true` is our `false`, and what their `false` is."""

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_SAME_ALGORITHM = (
    "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_torch_xla", "adamw_torch_npu_fused",
    "adamw_torch_foreach", "optimi_adamw", "paged_adamw", "paged_adamw_32bit", "fused_adamw", "AdamW",
)  # fmt: skip
"""AdamW in another coat: other kernels, or other places for the same states."""
_EIGHT_BIT = ("adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit", "ao_adamw_8bit")
"""AdamW with moments in 8 bit, in blocks of 256 elements, by the same map: that of bitsandbytes."""
_SMALLER_STATES = ("adamw_torch_4bit", "adamw_torch_fp8", "ao_adamw_4bit", "ao_adamw_fp8", "adamw_anyprecision")
"""AdamW with moments of fewer bits, which are an approximation of what Ratel computes."""
_LION = ("lion_32bit", "lion_pytorch", "paged_lion", "paged_lion_32bit", "Lion")
_SMALLER_LION = ("lion_8bit", "paged_lion_8bit")
VALUE_ALIASES: Mapping[str, Mapping[str, str]] = {
    "dtype": _DTYPES,
    "gradient_dtype": _DTYPES,
    "optimizer": {
        **dict.fromkeys((*_SAME_ALGORITHM, *_SMALLER_STATES), "adamw"),
        **dict.fromkeys(_EIGHT_BIT, "adamw_8bit"),
        **dict.fromkeys((*_LION, *_SMALLER_LION), "lion"),
        "SGD": "sgd",
    },
    "lr_scheduler": {
        "constant_with_warmup": "constant",
        "cosine_with_warmup": "cosine",
        "linear_with_warmup": "linear",
        "cosine_with_hard_restarts": "cosine_with_restarts",
        "wsd": "warmup_stable_decay",
    },
    "datasets.type": {
        "sharegpt": "chat_template",
        "sharegpt.load_role": "chat_template",
        "chat_template.default": "chat_template",
        "chatml": "chat_template",
        "messages": "chat_template",
        "openai": "chat_template",
        "pretrain": "completion",
        "text": "completion",
        "alpaca.load_prompt": "alpaca",
    },
}
"""By key: other names of its values."""
VALUE_NOTES: Mapping[str, str] = dict.fromkeys((*_SMALLER_STATES, *_SMALLER_LION), MOMENTS_IN_FP32)
"""By such a name: what is different here."""


def section_in(section: str, key: str) -> str:
    """The name of the section that is the value of `key` in `section`: sections may be nested."""
    return key if section == TOP else f"{section}.{key}"


def canonical_key(section: str, written: str) -> str:
    """Our name for a key: what it is an alias of, or the key itself."""
    return ALIASES.get(section, {}).get(written, written)


def is_dataset_type(content: object) -> bool:
    """Whether a dataset's `type` may have this value."""
    return content in get_args(DatasetConfig.model_fields["type"].annotation)


def explain_unknown(
    section: str, written: str, where: Where, value: Marked | None = None
) -> tuple[Finding, str | None]:
    """The finding for a key that the section does not have, and our name for the key that was probably meant.

    With a value, a name that is only similar is suggested if its key takes values of this kind.
    """
    foreign = foreign_key(section, written)
    known = [*SECTIONS[section].model_fields, *ALIASES.get(section, {})]
    close = get_close_matches(written, known, n=1, cutoff=0.85)
    if foreign is not None and (foreign is FOREIGN.get(written) or not close):
        message = f"`{written}` is not a key of Ratel: {foreign.reason}"
        return Finding(where=where, message=message, hint=foreign.hint or None), None
    message = f"unknown key `{written}`" + (f" in `{section}`" if section else "")
    plural = next((each for each in known if each in (f"{written}s", written.removesuffix("s"))), None)
    if plural is not None:  # nearer than a key of another section
        return Finding(where=where, message=message, hint=f"did you mean `{plural}`?"), canonical_key(section, plural)
    belongs = _elsewhere(section, written)
    if belongs:
        return Finding(where=where, message=message, hint=belongs), None
    if not close:
        similar = get_close_matches(written, known, n=3, cutoff=0.6)
        similar = [each for each in similar if _differs_little(written, each)]
        close = [each for each in similar if value is None or _takes(section, canonical_key(section, each), value)][:1]
    if close:
        hint = f"did you mean `{close[0]}`?"
        return Finding(where=where, message=message, hint=hint), canonical_key(section, close[0])
    return Finding(where=where, message=message), None


def _differs_little(written: str, known: str) -> bool:
    """Whether two names are also close without the words that they share: `train_on_mask` is not `train_on_eos`."""
    ours, theirs = known.split("_"), written.split("_")
    for at in (0, -1):
        while ours and theirs and ours[at] == theirs[at]:
            del ours[at], theirs[at]
    return not ours or not theirs or bool(get_close_matches("_".join(theirs), ["_".join(ours)], cutoff=0.6))


def _takes(section: str, key: str, value: Marked) -> bool:
    """Whether a key takes values of this kind: a mapping, a list, true or false, a number, or text."""
    kinds = _kinds(SECTIONS[section].model_fields[key].annotation)
    match value.content:
        case dict():
            return "mapping" in kinds or key in ("datasets", "test_datasets")
        case list():
            return "list" in kinds
        case bool():
            return "bool" in kinds
        case int() | float():
            return bool(kinds & {"int", "float"})
        case str():
            words = _words(SECTIONS[section].model_fields[key].annotation)
            others = VALUE_ALIASES.get(f"{section}.{key}" if section else key, {})
            return key in ("datasets", "test_datasets") or words is None or value.content in {*words, *others}
        case None:
            return True


def _kinds(annotation: object) -> set[str]:
    """The kinds of values that a type takes."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kinds(arguments[0])
    if origin is Literal:
        return {type(choice).__name__ for choice in arguments}
    if origin in (tuple, list):
        return {"list"}
    if origin is dict:
        return {"mapping"}
    if arguments:
        return set().union(*map(_kinds, arguments))
    if isinstance(annotation, type):
        return {"mapping"} if issubclass(annotation, Section) else {annotation.__name__}
    return set()


def _words(annotation: object) -> set[str] | None:
    """The texts that a type takes; None if it takes any."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(arguments[0])
    if origin is Literal:
        return {choice for choice in arguments if isinstance(choice, str)}
    if origin in (Union, UnionType):
        parts = [_words(each) for each in arguments]
        return None if None in parts else set().union(*filter(None, parts))
    return None if annotation in (str, Path) else set()


def _elsewhere(section: str, written: str) -> str | None:
    for other, model in SECTIONS.items():
        if other != section and written in model.model_fields:
            return f"`{written}` belongs in `{other}`" if other else f"`{written}` belongs at the top level"
    return None
