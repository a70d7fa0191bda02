"""The types of the keys that a person may write in several ways: `auto` or a number, a share or a count.

Invariant: a validator raises only `rejection`, in words that a user reads.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import partial
from typing import Annotated, Final, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field

from ratel_cli.config.keys.base import rejection
from ratel_cli.config.keys.sections import Number, within_most
from ratel_cli.config.yaml.yaml_marks import show

Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]
TRACKERS: tuple[Tracker, ...] = get_args(Tracker)
_HUB_ID = r"(?!.*(--|\.\.))([A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9_][\w.-]{0,95}"
_OTHER_TEMPLATES: Final = frozenset(
    {
        "alpaca", "mistral_v1", "mistral_v2v3", "mistral_v3_tekken", "mistral_v7_tekken", "gemma", "cohere",
        "llama3_2_vision", "llama4", "phi_3", "phi_35", "deepseek_v2", "deepseek_v3", "jamba", "qwen_25", "qwen3",
        "qwen3_5", "falcon_h1", "nemotron_h", "exaone", "exaone4", "metharme", "pixtral", "llava", "qwen2_vl", "gemma3",
        "gemma3n", "gemma4", "gemma4_unified", "command_a", "command_a_tool_use", "command_a_rag", "aya",
    }
)  # fmt: skip
"""axolotl's other chat templates, each of models whose tokenizers have one of their own."""
_Metric = Literal["loss", "accuracy", "rewards/accuracies", "rewards/margins"]
_TheirMetric = Literal["eval_loss", "eval_accuracy", "eval_rewards/accuracies", "eval_rewards/margins"]
_Policy = Literal["auto", "keep", "recompute", "swap_all", "static"]


def _check_activations(value: object) -> object:
    if isinstance(value, str) and value in get_args(_Policy):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        return float(value)
    raise rejection("must be `auto`, `keep`, `recompute`, `swap_all`, `static` or a fraction from 0 to 1")


def _check_split(value: object) -> object:
    if value == "auto":
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return within_most(value)
    hint = "remove the quotes" if isinstance(value, str) and value.isdigit() else None
    raise rejection("must be `auto` or a whole number of at least 1", hint)


def _check_flag(value: object, *, word: str) -> object:
    """A flag, or a word in its place."""
    if isinstance(value, bool) or value == word:
        return value
    raise rejection(f"must be true, false or `{word}`, not {show(value)}")


def _check_val_set_size(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise rejection("must be a fraction below 1 or a whole number of samples")
    if isinstance(value, float) and not value < 1:
        whole = f"; for {int(value)} samples write {int(value)}" if value.is_integer() else ""
        raise rejection(f"must be a fraction below 1 or a whole number of samples, not {value}{whole}")
    return within_most(value)


def _check_trackers(value: object) -> object:
    """The trackers as a tuple, each once."""
    names = list(value) if isinstance(value, list | tuple) else [value]
    if names in ([], [None], ["none"]):
        return ()
    for name in names:
        if not isinstance(name, str) or name not in TRACKERS:
            hint = "the metrics of every step are in run/metrics.jsonl in the output directory, for other trackers"
            raise rejection(f"must be `none` or names of {', '.join(TRACKERS)}, not {show(name)}", hint)
    return tuple(dict.fromkeys(names))


def _check_hub_id(value: object) -> object:
    if value is not None and not (isinstance(value, str) and re.fullmatch(_HUB_ID, value, re.ASCII)):
        raise rejection("must be the id of a repository on the hub, like `name` or `organization/name`")
    return value


def _check_chat_template(value: str) -> str:
    known = ("chatml", "llama3", "jinja", "tokenizer_default")
    if value in (*known, *_OTHER_TEMPLATES) or value.startswith("tokenizer_default_fallback_"):
        return value
    close = get_close_matches(value, known, n=1)
    hint = f"did you mean `{close[0]}`?" if close else "`chat_template_jinja` names a file with a template"
    raise rejection(f"must be {', '.join(known[:-1])} or {known[-1]}, not {show(value)}", hint)


def _check_interval(value: object) -> object:
    """A number of steps, or a share of all steps."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1):
        return value
    return _whole_steps(value, least=1)


def _check_warmup_steps(value: object) -> object:
    if isinstance(value, float) and 0 < value < 1:
        return value
    return _whole_steps(value, least=0)


def _whole_steps(value: object, *, least: int) -> object:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise rejection(f"must be a whole number of steps, or a share of all steps below 1, not {show(value)}")
    if value < least:
        raise rejection(f"must be at least {least}, not {value}")
    return within_most(value)


def _without_prefix(value: object) -> object:
    """Trainer takes `eval_loss` for `loss`."""
    return value.removeprefix("eval_") if isinstance(value, str) else value


def _zero_is_off(value: float | None) -> float | None:
    return value or None


ActivationPolicy = Annotated[
    _Policy | float,
    BeforeValidator(_check_activations, json_schema_input_type=_Policy | Annotated[float, Field(ge=0, le=1)]),
]
CountOrAuto = Annotated[
    Literal["auto"] | int,
    BeforeValidator(_check_split, json_schema_input_type=Literal["auto"] | Annotated[int, Field(ge=1)]),
]
TrainOnInputs = Annotated[
    bool | Literal["conversations"],
    BeforeValidator(partial(_check_flag, word="conversations"), json_schema_input_type=bool | Literal["conversations"]),
    "true, false or `conversations`",
]
AdapterInitialisation = Annotated[
    bool | Literal["gaussian"],
    BeforeValidator(partial(_check_flag, word="gaussian"), json_schema_input_type=bool | Literal["gaussian"]),
    "true, false or `gaussian`",
]
FractionOrCount = Annotated[
    int | float, BeforeValidator(_check_val_set_size, json_schema_input_type=Annotated[float, Field(ge=0)])
]
Interval = Annotated[
    int | float | None,
    BeforeValidator(_check_interval, json_schema_input_type=Annotated[float, Field(gt=0)] | None),
    "whole number of steps, or a share of all steps below 1",
]
WarmupSteps = Annotated[
    int | float,
    BeforeValidator(_check_warmup_steps, json_schema_input_type=Annotated[float, Field(ge=0)]),
    "whole number of steps, or a share of all steps below 1",
]
TimesPerEpoch = Annotated[Number | None, Field(ge=0), AfterValidator(_zero_is_off)]
TrackerNames = Annotated[
    tuple[Tracker, ...],
    BeforeValidator(
        _check_trackers, json_schema_input_type=Tracker | Literal["none"] | list[Tracker | Literal["none"]] | None
    ),
    "`none`, or one or several of `tensorboard`, `wandb`, `mlflow`, `trackio`",
]
ChatTemplate = Annotated[str, Field(min_length=1), AfterValidator(_check_chat_template)]
HubId = Annotated[
    str | None,
    BeforeValidator(_check_hub_id, json_schema_input_type=Annotated[str, Field(pattern=f"^{_HUB_ID}$")] | None),
    "text",
]
MetricOfBest = Annotated[_Metric, BeforeValidator(_without_prefix, json_schema_input_type=_Metric | _TheirMetric)]
NoiseAlpha = Annotated[float | None, Field(ge=0, le=10_000), AfterValidator(_zero_is_off)]
ClipNorm = Annotated[Number | None, Field(ge=0), AfterValidator(_zero_is_off)]
Decay = Annotated[float, Field(ge=0, lt=1)]
