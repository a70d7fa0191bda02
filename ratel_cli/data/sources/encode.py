"""Turns drafts into samples: token ids, and a label for each token that has loss.

Invariants: labels of texts and conversations are the token ids at their own places, or -100. The first label is never
used, because nothing predicts the first token. Prompt and answer are tokenised separately, as they will be at
inference. A sample has at most `sequence_len` tokens, and at least one label with loss.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ratel_cli.closing import Closing
from ratel_cli.data.pairs.encode_compared import compared
from ratel_cli.data.samples.samples import Encoded, Sample, TokenIds
from ratel_cli.data.sources.encode_rows import RowEncoder
from ratel_cli.data.text.chat_child import num_shared
from ratel_cli.data.text.chat_encoder import FinishChats
from ratel_cli.data.text.choose_chat_encoder import choose_chat_encoder
from ratel_cli.data.text.drafts import (
    ChatDraft,
    ComparedDraft,
    Draft,
    ExcessLengthStrategy,
    PairDraft,
    RowDraft,
    TextDraft,
    TokensDraft,
    TrainOnInputs,
    Unusable,
)
from ratel_cli.data.text.tokenise import token_ids, tokens_around, without_row
from ratel_cli.data.text.tokenizer import NoTokenizer, Tokenizer, num_ids
from ratel_cli.hardware.host import num_cores
from ratel_cli.sizes import IGNORED_TARGET


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """What decides the tokens of a row, besides the longest that a sample may be."""

    tokenizer: Tokenizer
    num_embeddings: int | None = None
    """The model's rows for tokens: its samples have smaller token ids. None: as many as there are tokens."""
    train_on_inputs: TrainOnInputs
    excess_length_strategy: ExcessLengthStrategy = "truncate"
    stop_ids: Collection[int] = ()
    """Tokens besides EOS with which a model stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """Drafts whose conversations are being encoded."""

    drafts: Sequence[Draft]
    parts: Sequence[Draft]
    """The drafts, and in place of those that compare answers these answers."""
    finish_chats: FinishChats | None
    """Gives the tokens of those of them that are conversations; None if there are none."""


class SampleEncoder(Closing):
    """Turns drafts into samples. Owns what encodes conversations."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        num_embeddings: int | None = None,
        sequence_len: int,
        train_on_inputs: TrainOnInputs,
        truncates: bool = True,
        notice: Callable[[str], None] = lambda text: None,
        stop_ids: Collection[int] = (),
    ) -> None:
        """`num_embeddings`: of the model, whose samples have smaller token ids; None: as many as there are tokens.
        `truncates`: what is longer than `sequence_len` is truncated; otherwise there is no sample of it. `stop_ids`:
        tokens besides EOS with which a model stops."""
        self._truncates = truncates
        self._tokenizer = tokenizer
        self._sequence_len = sequence_len
        self.train_on_inputs = train_on_inputs
        around = ([], []) if isinstance(tokenizer, NoTokenizer) else tokens_around(tokenizer)
        self._prefix = around[0]
        self._rows = RowEncoder(tokenizer, around, sequence_len=sequence_len, truncates=truncates)
        most = num_ids(tokenizer)
        self._vocabulary = min(most, num_embeddings or most)
        self._lacks_rows = self._vocabulary < most
        self._chats = choose_chat_encoder(tokenizer, is_whole=self._is_whole, notice=notice, stop_ids=stop_ids)

    @property
    def num_ahead(self) -> int:
        """How many groups of a few hundred drafts to begin before one is finished, so that no core waits."""
        return 1 + num_cores() // 8

    @property
    def closes_texts(self) -> bool:
        """Whether the tokenizer has an EOS token, with which texts end."""
        return self._tokenizer.eos_token_id is not None

    def close(self) -> None:
        """Close what encodes conversations. Idempotent."""
        self._chats.close()

    def encode(self, drafts: Sequence[Draft]) -> list[Encoded | Unusable]:
        """The samples of each draft, or why it has none, in order. Texts are tokenised together, which uses all cores.

        Raises BadInput if the tokenizer or the chat template cannot be used at all.
        """
        return self.finish(self.begin(drafts))

    def begin(self, drafts: Sequence[Draft]) -> Begun:
        """Begin with the conversations of drafts while other drafts are finished. Raises what `encode` raises."""
        parts: list[Draft] = []
        for draft in drafts:
            parts += draft.answers if isinstance(draft, ComparedDraft) else [draft]
        chats = [part for part in parts if isinstance(part, ChatDraft)]
        return Begun(drafts=drafts, parts=parts, finish_chats=self._chats.begin(chats) if chats else None)

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
        answers_of: Mapping[type[Draft], Iterator[Encoded | Unusable]] = {
            TextDraft: self._encode_texts([draft for draft in begun.parts if isinstance(draft, TextDraft)]),
            ChatDraft: self._encode_chats(begun),
            RowDraft: self._rows.rows([draft for draft in begun.parts if isinstance(draft, RowDraft)]),
            PairDraft: self._rows.pairs([draft for draft in begun.parts if isinstance(draft, PairDraft)]),
            TokensDraft: map(self._encode_tokens, [draft for draft in begun.parts if isinstance(draft, TokensDraft)]),
        }
        answers: list[Encoded | Unusable] = []
        for draft in begun.parts:
            answer = next(answers_of[type(draft)])
            if isinstance(answer, Encoded) and draft.remarks:
                answer = replace(answer, remarks=(*draft.remarks, *answer.remarks))
            if isinstance(answer, Encoded) and self._lacks_rows:
                answer = self._with_rows(answer)
            answers.append(answer)
        return answers

    def _encode_texts(self, drafts: Sequence[TextDraft]) -> Iterator[Encoded | Unusable]:
        prompts = token_ids(self._tokenizer, [draft.prompt for draft in drafts])
        whole = [draft.prompt + draft.answer if draft.is_cut else draft.answer for draft in drafts]
        answers = token_ids(self._tokenizer, whole)
        for draft, prompt, answer in zip(drafts, prompts, answers, strict=True):
            if not (draft.answer.strip() or (draft.is_cut and draft.prompt.strip())):
                yield Unusable("the text to train on is empty")
                continue
            num_before = num_shared(prompt, answer) if draft.is_cut else 0
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
        for chat in begun.finish_chats() if begun.finish_chats is not None else ():
            if isinstance(chat, Unusable):
                yield chat
                continue
            answer = self._truncate(chat.input_ids, chat.labels)
            if isinstance(answer, Encoded):
                answer = replace(answer, remarks=chat.remarks, skips_header=chat.skips_header)
            yield answer

    def _is_whole(self, draft: ChatDraft) -> bool:
        """Whether all tokens of a conversation have loss."""
        if self.train_on_inputs == "conversations":
            return draft.completion_from is None
        return self.train_on_inputs

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

    def _with_rows(self, encoded: Encoded) -> Encoded | Unusable:
        """The samples of a row if each of their tokens has a row in the model's embedding."""
        for sample in encoded.samples:
            token = int(sample.input_ids.max())
            if token >= self._vocabulary:
                return Unusable(without_row(self._tokenizer, token, self._vocabulary))
        return encoded

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
