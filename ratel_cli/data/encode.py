"""Turns drafts into samples: token ids, and a label for each token that has loss.

Invariants: labels of texts and conversations are the token ids at their own places, or -100. The first label is never
used, because nothing predicts the first token. Prompt and answer are tokenised separately, as they will be at
inference. A sample has at most `sequence_len` tokens, and at least one label with loss.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from ratel_cli.closing import Closing
from ratel_cli.data.chat import ChatRenderer, RenderedChat
from ratel_cli.data.chat_child import has_generation_tag
from ratel_cli.data.formats import ChatDraft, Draft, TextDraft, TokensDraft, Unusable
from ratel_cli.errors import BadInput, excerpt
from ratel_cli.json_fields import hash_of
from ratel_cli.sizes import IGNORED_TARGET

TokenIds = npt.NDArray[np.int32]
"""Token ids or labels `[tokens]`."""


class FastBackend(Protocol):
    """The part that we use of the `tokenizers` object in a fast tokenizer."""

    def to_str(self) -> str: ...


class Tokenizer(Protocol):
    """The part that we use of a tokenizer of transformers."""

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
    """One training sample."""

    input_ids: TokenIds
    """Shape `[tokens]`."""
    labels: TokenIds
    """Shape `[tokens]`; not shifted, -100 where there is no loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The samples of one row."""

    samples: tuple[Sample, ...]
    """One; several if a long text was split."""
    truncated: bool = False
    """Whether tokens beyond `sequence_len` were dropped."""


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """A hash of everything that token ids depend on: vocabulary, merges, normalisation, special tokens, template."""
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state.pop("truncation", None)  # left by the last call of the tokenizer
        state.pop("padding", None)
    else:
        state = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    whole = [state, {key: str(value) for key, value in tokenizer.special_tokens_map.items()}, tokenizer.chat_template]
    return hash_of(whole)


def has_chat_template(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer has a chat template, or a default one among several."""
    template = tokenizer.chat_template
    return "default" in template if isinstance(template, dict) else bool(template)


class SampleEncoder(Closing):
    """Turns drafts into samples. Owns the chat renderer, which starts with the first conversation."""

    def __init__(self, tokenizer: Tokenizer, *, sequence_len: int, train_on_inputs: bool) -> None:
        self._tokenizer = tokenizer
        self._sequence_len = sequence_len
        self._train_on_inputs = train_on_inputs
        self._prefix = _opening_tokens(tokenizer)
        self._vocabulary = len(tokenizer)
        self._renderer: ChatRenderer | None = None

    @property
    def closes_texts(self) -> bool:
        """Whether the tokenizer has an EOS token, with which texts end."""
        return self._tokenizer.eos_token_id is not None

    def close(self) -> None:
        """End the chat renderer, if there is one. Idempotent."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    def encode(self, drafts: Sequence[Draft]) -> list[Encoded | Unusable]:
        """The samples of each draft, or why it has none, in order. Texts are tokenised together, which uses all cores.

        Raises BadInput if the tokenizer or the chat template cannot be used at all.
        """
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
                yield Unusable("the text to train on is empty")
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
            yield self._split(input_ids, labels) if draft.splittable else self._truncate(input_ids, labels)

    def _encode_chats(self, drafts: Sequence[ChatDraft]) -> Iterator[Encoded | Unusable]:
        rendered = [self._render(draft) for draft in drafts]
        chats = [chat for chat in rendered if isinstance(chat, RenderedChat)]
        encoded = iter(self._encode_rendered(chats))
        for chat in rendered:
            yield next(encoded) if isinstance(chat, RenderedChat) else chat

    def _render(self, draft: ChatDraft) -> RenderedChat | Unusable:
        if not (self._tokenizer.is_fast or self._train_on_inputs):
            raise BadInput(
                "a fast tokenizer is needed to find the assistant turns, and this model has none",
                hint="set train_on_inputs: true, or use a dataset of type tokens",
            )
        if self._renderer is None:
            variables = self._tokenizer.special_tokens_map
            self._renderer = ChatRenderer(self._tokenizer.get_chat_template(), variables)
        try:
            return self._renderer.render(draft, locate_turns=not self._train_on_inputs)
        except Unusable as unusable:
            return unusable

    def _encode_rendered(self, chats: list[RenderedChat]) -> Iterator[Encoded | Unusable]:
        if self._train_on_inputs:
            for ids in self._tokenise([chat.text for chat in chats]):
                input_ids = np.array(ids, dtype=np.int32)
                yield self._truncate(input_ids, input_ids)
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
            char_spans = np.array(offsets, dtype=np.int64).reshape(-1, 2)
            try:
                for index, span in enumerate(chat.spans):
                    first, last = _tokens_of(char_spans, span, exact=inferred)
                    if inferred and first < last and ids[:first] != prefixes[index]:
                        raise Unusable(_NOT_SEPARATE)
                    labels[first:last] = input_ids[first:last]
                yield self._truncate(input_ids, labels)
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
                valid = f"the tokenizer has ids 0 to {self._vocabulary - 1}"
                return Unusable(f"{name!r} contains {ids[~allowed][0]}; {valid}")
        return self._truncate(np.array(draft.input_ids, dtype=np.int32), np.array(draft.labels, dtype=np.int32))

    def _split(self, input_ids: TokenIds, labels: TokenIds) -> Encoded | Unusable:
        """Split a long text. Parts overlap by one token, so every token but the first is predicted exactly once."""
        if len(input_ids) < 2:
            return Unusable("all masked: a text of one token has nothing to predict")
        stride = self._sequence_len - 1
        starts = range(0, len(input_ids) - 1, stride)
        parts = (slice(start, start + self._sequence_len) for start in starts)
        return Encoded(samples=tuple(Sample(input_ids=input_ids[part], labels=labels[part]) for part in parts))

    def _truncate(self, input_ids: TokenIds, labels: TokenIds) -> Encoded | Unusable:
        truncated = len(input_ids) > self._sequence_len
        sample = Sample(input_ids=input_ids[: self._sequence_len], labels=labels[: self._sequence_len])
        if not (sample.labels[1:] != IGNORED_TARGET).any():
            where = f" within the first {self._sequence_len} tokens" if truncated else ""
            return Unusable(f"all masked: no token has loss{where}")
        return Encoded(samples=(sample,), truncated=truncated)

    def _tokenise(self, texts: list[str]) -> list[list[int]]:
        return cast(list[list[int]], self._call(texts, offsets=False)["input_ids"])

    def _call(self, texts: list[str], *, offsets: bool) -> Mapping[str, object]:
        if not texts:
            return {"input_ids": [], "offset_mapping": []}
        return _tokenised(self._tokenizer, texts, special=False, offsets=offsets)


_NOT_SEPARATE = (
    "one token contains text from inside and outside an assistant turn, so loss cannot be limited to the turn; "
    "the chat template must separate turns, for example with special tokens"
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
    except Exception as error:  # `tokenizers` raises no other type
        raise BadInput(
            f"the tokenizer fails on a text: {excerpt(str(error))}",
            hint="use the tokenizer files that belong to the model",
        ) from error


def _tokens_of(offsets: npt.NDArray[np.int64], span: tuple[int, int], *, exact: bool) -> tuple[int, int]:
    """The tokens [first, last) that cover the characters of a span. `offsets`: `[tokens, 2]`, characters of each token.

    With `exact`, raises Unusable if a token also covers characters outside the span.
    """
    starts, ends = offsets[:, 0], offsets[:, 1]
    touched = np.flatnonzero((starts < span[1]) & (ends > span[0]))
    if not len(touched):
        return 0, 0
    first, last = int(touched[0]), int(touched[-1]) + 1
    if exact and (starts[first] < span[0] or ends[last - 1] > span[1]):
        raise Unusable(_NOT_SEPARATE)
    return first, last


def _opening_tokens(tokenizer: Tokenizer) -> list[int]:
    """The tokens that the tokenizer itself puts before a text: a BOS token, or none."""

    def ids(*, special: bool) -> list[int]:
        batch = _tokenised(tokenizer, ["a"], special=special, offsets=False)
        return cast(list[list[int]], batch["input_ids"])[0]

    plain, full = ids(special=False), ids(special=True)
    at = next((at for at in range(len(full)) if full[at : at + len(plain)] == plain), 0)
    return full[:at]
