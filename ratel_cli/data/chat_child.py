"""The process that renders chat templates, started by `data/chat.py`. Also where assistant turns are found.

A template is a program that came with a model: `transformers` runs it in jinja's sandbox, which neither ends an
endless loop nor bounds memory. So it runs here, where an alarm and an address-space limit kill only this process.
Invariant: imports nothing of ours and nothing but JSON crosses the pipes, one line each way per conversation.

 1. parent -> child   {"template", "variables", "limit_seconds", "limit_bytes", "start_seconds"}
 2. child  -> parent  {"ready": true}
 3. parent -> child   {"messages", "tools", "spans": whether turns are to be located}
 4. child  -> parent  {"text", "spans": [[start, end], ...]} or {"error": why}; back to 3 until end of file
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from collections.abc import Callable
from typing import Protocol, TextIO, cast

MAX_RENDERED_CHARS = 64 << 20
_STAND_IN = "TextOfOneAssistantTurn"
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")

Message = dict[str, object]
Span = tuple[int, int]
Render = Callable[[list[Message], bool], str]
_Plain = Callable[[list[Message], bool, list[object] | None], str]
_Marked = Callable[[list[Message], list[object] | None], tuple[str, list[Span]]]


class _RenderJinja(Protocol):
    """What we use of transformers' renderer: texts, and where `{% generation %}` blocks lie in them."""

    def __call__(
        self,
        conversations: list[list[Message]],
        *,
        tools: list[object] | None,
        chat_template: str,
        add_generation_prompt: bool,
        return_assistant_tokens_mask: bool,
        **variables: object,
    ) -> tuple[list[str], list[list[Span]]]: ...


class Refused(Exception):
    """The template cannot be used for this conversation."""


def has_generation_tag(template: str) -> bool:
    """Whether the template itself marks what the assistant wrote."""
    return _GENERATION_TAG.search(template) is not None


def locate_turns(render: Render, messages: list[Message]) -> tuple[str, list[Span]]:
    """The rendered conversation and the characters of each assistant turn, by rendering prefixes of it.

    A turn begins where the prompt for it ends (`messages[:k]` with the generation prompt) and ends where
    `messages[:k + 1]` ends. Templates that render an earlier turn otherwise than a last one (they drop its
    reasoning) have no such prefixes; there the turn is found by putting other words in its place.
    """
    text = render(messages, False)
    spans: list[Span] = []
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        start = _prefix_length(render, messages[:index], True, text) if index else None
        end = _prefix_length(render, messages[: index + 1], False, text)
        if start is None or end is None:
            first, last = _by_stand_in(render, messages, index, text)
            start, end = first if start is None else start, last if end is None else end
        if start > end or (spans and start < spans[-1][1]):
            raise Refused(f"assistant turn {index + 1} cannot be located: the template does not render in order")
        spans.append((start, end))
    return text, spans


def _prefix_length(render: Render, messages: list[Message], prompt: bool, text: str) -> int | None:
    try:
        prefix = render(messages, prompt)
    except Refused:  # templates may refuse a conversation that stops here
        return None
    return len(prefix) if text.startswith(prefix) else None


def _by_stand_in(render: Render, messages: list[Message], index: int, text: str) -> Span:
    """The content of one turn is what changes with it; its end mark is what follows when the turn is the last."""
    content = messages[index].get("content")
    stand_in = _STAND_IN
    while stand_in in text:
        stand_in += "X"
    if not isinstance(content, str):
        raise Refused(f"assistant turn {index + 1} has no text and the template renders it out of place")
    changed = [*messages[:index], {**messages[index], "content": stand_in}, *messages[index + 1 :]]
    before, found, after = render(changed, False).partition(stand_in)
    _, found_last, closing = render(changed[: index + 1], False).partition(stand_in)
    fits = text.startswith(before) and text.endswith(after) and len(before) + len(after) <= len(text)
    if not (found and found_last and fits):
        raise Refused(
            f"assistant turn {index + 1} cannot be located in what the chat template renders; "
            "a template with {% generation %} marks says where turns are"
        )
    return len(before), len(text) - len(after) + (len(closing) if after.startswith(closing) else 0)


def main() -> None:
    """Serves until the parent closes the pipe."""
    requests, answers = sys.stdin, sys.stdout
    setup = json.loads(requests.readline())
    signal.alarm(setup["start_seconds"])
    render, render_marked = _renderers(setup["template"], setup["variables"])
    resource.setrlimit(resource.RLIMIT_AS, (setup["limit_bytes"], setup["limit_bytes"]))
    signal.alarm(0)
    _answer(answers, {"ready": True})
    marked = has_generation_tag(setup["template"])
    for line in requests:
        signal.setitimer(signal.ITIMER_REAL, setup["limit_seconds"])  # SIGALRM is not handled: it ends us
        request = json.loads(line)
        try:
            text, spans = _serve(request, render, render_marked if marked else None)
            reply: dict[str, object] = {"text": text, "spans": spans}
        except Refused as refusal:
            reply = {"error": str(refusal)}
        except MemoryError:
            reply = {"error": "the chat template needs too much memory for this conversation"}
        _answer(answers, reply)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _serve(request: dict[str, object], render: _Plain, render_marked: _Marked | None) -> tuple[str, list[Span]]:
    messages, tools = cast(list[Message], request["messages"]), cast(list[object] | None, request["tools"])
    if not request["spans"]:
        return render(messages, False, tools), []
    if render_marked is not None:
        return render_marked(messages, tools)
    return locate_turns(lambda some, prompt: render(some, prompt, tools), messages)


def _answer(answers: TextIO, reply: dict[str, object]) -> None:
    answers.write(json.dumps(reply) + "\n")
    answers.flush()


def _renderers(template: str, variables: dict[str, object]) -> tuple[_Plain, _Marked]:
    from transformers.utils import chat_template_utils

    jinja = cast(_RenderJinja, chat_template_utils.render_jinja_template)

    def run(messages: list[Message], prompt: bool, tools: list[object] | None, marks: bool) -> tuple[str, list[Span]]:
        try:
            rendered, indices = jinja(
                conversations=[messages],
                tools=tools,
                chat_template=template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marks,
                **variables,
            )
        except MemoryError:
            raise
        except Exception as error:  # whatever a template may do: its own raise_exception, a type or syntax error
            raise Refused(f"the chat template refuses it: {type(error).__name__}: {str(error)[:200]}") from error
        if len(rendered[0]) > MAX_RENDERED_CHARS:
            raise Refused(f"the chat template renders more than {MAX_RENDERED_CHARS} characters")
        return rendered[0], indices[0] if marks else []

    return (
        lambda messages, prompt, tools: run(messages, prompt, tools, False)[0],
        lambda messages, tools: run(messages, False, tools, True),
    )


if __name__ == "__main__":
    main()
