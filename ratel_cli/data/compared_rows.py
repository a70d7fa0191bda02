"""Rows with answers to compare become drafts: pairs of a chosen and a rejected answer, or answers with a verdict.

It knows the forms of TRL (a prompt of its own, or one that both answers begin with; texts or messages), of axolotl and
of LLaMA-Factory. Invariant: the answers of a draft have the same prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ratel_cli.data.chat_child import ChatMessage
from ratel_cli.data.conversations import TurnOptions, further_input, messages_in, text_in, with_system_prompt
from ratel_cli.data.drafts import ComparedDraft, TextDraft, Unusable
from ratel_cli.data.lines import json_name
from ratel_cli.data.rows import DatasetSource
from ratel_cli.errors import BadInput, printable


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedColumns:
    """The columns of one source's rows, by their roles."""

    prompt: str | None
    """None: the answers begin with the prompt."""
    answers: tuple[str, ...]
    """The chosen one first, or the one that has a verdict."""
    verdict: str | None = None
    more: str | None = None
    """Further input, behind the prompt, on a line of its own."""
    is_chat: bool
    """Texts are turns of a conversation."""

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        named = (self.prompt, self.more, *self.answers, self.verdict)
        return tuple(name for name in named if name is not None)

    def draft(self, record: dict[str, object], options: TurnOptions) -> ComparedDraft:
        """The answers of a row. Raises Unusable."""
        is_good = None if self.verdict is None else _verdict(record, self.verdict)
        if self.is_chat:
            chats = [options.draft(record, turns, completion_from=at) for turns, at in self._turns(record, options)]
            return ComparedDraft(answers=tuple(chats), is_good=is_good)
        texts = [text_in(record, column) for column in self.answers]
        prompt = "" if self.prompt is None else text_in(record, self.prompt)
        if self.prompt is None:
            start = _shared_text(texts)
            prompt, texts = texts[0][:start], [text[start:] for text in texts]
        if not prompt:
            raise Unusable("there is no prompt: both answers differ from their beginning on")
        return ComparedDraft(answers=tuple(TextDraft(prompt=prompt, answer=text) for text in texts), is_good=is_good)

    def _turns(self, record: dict[str, object], options: TurnOptions) -> list[tuple[list[ChatMessage], int]]:
        """For each answer its conversation, and the message that it begins with."""
        answers = [messages_in(record, column, options, role="assistant") for column in self.answers]
        if answers[0][0]["role"] != "assistant" or self.prompt is None:  # they have the prompt, too
            start = _shared(answers) if self.verdict is None else _last_answer(answers[0])
            before, answers = answers[0][:start], [turns[start:] for turns in answers]
        else:
            before = self._prompt_turns(record, self.prompt, options)
        if not before or not all(answers):
            raise Unusable("there is no prompt" if not before else "one answer is the beginning of the other")
        if before[-1]["role"] == "assistant":
            raise Unusable("the prompt ends with an assistant turn, so there is nothing to answer")
        prompt = with_system_prompt(record, options, before)
        return [([dict(turn) for turn in (*prompt, *turns)], len(prompt)) for turns in answers]

    def _prompt_turns(self, record: dict[str, object], column: str, options: TurnOptions) -> list[ChatMessage]:
        if self.more is None:
            return messages_in(record, column, options, role="user")
        extra = further_input(record, (column, self.more))
        asked = text_in(record, column)
        return [{"role": "user", "content": f"{asked}\n{extra}" if extra else asked}]


def compared_columns(source: DatasetSource, record: Mapping[str, object]) -> ComparedColumns:
    """The columns of a source, by its settings and its first row. Raises BadInput if it has none that fit."""
    prompt = next((column for column in _prompts(source) if record.get(column) is not None), None)
    more = None
    if prompt == source.field_instruction and source.field_input != prompt and source.field_input in record:
        more = source.field_input
    if source.compares == "pairs":
        columns = ComparedColumns(
            prompt=prompt, more=more, answers=(source.field_chosen, source.field_rejected), is_chat=False
        )
    else:
        verdict = next((each for each in (source.field_label, "kto_tag") if each in record), source.field_label)
        answer = source.field_completion
        if answer not in record and prompt in (source.field_messages, *_CONVERSATIONS):
            answer, prompt = str(prompt), None
        columns = ComparedColumns(prompt=prompt, more=more, answers=(answer,), verdict=verdict, is_chat=False)
    missing = [each for each in columns.names if each not in record]
    if missing:
        names = ", ".join(map(printable, record)) or "(none)"
        raise BadInput(
            f"{printable(source.path)}: {_WANTED[source.compares or 'pairs']}, but its rows have the columns {names}",
            hint="name them: field_prompt, " + _KEYS[source.compares or "pairs"],
        )
    values = [record[each] for each in (columns.prompt, *columns.answers) if each is not None]
    is_chat = source.type == "chat_template" or any(isinstance(each, list | dict) for each in values)
    return ComparedColumns(
        prompt=columns.prompt, more=columns.more, answers=columns.answers, verdict=columns.verdict, is_chat=is_chat
    )


_CONVERSATIONS = ("messages", "conversations")
_WANTED = {
    "pairs": "`rl` needs pairs of a chosen and a rejected answer",
    "verdicts": "`rl: kto` needs answers with a verdict, true or false",
}
_KEYS = {"pairs": "field_chosen, field_rejected", "verdicts": "field_completion, field_label"}


def _prompts(source: DatasetSource) -> Sequence[str]:
    return (source.field_prompt, source.field_messages, *_CONVERSATIONS, source.field_instruction, "question")


def _verdict(record: Mapping[str, object], column: str) -> bool:
    value = record.get(column)
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):  # from a CSV file
        return value.strip().lower() == "true"
    if not isinstance(value, bool) and value not in (0, 1):
        raise Unusable(f"{column!r} must be true or false, not {json_name(value)}")
    return bool(value)


def _shared(conversations: Sequence[list[ChatMessage]]) -> int:
    """How many messages both conversations begin with."""
    pairs = enumerate(zip(*conversations, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(map(len, conversations)))


def _shared_text(texts: Sequence[str]) -> int:
    """How many characters both texts begin with, without a space at their end, which belongs to the answers."""
    pairs = enumerate(zip(*texts, strict=False))
    start = next((at for at, (one, other) in pairs if one != other), min(map(len, texts)))
    return start - 1 if texts[0][start - 1 : start] == " " else start


def _last_answer(turns: Sequence[ChatMessage]) -> int:
    """Where the assistant turns at the end of a conversation begin."""
    at = len(turns)
    while at and turns[at - 1]["role"] == "assistant":
        at -= 1
    return at
