"""The child process that renders chat templates, and the search for assistant turns in the rendered text.

A template is a program that comes with a model. `transformers` runs it in jinja's sandbox, which neither ends an
endless loop nor limits memory. So it runs in a process of its own, in which a timer and a limit on the address space
end nothing else. Invariant: this file imports nothing of ours, and only JSON crosses the pipes, one line each way:

 1. parent -> child   {"template", "variables", "limit_seconds", "limit_bytes", "start_seconds"}
 2. child  -> parent  {} when it is ready, or {"error": reason}
 3. parent -> child   {"messages", "tools", "variables", "locate", "muted"}, where "locate" is one of
                      null                              nothing
                      {"what": "prompt"}                nothing; the prompt for the next turn follows
                      {"what": "turns"}                 the assistant turns, each with the mark that ends it
                      {"what": "from", "message": k}    everything from message k on
                      {"what": "words", "messages": []} what stands in each of these messages, without marks
                      and "muted" has the messages whose turns are located as well, to be left out
 4. child  -> parent  {"text", "spans", "quiet", "muted", "remarks", "skips_header"} or {"error": reason}; then 3 again,
                      until the input ends
                      "spans": [start, end] or null (only for "words") each
                      "quiet": for each span null, or where it begins for a model that does not think
                      "muted": [start, end] of each muted turn; "remarks": [kind, what] each
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

MAX_RENDERED_CHARS = 64 << 20
_STAND_IN = "TextOfOneAssistantTurn"
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message with what the assistant thought before it answered: each template knows at most one of them."""
_THOUGHT, _THOUGHT_ENDS = "<think>", "</think>"
"""The marks around reasoning that stands in the content of a message."""
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")

_ASKED = ("enable_thinking", "thinking")
"""What templates ask whether the model thinks: each knows at most one of these."""
_THINKING: Mapping[Prompt, Mapping[str, bool]] = {
    "quiet": dict.fromkeys(_ASKED, False),
    "thinks": dict.fromkeys(_ASKED, True),
}

ChatMessage = dict[str, object]
CharSpan = tuple[int, int]
"""Characters [start, end) of a text."""
Prompt = Literal["none", "plain", "quiet", "thinks"]
"""Whether the prompt for the next turn follows the messages: not, as it is by default, without thinking, or with it."""
Render = Callable[[list[ChatMessage], Prompt], str]
"""Renders messages and a prompt. Raises RenderFailure."""


class RenderFailure(Exception):
    """Why the template cannot be used for a conversation."""


def has_generation_tag(template: str) -> bool:
    """Whether the template itself marks what the assistant wrote."""
    return _GENERATION_TAG.search(template) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The rendered conversation, and the parts of it that were asked for."""

    text: str
    spans: Sequence[CharSpan | None]
    """Characters of each part; None for the words of a message that were not found."""
    quiet: Sequence[int | None] = ()
    """For each span where it begins behind the prompt of a model that does not think; None: at the same place, or
    nothing depends on it. Empty: the same for all spans."""
    skips_header: bool = False
    """Whether turns begin behind their headers, because the template has no generation prompt."""


def find_turns(render: Render, messages: list[ChatMessage]) -> Found:
    """The rendered conversation and the characters of each assistant turn, found by rendering parts of it.

    A turn begins where the prompt for it ends (`messages[:k]` with the generation prompt), and it ends where
    `messages[:k + 1]` ends. Some templates render a turn differently when others follow it: they drop its reasoning.
    Then these parts are no prefixes of the conversation, and the turn is found by replacing its words by others. A
    template may have no generation prompt: then a turn begins behind its header, which is what stands before its words.
    Raises RenderFailure if a turn cannot be found.
    """
    text = render(messages, "none")
    spans: list[CharSpan] = []
    quiet: list[int | None] = []
    skips_header = False
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        start, other = _start_of_turn(render, messages[:index], text) if index else (None, None)
        if start is not None and (header := _header_length(render, messages, index, text[:start])):
            start, other, skips_header = start + header, None, True
        end = _prefix_length(render, messages[: index + 1], "none", text)
        if start is None or end is None:
            first, last = _find_by_stand_in(render, messages, index, text)
            start, end = first if start is None else start, last if end is None else end
        if start > end or (spans and start < spans[-1][1]):
            raise RenderFailure(
                f"assistant turn {index + 1} cannot be located: the chat template changes the order of the turns"
            )
        spans.append((start, end))
        quiet.append(other if other is not None and other <= end else None)
    return Found(text=text, spans=spans, quiet=quiet, skips_header=skips_header)


def find_completion(render: Render, messages: list[ChatMessage], first: int) -> Found:
    """The rendered conversation, and its characters from message `first` on: what follows the prompt for an answer.

    Raises RenderFailure if it is not found where the messages before it end, nor by the words of message `first`.
    """
    text = render(messages, "none")
    start, other = _start_of_turn(render, messages[:first], text)
    if start is None:
        around = _around_stand_in(render, messages, first, _words_alone(messages[first]), text)
        if around is None or messages[first].get("role") != "assistant":
            raise RenderFailure(
                "the completion cannot be located: the chat template changes the prompt when it is there"
            )
        start = len(around[0])
    return Found(text=text, spans=[(start, len(text))], quiet=[other])


def find_words(render: Render, messages: list[ChatMessage], wanted: list[int]) -> Found:
    """The rendered conversation, and the characters that each wanted message adds between its marks; None: not found.

    They are what changes when the message has other words and nothing else, as in axolotl: its reasoning and its tool
    calls are among them.
    """
    text = render(messages, "none")
    spans: list[CharSpan | None] = []
    for index in wanted:
        other: ChatMessage = {"role": messages[index]["role"]}
        around = _around_stand_in(render, messages, index, other, text)
        spans.append(None if around is None else (len(around[0]), len(text) - len(around[1])))
    return Found(text=text, spans=spans)


def remarks_on(messages: list[ChatMessage], tools: list[object] | None, text: str) -> list[tuple[str, str]]:
    """What the conversation has and its rendered text has not, and reasoning that the template did not recognise.

    Each with its kind: `lost` words, tool calls or tools; `reasoning` that is lost; `marks` of reasoning that the
    template took for words.
    """
    found = set()
    last = max((at for at, message in enumerate(messages) if message.get("role") == "assistant"), default=-1)
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        thoughts = [each for key in _REASONING_KEYS if isinstance(each := message.get(key), str)]
        if isinstance(content, str):
            thought, ends, words = content.rpartition(_THOUGHT_ENDS)
            thoughts += [thought.replace(_THOUGHT, "").replace(_THOUGHT_ENDS, "")] if ends else []
            if not _stands_in(words, text):
                found.add(("lost", f"text of {role} messages"))
            if ends and _has_marks_in_words(text):
                found.add(("marks", ""))
        if not all(_stands_in(each, text) for each in thoughts):
            found.add(("reasoning", "earlier" if index < last else "last"))
        if not all(_stands_in(_name_of(call), text) for call in _calls_in([message])):
            found.add(("lost", "tool calls"))
    if not all(_stands_in(_function_name(tool), text) for tool in tools or ()):
        found.add(("lost", "tools"))
    return sorted(found)


def _has_marks_in_words(text: str) -> bool:
    """Whether an end of reasoning has no beginning, or reasoning follows on reasoning."""
    marks = re.split(f"({_THOUGHT}|{_THOUGHT_ENDS})", text)
    for at in range(3, len(marks), 2):
        if marks[at] == _THOUGHT_ENDS == marks[at - 2] or (
            marks[at - 2] == _THOUGHT_ENDS and not marks[at - 1].strip()
        ):
            return True
    return marks[1:2] == [_THOUGHT_ENDS]


def _stands_in(content: str, text: str) -> bool:
    """Whether a template wrote this: as it is, or as JSON, without the white space around it."""
    stripped = content.strip()
    forms = (stripped, json.dumps(stripped, ensure_ascii=False)[1:-1], json.dumps(stripped)[1:-1])
    return any(form in text for form in forms)


def _function_name(tool: object) -> str:
    """The name of a tool; empty if it has none."""
    inner = tool.get("function", tool) if isinstance(tool, dict) else None
    return _name_of(inner) if isinstance(inner, dict) else ""


def _name_of(function: Mapping[str, object]) -> str:
    name = function.get("name")
    return name if isinstance(name, str) else ""


def _calls_in(messages: list[ChatMessage]) -> list[dict[str, object]]:
    """The functions that the tool calls of messages call, with their arguments."""
    calls = [call for message in messages if isinstance(each := message.get("tool_calls"), list) for call in each]
    found = [call.get("function", call) for call in calls if isinstance(call, dict)]
    return [each for each in found if isinstance(each, dict)]


def _with_arguments(messages: list[ChatMessage], convert: Callable[[object], object]) -> list[ChatMessage]:
    """The messages with the arguments of all tool calls converted."""
    changed = cast(list[ChatMessage], json.loads(json.dumps(messages)))
    for call in _calls_in(changed):
        call["arguments"] = convert(call.get("arguments"))
    return changed


def _parsed(arguments: object) -> object:
    """An object from its JSON text; anything else as it is."""
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _unparsed(arguments: object) -> object:
    """The JSON text of an object; anything else as it is."""
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


def _header_length(render: Render, messages: list[ChatMessage], index: int, prompt: str) -> int:
    """How many characters of header follow `prompt`, the conversation before a turn: 0 if the prompt has the header."""
    try:
        if render(messages[:index], "none") != prompt:
            return 0  # the template has a generation prompt
        probe = render([*messages[:index], {"role": "assistant", "content": _STAND_IN}], "none")
    except RenderFailure:
        return 0
    header, found, _ = probe[len(prompt) :].partition(_STAND_IN)
    return len(header) if found and header.strip() and probe.startswith(prompt) else 0


def _start_of_turn(render: Render, before: list[ChatMessage], text: str) -> tuple[int | None, int | None]:
    """Where the turn behind these messages begins: behind its prompt, and behind the prompt without thinking.

    The latter is looked for only where the first is not in the text, or where its last white space may share a token
    with the white space behind it: `<think>` and a line end, before a turn that begins with a line end. A template
    whose prompt is without thinking by default may have one with it.
    """
    start = _prefix_length(render, before, "plain", text)
    if start is not None and not text[max(0, start - 1) : start + 1].isspace():
        return start, None
    quiet = _prefix_length(render, before, "quiet", text)
    if start is None:
        return _prefix_length(render, before, "thinks", text) if quiet is None else quiet, None
    return start, None if quiet == start else quiet


def _prefix_length(render: Render, messages: list[ChatMessage], prompt: Prompt, text: str) -> int | None:
    try:
        prefix = render(messages, prompt)
    except RenderFailure:  # a template may reject a conversation that ends here
        return None
    return len(prefix) if text.startswith(prefix) else None


def _find_by_stand_in(render: Render, messages: list[ChatMessage], index: int, text: str) -> CharSpan:
    """The turn's content is what changes with its words. Its end mark is what follows when the turn is the last.

    Without words, the content is what changes if the message has words and nothing else.
    """
    message = _words_alone(messages[index])
    stand_in = _unused_words(text)
    last = [*messages[:index], {**message, "content": stand_in}]
    around = _around_stand_in(render, messages, index, message, text)
    _, found_last, closing = render(last, "none").partition(stand_in)
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
    """What stands in `text` before and behind what message `index` adds; None if that is not what differs.

    `message`: the same message without some of its parts. They may stand before its words, as reasoning does: then what
    the text and the changed text have in common stands before it.
    """
    stand_in = _unused_words(text)
    changed = [*messages[:index], {**message, "content": stand_in}, *messages[index + 1 :]]
    before, found, after = render(changed, "none").partition(stand_in)
    if _has_more(messages[index]) and not _has_more({**message, "content": ""}):
        before = _common_start(before, text)
    fits = text.startswith(before) and text.endswith(after) and len(before) + len(after) <= len(text)
    return (before, after) if found and fits else None


def _common_start(one: str, other: str) -> str:
    """The longest text that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))]


def _has_more(message: ChatMessage) -> bool:
    """Whether a message has reasoning or tool calls, or anything else that a template may write beside its words."""
    return bool(message.keys() - {"role", "content"}) or _THOUGHT_ENDS in str(message.get("content"))


def _words_alone(message: ChatMessage) -> ChatMessage:
    """A message whose words can be replaced by others: itself, or without its tool calls if it has no words."""
    return message if isinstance(message.get("content"), str) and message["content"] else {"role": "assistant"}


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
        tools = cast(list[object] | None, request["tools"])
        given = {"tools": tools, **cast(Mapping[str, object], request["variables"])}
        try:
            messages = self._with_fitting_arguments(cast(list[ChatMessage], request["messages"]), given)
            found = self._find(messages, given, cast(Mapping[str, object], request["locate"] or {}))
            muted = self._turns(messages, given, cast(list[int], request["muted"]))
        except RenderFailure as failure:
            return {"error": str(failure)}
        except MemoryError:
            return {"error": "the chat template needs too much memory for this conversation"}
        return {
            "text": found.text,
            "spans": found.spans,
            "quiet": [*found.quiet] or [None] * len(found.spans),
            "muted": muted,
            "remarks": remarks_on(messages, tools, found.text),
            "skips_header": found.skips_header,
        }

    def _find(self, messages: list[ChatMessage], given: Mapping[str, object], locate: Mapping[str, object]) -> Found:
        def render(some: list[ChatMessage], prompt: Prompt) -> str:
            return self._render(some, given, prompt=prompt)[0]

        match locate.get("what"):
            case "from":
                return find_completion(render, messages, cast(int, locate["message"]))
            case "words":
                return find_words(render, messages, cast(list[int], locate["messages"]))
            case "prompt":
                return Found(text=render(messages, "plain"), spans=[])
            case "turns" if not has_generation_tag(self._template):
                return find_turns(render, messages)
            case what:
                text, spans = self._render(messages, given, marks=what is not None)
                return Found(text=text, spans=spans)

    def _turns(self, messages: list[ChatMessage], given: Mapping[str, object], wanted: list[int]) -> list[CharSpan]:
        """The characters of these turns, whether the template marks what the assistant wrote or not."""
        if not wanted:
            return []
        found = find_turns(lambda some, prompt: self._render(some, given, prompt=prompt)[0], messages)
        turns = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
        return [cast(CharSpan, span) for index, span in zip(turns, found.spans, strict=True) if index in wanted]

    def _with_fitting_arguments(self, messages: list[ChatMessage], given: Mapping[str, object]) -> list[ChatMessage]:
        """The messages with the arguments of tool calls in the form that the template writes: an object, or its JSON.

        Most templates take objects, and write JSON text as text in quotes, or fail; some take JSON text only.
        """
        texts = [text for call in _calls_in(messages) if isinstance(text := call.get("arguments"), str)]
        if not any(call.get("arguments") for call in _calls_in(messages)):
            return messages
        for form in (messages, _with_arguments(messages, _parsed), _with_arguments(messages, _unparsed)):
            try:
                text = self._render(form, given)[0]
            except RenderFailure:
                continue
            if form is not messages or not any(json.dumps(each, ensure_ascii=False) in text for each in texts):
                return form
        return messages

    def _render(
        self, messages: list[ChatMessage], given: Mapping[str, object], *, prompt: Prompt = "none", marks: bool = False
    ) -> tuple[str, list[CharSpan]]:
        """The text and, with `marks`, the characters of its `{% generation %}` blocks."""
        variables = {**self._variables, **given, **_THINKING.get(prompt, {})}
        try:
            rendered, spans = self._render_jinja(
                conversations=[messages],
                chat_template=self._template,
                add_generation_prompt=prompt != "none",
                return_assistant_tokens_mask=marks,
                **variables,
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
