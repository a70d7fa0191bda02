"""Calls a tokenizer, and finds the tokens that it puts around a text by itself.

Invariant: whatever a tokenizer raises is BadInput.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from ratel_cli.data.tokenizer import Tokenizer
from ratel_cli.errors import BadInput, excerpt


def tokenised(tokenizer: Tokenizer, texts: list[str], *, special: bool, offsets: bool) -> Mapping[str, object]:
    """What the tokenizer returns for some texts. `special`: with the tokens that it adds by itself; `offsets`: with the
    characters of each token. Raises BadInput if it fails.
    """
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
        raise _fails(error) from error


def whole_texts(
    tokenizer: Tokenizer, texts: list[str], *, as_target: bool, **limits: bool | int
) -> Mapping[str, object]:
    """What the tokenizer returns for sources, or for targets, with its special tokens. Raises BadInput if it fails."""
    call = cast(Callable[..., Mapping[str, object]], tokenizer)
    try:
        return call(**{"text_target" if as_target else "text": texts}, return_attention_mask=False, **limits)
    except Exception as error:  # `tokenizers` raises no other type
        raise _fails(error) from error


def _fails(error: Exception) -> BadInput:
    return BadInput(
        f"the tokenizer fails on a text: {excerpt(str(error))}",
        hint="use the tokenizer files that belong to the model",
    )


def opening_tokens(tokenizer: Tokenizer) -> list[int]:
    """The tokens that the tokenizer itself puts before a text: a BOS token, or none."""
    return tokens_around(tokenizer)[0]


def tokens_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer itself puts before a text, and behind it."""

    def ids(*, special: bool) -> list[int]:
        batch = tokenised(tokenizer, ["a"], special=special, offsets=False)
        return cast(list[list[int]], batch["input_ids"])[0]

    plain, full = ids(special=False), ids(special=True)
    at = next((at for at in range(len(full)) if full[at : at + len(plain)] == plain), 0)
    return full[:at], full[at + len(plain) :]
