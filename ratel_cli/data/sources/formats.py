"""Decides the type of a dataset from its columns, and turns rows into drafts.

A draft is a text, a conversation or token ids, with a mark on the part that has loss. Making one needs no tokenizer.
Invariant: a row becomes exactly one draft or raises `Unusable` with the reason.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from ratel_cli.data.files.media import has_mark, has_media_parts, media_column, without_marks
from ratel_cli.data.pairs.compared_rows import ComparedColumns, compared_columns
from ratel_cli.data.sources.plain_drafts import alpaca, row_draft, tokens_of_row
from ratel_cli.data.sources.unread import CHATS, has_verdict, reject_preferences, unread_columns
from ratel_cli.data.text.conversations import (
    TurnOptions,
    as_messages,
    conversation,
    instruction,
    prompt_and_completion,
    question_and_answer,
    text_in,
)
from ratel_cli.data.text.drafts import (
    ChatDraft,
    ComparedDraft,
    Draft,
    TextDraft,
    TrainOnInputs,
    Unusable,
)
from ratel_cli.data.text.rows import DEFAULTS, DatasetSource, Media
from ratel_cli.dataset_keys import unread_for_rows
from ratel_cli.errors import BadInput, printable

Kind = Literal[
    "completion", "prompt_completion", "alpaca", "messages", "chat_completion", "instruction", "question_answer",
    "tokens", "mlm", "classification", "seq2seq", "compared",
]  # fmt: skip
_PLAIN = ("completion", "mlm", "classification", "seq2seq")
"""Kinds that read texts, whatever other columns a row has."""
_SHOWN_CLASSES = 6

_TEXT_ALONE = "Ratel trains on text: `media: ignore` in the dataset leaves them out"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """How the rows of one source become drafts."""

    kind: Kind
    columns: tuple[str, ...]
    """Names of the columns that this kind reads, in the order of their roles."""
    turns: TurnOptions = field(default_factory=TurnOptions)
    """How the turns of conversations become drafts."""
    media: Media = "reject"
    """What becomes of rows with images, video or sound."""
    labels: tuple[str, ...] = ()
    """The names of the classes, for `classification`."""
    compared: ComparedColumns | None = None
    """Columns of answers that are compared; None: the rows have none."""
    unread: tuple[str, ...] = ()
    """Keys of the dataset in the config that are set and that nothing reads."""

    def draft(self, record: dict[str, object]) -> Draft:
        """Turn one row into a draft. Raises Unusable."""
        column = None if self.kind in _PLAIN else media_column(record)
        if column is not None and self.media == "reject":
            raise Unusable(f"the row has an image, video or sound ({printable(column)}); {_TEXT_ALONE}")
        draft = self._read(record)
        read = {*self.columns, self.turns.system}
        if self.is_chat:
            read.add(self.turns.tools)
        if self.turns.system_prompt is not None:  # it takes the place of all others
            read |= {"system", "system_prompt"}
        like = self.kind if self.compared is None else "messages" if self.is_chat else "prompt_completion"
        remarks = (*draft.remarks, *unread_columns(like, read, record))
        is_marked = self.kind not in _PLAIN and any(map(has_mark, _asked(draft)))
        if is_marked and self.media == "reject":
            raise Unusable(f"a text has a placeholder of an image, video or sound, such as <image>; {_TEXT_ALONE}")
        if is_marked or column is not None or (self.media == "ignore" and has_media_parts(record)):
            draft = _without_marks(draft)
            remarks = (*remarks, ("media", "images, video and sound"))
        return replace(draft, remarks=remarks) if remarks else draft

    @property
    def is_chat(self) -> bool:
        """Whether rows are conversations."""
        return self.kind in CHATS or (self.compared is not None and self.compared.is_chat)

    def _read(self, record: dict[str, object]) -> Draft:
        if self.compared is not None:
            return self.compared.draft(record, self.turns)
        match self.kind:
            case "completion":
                return TextDraft(prompt="", answer=text_in(record, self.columns[0]), splittable=True)
            case "prompt_completion":
                prompt, completion = self.columns
                return TextDraft(prompt=text_in(record, prompt), answer=text_in(record, completion))
            case "alpaca":
                return alpaca(record, self.columns, self.turns)
            case "messages":
                return conversation(record, self.columns[0], self.turns)
            case "chat_completion":
                return prompt_and_completion(record, (self.columns[0], self.columns[1]), self.turns)
            case "instruction":
                return instruction(record, self.columns, self.turns)
            case "question_answer":
                return question_and_answer(record, (self.columns[0], self.columns[1]), self.turns)
            case "tokens":
                return tokens_of_row(record)
            case _:
                return row_draft(self.kind, record, self.columns, self.labels)

    def describe(self, *, train_on_inputs: TrainOnInputs = False) -> str:
        """What is read from which columns, and what has loss. For a notice."""
        columns = [printable(column) for column in dict.fromkeys(self.columns)]
        first, last = columns[0], columns[-1]
        names = ", ".join(self.unread)
        end = f"; {names} {'has' if len(self.unread) == 1 else 'have'} no effect here" if names else ""
        if self.compared is not None:
            what = "chat_template: conversations" if self.is_chat else "completion: texts"
            *_, last = [each for each in columns if each != self.compared.verdict]
            read = f"{', '.join(columns[:-1])} and {columns[-1]}"
            verb = "preference pairs" if self.compared.verdict is None else f"with a verdict on {last}"
            return f"type {what} in {read}, {verb}{end}"
        if self.kind == "mlm":
            return f"type mlm: texts in the column {first}, loss on tokens that are masked{end}"
        if self.kind == "seq2seq":
            return f"type seq2seq: texts in the column {first}, loss on those in {last}{end}"
        if self.kind == "classification":
            classes = ", ".join(map(printable, self.labels[:_SHOWN_CLASSES]))
            more = ", ..." if len(self.labels) > _SHOWN_CLASSES else ""
            return f"type classification: texts in {first}, classes in {last} ({classes}{more}){end}"
        if self.kind == "tokens":
            return f"type tokens: token ids from input_ids, and labels if there are any{end}"
        what, loss = {
            "completion": (f"type completion: texts in the column {first}", "all of it"),
            "prompt_completion": (f"type completion: {first} followed by {last}", last),
            "alpaca": (f"type alpaca: the Alpaca prompt with {', '.join(columns)}", last),
            "messages": (f"type chat_template: conversations in the column {first}", self._trained_turns()),
            "chat_completion": (f"type chat_template: conversations in {first} and {last}", f"all of {last}"),
            "instruction": (f"type chat_template: {', '.join(columns)} as turns", self._trained_turns()),
            "question_answer": (f"type chat_template: {first} and {last} as two turns", last),
        }[self.kind]
        has_prompt = self.kind in ("prompt_completion", "alpaca", "chat_completion")
        is_whole = train_on_inputs is True or (train_on_inputs == "conversations" and not has_prompt)
        return f"{what}, loss on {'all of it' if is_whole else loss}{end}"

    def _trained_turns(self) -> str:
        if not self.turns.chooses_turns:
            return "assistant turns"
        wanted = self.turns.roles_to_train
        roles = " and ".join(map(printable, ("assistant",) if wanted is None else wanted)) or "chosen"
        eos = self.turns.train_on_eos or "turn"
        behind = {"all": "every turn", "turn": "these turns", "last": "the last turn"}.get(eos)
        return f"{roles} turns" + (f" and on the EOS token of {behind}" if behind else " without their EOS tokens")


def decide_format(source: DatasetSource, record: dict[str, object], *, has_chat_template: bool) -> RowFormat:
    """Choose the format of a source from its settings and its first row. Raises BadInput if no type fits."""
    if source.type != "completion":  # its texts may be JSON
        record = {column: as_messages(value, _turn_options(source)) for column, value in record.items()}
    found = _matching_format(source, record, has_chat_template=has_chat_template)
    if source.compares is None and (found is None or not _reads_answers(source, found, record)):
        reject_preferences(source, record)
    if found is None:
        names = ", ".join(map(printable, record)) or "(none)"
        raise BadInput(
            f"{printable(source.path)}: no dataset type fits the columns {names}",
            hint="set the type and the names of its columns, for example type: completion and field: NAME",
        )
    column = None if found.kind in _PLAIN else media_column(record)
    if column is not None and source.media == "reject":
        raise BadInput(
            f"{printable(source.path)}: its rows have images, video or sound (column {printable(column)}); "
            "Ratel trains on text",
            hint="to train on their text alone, set media: ignore in the dataset",
        )
    if found.is_chat and not has_chat_template:
        raise BadInput(
            f"{printable(source.path)}: its rows are conversations, but the tokenizer has no chat template",
            hint="set chat_template, or use a base model whose tokenizer has one, or set type: alpaca or type: "
            "completion",
        )
    return replace(
        found,
        turns=_turn_options(source),
        media=source.media,
        labels=source.labels or (),
        unread=_unread(source, found),
    )


def _unread(source: DatasetSource, found: RowFormat) -> tuple[str, ...]:
    """Keys of a source that are set and that nothing reads: these rows have no such thing, or are read by others."""
    keys = {each.name: getattr(source, each.name) for each in fields(source)}
    unread = {*unread_for_rows(keys, DEFAULTS, source.compares or found.kind)}
    columns = found.columns if found.compared is None else found.compared.names
    unread |= {key for key in _COLUMN_KEYS if keys[key] != DEFAULTS[key] and keys[key] not in columns}
    if found.compared is not None and not found.is_chat:  # rows with a system prompt or a history are counted
        unread |= {key for key in _OF_CHATS if keys[key] != DEFAULTS[key]}
    return tuple(key for key in keys if key in unread)


_COLUMN_KEYS = (
    "field", "field_label", "field_prompt", "field_completion", "field_chosen", "field_rejected", "field_messages",
    "field_instruction", "field_input", "field_output", "field_history",
)  # fmt: skip
_OF_CHATS = ("system_prompt", "drop_system_message", "field_tools", "message_property_mappings", "roles")


def _reads_answers(source: DatasetSource, found: RowFormat, record: dict[str, object]) -> bool:
    """Whether a format reads answers to imitate, even if the row has others that are to be compared with them."""
    if any(column not in record for column in found.columns[:1]):
        return False
    if source.type == "auto" and has_verdict(record):
        return False
    turns = record[found.columns[0]]
    last = turns[-1] if found.kind == "messages" and isinstance(turns, list) and turns else None
    return not isinstance(last, dict) or last.get("role", last.get("from")) not in ("user", "human")


def _turn_options(source: DatasetSource) -> TurnOptions:
    return TurnOptions(
        properties=source.message_property_mappings or {},
        roles={name: role for role, names in (source.roles or {}).items() for name in names},
        tools=source.field_tools,
        system=source.field_system,
        system_prompt=source.system_prompt,
        drops_system_message=source.drop_system_message,
        roles_to_train=source.roles_to_train,
        train_on_eos=source.train_on_eos,
        training_key=source.message_field_training,
        drops_media=source.media == "ignore",
        closes_answers=source.closes_answers,
    )


def _matching_format(source: DatasetSource, record: dict[str, object], *, has_chat_template: bool) -> RowFormat | None:
    names = record.keys()
    if source.compares is not None:
        compared = compared_columns(source, record)
        columns = tuple(each for each in compared.names if each in record)
        return RowFormat(kind="compared", columns=columns, compared=compared)
    columns = (source.field_instruction, source.field_input, source.field_output)
    alpaca = RowFormat(kind="alpaca", columns=columns)
    match source.type:
        case "tokens":
            return _TOKENS
        case "mlm":
            return RowFormat(kind="mlm", columns=(source.field,))
        case "classification":
            return RowFormat(kind="classification", columns=(source.field, source.field_label))
        case "seq2seq":
            return RowFormat(kind="seq2seq", columns=(source.field_prompt, source.field_completion))
        case "chat_template":
            history = (source.field_history,) if source.field_history is not None else ()
            turns = RowFormat(kind="instruction", columns=(*columns, *history))
            fallback = RowFormat(kind="messages", columns=(source.field_messages,))
            named = (source.field_instruction, source.field_output) != _ALPACA_COLUMNS
            has_turns = {source.field_instruction, source.field_output} <= names
            guesses = (
                _named_pair(source, record),
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
                _named_pair(source, record),
                _TOKENS if "input_ids" in names else None,
                _pair(source, record),
                _conversation(source, names),
                alpaca if {source.field_instruction, source.field_output} <= names else None,
                _plain_text(source, names),
                (_QUESTIONS if has_chat_template else questions) if _asks(names) else None,
            )
            return next((guess for guess in of_all_types if guess is not None), None)


_TOKENS = RowFormat(kind="tokens", columns=("input_ids", "labels"))
_ALPACA_COLUMNS = ("instruction", "output")
_PAIR_COLUMNS = ("prompt", "completion")
"""The names of these columns by default. Others are the user's choice, and looked for before all else."""
_QUESTIONS = RowFormat(kind="question_answer", columns=("question", "answer"))


def _asks(names: AbstractSet[str]) -> bool:
    return {"question", "answer"} <= names


def _conversation(source: DatasetSource, names: AbstractSet[str]) -> RowFormat | None:
    usual = ("messages", "conversations")  # ShareGPT has the second name
    columns = usual if source.field_messages == "messages" else (source.field_messages,)
    found = next((column for column in columns if column in names), None)
    return None if found is None else RowFormat(kind="messages", columns=(found,))


def _named_pair(source: DatasetSource, record: dict[str, object]) -> RowFormat | None:
    """The columns that the user names for prompt and completion, as texts or as messages."""
    pair = (source.field_prompt, source.field_completion)
    if pair == _PAIR_COLUMNS or not {*pair} <= record.keys():
        return None
    if all(isinstance(record[column], str) for column in pair):
        return RowFormat(
            kind="question_answer" if source.type == "chat_template" else "prompt_completion", columns=pair
        )
    return RowFormat(kind="chat_completion", columns=pair)


def _chat_completion(record: dict[str, object]) -> RowFormat | None:
    is_chat = isinstance(record.get("prompt"), list) and isinstance(record.get("completion"), list)
    return RowFormat(kind="chat_completion", columns=("prompt", "completion")) if is_chat else None


def _pair(source: DatasetSource, record: dict[str, object]) -> RowFormat | None:
    """Prompt and completion, which TRL reads whatever else a row has, unless the user names other columns."""
    named = ("field", "field_messages", "field_instruction", "field_output")
    if any(getattr(source, key) != DEFAULTS[key] for key in named) or not {*_PAIR_COLUMNS} <= record.keys():
        return None
    return _chat_completion(record) or RowFormat(kind="prompt_completion", columns=_PAIR_COLUMNS)


def _plain_text(source: DatasetSource, names: AbstractSet[str]) -> RowFormat | None:
    pair = (source.field_prompt, source.field_completion)
    if pair != _PAIR_COLUMNS:
        return RowFormat(kind="prompt_completion", columns=pair)
    if source.field in names or source.field != "text":
        return RowFormat(kind="completion", columns=(source.field,))
    if {*_PAIR_COLUMNS} <= names:
        return RowFormat(kind="prompt_completion", columns=_PAIR_COLUMNS)
    return None


def _asked(draft: Draft) -> list[str]:
    """The texts of a draft that an answer follows."""
    if isinstance(draft, ComparedDraft):
        return _asked(draft.answers[0])
    if isinstance(draft, TextDraft):
        return [draft.prompt]
    messages = draft.messages if isinstance(draft, ChatDraft) else []
    return [str(each["content"]) for each in messages if each["role"] != "assistant" and "content" in each]


def _without_marks(draft: Draft) -> Draft:
    if isinstance(draft, ComparedDraft):
        answers = [_without_marks(each) for each in draft.answers]
        return replace(draft, answers=tuple(each for each in answers if isinstance(each, TextDraft | ChatDraft)))
    if isinstance(draft, TextDraft):
        return replace(draft, prompt=without_marks(draft.prompt), answer=without_marks(draft.answer))
    if isinstance(draft, ChatDraft):
        messages = draft.messages
        clean = [
            {**each, "content": without_marks(str(each["content"]))} if "content" in each else each for each in messages
        ]
        return replace(draft, messages=clean)
    return draft
