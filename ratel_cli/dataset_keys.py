"""Which keys of a dataset in the config are read, by what its rows are.

The config knows the `type` of a dataset, and `data` decides by its rows what they are. Both look here, so that a key
that is set and that nothing reads is rejected or reported: the run would train on other data than its user thinks.

Invariant: a key that is in none of these tables is read for all rows of text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_PAIR: Final = ("field_prompt", "field_completion")
_ALPACA: Final = ("field_instruction", "field_input", "field_output")
_CHAT: Final = ("field_system", "system_prompt", "drop_system_message", "field_tools")
_MESSAGES: Final = ("message_property_mappings", "roles")
_LOSS: Final = ("roles_to_train", "train_on_eos")
_COMPARED: Final = ("field_prompt", "field_messages", "field_instruction", "field_input", "field_history")

KEYS_OF_ROWS: Final[Mapping[str, frozenset[str]]] = {
    "completion": frozenset({"field"}),
    "prompt_completion": frozenset(_PAIR),
    "alpaca": frozenset({*_ALPACA, "field_system", "system_prompt"}),
    "messages": frozenset({"field_messages", *_CHAT, *_MESSAGES, *_LOSS, "message_field_training"}),
    "chat_completion": frozenset({*_PAIR, *_CHAT, *_MESSAGES}),
    "instruction": frozenset({*_ALPACA, "field_history", *_CHAT, *_LOSS, "roles"}),
    "question_answer": frozenset({*_PAIR, *_CHAT, *_LOSS, "roles"}),
    "tokens": frozenset(),
    "mlm": frozenset({"field"}),
    "classification": frozenset({"field", "field_label"}),
    "seq2seq": frozenset(_PAIR),
    "pairs": frozenset({*_COMPARED, *_CHAT, *_MESSAGES, "field_chosen", "field_rejected"}),
    "verdicts": frozenset({*_COMPARED, *_CHAT, *_MESSAGES, "field_completion", "field_label"}),
}
"""By kind of rows. `pairs` and `verdicts` are what `rl` learns from; `chat_completion` has its loss on all of the
completion."""
_ROWS_OF_TYPES: Final[Mapping[str, tuple[str, ...]]] = {
    "completion": ("completion", "prompt_completion"),
    "chat_template": ("messages", "chat_completion", "instruction", "question_answer"),
    "auto": (
        "completion", "prompt_completion", "messages", "chat_completion", "instruction", "question_answer", "alpaca",
    ),
}  # fmt: skip
"""By type: what the rows may be, if they are of another name or of several kinds."""
KEYS_OF_TEXT: Final = frozenset({"split", "name", "text_unit", "media"})
"""What is read for all rows of text."""
_KNOWN: Final = KEYS_OF_TEXT.union(*KEYS_OF_ROWS.values())
_LEARNT_BY_RL: Final = ("auto", "completion", "chat_template")


def unread_for_rows(keys: Mapping[str, object], defaults: Mapping[str, object], rows: str) -> tuple[str, ...]:
    """The keys with another value than their default that are not read for rows of this kind."""
    return _changed(keys, defaults, KEYS_OF_TEXT | KEYS_OF_ROWS[rows])


def unread_for_type(
    keys: Mapping[str, object], defaults: Mapping[str, object], of_type: str, *, compares: str | None
) -> tuple[str, ...]:
    """The keys with another value than their default that are not read for a type of dataset, whatever its rows are.
    `compares`: what `rl` compares, if it is set."""
    if compares is not None and of_type not in _LEARNT_BY_RL:
        return ()  # that is an error of its own
    return _changed(keys, defaults, _keys_of_type(of_type, compares))


def types_that_read(key: str) -> tuple[str, ...]:
    """The types of datasets for which a key may be read; none of them if only `rl` reads it."""
    names = ("completion", "chat_template", "alpaca", "mlm", "classification", "seq2seq")
    return tuple(name for name in names if key in _keys_of_type(name, None))


def _keys_of_type(name: str, compares: str | None) -> frozenset[str]:
    if name == "latents":
        return frozenset()
    kinds = (compares,) if compares is not None else _ROWS_OF_TYPES.get(name, (name,))
    return KEYS_OF_TEXT.union(*(KEYS_OF_ROWS[kind] for kind in kinds))


def _changed(keys: Mapping[str, object], defaults: Mapping[str, object], read: frozenset[str]) -> tuple[str, ...]:
    return tuple(key for key in keys if key in _KNOWN - read and keys[key] != defaults[key])
