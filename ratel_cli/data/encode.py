"""Drafts to samples: token ids and the labels that carry loss.

For `data/ingest.py`. Invariants: a label is the token id at its own place, or -100; the first label is never
used (nothing predicts the first token); prompt and answer are tokenised apart, as they will be at inference; a
sample has at most `sequence_len` tokens and at least one label that counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, cast

import numpy as np
import numpy.typing as npt

from ratel_cli.data.chat import ChatRenderer, RenderedChat
from ratel_cli.data.chat_child import has_generation_tag
from ratel_cli.data.formats import ChatDraft, Draft, TextDraft, TokensDraft, Unusable
from ratel_cli.errors import BadInput, printable
from ratel_cli.sizes import IGNORED_TARGET

TokenIds = npt.NDArray[np.int32]


class FastBackend(Protocol):
    """The `tokenizers` object inside a fast tokenizer."""

    def to_str(self) -> str: ...


class Tokenizer(Protocol):
    """What we use of a transformers tokenizer."""

    is_fast: bool
    eos_token_id: int | None
    pad_token_id: int | None
    special_tokens_map: Mapping[str, object]
    chat_template: object
    backend_tokenizer: FastBackend

    def __len__(self) -> int: ...
    def __call__(
        self,
        text: list[str],
        *,
        add_special_tokens: bool,
        return_offsets_mapping: bool,
        return_attention_mask: bool,
        return_token_type_ids: bool,
        verbose: bool,
    ) -> Mapping[str, object]: ...
    def get_chat_template(self) -> str: ...
    def get_vocab(self) -> dict[str, int]: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One sequence to train on; both arrays have the same length."""

    input_ids: TokenIds
    labels: TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The samples of one row: several when a text was split, none of them empty."""

    samples: tuple[Sample, ...]
    truncated: bool = False


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Changes with whatever changes the ids: vocabulary, merges, normalisation, special tokens, template."""
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state.pop("truncation", None)  # set by whoever called the tokenizer last
        state.pop("padding", None)
    else:
        state = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    whole = [state, {key: str(value) for key, value in tokenizer.special_tokens_map.items()}, tokenizer.chat_template]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def has_chat_template(tokenizer: Tokenizer) -> bool:
    """Whether there is one to use: the only one, or the default of several."""
    template = tokenizer.chat_template
    return "default" in template if isinstance(template, dict) else bool(template)


class SampleEncoder:
    """Turns drafts into samples; owns the chat renderer, which starts at the first conversation."""

    def __init__(self, tokenizer: Tokenizer, *, sequence_len: int, train_on_inputs: bool) -> None:
        self._tokenizer = tokenizer
        self._sequence_len = sequence_len
        self._train_on_inputs = train_on_inputs
        self._prefix = _opening_tokens(tokenizer)
        self._vocabulary = len(tokenizer)
        self._renderer: ChatRenderer | None = None
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def closes_texts(self) -> bool:
        """Whether the tokenizer has an EOS token to put behind a text."""
        return self._tokenizer.eos_token_id is not None

    def close(self) -> None:
        """Ends the chat renderer, if there is one."""
        self._renderer = None
        self._exits.close()

    def encode(self, drafts: Sequence[Draft]) -> list[Encoded | Unusable]:
        """One answer per draft, in order. Texts are tokenised together, which uses all cores."""
        texts = [draft for draft in drafts if isinstance(draft, TextDraft)]
        chats = [draft for draft in drafts if isinstance(draft, ChatDraft)]
        text_answers, chat_answers = self._encode_texts(texts), self._encode_chats(chats)
        answers: list[Encoded | Unusable] = []
        for draft in drafts:
            if isinstance(draft, TextDraft):
                answers.append(next(text_answers))
            elif isinstance(draft, ChatDraft):
                answers.append(next(chat_answers))
            else:
                answers.append(self._encode_tokens(draft))
        return answers

    def _encode_texts(self, drafts: Sequence[TextDraft]) -> Iterator[Encoded | Unusable]:
        prompts = self._tokenise([draft.prompt for draft in drafts])
        answers = self._tokenise([draft.answer for draft in drafts])
        for draft, prompt, answer in zip(drafts, prompts, answers, strict=True):
            if not draft.answer.strip():
                yield Unusable("the text to learn is empty")
                continue
            head = [*prompt]
            if (head or answer)[: len(self._prefix)] != self._prefix:
                head = [*self._prefix, *head]
            tail = [*answer]
            end = self._tokenizer.eos_token_id
            if end is not None and tail[-1:] != [end]:
                tail.append(end)
            input_ids = np.array(head + tail, dtype=np.int32)
            labels = input_ids.copy()
            if draft.prompt and not self._train_on_inputs:
                labels[: len(head)] = IGNORED_TARGET
            yield self._split(input_ids, labels) if draft.splittable else self._cut(input_ids, labels)

    def _encode_chats(self, drafts: Sequence[ChatDraft]) -> Iterator[Encoded | Unusable]:
        rendered = [self._render(draft) for draft in drafts]
        chats = [chat for chat in rendered if isinstance(chat, RenderedChat)]
        encoded = iter(self._encode_rendered(chats))
        for chat in rendered:
            yield next(encoded) if isinstance(chat, RenderedChat) else chat

    def _render(self, draft: ChatDraft) -> RenderedChat | Unusable:
        if not (self._tokenizer.is_fast or self._train_on_inputs):
            raise BadInput(
                "finding assistant turns needs a fast tokenizer, and this model has none",
                hint="set train_on_inputs: true, or give rows of type tokens",
            )
        if self._renderer is None:
            variables = self._tokenizer.special_tokens_map
            self._renderer = self._exits.enter_context(ChatRenderer(self._tokenizer.get_chat_template(), variables))
        try:
            return self._renderer.render(draft, locate_turns=not self._train_on_inputs)
        except Unusable as unusable:
            return unusable

    def _encode_rendered(self, chats: list[RenderedChat]) -> Iterator[Encoded | Unusable]:
        if self._train_on_inputs:
            for ids in self._tokenise([chat.text for chat in chats]):
                input_ids = np.array(ids, dtype=np.int32)
                yield self._cut(input_ids, input_ids)
            return
        inferred = not has_generation_tag(self._tokenizer.get_chat_template()) if chats else False
        batch = self._call([chat.text for chat in chats], offsets=True)
        ids_of, offsets_of = cast(list[list[int]], batch["input_ids"]), batch["offset_mapping"]
        prompts = [chat.text[:start] for chat in chats for start, _ in chat.spans] if inferred else []
        prompt_ids = iter(self._tokenise(prompts))
        for chat, ids, offsets in zip(chats, ids_of, cast(list[list[tuple[int, int]]], offsets_of), strict=True):
            prefixes = [next(prompt_ids) for _ in chat.spans] if inferred else []
            input_ids = np.array(ids, dtype=np.int32)
            labels = np.full_like(input_ids, IGNORED_TARGET)
            reaches = np.array(offsets, dtype=np.int64).reshape(-1, 2)
            try:
                for index, span in enumerate(chat.spans):
                    first, last = _tokens_of(reaches, span, exact=inferred)
                    if inferred and first < last and ids[:first] != prefixes[index]:
                        raise Unusable(_JOINED)
                    labels[first:last] = input_ids[first:last]
                yield self._cut(input_ids, labels)
            except Unusable as unusable:
                yield unusable

    def _encode_tokens(self, draft: TokensDraft) -> Encoded | Unusable:
        if not draft.input_ids:
            return Unusable("the row has no tokens")
        for name, values in (("input_ids", draft.input_ids), ("labels", draft.labels)):
            ids = np.array(values, dtype=np.int64)
            allowed = (ids >= 0) & (ids < self._vocabulary)
            if name == "labels":
                allowed |= ids == IGNORED_TARGET
            if not allowed.all():
                reach = f"the tokenizer has ids 0 to {self._vocabulary - 1}"
                return Unusable(f"{name!r} holds {ids[~allowed][0]}; {reach}")
        return self._cut(np.array(draft.input_ids, dtype=np.int32), np.array(draft.labels, dtype=np.int32))

    def _split(self, input_ids: TokenIds, labels: TokenIds) -> Encoded | Unusable:
        """Pieces overlap by one token, so that every token but the first is predicted exactly once."""
        if len(input_ids) < 2:
            return Unusable("all masked: a text of one token leaves nothing to predict")
        stride = self._sequence_len - 1
        starts = range(0, len(input_ids) - 1, stride)
        pieces = (slice(start, start + self._sequence_len) for start in starts)
        return Encoded(samples=tuple(Sample(input_ids=input_ids[piece], labels=labels[piece]) for piece in pieces))

    def _cut(self, input_ids: TokenIds, labels: TokenIds) -> Encoded | Unusable:
        truncated = len(input_ids) > self._sequence_len
        sample = Sample(input_ids=input_ids[: self._sequence_len], labels=labels[: self._sequence_len])
        if not (sample.labels[1:] != IGNORED_TARGET).any():
            where = f" within the first {self._sequence_len} tokens" if truncated else ""
            return Unusable(f"all masked: no token carries loss{where}")
        return Encoded(samples=(sample,), truncated=truncated)

    def _tokenise(self, texts: list[str]) -> list[list[int]]:
        return cast(list[list[int]], self._call(texts, offsets=False)["input_ids"])

    def _call(self, texts: list[str], *, offsets: bool) -> Mapping[str, object]:
        if not texts:
            return {"input_ids": [], "offset_mapping": []}
        return _tokenised(self._tokenizer, texts, special=False, offsets=offsets)


_JOINED = (
    "the tokenizer joins an assistant turn with the text beside it, so the loss cannot begin or end between them; "
    "the chat template must set them apart"
)


def _tokenised(tokenizer: Tokenizer, texts: list[str], *, special: bool, offsets: bool) -> Mapping[str, object]:
    try:
        return tokenizer(
            texts,
            add_special_tokens=special,
            return_offsets_mapping=offsets,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
    except Exception as error:  # `tokenizers` raises nothing more special
        raise BadInput(
            f"the tokenizer fails on a text: {printable(str(error))[:200]}",
            hint="use the tokenizer files that belong to the model",
        ) from error


def _tokens_of(offsets: npt.NDArray[np.int64], span: tuple[int, int], *, exact: bool) -> tuple[int, int]:
    """The tokens [first, last) that cover the characters of a span. `exact`: none may reach beyond it."""
    starts, ends = offsets[:, 0], offsets[:, 1]
    touched = np.flatnonzero((starts < span[1]) & (ends > span[0]))
    if not len(touched):
        return 0, 0
    first, last = int(touched[0]), int(touched[-1]) + 1
    if exact and (starts[first] < span[0] or ends[last - 1] > span[1]):
        raise Unusable(_JOINED)
    return first, last


def _opening_tokens(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer itself puts before a text: a BOS token, or nothing."""

    def ids(*, special: bool) -> list[int]:
        batch = _tokenised(tokenizer, ["a"], special=special, offsets=False)
        return cast(list[list[int]], batch["input_ids"])[0]

    plain, full = ids(special=False), ids(special=True)
    at = next((at for at in range(len(full)) if full[at : at + len(plain)] == plain), 0)
    return full[:at]
