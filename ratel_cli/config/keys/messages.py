"""Error messages for wrong values: pydantic's findings, in the words of the user's YAML.

Invariant: a message names the key, what its value must be, and what it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from pydantic_core import ErrorDetails

from ratel_cli.config.keys.base import Contradiction
from ratel_cli.config.keys.sections import MOST
from ratel_cli.config.keys.topics import instead_of
from ratel_cli.config.yaml.source import locate, place_of_keys
from ratel_cli.config.yaml.yaml_marks import Finding, Marked, show

_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "model_type": "a mapping (`key: value` lines)",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
_KEY_HINTS = {
    "max_steps": "remove `max_steps` to train for `num_epochs`",
    "save_steps": "write a number of steps, or remove the key to save only the last step",
    "eval_steps": "write a number of steps, or remove the key to evaluate only at the end",
}
_CHAT_HINT = "use `chat_template` for lists of messages with `role` and `content`; `field_messages` names their column"
_PROMPT_HINT = "write the words of a prompt into the data: `type: completion` reads `prompt` and `completion`"
_VALUE_HINTS: Mapping[str, str] = {
    **dict.fromkeys(("grpo", "gdpo", "ppo", "rloo", "online_dpo", "reward", "rm"), instead_of("grpo")),
    **dict.fromkeys(("oasst", "input_output"), _CHAT_HINT),
    "rex": "the nearest is `polynomial` with `lr_scheduler_kwargs: {power: 0.6}`",
    "one_cycle": "the nearest is `cosine` with `warmup_ratio: 0.3`",
    "reduce_lr_on_plateau": "the nearest is `cosine`; no schedule of Ratel looks at the loss",
    "stable_adamw": "the nearest is `adamw` with `max_grad_norm`: stable_adamw clips updates, Ratel clips gradients",
    **dict.fromkeys(
        (
            "adafactor",
            "adam_mini",
            "ademamix",
            "lomo",
            "adalomo",
        ),
        "Ratel has adamw, adamw_8bit, lion, muon and sgd; adamw_8bit has the smallest state of the adaptive ones",
    ),
}
_CHOICE_HINTS: Mapping[str, str] = {
    "optimizer": "write `adamw`, with a learning rate that suits it",
    "lr_scheduler": "the nearest is one of these: `cosine` and `linear` suit most runs",
}
"""By our key: what to choose where no value is close."""


def finding_of(error: ErrorDetails, root: Marked, *, default: object = None) -> Finding:
    """The finding for one error of pydantic's about a single value; `default` is that key's default, for the hint."""
    place = locate(root, error["loc"])
    message, hint = _explain(error, place.name, default)
    return Finding(where=place.key if error["input"] is None else place.value, message=message, hint=hint)


def contradictions_in(error: ErrorDetails, root: Marked) -> Iterator[tuple[Contradiction, Finding]]:
    """The contradictions that `sections.contradictions` put into an error, each with its finding."""
    for each in error["ctx"]["found"]:
        assert isinstance(each, Contradiction)
        where = place_of_keys(root, error["loc"], each.keys)
        if each.within:
            where = locate(root, (*error["loc"], each.keys[0], *each.within)).key
        yield each, Finding(where=where, message=each.message, hint=each.hint)


def _explain(error: ErrorDetails, key: str, default: object) -> tuple[str, str | None]:
    """The message and the hint for one of pydantic's findings. `key` is the name that the user wrote."""
    context: Mapping[str, object] = error.get("ctx") or {}
    value: object = error["input"]
    kind = error["type"]
    if kind == "missing":
        return f"`{key}` is missing", None
    if value is None:
        known = isinstance(default, str | bool | int | float)
        return f"`{key}` has no value", f"remove the key to use its default ({default})" if known else None
    if kind == "rejected":
        hint = context["hint"]
        return f"`{key}` {context['words']}", hint if isinstance(hint, str) else None
    if kind == "literal_error":
        ours = str(error["loc"][-1]) if error["loc"] else key
        otherwise = _PROMPT_HINT if ours == "type" and isinstance(value, dict) else _CHOICE_HINTS.get(ours)
        return _explain_literal(str(context["expected"]), value, key, otherwise)
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        bound = context[name]
        shown = f"{bound:g}" if isinstance(bound, float) or bound == MOST else str(bound)
        return f"`{key}` must be {words} {shown}, not {show(value)}", _KEY_HINTS.get(key)
    if kind == "string_too_short":
        return f"`{key}` must not be empty", None
    if kind in _EXPECTED:
        return f"`{key}` must be {_EXPECTED[kind]}, not {show(value)}", _hint_for_type(kind, value, key)
    return f"`{key}` is not accepted: {error['msg'][:1].lower()}{error['msg'][1:]}", None


def _explain_literal(expected: str, value: object, key: str, otherwise: str | None) -> tuple[str, str | None]:
    """`otherwise`: the hint if no choice is close, or the value is no text."""
    choices = [choice.strip("' ") for choice in expected.replace(" or ", ", ").split(",")]
    named = [f"`{choice}`" for choice in choices]
    listed = " or ".join(filter(None, (", ".join(named[:-1]), named[-1])))
    message = f"`{key}` must be {listed}, not {show(value)}"
    if not isinstance(value, str):
        return message, otherwise if isinstance(value, dict) else None
    close = get_close_matches(value, choices, n=1)
    return message, _VALUE_HINTS.get(value) or (f"did you mean `{close[0]}`?" if close else otherwise)


def _hint_for_type(kind: str, value: object, key: str) -> str | None:
    if kind == "string_type" and isinstance(value, bool | int | float):
        return "put it in quotes"
    if kind in ("int_type", "float_type") and isinstance(value, str) and value.strip().isdigit():
        return "remove the quotes"
    if kind == "int_type" and isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"write {int(value)}"
    if kind == "tuple_type" and isinstance(value, str):
        return f"write [{', '.join(part.strip() for part in value.split(','))}]"
    return _KEY_HINTS.get(key)
