"""What mistral-common's own `encode_chat_completion` makes of conversations, and its loss masks by brute force.

A conversation is given as OpenAI has it. Nothing here knows a control token, or how a message is encoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import cast

from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.validator import ValidationMode
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

Message = Mapping[str, object]
Tools = Sequence[Mapping[str, object]] | None


@cache
def _library(path: Path, mode: ValidationMode) -> MistralTokenizer:  # type: ignore[type-arg]
    return MistralTokenizer.from_file(str(path), mode=mode)


def whole(path: Path, messages: Sequence[Message], tools: Tools = None) -> list[int]:
    """The tokens of a conversation that ends with the assistant."""
    return _encode(path, ValidationMode.finetuning, messages, tools)


def prompt(path: Path, messages: Sequence[Message], tools: Tools = None) -> list[int]:
    """The tokens that the model answers."""
    return _encode(path, ValidationMode.test, messages, tools)


def turns(path: Path, messages: Sequence[Message]) -> list[list[int]]:
    """The tokens of each assistant turn, with the mark that ends it: what it adds to a question."""
    asked: list[Message] = [{"role": "user", "content": "?"}]
    before = prompt(path, asked)
    found = []
    for first, end in assistant_runs(messages):
        tokens = whole(path, [*asked, *messages[first:end]])
        assert tokens[: len(before)] == before
        found.append(tokens[len(before) :])
    return found


def mask_by_prefixes(path: Path, messages: Sequence[Message], tools: Tools = None) -> list[bool]:
    """Which tokens have loss: a turn begins where its prompt ends. For versions whose prompts are prefixes."""
    tokens = whole(path, messages, tools)
    mask = [False] * len(tokens)
    for first, end in assistant_runs(messages):
        before, behind = prompt(path, messages[:first], tools), whole(path, messages[:end], tools)
        assert tokens[: len(before)] == before and tokens[: len(behind)] == behind
        mask[len(before) : len(behind)] = [True] * (len(behind) - len(before))
    return mask


def mask_of_words(path: Path, messages: Sequence[Message], index: int) -> list[bool]:
    """Which tokens stand for the text of one message: those that change with it."""
    tokens = whole(path, messages)
    same_before, same_behind = len(tokens), len(tokens)
    for text in ("7", "Zebra."):
        changed = [*messages[:index], {**messages[index], "content": text}, *messages[index + 1 :]]
        other = whole(path, changed)
        same_before = min(same_before, _num_same(tokens, other))
        same_behind = min(same_behind, _num_same(tokens[::-1], other[::-1]))
    return [same_before <= at < len(tokens) - same_behind for at in range(len(tokens))]


def assistant_runs(messages: Sequence[Message]) -> list[tuple[int, int]]:
    """Messages [first, end) of each row of assistant messages."""
    found: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            first = found.pop()[0] if found and found[-1][1] == index else index
            found.append((first, index + 1))
    return found


def _num_same(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (first, second) in pairs if first != second), min(len(one), len(other)))


def _encode(path: Path, mode: ValidationMode, messages: Sequence[Message], tools: Tools) -> list[int]:
    asked = ChatCompletionRequest.from_openai(
        messages=[dict(message) for message in messages],  # type: ignore[arg-type]
        tools=[dict(tool) for tool in tools] if tools else None,
    )
    return cast(list[int], _library(path, mode).encode_chat_completion(asked).tokens)
