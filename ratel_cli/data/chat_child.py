"""The child process that renders chat templates, and the search for assistant turns in the rendered text.

A template is a program that comes with a model. `transformers` runs it in jinja's sandbox, which neither ends an
endless loop nor limits memory. So it runs in a process of its own, in which a timer and a limit on the address space
end nothing else. Invariant: this file imports nothing of ours, and only JSON crosses the pipes, one line each way:

 1. parent -> child   {"template", "variables", "limit_seconds", "limit_bytes", "start_seconds"}
 2. child  -> parent  {} when it is ready, or {"error": reason}
 3. parent -> child   {"messages", "tools", "locate_turns"}
 4. child  -> parent  {"text", "spans": [[start, end], ...]} or {"error": reason}; then 3 again, until the input ends
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import cast

MAX_RENDERED_CHARS = 64 << 20
_STAND_IN = "TextOfOneAssistantTurn"
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")

ChatMessage = dict[str, object]
CharSpan = tuple[int, int]
"""Characters [start, end) of a text."""
Render = Callable[[list[ChatMessage], bool], str]
"""Renders messages; True adds the prompt for the next turn. Raises RenderFailure."""


class RenderFailure(Exception):
    """Why the template cannot be used for a conversation."""


def has_generation_tag(template: str) -> bool:
    """Whether the template itself marks what the assistant wrote."""
    return _GENERATION_TAG.search(template) is not None


def find_turns(render: Render, messages: list[ChatMessage]) -> tuple[str, list[CharSpan]]:
    """The rendered conversation and the characters of each assistant turn, found by rendering parts of it.

    A turn begins where the prompt for it ends (`messages[:k]` with the generation prompt), and it ends where
    `messages[:k + 1]` ends. Some templates render a turn differently when others follow it: they drop its reasoning.
    Then these parts are no prefixes of the conversation, and the turn is found by replacing its words by others.
    Raises RenderFailure if a turn cannot be found.
    """
    text = render(messages, False)
    spans: list[CharSpan] = []
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        start = _prefix_length(render, messages[:index], True, text) if index else None
        end = _prefix_length(render, messages[: index + 1], False, text)
        if start is None or end is None:
            first, last = _find_by_stand_in(render, messages, index, text)
            start, end = first if start is None else start, last if end is None else end
        if start > end or (spans and start < spans[-1][1]):
            raise RenderFailure(
                f"assistant turn {index + 1} cannot be located: the chat template changes the order of the turns"
            )
        spans.append((start, end))
    return text, spans


def _prefix_length(render: Render, messages: list[ChatMessage], prompt: bool, text: str) -> int | None:
    try:
        prefix = render(messages, prompt)
    except RenderFailure:  # a template may reject a conversation that ends here
        return None
    return len(prefix) if text.startswith(prefix) else None


def _find_by_stand_in(render: Render, messages: list[ChatMessage], index: int, text: str) -> CharSpan:
    """The turn's content is what changes with its words. Its end mark is what follows when the turn is the last."""
    content = messages[index].get("content")
    stand_in = _STAND_IN
    while stand_in in text:
        stand_in += "X"
    if not isinstance(content, str):
        raise RenderFailure(f"assistant turn {index + 1} cannot be located: it has no text")
    changed = [*messages[:index], {**messages[index], "content": stand_in}, *messages[index + 1 :]]
    before, found, after = render(changed, False).partition(stand_in)
    _, found_last, closing = render(changed[: index + 1], False).partition(stand_in)
    fits = text.startswith(before) and text.endswith(after) and len(before) + len(after) <= len(text)
    if not (found and found_last and fits):
        raise RenderFailure(
            f"assistant turn {index + 1} cannot be located in the rendered conversation; "
            "mark the assistant turns in the chat template with {% generation %}"
        )
    return len(before), len(text) - len(after) + (len(closing) if after.startswith(closing) else 0)


class ChatTemplate:
    """One template, rendered by transformers."""

    def __init__(self, template: str, variables: Mapping[str, object]) -> None:
        from transformers.utils import chat_template_utils

        self._template = template
        self._variables = variables
        self._render_jinja = cast(
            Callable[..., tuple[list[str], list[list[CharSpan]]]], chat_template_utils.render_jinja_template
        )

    def answer(self, request: Mapping[str, object]) -> dict[str, object]:
        """The reply to one request."""
        messages = cast(list[ChatMessage], request["messages"])
        tools = cast(list[object] | None, request["tools"])
        try:
            if not request["locate_turns"] or has_generation_tag(self._template):
                text, spans = self._render(messages, tools, marks=bool(request["locate_turns"]))
            else:
                text, spans = find_turns(lambda some, prompt: self._render(some, tools, prompt=prompt)[0], messages)
        except RenderFailure as failure:
            return {"error": str(failure)}
        except MemoryError:
            return {"error": "the chat template needs too much memory for this conversation"}
        return {"text": text, "spans": spans}

    def _render(
        self, messages: list[ChatMessage], tools: list[object] | None, *, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[CharSpan]]:
        """The text and, with `marks`, the characters of its `{% generation %}` blocks."""
        try:
            rendered, spans = self._render_jinja(
                conversations=[messages],
                tools=tools,
                chat_template=self._template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marks,
                **self._variables,
            )
        except MemoryError:
            raise
        except Exception as error:  # a template may raise anything: by raise_exception, a wrong type, bad syntax
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            raise RenderFailure(f"the chat template fails on this conversation: {reason}") from error
        if len(rendered[0]) > MAX_RENDERED_CHARS:
            raise RenderFailure(f"the chat template renders more than {MAX_RENDERED_CHARS} characters")
        return rendered[0], spans[0] if marks else []


def main() -> None:
    """Answer requests until the parent closes the pipe."""
    setup = json.loads(sys.stdin.readline())
    signal.alarm(setup["start_seconds"])
    try:
        template = ChatTemplate(setup["template"], setup["variables"])
        resource.setrlimit(resource.RLIMIT_AS, (setup["limit_bytes"], setup["limit_bytes"]))
    except Exception as error:  # noqa: BLE001  whatever it is, the parent reports it
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        return
    signal.alarm(0)
    print("{}", flush=True)
    for line in sys.stdin:
        # SIGALRM has no handler, so it ends this process wherever it is.
        signal.setitimer(signal.ITIMER_REAL, setup["limit_seconds"])
        print(json.dumps(template.answer(json.loads(line))), flush=True)
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
