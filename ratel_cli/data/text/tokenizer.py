"""What we use of a tokenizer, the tokenizer of a model that has none, and the hash of what token ids depend on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Protocol

from ratel_cli.errors import BadInput
from ratel_cli.json_fields import hash_of


class FastBackend(Protocol):
    """The part that we use of the `tokenizers` object in a fast tokenizer."""

    def to_str(self) -> str: ...


class AddedToken(Protocol):
    """The part that we use of a token that is found in a text before anything else is done to it."""

    content: str
    normalized: bool
    """It is found in the normalised text."""
    single_word: bool
    """It is found only as a word of its own."""


class Tokenizer(Protocol):
    """The part that we use of a tokenizer of transformers."""

    is_fast: bool
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    mask_token_id: int | None
    special_tokens_map: Mapping[str, object]
    vocab_files_names: Mapping[str, str]
    """The names of the files that it is made of."""
    chat_template: object

    @property
    def backend_tokenizer(self) -> FastBackend: ...
    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...
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
    def decode(self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...
    def get_chat_template(self) -> str: ...
    def get_vocab(self) -> dict[str, int]: ...


class NoTokenizer:
    """The tokenizer of a model without tokenizer files: only rows of token ids can be trained on."""

    def __init__(self, reason: str, *, num_tokens: int = 0) -> None:
        """`reason` is why there is none, for the error."""
        self._reason = reason
        self.num_tokens = num_tokens
        """The rows of the model's embedding, once they are known."""
        self.is_fast = False
        self.bos_token_id: int | None = None
        self.eos_token_id: int | None = None
        self.pad_token_id: int | None = None
        self.mask_token_id: int | None = None
        self.special_tokens_map: Mapping[str, object] = {}
        self.vocab_files_names: Mapping[str, str] = {}
        self.chat_template: object = None

    def missing(self) -> BadInput:
        """The error for rows that have to be tokenised."""
        return BadInput(
            f"no usable tokenizer: {self._reason}",
            hint="put the tokenizer's files next to the model, or train on token ids with type: tokens",
        )

    @property
    def backend_tokenizer(self) -> FastBackend:
        raise self.missing()

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        raise self.missing()

    def __len__(self) -> int:
        return self.num_tokens

    def __call__(self, *_arguments: object, **_options: object) -> Mapping[str, object]:
        raise self.missing()

    def decode(self, *_arguments: object, **_options: object) -> str:
        raise self.missing()

    def get_chat_template(self) -> str:
        raise self.missing()

    def get_vocab(self) -> dict[str, int]:
        return {"any token": self.num_tokens}


def num_ids(tokenizer: Tokenizer) -> int:
    """How many rows an embedding of all its tokens has. There may be ids that are no token's."""
    return max([len(tokenizer), *(1 + token for token in tokenizer.get_vocab().values() if tokenizer.is_fast)])


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


def tool_template(tokenizer: Tokenizer) -> str | None:
    """The chat template for conversations with tools, as transformers chooses it; None: the same as for others."""
    named = tokenizer.chat_template
    return named.get("tool_use") if isinstance(named, dict) else None
