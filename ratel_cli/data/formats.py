"""Decides the type of a dataset from its columns, and turns rows into drafts.

A draft is a text, a conversation or token ids, with a mark on the part that has loss. Making one needs no tokenizer.
Invariant: a row becomes exactly one draft or raises `Unusable` with the reason.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Literal

from ratel_cli.data.chat_child import ChatMessage
from ratel_cli.data.lines import json_name
from ratel_cli.data.rows import DatasetSource
from ratel_cli.errors import BadInput, printable

Kind = Literal["completion", "prompt_completion", "alpaca", "messages", "question_answer", "tokens"]

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "observation": "tool"}
_INT32_MAX = 2**31 - 1

# The prompts of Stanford Alpaca. Models that were tuned on them expect exactly these words.
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


class Unusable(Exception):
    """Why one row cannot be trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDraft:
    """A text that ends with an EOS token."""

    prompt: str
    """Has loss only with `train_on_inputs`."""
    answer: str
    """Has loss."""
    splittable: bool = False
    """Whether a text that is too long becomes several samples. Otherwise it is truncated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDraft:
    """A conversation for the tokenizer's chat template. Its assistant turns have loss."""

    messages: list[ChatMessage]
    """Each has a role, and content or tool calls; further keys are for the template."""
    tools: list[object] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensDraft:
    """Token ids that need no tokenizer."""

    input_ids: list[int]
    labels: list[int]
    """The target of each token; -100 where there is no loss."""


Draft = TextDraft | ChatDraft | TokensDraft


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """How the rows of one source become drafts."""

    kind: Kind
    columns: tuple[str, ...]
    """Names of the columns that this kind reads, in the order of their roles."""

    def draft(self, record: dict[str, object]) -> Draft:
        """Turn one row into a draft. Raises Unusable."""
        match self.kind:
            case "completion":
                return TextDraft(prompt="", answer=_text(record, self.columns[0]), splittable=True)
            case "prompt_completion":
                prompt, completion = self.columns
                return TextDraft(prompt=_text(record, prompt), answer=_text(record, completion))
            case "alpaca":
                return _alpaca(record, *self.columns)
            case "messages":
                return ChatDraft(messages=_messages(record, self.columns[0]), tools=_tools(record))
            case "question_answer":
                question, answer = (_text(record, column) for column in self.columns)
                turns: list[ChatMessage] = [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]
                return ChatDraft(messages=turns, tools=None)
            case "tokens":
                return _tokens(record)

    def describe(self) -> str:
        """What is read from which columns, and what has loss. For a notice."""
        columns = [printable(column) for column in self.columns]
        first, last = columns[0], columns[-1]
        return {
            "completion": f"type completion: text from {first}, loss on all of it",
            "prompt_completion": f"type completion: {first} followed by {last}, loss on {last}",
            "alpaca": f"type alpaca: the Alpaca prompt with {', '.join(columns)}, loss on {last}",
            "messages": f"type chat_template: conversations from {first}, loss on assistant turns",
            "question_answer": f"type chat_template: {first} and {last} as two turns, loss on {last}",
            "tokens": "type tokens: token ids from input_ids, and labels if there are any",
        }[self.kind]


def decide_format(source: DatasetSource, record: dict[str, object], *, has_chat_template: bool) -> RowFormat:
    """Choose the format of a source from its settings and its first row. Raises BadInput if no type fits."""
    found = _matching_format(source, record.keys(), has_chat_template=has_chat_template)
    if found is None:
        names = ", ".join(map(printable, record)) or "(none)"
        raise BadInput(
            f"{printable(source.path)}: no type of dataset has the columns {names}",
            hint="set the type and the names of its columns, for example type: completion and field: NAME",
        )
    if found.kind in ("messages", "question_answer") and not has_chat_template:
        raise BadInput(
            f"{printable(source.path)}: its rows are conversations, but the tokenizer has no chat template",
            hint="use a base model whose tokenizer has one, or set type: alpaca or type: completion",
        )
    return found


def _matching_format(source: DatasetSource, names: AbstractSet[str], *, has_chat_template: bool) -> RowFormat | None:
    alpaca = RowFormat(kind="alpaca", columns=(source.field_instruction, source.field_input, source.field_output))
    match source.type:
        case "tokens":
            return _TOKENS
        case "chat_template":
            fallback = RowFormat(kind="messages", columns=(source.field_messages,))
            return _conversation(source, names) or (_QUESTIONS if _asks(names) else fallback)
        case "alpaca":
            return alpaca
        case "completion":
            return _plain_text(source, names) or RowFormat(kind="completion", columns=(source.field,))
        case "auto":
            questions = replace(alpaca, columns=("question", source.field_input, "answer"))
            guesses = (
                _TOKENS if "input_ids" in names else None,
                _conversation(source, names),
                alpaca if {source.field_instruction, source.field_output} <= names else None,
                _plain_text(source, names),
                (_QUESTIONS if has_chat_template else questions) if _asks(names) else None,
            )
            return next((guess for guess in guesses if guess is not None), None)


_TOKENS = RowFormat(kind="tokens", columns=("input_ids", "labels"))
_QUESTIONS = RowFormat(kind="question_answer", columns=("question", "answer"))


def _asks(names: AbstractSet[str]) -> bool:
    return {"question", "answer"} <= names


def _conversation(source: DatasetSource, names: AbstractSet[str]) -> RowFormat | None:
    usual = ("messages", "conversations")  # ShareGPT has the second name
    columns = usual if source.field_messages == "messages" else (source.field_messages,)
    found = next((column for column in columns if column in names), None)
    return None if found is None else RowFormat(kind="messages", columns=(found,))


def _plain_text(source: DatasetSource, names: AbstractSet[str]) -> RowFormat | None:
    if source.field in names or source.field != "text":
        return RowFormat(kind="completion", columns=(source.field,))
    if {"prompt", "completion"} <= names:
        return RowFormat(kind="prompt_completion", columns=("prompt", "completion"))
    return None


def _text(record: dict[str, object], column: str) -> str:
    if column not in record:
        raise Unusable(f"the field {printable(column)!r} is missing")
    return _checked_text(record[column], column)


def _checked_text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise Unusable(f"{printable(what)!r} must be text, not {json_name(value)}")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise Unusable(f"{printable(what)!r} contains half of a surrogate pair") from None
    return value


def _alpaca(record: dict[str, object], instruction: str, extra: str, output: str) -> TextDraft:
    asked, answer = _text(record, instruction), _text(record, output)
    context = "" if record.get(extra) is None else _text(record, extra)
    form = _ALPACA_WITH_INPUT if context.strip() else _ALPACA
    return TextDraft(prompt=form.format(instruction=asked, input=context), answer=answer)


def _messages(record: dict[str, object], column: str) -> list[ChatMessage]:
    if column not in record:
        raise Unusable(f"the field {printable(column)!r} is missing")
    turns = record[column]
    if not isinstance(turns, list):
        raise Unusable(f"{printable(column)!r} must be an array of messages, not {json_name(turns)}")
    if not turns:
        raise Unusable("the conversation has no messages")
    return [_message(turn, f"message {index + 1}") for index, turn in enumerate(turns)]


def _message(turn: object, where: str) -> ChatMessage:
    """Check role and content, and rename ShareGPT's `from` and `value`. Other keys stay, for the template."""
    if not isinstance(turn, dict):
        raise Unusable(f"{where} must be an object, not {json_name(turn)}")
    message = {key: value for key, value in turn.items() if value is not None}
    if "role" not in message and "from" in message:
        role = message.pop("from")
        message["role"] = _ROLES.get(role, role) if isinstance(role, str) else role
        if "value" in message:
            message["content"] = message.pop("value")
    if "role" not in message:
        raise Unusable(f"{where} has no role")
    _checked_text(message["role"], f"role of {where}")
    if "content" in message:
        _checked_text(message["content"], f"content of {where}")
    elif not message.get("tool_calls"):
        raise Unusable(f"{where} has no content")
    return message


def _tools(record: dict[str, object]) -> list[object] | None:
    tools = record.get("tools")
    if tools is None or isinstance(tools, list):
        return tools or None
    raise Unusable(f"'tools' must be an array, not {json_name(tools)}")


def _tokens(record: dict[str, object]) -> TokensDraft:
    input_ids = _integers(record, "input_ids")
    labels = input_ids if record.get("labels") is None else _integers(record, "labels")
    if len(labels) != len(input_ids):
        raise Unusable(f"'labels' and 'input_ids' have different lengths, {len(labels)} and {len(input_ids)}")
    return TokensDraft(input_ids=input_ids, labels=labels)


def _integers(record: dict[str, object], column: str) -> list[int]:
    if column not in record:
        raise Unusable(f"the field {column!r} is missing")
    values = record[column]
    if not isinstance(values, list):
        raise Unusable(f"{column!r} must be an array of token ids, not {json_name(values)}")
    if not set(map(type, values)) <= {int}:
        raise Unusable(f"{column!r} must contain only whole numbers")
    if values and (min(values) < -100 or max(values) > _INT32_MAX):
        raise Unusable(f"{column!r} contains a number that cannot be a token id")
    return values
