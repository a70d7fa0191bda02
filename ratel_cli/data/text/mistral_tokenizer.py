"""The tokenizer of the package mistral-common, which also encodes conversations: Mistral's models have it as reference.

It reads `tekken.json`, or a SentencePiece model whose name has a version. Both are data and run no code. Text never
becomes a control token such as `[INST]`; only the encoding of conversations writes them.

Invariant: the tokens of a conversation are those of mistral-common's own `encode_chat_completion`. Whatever the package
raises is BadInput for a file, and Unusable for a conversation. Importing this file imports nothing of the package.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Protocol, cast

from ratel_cli.commands import install_extras
from ratel_cli.data.text.drafts import Unusable
from ratel_cli.data.text.mistral_messages import MistralRequest
from ratel_cli.data.text.tokenizer import AddedToken, FastBackend
from ratel_cli.errors import BadInput, excerpt

_FILE_NAME = re.compile(r"tekken\.json|tokenizer\.model|.+\.model\.v\d+(m\d+)?")
_MISSING = "tokenizer_use_mistral_common: the package mistral-common is not installed here"
_ROLES = ("system", "user", "assistant", "tool")


class _Texts(Protocol):
    """The part that we use of the package's tokenizer of texts."""

    bos_id: int
    eos_id: int
    pad_id: int
    """-1: there is none."""
    n_words: int

    def encode(self, s: str, bos: bool, eos: bool) -> list[int]: ...
    def decode(self, tokens: list[int], special_token_policy: object) -> str: ...
    def id_to_piece(self, token_id: int) -> str: ...
    def is_special(self, token: int) -> bool: ...


class _Messages(Protocol):
    """The part that we use of the package's encoder of messages."""

    tokenizer: _Texts


class _Version(Protocol):
    value: str


class _Tokenized(Protocol):
    tokens: list[int]


class _Library(Protocol):
    """The part that we use of the package's whole tokenizer."""

    version: _Version
    instruct_tokenizer: _Messages

    def encode_chat_completion(self, request: object) -> _Tokenized: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What a message, or several of one role that are joined, adds to a conversation."""

    role: str
    tokens: Sequence[int]
    """Empty if the format leaves it out."""


def check_mistral_common() -> None:
    """Raise BadInput unless the package is installed."""
    if find_spec("mistral_common") is None:
        raise BadInput(_MISSING, f"{install_extras('mistral')}, or remove tokenizer_use_mistral_common")


def mistral_file(names: Sequence[str]) -> str | None:
    """The file that mistral-common takes of these: `tekken.json`, or the last one by name."""
    found = sorted(name for name in names if _FILE_NAME.fullmatch(name))
    return "tekken.json" if "tekken.json" in found else found[-1] if found else None


class MistralTokenizer:
    """A tokenizer of mistral-common as `Tokenizer` has them, with the encoding of conversations."""

    is_fast = False
    mask_token_id: int | None = None
    added_tokens_decoder: Mapping[int, AddedToken] = {}
    vocab_files_names: Mapping[str, str] = {}

    def __init__(self, path: Path) -> None:
        """Read a file. Raises BadInput."""
        check_mistral_common()
        self._path = path
        self._library = self._load("finetuning")  # a conversation ends with the assistant
        self._for_prompts: _Library | None = None
        self._texts = self._library.instruct_tokenizer.tokenizer
        self._blocks: list[Block] = []
        self._record_blocks()
        self.bos_token_id: int | None = self._texts.bos_id
        self.eos_token_id: int | None = self._texts.eos_id
        self.pad_token_id: int | None = self._texts.pad_id if self._texts.pad_id >= 0 else None
        self.special_tokens_map: Mapping[str, object] = {
            "bos_token": self._texts.id_to_piece(self._texts.bos_id),
            "eos_token": self._texts.id_to_piece(self._texts.eos_id),
        }
        self.chat_template: object = f"that of mistral-common, {self._library.version.value}"
        """Stands where others have a template: tokens depend on it, and conversations can be encoded."""

    @property
    def backend_tokenizer(self) -> FastBackend:
        """There is none: the tokenizer is not fast."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self._texts.n_words

    def __call__(
        self, text: list[str], *, add_special_tokens: bool, return_offsets_mapping: bool = False, **_options: object
    ) -> Mapping[str, object]:
        """The token ids of texts, with BOS where special tokens are asked for, as Llama's tokenizer has it."""
        assert not return_offsets_mapping, "it is not fast"
        return {"input_ids": [self._texts.encode(each, bos=add_special_tokens, eos=False) for each in text]}

    def decode(self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """The text of tokens. A model may have more ids than the tokenizer: those have no text."""
        assert not clean_up_tokenization_spaces
        from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy

        parts = []
        for is_special, group in groupby((each for each in ids if each < len(self)), self.is_control):
            if not is_special:
                parts.append(self._texts.decode(list(group), special_token_policy=SpecialTokenPolicy.IGNORE))
            elif not skip_special_tokens:
                parts += map(self._texts.id_to_piece, group)
        return "".join(parts)

    def get_chat_template(self) -> str:
        """There is none: conversations are encoded by `encode_chat`."""
        raise NotImplementedError

    def get_vocab(self) -> dict[str, int]:
        """What stands for the vocabulary in a hash: that of the file."""
        return {hashlib.sha256(self._path.read_bytes()).hexdigest(): len(self)}

    def is_control(self, token: int) -> bool:
        """Whether no text becomes this token."""
        return self._texts.is_special(token)

    def encode_chat(self, request: MistralRequest) -> tuple[list[int], list[Block]]:
        """The tokens of a conversation that ends with the assistant, and of what they are put together, in order.

        The blocks are at the end of the tokens, one behind the other. Raises Unusable, and BadInput if they are not.
        """
        self._blocks = []
        tokens = self._encode(self._library, request)
        together = [token for block in self._blocks for token in block.tokens]
        if tokens[len(tokens) - len(together) :] != together:
            raise BadInput(
                "this version of mistral-common puts conversations together in a way that Ratel does not know",
                "install another version of it, or remove tokenizer_use_mistral_common",
            )
        return tokens, self._blocks

    def encode_prompt(self, request: MistralRequest) -> list[int]:
        """The tokens that the model answers. Raises Unusable if the last message is the assistant's."""
        if self._for_prompts is None:
            self._for_prompts = self._load("test")
        return self._encode(self._for_prompts, request)

    def _encode(self, library: _Library, request: MistralRequest) -> list[int]:
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        read = cast(Callable[..., object], ChatCompletionRequest.from_openai)
        try:
            return library.encode_chat_completion(read(messages=request.messages, tools=request.tools)).tokens
        except Exception as error:
            raise Unusable(f"mistral-common rejects the conversation: {_reason(error)}") from error

    def _load(self, mode: str) -> _Library:
        """The package's tokenizer. It checks conversations by the mode. Raises BadInput."""
        try:
            from mistral_common.protocol.instruct.validator import ValidationMode
            from mistral_common.tokens.tokenizers.mistral import MistralTokenizer as Library

            return cast(_Library, Library.from_file(str(self._path), mode=ValidationMode[mode]))
        except Exception as error:
            raise BadInput(f"{self._path}: no usable tokenizer: {_reason(error)}") from error

    def _record_blocks(self) -> None:
        """From now on, note what the package's encoder of each message returns."""
        encoder = self._library.instruct_tokenizer

        def recorded(role: str, encode: Callable[..., object]) -> Callable[..., object]:
            def note(*arguments: object, **options: object) -> object:
                found = encode(*arguments, **options)
                tokens = found[0] if isinstance(found, tuple) else found  # with images and sound
                self._blocks.append(Block(role=role, tokens=cast(list[int], tokens)))
                return found

            return note

        for role in _ROLES:
            name = f"encode_{role}_message"
            setattr(encoder, name, recorded(role, getattr(encoder, name)))


def _reason(error: Exception) -> str:
    """An error of the package, or of its models, which name a field and more on lines of their own."""
    return excerpt(" ".join(str(error).partition(" [type=")[0].split())) or type(error).__name__
