"""The child process that renders chat templates, and the search for assistant turns in the rendered text.

A template is a program that comes with a model. `transformers` runs it in jinja's sandbox, which neither ends an
endless loop nor limits memory. So it runs in a process of its own, in which a timer and a limit on the address space
end nothing else. Invariant: this file imports nothing of ours, and only JSON crosses the pipes, one line each way:

 1. parent -> child   {"template", "variables", "limit_seconds", "limit_bytes", "start_seconds"}
 2. child  -> parent  {} when it is ready, or {"error": reason}
 3. parent -> child   {"messages", "tools", "locate"}, where "locate" is one of
                      null                              nothing
                      {"what": "prompt"}                nothing; the prompt for the next turn follows
                      {"what": "turns"}                 the assistant turns, each with the mark that ends it
                      {"what": "from", "message": k}    everything from message k on
                      {"what": "words", "messages": []} what stands in each of these messages, without marks
 4. child  -> parent  {"text", "spans", "lost", "skips_header"} or {"error": reason}; then 3 again, until the input ends
                      "spans": [start, end] or null (only for "words") each; "lost": what the template did not write
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import cast

MAX_RENDERED_CHARS = 64 << 20
_STAND_IN = "TextOfOneAssistantTurn"
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message with what the assistant thought before it answered: each template knows at most one of them."""
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


def find_turns(render: Render, messages: list[ChatMessage]) -> tuple[str, list[CharSpan], bool]:
    """The rendered conversation and the characters of each assistant turn, found by rendering parts of it.

    A turn begins where the prompt for it ends (`messages[:k]` with the generation prompt), and it ends where
    `messages[:k + 1]` ends. Some templates render a turn differently when others follow it: they drop its reasoning.
    Then these parts are no prefixes of the conversation, and the turn is found by replacing its words by others. A
    template may have no generation prompt: then a turn begins behind its header, which is what stands before its words.
    The last value says whether a header was found in this way. Raises RenderFailure if a turn cannot be found.
    """
    text = render(messages, False)
    spans: list[CharSpan] = []
    skips_header = False
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        start = _prefix_length(render, messages[:index], True, text) if index else None
        if start is not None and (header := _header_length(render, messages, index, text[:start])):
            start, skips_header = start + header, True
        end = _prefix_length(render, messages[: index + 1], False, text)
        if start is None or end is None:
            first, last = _find_by_stand_in(render, messages, index, text)
            start, end = first if start is None else start, last if end is None else end
        if start > end or (spans and start < spans[-1][1]):
            raise RenderFailure(
                f"assistant turn {index + 1} cannot be located: the chat template changes the order of the turns"
            )
        spans.append((start, end))
    return text, spans, skips_header


def find_completion(render: Render, messages: list[ChatMessage], first: int) -> tuple[str, list[CharSpan]]:
    """The rendered conversation, and its characters from message `first` on: what follows the prompt for an answer.

    Raises RenderFailure if the messages before it, with the generation prompt, are no prefix of the conversation.
    """
    text = render(messages, False)
    start = _prefix_length(render, messages[:first], True, text)
    if start is None:
        raise RenderFailure("the completion cannot be located: the chat template changes the prompt when it is there")
    return text, [(start, len(text))]


def find_words(render: Render, messages: list[ChatMessage], wanted: list[int]) -> tuple[str, list[CharSpan | None]]:
    """The rendered conversation, and the characters that each wanted message adds between its marks; None: not found.

    They are what changes when the message has other words, as in axolotl.
    """
    text = render(messages, False)
    spans: list[CharSpan | None] = []
    for index in wanted:
        other: ChatMessage = {"role": messages[index]["role"]}
        around = _around_stand_in(render, messages, index, other, text)
        spans.append(None if around is None else (len(around[0]), len(text) - len(around[1])))
    return text, spans


def lost_parts(messages: list[ChatMessage], tools: list[object] | None, text: str) -> list[str]:
    """What the conversation has and its rendered text has not: words, reasoning, tool calls, tools."""
    lost = set()
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) and not _stands_in(content, text):
            lost.add(f"text of {message.get('role')} messages")
        reasoning = (message.get(key) for key in _REASONING_KEYS)
        if any(isinstance(words, str) and not _stands_in(words, text) for words in reasoning):
            lost.add(f"reasoning of {message.get('role')} messages")
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if not _stands_in(_function_name(call), text):
                lost.add("tool calls")
    if any(not _stands_in(_function_name(tool), text) for tool in tools or ()):
        lost.add("tools")
    return sorted(lost)


def _stands_in(content: str, text: str) -> bool:
    """Whether a template wrote this: as it is, or as JSON, without the white space around it."""
    stripped = content.strip()
    forms = (stripped, json.dumps(stripped, ensure_ascii=False)[1:-1], json.dumps(stripped)[1:-1])
    return any(form in text for form in forms)


def _function_name(call: object) -> str:
    """The name in a tool or a tool call; empty if it has none."""
    inner = call.get("function", call) if isinstance(call, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else ""


def _header_length(render: Render, messages: list[ChatMessage], index: int, prompt: str) -> int:
    """How many characters of header follow `prompt`, the conversation before a turn: 0 if the prompt has the header."""
    try:
        if render(messages[:index], False) != prompt:
            return 0  # the template has a generation prompt
        probe = render([*messages[:index], {"role": "assistant", "content": _STAND_IN}], False)
    except RenderFailure:
        return 0
    header, found, _ = probe[len(prompt) :].partition(_STAND_IN)
    return len(header) if found and header.strip() and probe.startswith(prompt) else 0


def _prefix_length(render: Render, messages: list[ChatMessage], prompt: bool, text: str) -> int | None:
    try:
        prefix = render(messages, prompt)
    except RenderFailure:  # a template may reject a conversation that ends here
        return None
    return len(prefix) if text.startswith(prefix) else None


def _find_by_stand_in(render: Render, messages: list[ChatMessage], index: int, text: str) -> CharSpan:
    """The turn's content is what changes with its words. Its end mark is what follows when the turn is the last."""
    if not isinstance(messages[index].get("content"), str):
        raise RenderFailure(f"assistant turn {index + 1} cannot be located: it has no text")
    stand_in = _unused_words(text)
    last = [*messages[:index], {**messages[index], "content": stand_in}]
    around = _around_stand_in(render, messages, index, messages[index], text)
    _, found_last, closing = render(last, False).partition(stand_in)
    if around is None or not found_last:
        raise RenderFailure(
            f"assistant turn {index + 1} cannot be located in the rendered conversation; "
            "mark the assistant turns in the chat template with {% generation %}"
        )
    before, after = around
    return len(before), len(text) - len(after) + (len(closing) if after.startswith(closing) else 0)


def _around_stand_in(
    render: Render, messages: list[ChatMessage], index: int, message: ChatMessage, text: str
) -> tuple[str, str] | None:
    """What stands before and behind the words of a message; None if they are not what differs from `text`."""
    stand_in = _unused_words(text)
    changed = [*messages[:index], {**message, "content": stand_in}, *messages[index + 1 :]]
    before, found, after = render(changed, False).partition(stand_in)
    fits = text.startswith(before) and text.endswith(after) and len(before) + len(after) <= len(text)
    return (before, after) if found and fits else None


def _unused_words(text: str) -> str:
    words = _STAND_IN
    while words in text:
        words += "X"
    return words


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
        locate = cast(Mapping[str, object], request["locate"] or {})
        spans: Sequence[CharSpan | None]
        skips_header = False

        def render(some: list[ChatMessage], prompt: bool) -> str:
            return self._render(some, tools, prompt=prompt)[0]

        try:
            match locate.get("what"):
                case "from":
                    text, spans = find_completion(render, messages, cast(int, locate["message"]))
                case "words":
                    text, spans = find_words(render, messages, cast(list[int], locate["messages"]))
                case "prompt":
                    text, spans = render(messages, True), []
                case "turns" if not has_generation_tag(self._template):
                    text, spans, skips_header = find_turns(render, messages)
                case what:
                    text, spans = self._render(messages, tools, marks=what is not None)
        except RenderFailure as failure:
            return {"error": str(failure)}
        except MemoryError:
            return {"error": "the chat template needs too much memory for this conversation"}
        lost = lost_parts(messages, tools, text)
        return {"text": text, "spans": spans, "lost": lost, "skips_header": skips_header}

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
