"""Calls a tokenizer, and finds the tokens that it puts around a text by itself.

Invariant: whatever a tokenizer raises is BadInput.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from ratel_cli.data.text.tokenizer import Tokenizer
from ratel_cli.errors import BadInput, excerpt


def tokenised(
    tokenizer: Tokenizer,
    texts: list[str],
    *,
    special: bool,
    offsets: bool = False,
    as_target: bool = False,
    most_tokens: int | None = None,
) -> Mapping[str, object]:
    """What the tokenizer returns for some texts. `special`: with the tokens that it adds by itself; `offsets`: with the
    characters of each token; `as_target`: as the second of two texts; `most_tokens`: the most, with truncation. Raises
    BadInput if it fails.
    """
    if not texts:
        return {"input_ids": [], "offset_mapping": []}
    call = cast(Callable[..., Mapping[str, object]], tokenizer)
    limits = {} if most_tokens is None else {"truncation": True, "max_length": most_tokens}
    try:
        return call(
            **{"text_target" if as_target else "text": texts},
            add_special_tokens=special,
            return_offsets_mapping=offsets,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
            **limits,
        )
    except Exception as error:  # `tokenizers` raises no other type
        raise BadInput(
            f"the tokenizer fails on a text: {excerpt(str(error))}",
            hint="use the tokenizer files that belong to the model",
        ) from error


def token_ids(
    tokenizer: Tokenizer,
    texts: list[str],
    *,
    special: bool = False,
    as_target: bool = False,
    most_tokens: int | None = None,
) -> list[list[int]]:
    """The tokens of each text; the rest as in `tokenised`."""
    found = tokenised(tokenizer, texts, special=special, as_target=as_target, most_tokens=most_tokens)
    return cast(list[list[int]], found["input_ids"])


def without_row(tokenizer: Tokenizer, token: int, num_embeddings: int) -> str:
    """Why a model cannot use a token of the tokenizer."""
    text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return f"the token {text!r} has the id {token}, but the model's embedding has only {num_embeddings} rows"


def opening_tokens(tokenizer: Tokenizer) -> list[int]:
    """The tokens that the tokenizer itself puts before a text: a BOS token, or none."""
    return tokens_around(tokenizer)[0]


def tokens_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer itself puts before a text, and behind it."""
    [plain], [full] = (token_ids(tokenizer, ["a"], special=special) for special in (False, True))
    at = next((at for at in range(len(full)) if full[at : at + len(plain)] == plain), 0)
    return full[:at], full[at + len(plain) :]
