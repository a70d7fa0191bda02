"""Rows with answers to compare become drafts: pairs of a chosen and a rejected answer, or answers with a verdict.

It knows the forms of TRL (a prompt of its own, or one that both answers begin with; texts or messages), of axolotl and
of LLaMA-Factory. Invariant: the answers of a draft have the same prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ratel_cli.data.files.lines import json_name
from ratel_cli.data.files.remarks import Remark
from ratel_cli.data.text.chat_child import ChatMessage, num_shared
from ratel_cli.data.text.conversations import (
    TurnOptions,
    further_input,
    history_in,
    messages_in,
    text_in,
    with_system_prompt,
)
from ratel_cli.data.text.drafts import ComparedDraft, TextDraft, Unusable
from ratel_cli.data.text.rows import DatasetSource
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
    """Further input, behind the prompt, on a line of its own. Rows may lack it."""
    history: str | None = None
    """Earlier turns, as pairs of question and answer. Rows may lack it."""
    is_chat: bool
    """Texts are turns of a conversation."""

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that have a role."""
        named = (self.prompt, self.more, self.history, *self.answers, self.verdict)
        return tuple(name for name in named if name is not None)

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns that each row must have."""
        return tuple(name for name in self.names if name not in (self.more, self.history))

    def draft(self, record: dict[str, object], options: TurnOptions) -> ComparedDraft:
        """The answers of a row. Raises Unusable."""
        is_good = None if self.verdict is None else _verdict(record, self.verdict)
        if self.is_chat:
            chats = (options.draft(record, turns, completion_from=at) for turns, at in self._turns(record, options))
            answers = tuple(replace(each, is_closed=options.closes_answers) for each in chats)
            return ComparedDraft(answers=answers, is_good=is_good)
        texts = [text_in(record, column) for column in self.answers]
        if self.prompt is None:
            start = _shared_text(texts)
            if not start:
                raise Unusable("there is no prompt: the two answers have no common beginning")
            cut = (TextDraft(prompt=text[:start], answer=text[start:], is_cut=True) for text in texts)
            return ComparedDraft(answers=tuple(cut), remarks=self._unread(record, options))
        prompt = self._asked(record, self.prompt)
        if not prompt:
            raise Unusable(f"there is no prompt: {printable(self.prompt)!r} is empty")
        drafts = tuple(TextDraft(prompt=prompt, answer=text) for text in texts)
        return ComparedDraft(answers=drafts, is_good=is_good, remarks=self._unread(record, options))

    def _unread(self, record: Mapping[str, object], options: TurnOptions) -> tuple[Remark, ...]:
        """What the config names of a conversation, and texts do not have."""
        way = "only conversations have it; see `type: chat_template`"
        named = (options.system, self.history)
        return tuple(("unread", f"{column}; {way}") for column in named if column is not None and record.get(column))

    def _turns(self, record: dict[str, object], options: TurnOptions) -> list[tuple[list[ChatMessage], int]]:
        """For each answer its conversation, and the message that it begins with."""
        answers = [messages_in(record, column, options, role="assistant") for column in self.answers]
        prompt = [] if self.prompt is None else self._prompt_turns(record, self.prompt, options)
        whole = [_behind(prompt, turns, column) for turns, column in zip(answers, self.answers, strict=True)]
        start = len(prompt)
        if not prompt or all(turns[0]["role"] != "assistant" for turns in answers):  # they have the prompt, too
            start = _shared(whole) if self.verdict is None else _last_answer(whole[0])
        if any(len(turns) <= max(start, len(prompt)) for turns in whole):
            raise Unusable("there is no answer behind the prompt")
        if start < len(prompt) or _num_shared((whole[0][:start], whole[-1])) < start:
            raise Unusable("the two answers have different prompts")
        before = whole[0][:start]
        if not before:
            why = ": the two answers have no common beginning" if self.verdict is None else ""
            raise Unusable(f"there is no prompt{why}")
        if before[-1]["role"] == "assistant":
            raise Unusable("the prompt ends with an assistant turn, so there is nothing to answer")
        if self.history is not None:
            first = next((at for at, turn in enumerate(before) if turn["role"] != "system"), len(before))
            before = [*before[:first], *history_in(record, self.history), *before[first:]]
        before = with_system_prompt(record, options, before)
        return [([dict(turn) for turn in (*before, *turns[start:])], len(before)) for turns in whole]

    def _prompt_turns(self, record: dict[str, object], column: str, options: TurnOptions) -> list[ChatMessage]:
        if self.more is None or not isinstance(record.get(column), str):
            return messages_in(record, column, options, role="user")
        return [{"role": "user", "content": self._asked(record, column)}]

    def _asked(self, record: dict[str, object], column: str) -> str:
        """The text of a prompt, with further input."""
        extra = "" if self.more is None else further_input(record, (column, self.more))
        asked = text_in(record, column)
        return f"{asked}\n{extra}" if extra else asked


def compared_columns(source: DatasetSource, record: Mapping[str, object]) -> ComparedColumns:
    """The columns of a source, by its settings and its first row. Raises BadInput if it has none that fit."""
    prompt = next((column for column in _prompts(source) if record.get(column) is not None), None)
    if prompt is None and source.field_prompt in record:  # other rows may have it
        prompt = source.field_prompt
    more = source.field_input if prompt == source.field_instruction != source.field_input else None
    columns = ComparedColumns(
        prompt=prompt,
        more=more,
        history=source.field_history,
        answers=(source.field_chosen, source.field_rejected),
        is_chat=False,
    )
    if source.compares == "verdicts":
        verdict = next((each for each in (source.field_label, "kto_tag") if each in record), source.field_label)
        answer = source.field_completion
        if answer not in record and prompt in (source.field_messages, *_CONVERSATIONS):
            answer, prompt = str(prompt), None
        columns = replace(columns, prompt=prompt, answers=(answer,), verdict=verdict)
    lacks_prompt = columns.verdict is not None and prompt is None and isinstance(record.get(columns.answers[0]), str)
    if lacks_prompt or any(each not in record for each in columns.needed):
        names = ", ".join(map(printable, record)) or "(none)"
        raise BadInput(
            f"{printable(source.path)}: {_WANTED[source.compares or 'pairs']}, but its rows have the columns {names}",
            hint="name them: field_prompt, " + _KEYS[source.compares or "pairs"],
        )
    values = [record[each] for each in (columns.prompt, *columns.answers) if each is not None]
    is_chat = source.type == "chat_template" or any(isinstance(each, list | dict) for each in values)
    return replace(columns, is_chat=is_chat)


_CONVERSATIONS = ("messages", "conversations")
_WANTED = {
    "pairs": "`rl` needs pairs of a chosen and a rejected answer",
    "verdicts": "`rl: kto` needs answers that are marked true (good) or false (bad)",
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


def _differ(one: ChatMessage, other: ChatMessage) -> bool:
    """Whether two messages say something else. Other keys, such as an id, do not count."""
    return any(one.get(key) != other.get(key) for key in ("role", "content", "tool_calls"))


def _behind(prompt: list[ChatMessage], turns: list[ChatMessage], column: str) -> list[ChatMessage]:
    """The conversation of an answer, which may have the prompt, or its end, or more before it. Raises Unusable."""
    if not prompt:
        return turns
    for length in range(min(len(prompt), len(turns)), 0, -1):
        if not any(map(_differ, prompt[-length:], turns)):
            return [*prompt[:-length], *turns]
    if any(not any(map(_differ, prompt, turns[at:])) for at in range(1, len(turns) - len(prompt) + 1)):
        return turns
    if turns[0]["role"] == "assistant":
        return [*prompt, *turns]
    raise Unusable(
        f"{printable(column)!r} begins with a {printable(str(turns[0]['role']))} turn that is not in the prompt"
    )


def _num_shared(conversations: Sequence[list[ChatMessage]]) -> int:
    """How many messages all of these begin with."""
    pairs = enumerate(zip(*conversations, strict=False))
    return next((at for at, (one, other) in pairs if _differ(one, other)), min(map(len, conversations)))


def _shared(conversations: Sequence[list[ChatMessage]]) -> int:
    """How many messages both conversations begin with; as in TRL, each has one more."""
    return min(_num_shared(conversations), min(map(len, conversations)) - 1)


def _shared_text(texts: Sequence[str]) -> int:
    """How many characters both texts begin with, without a space at their end, which belongs to the answers; as in TRL,
    each has one more."""
    start = num_shared(texts[0], texts[1])
    if start == min(map(len, texts)):
        return max(0, start - 1)
    return start - 1 if texts[0][start - 1 : start] == " " else start


def _last_answer(turns: Sequence[ChatMessage]) -> int:
    """Where the assistant turns at the end of a conversation begin."""
    return next((at for at in range(len(turns), 0, -1) if turns[at - 1]["role"] != "assistant"), 0)
