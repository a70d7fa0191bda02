"""Turns texts into samples for encoders: between the tokenizer's special tokens, with a class, or with a second text.

Invariant: a special token has no label. A sample has at most `sequence_len` tokens of each of its texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from ratel_cli.data.samples.samples import Encoded, Sample
from ratel_cli.data.text.drafts import PairDraft, RowDraft, Unusable
from ratel_cli.data.text.tokenise import token_ids
from ratel_cli.data.text.tokenizer import Tokenizer
from ratel_cli.sizes import IGNORED_TARGET


class RowEncoder:
    """Encodes texts with one tokenizer."""

    def __init__(
        self, tokenizer: Tokenizer, around: tuple[list[int], list[int]], *, sequence_len: int, truncates: bool
    ) -> None:
        """`around`: the special tokens before a text, and behind it. `truncates`: what is too long is truncated;
        otherwise there is no sample of it."""
        self._tokenizer = tokenizer
        self._prefix, self._suffix = around
        self._sequence_len = sequence_len
        self._truncates = truncates

    def rows(self, drafts: Sequence[RowDraft]) -> Iterator[Encoded | Unusable]:
        """Put texts between the tokenizer's special tokens: those with a class truncated, others in as many samples as
        it takes.

        Labels are the tokens that may be masked; of a text with a class, that class at the first token.
        """
        room = self._sequence_len - len(self._prefix) - len(self._suffix)
        for draft, ids in zip(drafts, token_ids(self._tokenizer, [draft.text for draft in drafts]), strict=True):
            if not ids or room < 1:
                yield Unusable("the text has no tokens" if room > 0 else "sequence_len has no room for a token")
            elif draft.label is None:
                parts = (ids[start : start + room] for start in range(0, len(ids), room))
                yield Encoded(samples=tuple(self._row(part, None) for part in parts))
            else:
                excess_tokens = max(0, len(ids) - room)
                is_dropped = excess_tokens and not self._truncates
                samples = () if is_dropped else (self._row(ids[:room], draft.label),)
                yield Encoded(samples=samples, excess_tokens=excess_tokens)

    def pairs(self, drafts: Sequence[PairDraft]) -> Iterator[Encoded | Unusable]:
        """Encode both texts with the tokenizer's special tokens, as it has them for sources and for targets, each of at
        most `sequence_len` tokens. The source has no labels, and comes first."""
        sources = self._whole([draft.source for draft in drafts], as_target=False)
        targets = self._whole([draft.target for draft in drafts], as_target=True)
        for (source, cut), (target, more) in zip(sources, targets, strict=True):
            excess_tokens = max(cut, more)
            if not source or not target:
                yield Unusable("the text has no tokens")
            elif excess_tokens and not self._truncates:
                yield Encoded(samples=(), excess_tokens=excess_tokens)
            else:
                input_ids = np.array([*source, *target], dtype=np.int32)
                labels = np.array([*[IGNORED_TARGET] * len(source), *target], dtype=np.int32)
                yield Encoded(samples=(Sample(input_ids=input_ids, labels=labels),), excess_tokens=excess_tokens)

    def _whole(self, texts: list[str], *, as_target: bool) -> Iterator[tuple[list[int], int]]:
        """The tokens of each text, with special ones, and how many more there would be."""
        tokenised = partial(token_ids, self._tokenizer, special=True, as_target=as_target)
        for text, ids in zip(texts, tokenised(texts), strict=True):
            excess_tokens = max(0, len(ids) - self._sequence_len)
            yield tokenised([text], most_tokens=self._sequence_len)[0] if excess_tokens else ids, excess_tokens

    def _row(self, ids: list[int], label: int | None) -> Sample:
        input_ids = np.array([*self._prefix, *ids, *self._suffix], dtype=np.int32)
        labels = np.full_like(input_ids, IGNORED_TARGET)
        if label is None:
            labels[len(self._prefix) : len(self._prefix) + len(ids)] = ids
        else:
            labels[0] = label
        return Sample(input_ids=input_ids, labels=labels)
