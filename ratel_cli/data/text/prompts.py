"""Prompts: from a text, a conversation or the lines of a file or of stdin to the token ids that a model continues.

Invariant: the ids are those that stand before an answer in training: of a text with the tokenizer's opening tokens, and
of a conversation as the chat template renders it, with the prompt for the next turn.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ratel_cli.data.files.lines import is_object
from ratel_cli.data.text.chat_child import ChatMessage
from ratel_cli.data.text.choose_chat_encoder import choose_chat_encoder
from ratel_cli.data.text.conversations import content_text
from ratel_cli.data.text.drafts import Unusable
from ratel_cli.data.text.tokenise import opening_tokens, token_ids
from ratel_cli.data.text.tokenizer import NoTokenizer, Tokenizer, has_chat_template
from ratel_cli.errors import BadInput, excerpt, printable
from ratel_cli.input_files import open_to_read, uncompressed_name
from ratel_cli.units import MIB, format_bytes

_MOST_BYTES = 64 * MIB
"""The most bytes of a file with prompts, so that none can fill the memory."""

STDIN = Path("-")
"""What names stdin where a file is expected. A file of this name is `./-`."""

Prompt = str | list[ChatMessage]
"""A text, or a conversation."""


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file: of `.jsonl` a row each, with `prompt` or `messages`; of other files a line each.

    `STDIN` counts as `.jsonl` if its first line is a JSON object. The file may be compressed. Empty lines are skipped.
    Raises BadInput if the file cannot be read, or a row is no prompt.
    """
    name = "stdin" if path == STDIN else str(path)
    try:
        content = _content(path)
        if len(content) > _MOST_BYTES:
            raise BadInput(f"{name}: larger than {format_bytes(_MOST_BYTES)}", "give the prompts in several files")
        lines = content.decode("utf-8").split("\n")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadInput(f"{name}: cannot be read: {reason}") from error
    kept = [(number, line.rstrip("\r")) for number, line in enumerate(lines, start=1) if line.strip()]
    if not kept:
        raise BadInput(f"{name}: there are no prompts: it has no line with text")
    has_rows = is_object(kept[0][1]) if path == STDIN else uncompressed_name(path).suffix == ".jsonl"
    if not has_rows:
        return [line for _, line in kept]
    return [_of_row(line, f"{name}:{number}") for number, line in kept]


def encode_prompts(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], *, raw: bool, notice: Callable[[str], None]
) -> list[list[int]]:
    """The token ids of each prompt. `raw`: texts are continued as they are, without the chat template.

    Raises BadInput if there is no tokenizer, or if a prompt is empty or cannot be rendered.
    """
    if isinstance(tokenizer, NoTokenizer):
        raise BadInput(tokenizer.missing().message, "put the tokenizer's files next to the model")
    for number, prompt in enumerate(prompts, start=1):
        if not (prompt.strip() if isinstance(prompt, str) else prompt):
            raise BadInput(f"prompt {number} is empty", "write what the model should continue or answer")
    is_chat = has_chat_template(tokenizer) and not raw
    if not is_chat:
        ids = _encode_texts(tokenizer, prompts)
    else:
        with choose_chat_encoder(tokenizer, is_whole=lambda draft: False, notice=notice) as chats:
            found = chats.prompts(
                [[{"role": "user", "content": each}] if isinstance(each, str) else each for each in prompts]
            )
        ids = [_usable(each, number) for number, each in enumerate(found, start=1)]
    for number, each in enumerate(ids, start=1):
        if not each:
            raise BadInput(f"prompt {number} has no tokens")
    return ids


def _content(path: Path) -> bytes:
    """The first bytes, one more than may be. Raises OSError."""
    if path != STDIN:
        with open_to_read(path) as file:
            return file.read(_MOST_BYTES + 1)
    return b"" if sys.stdin is None else sys.stdin.buffer.read(_MOST_BYTES + 1)  # None: it was closed


def _of_row(line: str, place: str) -> Prompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{place}: not valid JSON: {excerpt(str(error))}") from error
    found = row.get("prompt", row.get("messages")) if isinstance(row, dict) else row
    if isinstance(found, list) and all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in found):
        return [_with_text(each, f"message {number}", place) for number, each in enumerate(found, start=1)]
    if not isinstance(found, str):
        raise BadInput(
            f"{place}: no prompt: a row must be a text, or have a text in `prompt` or, in `messages`, a list of"
            " messages with a `role` each"
        )
    return found


def _with_text(message: ChatMessage, where: str, place: str) -> ChatMessage:
    """A message whose content is a text, as in training, where it may be a list of parts."""
    if not isinstance(message.get("content"), list):
        return message
    try:
        return {**message, "content": content_text(message["content"], where)}
    except Unusable as unusable:
        raise BadInput(f"{place}: {unusable}") from unusable


def _encode_texts(tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> list[list[int]]:
    texts = []
    for number, prompt in enumerate(prompts, start=1):
        if not isinstance(prompt, str):
            raise BadInput(
                f"prompt {number} is a conversation, which needs a chat template", "give it as a text in `prompt`"
            )
        texts.append(prompt)
    opening = opening_tokens(tokenizer)
    return [each if each[: len(opening)] == opening else [*opening, *each] for each in token_ids(tokenizer, texts)]


def _usable(ids: list[int] | Unusable, number: int) -> list[int]:
    if isinstance(ids, Unusable):
        hint = "continue a text without the chat template: --raw"
        raise BadInput(f"prompt {number}: {printable(str(ids))}", hint) from ids
    return ids
