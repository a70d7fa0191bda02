"""From columns to drafts: which type a dataset has, and what one row asks the tokenizer for.

For `data/ingest.py`. A draft is text (or token ids) with the part marked that carries loss; no tokenizer is
needed to make one. Invariant: a row either becomes one draft or raises `Unusable` with the reason.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Literal

from ratel_cli.data.lines import json_name
from ratel_cli.data.rows import DatasetSource
from ratel_cli.errors import BadInput, printable

Kind = Literal["completion", "prompt_completion", "alpaca", "messages", "question_answer", "tokens"]
Message = dict[str, object]

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "observation": "tool"}
_INT32_MAX = 2**31 - 1

# The format of Stanford Alpaca, which models tuned on it expect to the letter.
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
    """`answer` carries loss, `prompt` only with train_on_inputs; an EOS token closes the sample."""

    prompt: str
    answer: str
    splittable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDraft:
    """A conversation for the tokenizer's chat template; assistant turns carry loss."""

    messages: list[Message]
    tools: list[object] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensDraft:
    """Token ids as they are; `labels` aligned with them, -100 where there is no loss."""

    input_ids: list[int]
    labels: list[int]


Draft = TextDraft | ChatDraft | TokensDraft


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """How the rows of one source are read: what they are, and the columns by their role."""

    kind: Kind
    columns: tuple[str, ...]

    def draft(self, record: dict[str, object]) -> Draft:
        """The draft of one row. Raises Unusable."""
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
                turns: list[Message] = [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]
                return ChatDraft(messages=turns, tools=None)
            case "tokens":
                return _tokens(record)

    def describe(self) -> str:
        """The decision in words, for the notice."""
        columns = ", ".join(printable(column) for column in self.columns)
        return {
            "completion": f"type completion: plain text from {columns}, loss on all of it",
            "prompt_completion": f"type completion: {columns} put together as they are, loss on the second",
            "alpaca": f"type alpaca: the Alpaca prompt filled from {columns}, loss on the last",
            "messages": f"type chat_template: conversations from {columns}, loss on assistant turns",
            "question_answer": f"type chat_template: {columns} as a user and an assistant turn, loss on the second",
            "tokens": "type tokens: input_ids and, where there are any, labels",
        }[self.kind]


def decide_format(source: DatasetSource, record: dict[str, object], *, has_chat_template: bool) -> RowFormat:
    """The format of a source from its settings and its first row. Raises BadInput when no type fits."""
    found = _matching_format(source, record.keys(), has_chat_template=has_chat_template)
    if found is None:
        raise BadInput(
            f"{printable(source.path)}: no known type has the columns {', '.join(map(printable, record)) or '(none)'}",
            hint="set type: and the field keys of this dataset",
        )
    if found.kind in ("messages", "question_answer") and not has_chat_template:
        raise BadInput(
            f"{printable(source.path)}: type chat_template, but the tokenizer has no chat template",
            hint="use a base model whose tokenizer has one, or type: alpaca or completion",
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
    usual = ("messages", "conversations")  # the second is ShareGPT's name
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
        raise Unusable(f"{printable(what)!r} must be text, this is {json_name(value)}")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise Unusable(f"{printable(what)!r} holds half of a surrogate pair") from None
    return value


def _alpaca(record: dict[str, object], instruction: str, extra: str, output: str) -> TextDraft:
    asked, answer = _text(record, instruction), _text(record, output)
    context = "" if record.get(extra) is None else _text(record, extra)
    form = _ALPACA_WITH_INPUT if context.strip() else _ALPACA
    return TextDraft(prompt=form.format(instruction=asked, input=context), answer=answer)


def _messages(record: dict[str, object], column: str) -> list[Message]:
    if column not in record:
        raise Unusable(f"the field {printable(column)!r} is missing")
    turns = record[column]
    if not isinstance(turns, list):
        raise Unusable(f"{printable(column)!r} must be an array of messages, this is {json_name(turns)}")
    if not turns:
        raise Unusable("the conversation has no messages")
    return [_message(turn, f"message {index + 1}") for index, turn in enumerate(turns)]


def _message(turn: object, where: str) -> Message:
    """Role and content checked, ShareGPT's from/value translated; other keys stay, for the template."""
    if not isinstance(turn, dict):
        raise Unusable(f"{where} must be an object, this is {json_name(turn)}")
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
    raise Unusable(f"'tools' must be an array, this is {json_name(tools)}")


def _tokens(record: dict[str, object]) -> TokensDraft:
    input_ids = _integers(record, "input_ids")
    labels = input_ids if record.get("labels") is None else _integers(record, "labels")
    if len(labels) != len(input_ids):
        raise Unusable(f"{len(labels)} labels for {len(input_ids)} input_ids")
    return TokensDraft(input_ids=input_ids, labels=labels)


def _integers(record: dict[str, object], column: str) -> list[int]:
    if column not in record:
        raise Unusable(f"the field {column!r} is missing")
    values = record[column]
    if not isinstance(values, list):
        raise Unusable(f"{column!r} must be an array of token ids, this is {json_name(values)}")
    if not set(map(type, values)) <= {int}:
        raise Unusable(f"{column!r} must hold whole numbers only")
    if values and (min(values) < -100 or max(values) > _INT32_MAX):
        raise Unusable(f"{column!r} holds a number that is no token id")
    return values
