"""Turns drafts into samples: token ids, and a label for each token that has loss.

Invariants: labels of texts and conversations are the token ids at their own places, or -100. The first label is never
used, because nothing predicts the first token. Prompt and answer are tokenised separately, as they will be at
inference. A sample has at most `sequence_len` tokens, and at least one label with loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import cast

import numpy as np
import numpy.typing as npt

from ratel_cli.closing import Closing
from ratel_cli.data.chat import ChatRenderer, RenderedChat, located_messages
from ratel_cli.data.chat_child import has_generation_tag
from ratel_cli.data.chat_pool import ChatPool, Rendering
from ratel_cli.data.drafts import (
    ChatDraft,
    ComparedDraft,
    Draft,
    PairDraft,
    RowDraft,
    TextDraft,
    TokensDraft,
    TrainOnInputs,
    Unusable,
)
from ratel_cli.data.encode_compared import compared
from ratel_cli.data.encode_rows import RowEncoder
from ratel_cli.data.prompt_tokens import PromptTokens
from ratel_cli.data.samples import Encoded, Sample, TokenIds
from ratel_cli.data.tokenise import token_ids, tokenised, tokens_around
from ratel_cli.data.tokenizer import NoTokenizer, Tokenizer
from ratel_cli.errors import BadInput
from ratel_cli.hardware.host import num_cores
from ratel_cli.sizes import IGNORED_TARGET


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """Drafts whose conversations are being rendered."""

    drafts: Sequence[Draft]
    parts: Sequence[Draft]
    """The drafts, and in place of those that compare answers these answers."""
    chats: Sequence[ChatDraft]
    """Those of them that are conversations."""
    rendering: Rendering | None
    """Their texts; None if there are none."""


class SampleEncoder(Closing):
    """Turns drafts into samples. Owns the processes that render conversations, and starts the first with the first."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        sequence_len: int,
        train_on_inputs: TrainOnInputs,
        truncates: bool = True,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`truncates`: what is longer than `sequence_len` is truncated; otherwise there is no sample of it."""
        self._truncates = truncates
        self._tokenizer = tokenizer
        self._sequence_len = sequence_len
        self.train_on_inputs = train_on_inputs
        self._notice = notice
        around = ([], []) if isinstance(tokenizer, NoTokenizer) else tokens_around(tokenizer)
        self._prefix = around[0]
        self._rows = RowEncoder(tokenizer, around, sequence_len=sequence_len, truncates=truncates)
        self._vocabulary = len(tokenizer)
        self._pool: ChatPool | None = None
        self._prompts: PromptTokens | None = None

    @property
    def num_ahead(self) -> int:
        """How many groups of a few hundred drafts to begin before one is finished, so that no core waits."""
        return 1 + num_cores() // 8

    @property
    def closes_texts(self) -> bool:
        """Whether the tokenizer has an EOS token, with which texts end."""
        return self._tokenizer.eos_token_id is not None

    def close(self) -> None:
        """End the processes that render conversations, if there are any. Idempotent."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def encode(self, drafts: Sequence[Draft]) -> list[Encoded | Unusable]:
        """The samples of each draft, or why it has none, in order. Texts are tokenised together, which uses all cores.

        Raises BadInput if the tokenizer or the chat template cannot be used at all.
        """
        return self.finish(self.begin(drafts))

    def begin(self, drafts: Sequence[Draft]) -> Begun:
        """Have the conversations of drafts rendered while other drafts are finished. Raises what `encode` raises."""
        parts = [part for draft in drafts for part in _parts_of(draft)]
        chats = [part for part in parts if isinstance(part, ChatDraft)]
        return Begun(drafts=drafts, parts=parts, chats=chats, rendering=self._render(chats) if chats else None)

    def finish(self, begun: Begun) -> list[Encoded | Unusable]:
        """What `encode` gives for the drafts."""
        found = iter(self._finish_parts(begun))
        return [
            compared(
                [next(found) for _ in draft.answers],
                is_good=draft.is_good,
                is_cut=any(isinstance(each, TextDraft) and each.is_cut for each in draft.answers),
                remarks=draft.remarks,
            )
            if isinstance(draft, ComparedDraft)
            else next(found)
            for draft in begun.drafts
        ]

    def _finish_parts(self, begun: Begun) -> list[Encoded | Unusable]:
        texts = [draft for draft in begun.parts if isinstance(draft, TextDraft)]
        text_answers, chat_answers = self._encode_texts(texts), self._encode_chats(begun)
        row_answers = self._rows.rows([draft for draft in begun.parts if isinstance(draft, RowDraft)])
        pair_answers = self._rows.pairs([draft for draft in begun.parts if isinstance(draft, PairDraft)])
        answers: list[Encoded | Unusable] = []
        for draft in begun.parts:
            if isinstance(draft, TextDraft):
                answer = next(text_answers)
            elif isinstance(draft, ChatDraft):
                answer = next(chat_answers)
            elif isinstance(draft, RowDraft):
                answer = next(row_answers)
            elif isinstance(draft, PairDraft):
                answer = next(pair_answers)
            else:
                assert isinstance(draft, TokensDraft)
                answer = self._encode_tokens(draft)
            if isinstance(answer, Encoded) and draft.remarks:
                answer = replace(answer, remarks=(*draft.remarks, *answer.remarks))
            answers.append(answer)
        return answers

    def _encode_texts(self, drafts: Sequence[TextDraft]) -> Iterator[Encoded | Unusable]:
        prompts = self._tokenise([draft.prompt for draft in drafts])
        answers = self._tokenise([draft.prompt + draft.answer if draft.is_cut else draft.answer for draft in drafts])
        for draft, prompt, answer in zip(drafts, prompts, answers, strict=True):
            if not (draft.answer.strip() or (draft.is_cut and draft.prompt.strip())):
                yield Unusable("the text to train on is empty")
                continue
            num_before = _num_shared(prompt, answer) if draft.is_cut else 0
            head, tail = answer[:num_before] if draft.is_cut else [*prompt], answer[num_before:]
            if (head or answer)[: len(self._prefix)] != self._prefix:
                head = [*self._prefix, *head]
            end = self._tokenizer.eos_token_id
            if end is not None and tail[-1:] != [end]:
                tail.append(end)
            input_ids = np.array(head + tail, dtype=np.int32)
            labels = input_ids.copy()
            if draft.prompt and self.train_on_inputs is not True:
                labels[: len(head)] = IGNORED_TARGET
            yield self._split(input_ids, labels) if draft.splittable else self._truncate(input_ids, labels)

    def _encode_chats(self, begun: Begun) -> Iterator[Encoded | Unusable]:
        rendered = [] if begun.rendering is None else begun.rendering.answers()
        answered = zip(begun.chats, rendered, strict=True)
        chats = [(draft, chat) for draft, chat in answered if isinstance(chat, RenderedChat)]
        encoded = iter(self._encode_rendered(chats))
        for chat in rendered:
            if isinstance(chat, RenderedChat):
                answer = next(encoded)
                if isinstance(answer, Encoded):
                    answer = replace(answer, remarks=chat.remarks, skips_header=chat.skips_header)
                yield answer
            else:
                yield chat

    def _render(self, drafts: Sequence[ChatDraft]) -> Rendering:
        if not self._tokenizer.is_fast and any(draft.muted or not self._is_whole(draft) for draft in drafts):
            raise BadInput(
                "a fast tokenizer is needed to find the assistant turns, and this model has none",
                hint="set train_on_inputs: true, or use a dataset of type tokens",
            )
        if self._pool is None:
            begin = partial(ChatRenderer, self._tokenizer.get_chat_template(), self._tokenizer.special_tokens_map)
            self._pool = ChatPool(begin, most=min(_MOST_CHILDREN, num_cores()), notice=self._notice)
        return self._pool.start(drafts, locate=lambda draft: not self._is_whole(draft))

    def _is_whole(self, draft: ChatDraft) -> bool:
        """Whether all tokens of a conversation have loss."""
        if self.train_on_inputs == "conversations":
            return draft.completion_from is None
        return self.train_on_inputs

    def _encode_rendered(self, chats: list[tuple[ChatDraft, RenderedChat]]) -> Iterator[Encoded | Unusable]:
        if all(self._is_whole(draft) and not chat.muted for draft, chat in chats):
            for ids in self._tokenise([chat.text for _, chat in chats]):
                input_ids = np.array(ids, dtype=np.int32)
                yield self._truncate(input_ids, input_ids)
            return
        has_marks = has_generation_tag(self._tokenizer.get_chat_template()) if chats else False
        batch = tokenised(self._tokenizer, [chat.text for _, chat in chats], special=False, offsets=True)
        ids_of = [np.array(ids, dtype=np.int32) for ids in cast(list[list[int]], batch["input_ids"])]
        spans_of = [_as_array(spans) for spans in cast(list[list[tuple[int, int]]], batch["offset_mapping"])]
        ends = [self._prompt_ends(draft, chat, has_marks=has_marks) for draft, chat in chats]
        texts = [(chat.text, ids, spans) for (_, chat), ids, spans in zip(chats, ids_of, spans_of, strict=True)]
        if self._prompts is None:
            self._prompts = PromptTokens(self._tokenizer, self._tokenise)
        prefixes_of = self._prompts.of_beginnings(list(zip(texts, ends, strict=True)))
        found = zip(chats, texts, ends, prefixes_of, strict=True)
        for (draft, chat), (_, input_ids, char_spans), places, tokens in found:
            prefixes = dict(zip(places, tokens, strict=True))
            try:
                if self._is_whole(draft):
                    labels = input_ids.copy()
                elif draft.trained is not None:
                    labels = self._label_words(draft, chat, input_ids, char_spans)
                else:
                    labels = _label_turns(chat, input_ids, char_spans, prefixes)
                for span in chat.muted:
                    first, last = _tokens_of(char_spans, span)
                    labels[first:last] = IGNORED_TARGET
                end = self._tokenizer.eos_token_id
                is_open = draft.is_closed and end is not None and input_ids[-1:].tolist() != [end]
                tail = np.array([end] if is_open else [], dtype=np.int32)
                yield self._truncate(np.append(input_ids, tail), np.append(labels, tail))
            except Unusable as unusable:
                yield unusable

    def _prompt_ends(self, draft: ChatDraft, chat: RenderedChat, *, has_marks: bool) -> list[int]:
        """The character where each turn begins, if the prompt for it has to have the same tokens at inference."""
        is_whole = self._is_whole(draft)
        if is_whole or draft.trained is not None or (has_marks and draft.completion_from is None):
            return []
        starts = {span[0] for span in chat.spans if span is not None} | {at for at in chat.quiet if at is not None}
        return sorted(starts)

    def _label_words(
        self, draft: ChatDraft, chat: RenderedChat, input_ids: TokenIds, char_spans: npt.NDArray[np.int64]
    ) -> TokenIds:
        """The labels of the words of the trained messages, and of EOS tokens: axolotl's `roles_to_train`.

        `char_spans`: `[tokens, 2]`. A message's EOS token is the first within a few tokens behind its words.
        """
        assert draft.trained is not None
        labels = np.full_like(input_ids, IGNORED_TARGET)
        last_eos: int | None = None
        for index, span in zip(located_messages(draft), chat.spans, strict=True):
            is_trained = index in draft.trained
            if span is None:
                if is_trained:
                    raise Unusable(f"message {index + 1} cannot be located in the rendered conversation")
                continue
            first, last = _tokens_of(char_spans, span)
            if is_trained:
                labels[first:last] = input_ids[first:last]
            behind = np.flatnonzero(input_ids[last : last + _MOST_BEFORE_EOS + 1] == self._tokenizer.eos_token_id)
            if first < last and len(behind):
                last_eos = None if index in draft.muted else last + int(behind[0])
                if last_eos is None:
                    continue
                if draft.train_on_eos == "all" or (draft.train_on_eos == "turn" and is_trained):
                    labels[last_eos] = input_ids[last_eos]
        if draft.train_on_eos == "last" and last_eos is not None:
            labels[last_eos] = input_ids[last_eos]
        return labels

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
        excess_tokens = max(0, len(input_ids) - self._sequence_len)
        if excess_tokens and not self._truncates:
            return Encoded(samples=(), excess_tokens=excess_tokens)
        sample = Sample(input_ids=input_ids[: self._sequence_len], labels=labels[: self._sequence_len])
        if not (sample.labels[1:] != IGNORED_TARGET).any():
            where = f" within the first {self._sequence_len} tokens" if excess_tokens else ""
            return Unusable(f"all masked: no token has loss{where}")
        return Encoded(samples=(sample,), excess_tokens=excess_tokens)

    def _tokenise(self, texts: list[str]) -> list[list[int]]:
        return token_ids(self._tokenizer, texts)


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (first, second) in pairs if first != second), min(len(one), len(other)))


def _parts_of(draft: Draft) -> Sequence[Draft]:
    return draft.answers if isinstance(draft, ComparedDraft) else (draft,)


_MOST_CHILDREN = 16  # that render; each takes 60 MB, and one thread tokenises what they make
_MOST_BEFORE_EOS = 3  # tokens that a template may write between a message and its EOS token, as in axolotl
_NOT_SEPARATE = (
    "one token contains text from inside and outside an assistant turn, so loss cannot be limited to the turn; "
    "the chat template must separate turns, for example with special tokens"
)


def _as_array(char_spans: list[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """The characters of each token `[tokens, 2]`. One by one: an array of tuples takes numpy four times as long."""
    return np.fromiter(chain.from_iterable(char_spans), np.int64, 2 * len(char_spans)).reshape(-1, 2)


def _label_turns(
    chat: RenderedChat, input_ids: TokenIds, char_spans: npt.NDArray[np.int64], prefixes: Mapping[int, list[int]]
) -> TokenIds:
    """The labels of whole turns. `char_spans`: `[tokens, 2]`. `prefixes`: by number of characters, the tokens of the
    text up to there.

    Without prefixes the template has marked the turns. Raises Unusable if a turn would be trained after other tokens
    than those of its prompt.
    """
    labels = np.full_like(input_ids, IGNORED_TARGET)
    for span, quiet in zip(chat.spans, chat.quiet, strict=True):
        assert span is not None
        first, last = _tokens_of(char_spans, span)
        if prefixes and first < last:
            if char_spans[last - 1, 1] > span[1]:
                raise Unusable(_NOT_SEPARATE)
            first = _first_of_turn(chat.text, (span[0], quiet), input_ids, char_spans, prefixes)
        labels[first:last] = input_ids[first:last]
    return labels


def _first_of_turn(
    text: str,
    starts: tuple[int, int | None],
    input_ids: TokenIds,
    char_spans: npt.NDArray[np.int64],
    prefixes: Mapping[int, list[int]],
) -> int:
    """The first token of a turn behind the same tokens as those of its prompt. Raises Unusable if there is none.

    The turn begins at one of `starts`. If the end of its prompt shares a token with white space of the turn, it begins
    with the next token: `<think>` and a line end, before a turn that has no reasoning and begins with a line end.
    """
    for start in starts:
        if start is not None and start < len(text):
            first = int(np.flatnonzero(char_spans[:, 1] > start)[0])
            if char_spans[first, 0] >= start and input_ids[:first].tolist() == prefixes[start]:
                return first
    first = int(np.flatnonzero(char_spans[:, 1] > starts[0])[0])
    shared, end = (int(at) for at in char_spans[first])
    is_same_before = input_ids[:first].tolist() == prefixes[starts[0]][:first]
    if shared < starts[0] and text[starts[0] : end].isspace() and is_same_before:
        return first + 1
    raise Unusable(_NOT_SEPARATE)


def _tokens_of(char_spans: npt.NDArray[np.int64], span: tuple[int, int]) -> tuple[int, int]:
    """The tokens [first, last) that cover the characters of a span. `char_spans`: `[tokens, 2]`."""
    touched = np.flatnonzero((char_spans[:, 0] < span[1]) & (char_spans[:, 1] > span[0]))
    return (int(touched[0]), int(touched[-1]) + 1) if len(touched) else (0, 0)
