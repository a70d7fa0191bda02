"""Drafts: what a row asks to be trained on, before any tokenizer has seen it.

A draft is a text, a conversation or token ids, with a mark on the part that has loss. Invariant: a draft is checked; a
row that cannot become one raised `Unusable` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from ratel_cli.data.files.lines import json_name
from ratel_cli.data.files.remarks import Remark
from ratel_cli.data.text.chat_child import ChatMessage

T = TypeVar("T")

TrainOnEos = Literal["all", "turn", "last", "none"]
"""Which EOS tokens behind turns have loss: all, those of trained turns, the last of the conversation, or none."""

TrainOnInputs = bool | Literal["conversations"]
"""Whether prompts have loss too. `conversations`: all of a conversation has, unless it has a completion of its own."""

ExcessLengthStrategy = Literal["truncate", "drop", "raise"]
"""What becomes of a sample that is longer than `sequence_len` and is no plain text."""


class Unusable(Exception):
    """Why one row cannot be trained on."""


def of_type(value: object, wanted: type[T], must_be: str) -> T:
    """The value, if it is what it must be. Raises Unusable."""
    if not isinstance(value, wanted):
        raise Unusable(f"{must_be}, not {json_name(value)}")
    return value


def unless_unusable(make: Callable[[], T]) -> T | Unusable:
    """What `make` returns, or why it does not."""
    try:
        return make()
    except Unusable as unusable:
        return unusable


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDraft:
    """A text that ends with an EOS token."""

    prompt: str
    """Has loss only with `train_on_inputs`."""
    answer: str
    """Has loss."""
    splittable: bool = False
    """Whether a text that is too long becomes several samples. Otherwise it is truncated."""
    is_cut: bool = False
    """Whether prompt and answer are one text, and tokenised as one: the answer begins with its first token that the
    prompt does not have."""
    remarks: tuple[Remark, ...] = ()
    """What of its row is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDraft:
    """A conversation for the tokenizer's chat template, or for mistral-common. Unless it says otherwise, its assistant
    turns have loss."""

    messages: list[ChatMessage]
    """Each has a role, and content or tool calls; further keys are for the template."""
    tools: list[object] | None
    variables: Mapping[str, object] = field(default_factory=dict)
    """What else the chat template gets, such as `enable_thinking`."""
    completion_from: int | None = None
    """Index of the first message with loss: everything from it on has loss, and nothing before it. None: other fields
    say what has loss."""
    trained: tuple[int, ...] | None = None
    """Not None: only what stands in these messages has loss, without the marks around them, and `train_on_eos`."""
    muted: tuple[int, ...] = ()
    """Messages with a weight of 0: assistant turns among them have no loss, whatever else has."""
    train_on_eos: TrainOnEos = "turn"
    """Which EOS tokens have loss as well, if `trained` is not None."""
    is_closed: bool = False
    """An EOS token with loss ends it, unless the template has written one there."""
    remarks: tuple[Remark, ...] = ()
    """What of its row is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensDraft:
    """Token ids that need no tokenizer."""

    input_ids: list[int]
    labels: list[int]
    """The target of each token; -100 where there is no loss."""
    remarks: tuple[Remark, ...] = ()
    """What of its row is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDraft:
    """A text as an encoder reads it, between the tokenizer's own special tokens."""

    text: str
    label: int | None
    """Its class, counted from 0; None: it has none, and its tokens may be masked."""
    remarks: tuple[Remark, ...] = ()
    """What of its row is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairDraft:
    """A text that an encoder reads, and the text that a decoder writes to it."""

    source: str
    target: str
    remarks: tuple[Remark, ...] = ()
    """What of its row is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedDraft:
    """Two answers to one prompt, of which one is better; or one answer with a verdict."""

    answers: tuple[TextDraft | ChatDraft, ...]
    """The better one first. Each has its prompt, which is the same."""
    is_good: bool | None = None
    """The verdict on the one answer."""
    remarks: tuple[Remark, ...] = ()
    """What of its row is not used."""


Draft = TextDraft | ChatDraft | TokensDraft | RowDraft | PairDraft | ComparedDraft
