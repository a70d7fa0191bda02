"""The tokens of the beginnings of a text that is tokenised already: of what stands before each turn.

A tokenizer cuts a text at its added tokens, such as `<|im_start|>`, before it does anything else, and handles each
piece alone. So up to the last added token a beginning has the tokens of the whole text, and only the rest is tokenised
again. The rest is mostly the header of a turn, the same in every conversation.

Invariant: the tokens are those that the tokenizer gives for the beginning alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ratel_cli.data.text.tokenizer import Tokenizer

_MOST_CACHED = 1024
_MOST_CACHED_CHARS = 200

TokenisedText = tuple[str, npt.NDArray[np.int32], npt.NDArray[np.int64]]
"""A text, its token ids `[tokens]`, and the characters of each token `[tokens, 2]`."""


class PromptTokens:
    """Tokenises beginnings of texts. `tokenise` gives the token ids of each of several texts."""

    def __init__(self, tokenizer: Tokenizer, tokenise: Callable[[list[str]], list[list[int]]]) -> None:
        self._tokenise = tokenise
        # Others are found in a text that is normalised, or depend on the characters before them.
        self._contents = {
            number: token.content
            for number, token in tokenizer.added_tokens_decoder.items()
            if not (token.normalized or token.single_word)
        }
        self._is_added = np.zeros(max(self._contents, default=0) + 2, dtype=np.bool_)
        self._is_added[list(self._contents)] = True
        self._cached: dict[str, list[int]] = {}

    def of_beginnings(self, texts: Sequence[tuple[TokenisedText, Sequence[int]]]) -> list[list[list[int]]]:
        """The token ids of beginnings of each text, which end before the given characters."""
        kept = [self._last_added(text, ends) for text, ends in texts]
        rests = [
            [text[int(char_spans[at, 0]) if at else 0 : end] for at, end in zip(found, ends, strict=True)]
            for ((text, _, char_spans), ends), found in zip(texts, kept, strict=True)
        ]
        new = list({rest for each in rests for rest in each} - self._cached.keys())
        ids_of = {**self._cached, **dict(zip(new, self._tokenise(new), strict=True))}
        self._cached = {rest: ids for rest, ids in ids_of.items() if len(rest) <= _MOST_CACHED_CHARS}
        if len(self._cached) > _MOST_CACHED:
            self._cached = {}
        return [
            [ids[:at].tolist() + ids_of[rest] for at, rest in zip(found, each, strict=True)]
            for ((_, ids, _), _), found, each in zip(texts, kept, rests, strict=True)
        ]

    def _last_added(self, tokenised: TokenisedText, ends: Sequence[int]) -> list[int]:
        """For each beginning its last added token; 0 if there is none, since nothing stands before token 0."""
        text, ids, char_spans = tokenised
        added = np.flatnonzero(self._is_added.take(ids, mode="clip"))
        last_chars = char_spans[added, 1]
        found = []
        for end in ends:
            for at in reversed(added[last_chars <= end].tolist()):
                first, last = char_spans[at].tolist()
                # An unknown character has the id of an added token, and a token may have taken white space with it.
                if text[first:last] == self._contents[int(ids[at])]:
                    found.append(at)
                    break
            else:
                found.append(0)
        return found
