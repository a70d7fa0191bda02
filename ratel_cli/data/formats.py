"""Decides the type of a dataset from its columns, and turns rows into drafts.

A draft is a text, a conversation or token ids, with a mark on the part that has loss. Making one needs no tokenizer.
Invariant: a row becomes exactly one draft or raises `Unusable` with the reason.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Literal

from ratel_cli.data.chat_child import ChatMessage
from ratel_cli.data.conversations import (
    TurnOptions,
    conversation,
    further_input,
    instruction,
    prompt_and_completion,
    text_in,
    with_system_prompt,
)
from ratel_cli.data.drafts import Draft, TextDraft, TokensDraft, TrainOnInputs, Unusable
from ratel_cli.data.lines import json_name
from ratel_cli.data.rows import DatasetSource
from ratel_cli.errors import BadInput, printable

Kind = Literal[
    "completion", "prompt_completion", "alpaca", "messages", "chat_completion", "instruction", "question_answer",
    "tokens",
]  # fmt: skip
_CONVERSATIONS = ("messages", "chat_completion", "instruction", "question_answer")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """How the rows of one source become drafts."""

    kind: Kind
    columns: tuple[str, ...]
    """Names of the columns that this kind reads, in the order of their roles."""
    turns: TurnOptions = field(default_factory=TurnOptions)
    """For conversations."""

    def draft(self, record: dict[str, object]) -> Draft:
        """Turn one row into a draft. Raises Unusable."""
        match self.kind:
            case "completion":
                return TextDraft(prompt="", answer=text_in(record, self.columns[0]), splittable=True)
            case "prompt_completion":
                prompt, completion = self.columns
                return TextDraft(prompt=text_in(record, prompt), answer=text_in(record, completion))
            case "alpaca":
                return _alpaca(record, self.columns, self.turns)
            case "messages":
                return conversation(record, self.columns[0], self.turns)
            case "chat_completion":
                return prompt_and_completion(record, (self.columns[0], self.columns[1]), self.turns)
            case "instruction":
                return instruction(record, self.columns, self.turns)
            case "question_answer":
                question, answer = (text_in(record, column) for column in self.columns)
                turns: list[ChatMessage] = [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]
                return self.turns.draft(with_system_prompt(record, self.turns, turns), None)
            case "tokens":
                return _tokens(record)

    def describe(self, *, train_on_inputs: TrainOnInputs = False) -> str:
        """What is read from which columns, and what has loss. For a notice."""
        columns = [printable(column) for column in dict.fromkeys(self.columns)]
        first, last = columns[0], columns[-1]
        if self.kind == "tokens":
            return "type tokens: token ids from input_ids, and labels if there are any"
        what, loss = {
            "completion": (f"type completion: text from {first}", "all of it"),
            "prompt_completion": (f"type completion: {first} followed by {last}", last),
            "alpaca": (f"type alpaca: the Alpaca prompt with {', '.join(columns)}", last),
            "messages": (f"type chat_template: conversations from {first}", self._trained_turns()),
            "chat_completion": (f"type chat_template: conversations from {first} and {last}", f"all of {last}"),
            "instruction": (f"type chat_template: {', '.join(columns)} as turns", self._trained_turns()),
            "question_answer": (f"type chat_template: {first} and {last} as two turns", last),
        }[self.kind]
        has_prompt = self.kind in ("prompt_completion", "alpaca", "chat_completion")
        is_whole = train_on_inputs is True or (train_on_inputs == "conversations" and not has_prompt)
        return f"{what}, loss on {'all of it' if is_whole else loss}"

    def _trained_turns(self) -> str:
        if not self.turns.chooses_turns:
            return "assistant turns"
        roles = " and ".join(map(printable, self.turns.roles_to_train or ("assistant",)))
        eos = self.turns.train_on_eos or "turn"
        behind = {"all": "every turn", "turn": "these turns", "last": "the last turn"}.get(eos)
        return f"{roles} turns" + (f" and on the EOS token of {behind}" if behind else " without their EOS tokens")


def decide_format(source: DatasetSource, record: dict[str, object], *, has_chat_template: bool) -> RowFormat:
    """Choose the format of a source from its settings and its first row. Raises BadInput if no type fits."""
    found = _matching_format(source, record, has_chat_template=has_chat_template)
    if found is None or (found.kind == "messages" and found.columns[0] not in record):
        _reject_preferences(source, record)
    if found is None:
        names = ", ".join(map(printable, record)) or "(none)"
        raise BadInput(
            f"{printable(source.path)}: no type of dataset has the columns {names}",
            hint="set the type and the names of its columns, for example type: completion and field: NAME",
        )
    if found.kind in _CONVERSATIONS and not has_chat_template:
        raise BadInput(
            f"{printable(source.path)}: its rows are conversations, but the tokenizer has no chat template",
            hint="set chat_template, or use a base model whose tokenizer has one, or set type: alpaca or type: "
            "completion",
        )
    return replace(found, turns=_turn_options(source))


def _reject_preferences(source: DatasetSource, record: dict[str, object]) -> None:
    """Raise BadInput if the rows are for preference tuning: pairs of answers, or answers with a verdict."""
    names = record.keys()
    if {"chosen", "rejected"} <= names:
        what = "pairs of a chosen and a rejected answer, for preference tuning (DPO, ORPO, reward models)"
        is_chat = isinstance(record["chosen"], list)
        column = "type: chat_template and field_messages: chosen" if is_chat else "field: chosen"
        hint: str | None = f"to train on the chosen answers only, set {column}"
    elif {"kto_tag"} <= names or ({"prompt", "completion", "label"} <= names and isinstance(record["label"], bool)):
        what, hint = "answers with a verdict, for preference tuning (KTO)", None
    elif {"prompt", "completions", "labels"} <= names:
        what, hint = "solutions with a verdict for each step, for a reward model", None
    else:
        return
    raise BadInput(f"{printable(source.path)}: its rows are {what}; Ratel does supervised fine-tuning only", hint=hint)


def _turn_options(source: DatasetSource) -> TurnOptions:
    return TurnOptions(
        properties=source.message_property_mappings or {},
        roles={name: role for role, names in (source.roles or {}).items() for name in names},
        tools=source.field_tools,
        system=source.field_system,
        system_prompt=source.system_prompt,
        roles_to_train=source.roles_to_train,
        train_on_eos=source.train_on_eos,
        training_key=source.message_field_training,
    )


def _matching_format(source: DatasetSource, record: dict[str, object], *, has_chat_template: bool) -> RowFormat | None:
    names = record.keys()
    columns = (source.field_instruction, source.field_input, source.field_output)
    alpaca = RowFormat(kind="alpaca", columns=columns)
    match source.type:
        case "tokens":
            return _TOKENS
        case "chat_template":
            history = (source.field_history,) if source.field_history is not None else ()
            turns = RowFormat(kind="instruction", columns=(*columns, *history))
            fallback = RowFormat(kind="messages", columns=(source.field_messages,))
            named = (source.field_instruction, source.field_output) != _ALPACA_COLUMNS
            has_turns = {source.field_instruction, source.field_output} <= names
            guesses = (
                turns if named and has_turns else None,
                _conversation(source, names),
                _QUESTIONS if _asks(names) else None,
                _chat_completion(record),
                turns if has_turns else None,
            )
            return next((guess for guess in guesses if guess is not None), fallback)
        case "alpaca":
            return alpaca
        case "completion":
            return _plain_text(source, names) or RowFormat(kind="completion", columns=(source.field,))
        case "auto":
            questions = replace(alpaca, columns=("question", source.field_input, "answer"))
            of_all_types = (
                _TOKENS if "input_ids" in names else None,
                _conversation(source, names),
                alpaca if {source.field_instruction, source.field_output} <= names else None,
                _chat_completion(record) if source.field not in names else None,
                _preference_free(source, record),
                (_QUESTIONS if has_chat_template else questions) if _asks(names) else None,
            )
            return next((guess for guess in of_all_types if guess is not None), None)


_TOKENS = RowFormat(kind="tokens", columns=("input_ids", "labels"))
_ALPACA_COLUMNS = ("instruction", "output")
"""The names of these columns by default. Others are the user's choice, and looked for before all else."""
_QUESTIONS = RowFormat(kind="question_answer", columns=("question", "answer"))


def _asks(names: AbstractSet[str]) -> bool:
    return {"question", "answer"} <= names


def _conversation(source: DatasetSource, names: AbstractSet[str]) -> RowFormat | None:
    usual = ("messages", "conversations")  # ShareGPT has the second name
    columns = usual if source.field_messages == "messages" else (source.field_messages,)
    found = next((column for column in columns if column in names), None)
    return None if found is None else RowFormat(kind="messages", columns=(found,))


def _chat_completion(record: dict[str, object]) -> RowFormat | None:
    is_chat = isinstance(record.get("prompt"), list) and isinstance(record.get("completion"), list)
    return RowFormat(kind="chat_completion", columns=("prompt", "completion")) if is_chat else None


def _preference_free(source: DatasetSource, record: dict[str, object]) -> RowFormat | None:
    """Plain text, unless the prompts and completions are there to be judged."""
    found = _plain_text(source, record.keys())
    is_judged = isinstance(record.get("label"), bool)
    return None if found is not None and found.kind == "prompt_completion" and is_judged else found


def _plain_text(source: DatasetSource, names: AbstractSet[str]) -> RowFormat | None:
    if source.field in names or source.field != "text":
        return RowFormat(kind="completion", columns=(source.field,))
    if {"prompt", "completion"} <= names:
        return RowFormat(kind="prompt_completion", columns=("prompt", "completion"))
    return None


def _alpaca(record: dict[str, object], columns: tuple[str, ...], options: TurnOptions) -> TextDraft:
    asked, answer = text_in(record, columns[0]), text_in(record, columns[2])
    context = further_input(record, columns)
    form = _ALPACA_WITH_INPUT if context.strip() else _ALPACA
    system, prompt = options.system, options.system_prompt or ""
    if not prompt and system is not None and record.get(system) is not None:
        prompt = text_in(record, system)
    if prompt.strip():
        form = prompt.replace("{", "{{").replace("}", "}}") + form[form.index("\n\n") :]
    return TextDraft(prompt=form.format(instruction=asked, input=context), answer=answer)


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
