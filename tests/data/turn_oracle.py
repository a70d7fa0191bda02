"""Where assistant turns are in a rendered conversation: found by rendering it with and without each of them.

What a turn's words change is found by comparing characters. From there a turn goes back to the end of the prompt for
it, as far as the text has that prompt, and on to the first mark at which its model stops. Nothing of Ratel is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

Message = dict[str, object]
Render = Callable[[list[Message], str], str]
"""Renders messages and a prompt for the next turn: `none`, `plain`, `quiet` without thinking, `thinks` with it."""
_REASONING = ("reasoning_content",)


def turns(
    render: Render, messages: list[Message], *, stops: Sequence[str], ends: Sequence[str], header: str | None
) -> list[tuple[int, int]]:
    """The characters of each assistant turn, without white space at its end."""
    text = render(messages, "none")
    return [
        _turn(render, messages, number, text, (*stops, *ends), header)
        for number, message in enumerate(messages)
        if message["role"] == "assistant"
    ]


def _turn(
    render: Render, messages: list[Message], number: int, text: str, marks: Sequence[str], header: str | None
) -> tuple[int, int]:
    first, last = _changed(render, messages, number, text)
    begin = 0 if number == 0 else _changed(render, messages, number - 1, text)[1]
    if header:
        start = text.rindex(header, begin, first) + len(header)
    else:
        start = _start(render, messages[:number], text, (begin, first))
    limit = len(text) if number + 1 == len(messages) else _changed(render, messages, number + 1, text)[0]
    at = last if limit > last else first  # what follows may stand within the turn
    found = min((place + len(mark) for mark in marks if (place := text.find(mark, at, limit)) >= 0), default=last)
    more = re.compile(rf"\s*(?:{'|'.join(map(re.escape, marks))})")
    while number + 1 == len(messages) and (behind := more.match(text, found)):
        found = behind.end()
    return start, found


def _start(render: Render, before: list[Message], text: str, limits: tuple[int, int]) -> int:
    """Where the text leaves the prompt for a turn, of those prompts with and without thinking that it has most of."""
    for some in _with_and_without_reasoning(before):
        plain, *others = (render(some, prompt) for prompt in ("plain", "quiet", "thinks"))
        if text.startswith(plain):
            return len(plain)
        start = max(_shared(text, prompt) for prompt in (plain, *others))
        if start > limits[0]:
            return start
    # Earlier turns look otherwise here: the header is as much of the prompt as stands before the turn's words.
    asked = render(before, "plain")
    header = asked[_alike(asked, render(before, "none")) :]
    for length in range(len(header), 0, -1):
        place = text.rfind(header[:length], *limits)
        if place >= 0:
            return place + _shared(text[place:], header)
    return limits[0]


def _shared(text: str, prompt: str) -> int:
    """How many characters both begin with, but for a mark that is cut in two."""
    number = _alike(text, prompt)
    opened = max(text.rfind("<", 0, number), text.rfind("[", 0, number))
    closed = max(text.rfind(">", 0, number), text.rfind("]", 0, number))
    return opened if opened > closed and number < len(prompt) else number


def _alike(one: str, other: str) -> int:
    """How many characters both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _with_and_without_reasoning(messages: list[Message]) -> list[list[Message]]:
    return [messages, [{key: value for key, value in each.items() if key not in _REASONING} for each in messages]]


def _changed(render: Render, messages: list[Message], number: int, text: str) -> tuple[int, int]:
    """The first and the last character that another letter in the last of a message's words changes.

    What a message writes last are its calls, or its words if it has none.
    """
    other = json.loads(json.dumps(messages))
    message = other[number]
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        calls[0]["function"]["arguments"]["city"] = "Zrome!"
    else:
        message["content"] = "Yother!"
    changed = render(other, "none")
    first = _alike(text, changed)
    behind = _alike(text[first:][::-1], changed[first:][::-1])
    return first, len(text) - behind
