"""Columns that change what a row means in other tools, and that a format does not read.

Invariant: a row that has something in such a column is rejected as made for another training method, or has a remark
that names the column and the way to have it read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from ratel_cli.data.files.remarks import Remark
from ratel_cli.data.text.rows import DatasetSource
from ratel_cli.errors import BadInput, printable

_COMPARED = ("chosen", "rejected")
_OPENAI_COMPARED = ("preferred_output", "non_preferred_output")
_PROMPTS = ("prompt", "instruction", "question", "query", "input", "conversations", "messages")

CHATS = ("messages", "chat_completion", "instruction", "question_answer")
_TEXTS = ("completion", "prompt_completion", "alpaca")
_ALL = (*CHATS, *_TEXTS, "tokens")
_EVAL = "`ratel eval` takes supervised data only"
_ONE_ANSWER = "without `rl`, Ratel trains on one answer of each row"
_WAYS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "system": ((*CHATS, "alpaca"), "`field_system: system` makes it the system prompt"),
    "system_prompt": ((*CHATS, "alpaca"), "`field_system: system_prompt` makes it the system prompt"),
    "history": (("instruction", "alpaca"), "`field_history: history` with `type: chat_template` makes turns of it"),
    "functions": (CHATS, "`field_tools: functions` gives them to the chat template as tools"),
    "tools": (_TEXTS, "only conversations have tools; see `type: chat_template`"),
    "image": (("completion",), "Ratel trains on text"),
    "images": (("completion",), "Ratel trains on text"),
    **dict.fromkeys((*_COMPARED, *_OPENAI_COMPARED), (_ALL, _ONE_ANSWER)),
    "kto_tag": (_ALL, "without `rl: kto`, good and bad answers are trained alike"),
}
"""By column: the kinds of formats where it means something elsewhere, and what to do to have it read."""


def unread_columns(kind: str, read: AbstractSet[str | None], record: Mapping[str, object]) -> tuple[Remark, ...]:
    """A remark for each column that means something elsewhere, has something in it, and is not `read`."""
    is_chosen = bool(read & {_COMPARED[0], _OPENAI_COMPARED[0]})
    known = {*read, *_COMPARED, *_OPENAI_COMPARED} if is_chosen else read
    found = [
        ("unread", f"{column}; {way}")
        for column, (kinds, way) in _WAYS.items()
        if kind in kinds and column not in known and record.get(column) not in (None, "", [], {}, False)
    ]
    if "label" not in read and isinstance(record.get("label"), bool) and has_verdict(record):
        found.append(("unread", "label; without `rl: kto`, good and bad answers are trained alike"))
    if isinstance(record.get("weight"), int | float) and record["weight"] != 1:
        found.append(("unread", "weight; rows have no weights of their own, a dataset has one: `weight`"))
    return tuple(found)


def has_verdict(record: Mapping[str, object]) -> bool:
    """Whether a row says of its answer that it is good or bad, for preference tuning (KTO)."""
    is_answer = record.keys() & {"messages", "conversations", "completion"}
    return "kto_tag" in record or bool(is_answer and isinstance(record.get("label"), bool))


def reject_preferences(source: DatasetSource, record: Mapping[str, object]) -> None:
    """Raise BadInput if the rows are for preference tuning: answers to compare, or answers with a verdict."""
    for is_one, what, hint in _FOR_PREFERENCES:
        if is_one(record):
            raise BadInput(f"{printable(source.path)}: its rows are {what}", hint=hint(record))


def _way_to_chosen(record: Mapping[str, object]) -> str:
    """The keys of a dataset with which the chosen answers are trained, behind their prompts."""
    chosen = record["chosen"]
    prompt = next((each for each in _PROMPTS if record.get(each)), None)
    first = chosen[0] if isinstance(chosen, list) and chosen else None
    starts_with_answer = isinstance(first, dict) and first.get("role", first.get("from")) in ("assistant", "gpt")
    to = "to train on the chosen answers only, set"
    if isinstance(chosen, list) and not (starts_with_answer and prompt):
        return f"{to} type: chat_template and field_messages: chosen, which has the prompts too"
    if prompt is None:
        return f"{to} type: completion and field: chosen, which has the prompts too"
    names = "field_completion: chosen" if prompt == "prompt" else f"field_prompt: {prompt} and field_completion: chosen"
    turns = "; with type: chat_template they are turns of a chat" if isinstance(chosen, str) else ""
    return f"to train on the chosen answers behind their prompts, set {names}{turns}"


def _has(*columns: str) -> Callable[[Mapping[str, object]], bool]:
    return lambda record: {*columns} <= record.keys()


_FOR_PREFERENCES: Sequence[
    tuple[Callable[[Mapping[str, object]], bool], str, Callable[[Mapping[str, object]], str | None]]
] = (
    (
        _has(*_COMPARED),
        f"preference data (chosen and rejected answers): set `rl: dpo` to train on it; {_EVAL}",
        _way_to_chosen,
    ),
    (
        _has(*_OPENAI_COMPARED),
        (
            "preference data (preferred and other answers): `rl: dpo` trains on columns prompt, chosen and rejected; "
            f"{_EVAL}"
        ),
        lambda _: (
            "to train on the preferred answers only, write prompts and answers as lists of messages into the "
            "columns prompt and completion"
        ),
    ),
    (
        has_verdict,
        f"answers that are marked good or bad: set `rl: kto` to train on them; {_EVAL}",
        lambda _: "remove the rows with bad answers, and set the type of the others, such as type: chat_template",
    ),
    (
        _has("prompt", "completions", "labels"),
        "solutions with a label for each step, for a process reward model; Ratel trains no reward models",
        lambda _: None,
    ),
)
"""Rows of each kind: whether a row is one, what they are, and what to do."""
