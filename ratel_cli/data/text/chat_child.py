"""The child process that renders chat templates, and the search for assistant turns in the rendered text.

A template is a program that comes with a model. `transformers` runs it in jinja's sandbox, which neither ends an
endless loop nor limits memory. So it runs in a process of its own, in which a timer and a limit on the address space
end nothing else. Invariant: this file imports nothing of ours, and only JSON crosses the pipes, one line each way:

 1. parent -> child   {"template", "tool_template", "variables", "marks", "stops", "limit_seconds", "limit_bytes",
                       "start_seconds"}
                      "tool_template": for conversations with tools; null: the same
                      "marks": the tokens that stand for themselves in a text, such as <|im_end|>
                      "stops": those of them that end what a model writes
 2. child  -> parent  {} when it is ready, or {"error": reason}
 3. parent -> child   {"messages", "tools", "variables", "locate", "muted"}, where "locate" is one of
                      null                              nothing
                      {"what": "prompt"}                nothing; the prompt for the next turn follows
                      {"what": "turns"}                 the assistant turns, each with its stop token
                      {"what": "from", "message": k}    everything from message k on
                      {"what": "words", "messages": []} what stands in each of these messages, without marks
                      and "muted" has the messages whose turns are located as well, to be left out
 4. child  -> parent  {"text", "spans", "quiet", "muted", "remarks", "skips_header"} or {"error": reason}; then 3 again,
                      until the input ends
                      "spans": [start, end] or null (only for "words") each
                      "quiet": for each span null, or where it begins for a model that does not think
                      "muted": [start, end] of each muted turn; "remarks": [kind, what] each

A turn is what the model must write: from the end of its header, which is the prompt for it as far as the conversation
has that, to its own stop token, whatever follows. A template may write that token as the next message's header: then it
belongs to both, and the last turn gets the one that another message would begin with.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

MAX_RENDERED_CHARS = 64 << 20
_STAND_IN = "TextOfOneAssistantTurn"
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message with what the assistant thought before it answered: each template knows at most one of them."""
_THOUGHT, _THOUGHT_ENDS = "<think>", "</think>"
"""The marks around reasoning that stands in the content of a message."""
_AS_GIVEN = "as given"
_TRAINED = ("turns", "from", "words")
"""What is located to be trained."""
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")

_ASKED = ("enable_thinking", "thinking")
"""What templates ask whether the model thinks: each knows at most one of these."""
_THINKING: Mapping[Prompt, Mapping[str, bool]] = {
    "quiet": dict.fromkeys(_ASKED, False),
    "thinks": dict.fromkeys(_ASKED, True),
}

ChatMessage = dict[str, object]
_QUESTION: list[ChatMessage] = [{"role": "user", "content": _STAND_IN}]
CharSpan = tuple[int, int]
"""Characters [start, end) of a text."""
Prompt = Literal["none", "plain", "quiet", "thinks"]
"""Whether the prompt for the next turn follows the messages: not, as it is by default, without thinking, or with it."""
Render = Callable[[list[ChatMessage], Prompt], str]
"""Renders messages and a prompt. Raises RenderFailure."""


class RenderFailure(Exception):
    """Why the template cannot be used for a conversation."""


def _is_refusal(failure: RenderFailure | None) -> bool:
    """Whether a template called `raise_exception`, which another form of the conversation must not get around."""
    return failure is not None and type(failure.__cause__).__name__ == "TemplateError"


def has_generation_tag(template: str) -> bool:
    """Whether the template itself marks what the assistant wrote."""
    return _GENERATION_TAG.search(template) is not None


def num_shared(one: Sequence[object], other: Sequence[object]) -> int:
    """How many items both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


class Marks:
    """The tokens that stand for themselves in a text, and which of them end what a model writes.

    Two texts have in common whole pieces: marks, tags, words and other characters.
    """

    def __init__(self, marks: Sequence[str] = (), stops: Sequence[str] = ()) -> None:
        one_of = [*(re.escape(mark) for mark in sorted(marks, key=len, reverse=True)), r"<[^<>\s]*>"]
        self._piece = re.compile("|".join([*one_of, r"\w+", r"[\s\S]"]))
        self._marks_alone = re.compile(rf"(?:{'|'.join([*one_of, chr(92) + 's'])})*")
        any_stop = "|".join(re.escape(stop) for stop in sorted(stops, key=len, reverse=True)) or r"(?!)"
        self._stop, self._next_stop = re.compile(any_stop), re.compile(rf"\s*({any_stop})")

    def num_shared(self, one: str, other: str, first: int = 0) -> int:
        """How many characters both begin with, in whole pieces. They are the same up to `first`."""
        for a, b in zip(self._piece.finditer(one, first), self._piece.finditer(other, first), strict=False):
            if a.group() != b.group():
                return a.start()
        return min(len(one), len(other))

    def are_all_of(self, text: str) -> bool:
        """Whether a text has nothing but marks and white space."""
        return self._marks_alone.fullmatch(text) is not None

    def last_stop(self, text: str, span: CharSpan) -> int | None:
        """Where the last stop token in these characters ends; None if there is none."""
        return max((found.end() for found in self._stop.finditer(text, *span)), default=None)

    def stop_at(self, text: str, place: int) -> str:
        """The stop token at this place, behind white space; empty if there is none."""
        found = self._next_stop.match(text, place)
        return found.group(1) if found else ""

    def own_end(self, text: str, span: CharSpan) -> int:
        """Where a turn ends: behind its stop token, be it the next message's header, and before a prompt behind it."""
        end = span[1]
        stop = self.last_stop(text, span)
        if stop is not None and self.are_all_of(text[stop:end]):
            return stop if text[stop:end].strip() else end
        found = self._next_stop.match(text, end)
        return found.end() if found else end


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


def find_turns(render: Render, messages: list[ChatMessage], marks: Marks | None = None) -> Found:
    """The rendered conversation and the characters of each assistant turn, found by rendering parts of it.

    A turn begins where the prompt for it ends (`messages[:k]` with the generation prompt), and it ends where
    `messages[:k + 1]` ends. Some templates render a turn differently when others follow it: they drop its reasoning.
    Then these parts are no prefixes of the conversation, and the turn is found by replacing its words by others. A
    template may have no generation prompt: then a turn begins behind its header, which is what stands before its words.
    Raises RenderFailure if a turn cannot be found.
    """
    marks = marks or Marks()
    text = render(messages, "none")
    spans: list[CharSpan] = []
    quiet: list[int | None] = []
    skips_header = False
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        start, other = None, None
        for before in _without_reasoning(messages[:index]) if index else ():
            start, other = _start_of_turn(render, before, text, marks)
            if start is not None:
                header = _header_length(render, before, text[:start], marks)
                start, other, skips_header = start + header, None if header else other, skips_header or header > 0
                break
        end = _end_of_turn(render, messages[: index + 1], text, start, marks)
        if start is None or end is None:
            first, last = _find_by_stand_in(render, messages, index, text, marks)
            header_end = _last_header_end(render, text, (spans[-1][1] if spans else 0, first))
            start, end = header_end if start is None else start, last if end is None else end
        if start > end or (spans and start < spans[-1][1]):
            raise RenderFailure(
                f"assistant turn {index + 1} cannot be located: the chat template changes the order of the turns"
            )
        spans.append((start, marks.own_end(text, (start, end))))
        quiet.append(other if other is not None and other <= end else None)
    return Found(text=text, spans=spans, quiet=quiet, skips_header=skips_header)


def find_completion(render: Render, messages: list[ChatMessage], first: int, marks: Marks) -> Found:
    """The rendered conversation, and its characters from message `first` on: what follows the prompt for an answer.

    Raises RenderFailure if it is not found where the messages before it end, nor by the words of message `first`.
    """
    text = render(messages, "none")
    start, other = _start_of_turn(render, messages[:first], text, marks)
    if start is None:
        around = _around_stand_in(render, messages, first, _words_alone(messages[first]), text)
        if around is None or messages[first].get("role") != "assistant":
            raise RenderFailure(
                "the completion cannot be located: the chat template changes the prompt when an answer follows"
            )
        start = len(around[0])
    return Found(text=text, spans=[(start, marks.own_end(text, (start, len(text))))], quiet=[other])


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
        thoughts = [each for key in REASONING_KEYS if isinstance(each := message.get(key), str)]
        if isinstance(content, str):
            thought, ends, words = content.rpartition(_THOUGHT_ENDS)
            thoughts += [thought.replace(_THOUGHT, "").replace(_THOUGHT_ENDS, "")] if ends else []
            if not _stands_in(words, text):
                found.add(("lost", f"text of {role} messages"))
            if ends and _has_marks_in_words(text):
                found.add(("marks", ""))
        if not all(_stands_in(each, text) for each in thoughts):
            found.add(("reasoning", "earlier" if index < last else "last"))
        calls = _calls_in([message])
        if not all(_stands_in(_name_of(call), text) for call in calls):
            found.add(("lost", "tool calls"))
        elif not all(_is_written(leaf, text) for call in calls for leaf in _leaves(_parsed(call.get("arguments")))):
            found.add(("lost", "arguments of tool calls"))
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
    if stripped in text:
        return True
    return any(json.dumps(stripped, ensure_ascii=is_ascii)[1:-1] in text for is_ascii in (False, True))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A form of messages, which says the same. A template may read only one."""

    in_parts: bool
    """Whether texts are lists of one part."""
    blank: str | None
    """The content of calls that have none; `as given`: what they have instead."""
    convert: Callable[[object], object] | None
    """Gives the arguments of calls another type; None: there are no arguments."""

    def of(self, messages: list[ChatMessage]) -> list[ChatMessage]:
        """The messages in this form."""
        if self.convert is None and not self.in_parts and self.blank == _AS_GIVEN:
            return messages
        changed = cast(list[ChatMessage], json.loads(json.dumps(messages)))
        for message in changed:
            if self.blank != _AS_GIVEN and message.get("tool_calls") and not message.get("content"):
                message["content"] = self.blank
            if self.in_parts and isinstance(message.get("content"), str):
                message["content"] = [{"type": "text", "text": message["content"]}]
        if self.convert is not None:
            for call in _calls_in(changed):
                call["arguments"] = self.convert(call.get("arguments"))
        return changed


def _forms(messages: list[ChatMessage]) -> list[Form]:
    """The forms that a template may read these messages in, the usual ones first."""
    has_arguments = any(call.get("arguments") for call in _calls_in(messages))
    has_text = any(isinstance(message.get("content"), str) for message in messages)
    has_blank = any(message.get("tool_calls") and not message.get("content") for message in messages)
    return [
        Form(in_parts=in_parts, blank=blank, convert=convert)
        for in_parts in ((False, True) if has_text else (False,))
        for blank in ((_AS_GIVEN, "", None) if has_blank else (_AS_GIVEN,))
        for convert in ((_parsed, _unparsed) if has_arguments else (None,))
    ]


def _has_foreign_values(messages: list[ChatMessage], text: str) -> bool:
    """Whether a template writes arguments as Python does or in quotes, or a list of parts as it is."""
    given = [call.get("arguments") for call in _calls_in(messages)]
    given += [content for message in messages if isinstance(content := message.get("content"), list)]
    for value in given:
        as_json, as_python = json.dumps(value, ensure_ascii=False), str(value)
        forms = [as_json] * (not isinstance(value, dict)) + [as_python] * (not isinstance(value, str))
        if value and any(form in text for form in forms):
            return True
    return False


def _is_written(value: object, text: str) -> bool:
    """Whether a template wrote a text, a number or the like, as JSON or as Python has it."""
    return _stands_in(value, text) if isinstance(value, str) else json.dumps(value) in text or str(value) in text


def _leaves(value: object) -> Iterator[object]:
    """The texts, numbers and the like in a JSON value."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)
    else:
        yield value


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


def _header_length(render: Render, before: list[ChatMessage], prompt: str, marks: Marks) -> int:
    """How many characters of header follow `prompt`, the conversation before a turn: 0 if the prompt has the header."""
    try:
        if render(before, "none") != prompt:
            return 0  # the template has a generation prompt
        probe = render([*before, {"role": "assistant", "content": _STAND_IN}], "none")
    except RenderFailure:
        return 0
    header, found, _ = probe[len(prompt) :].partition(_STAND_IN)
    # A template that always writes a prompt behind the last message has written that of the turn, too.
    asks = marks.own_end(probe, (len(prompt), len(probe))) < len(probe)
    return len(header) if found and header.strip() and probe.startswith(prompt) and not asks else 0


def _start_of_turn(render: Render, before: list[ChatMessage], text: str, marks: Marks) -> tuple[int | None, int | None]:
    """Where the turn behind these messages begins: behind its prompt, and behind the prompt without thinking.

    The latter is looked for only where the first is not in the text, or where its last white space may share a token
    with the white space behind it: `<think>` and a line end, before a turn that begins with a line end. A template
    whose prompt is without thinking by default may have one with it. If none of them is in the text, the turn begins
    where the text leaves the prompt: behind the header, before an empty thought that only prompts have.
    """
    start = _prefix_length(render, before, "plain", text)
    if start is not None and not text[max(0, start - 1) : start + 1].isspace():
        return start, None
    quiet = _prefix_length(render, before, "quiet", text)
    if start is None:
        start = _prefix_length(render, before, "thinks", text) if quiet is None else quiet
        return _end_of_header(render, before, text, marks) if start is None else start, None
    return start, None if quiet == start else quiet


def _last_header_end(render: Render, text: str, span: CharSpan) -> int:
    """Where the last header of a turn ends in these characters, as the prompt behind a question has it; else their end.

    For a turn that no prompt can be made for, such as one before which nothing stands.
    """
    question, asked = _rendered(render, _QUESTION), _rendered(render, _QUESTION, "plain")
    header = asked[len(question) :] if question and asked and asked.startswith(question) else ""
    place = text.rfind(header, *span)
    return span[1] if place < 0 else place + len(header)


def _end_of_header(render: Render, before: list[ChatMessage], text: str, marks: Marks) -> int | None:
    """Where the text leaves the prompt behind these messages, after some of it; None if it has nothing of it."""
    plain, asked = _rendered(render, before), _rendered(render, before, "plain")
    if plain is None or asked is None:
        return None
    if plain == asked:  # whatever is asked for, the template writes a prompt: some of it follows on the last stop token
        end = marks.num_shared(asked, text)
        stop = marks.last_stop(text, (0, end))
        is_header = stop is not None and text[stop:end].strip() and marks.are_all_of(text[stop:end] + asked[end:])
        return end if is_header else None
    if not (text.startswith(plain) and asked.startswith(plain)):
        return None
    end = marks.num_shared(asked, text, len(plain))
    return end if text[len(plain) : end].strip() else None


def _end_of_turn(render: Render, messages: list[ChatMessage], text: str, start: int | None, marks: Marks) -> int | None:
    """Where the last of these messages ends in the text of a conversation that goes on; None if it cannot be seen.

    A template may write something else behind the last message: then the turn ends where the prompt for another one
    begins, or behind the last stop token that the text has in common with the shorter one. It may leave out earlier
    reasoning, and what was said before a call.
    """
    words = _words_of(messages[-1])
    tried = _without_reasoning(messages)
    if messages[-1].get("tool_calls") and words:
        tried.append([*tried[-1][:-1], {**tried[-1][-1], "content": ""}])
    for some in tried:
        whole = _rendered(render, some)
        if whole is None:
            continue
        if text.startswith(whole):
            return len(whole)
        alone = _before_prompt(render, some, marks)
        if start is not None and len(alone) > start and text.startswith(alone):
            return len(alone)
        if start is not None and whole[:start] == text[:start]:
            shared = marks.num_shared(whole, text, start)
            stop = marks.last_stop(text, (start, shared))
            if stop is not None and _stands_in(_words_of(some[-1]), text[start:stop]):
                return shared if text[stop:shared].isspace() else stop
    return None


def _without_reasoning(messages: list[ChatMessage]) -> list[list[ChatMessage]]:
    """The messages, and the same without reasoning if they have some, which templates may leave out."""
    others = [{key: value for key, value in each.items() if key not in REASONING_KEYS} for each in messages]
    return [messages] if others == messages else [messages, others]


def _before_prompt(render: Render, messages: list[ChatMessage], marks: Marks) -> str:
    """What a template makes of messages that end with a turn, up to the prompt for the next one; empty if unknown."""
    before = messages[:-1] or _QUESTION
    plain, asked = _rendered(render, before), _rendered(render, before, "plain")
    followed = _rendered(render, messages, "plain")
    if plain is None or asked is None or followed is None:
        return ""
    prompt = asked[len(plain) if asked.startswith(plain) else marks.num_shared(plain, asked) :]
    return followed.removesuffix(prompt) if prompt and followed.endswith(prompt) else ""


def _words_of(message: ChatMessage) -> str:
    """The text of a message, without reasoning."""
    content = message.get("content")
    return content.rpartition(_THOUGHT_ENDS)[2] if isinstance(content, str) else ""


def _rendered(render: Render, messages: list[ChatMessage], prompt: Prompt = "none") -> str | None:
    """What a template makes of messages; None if it rejects them."""
    try:
        return render(messages, prompt)
    except RenderFailure:
        return None


def find_own_stop(render: Render, messages: list[ChatMessage], text: str, marks: Marks) -> str:
    """The stop token that a template would write behind the last turn if another message followed.

    Empty if the text ends with one, or if the template writes none there either.
    """
    message = messages[-1]
    if message.get("role") != "assistant" or marks.own_end(text, (0, len(text))) < len(text):
        return ""
    last_stop = marks.last_stop(text, (0, len(text)))
    if last_stop is not None and not text[last_stop:].strip():
        return ""
    calls = message.get("tool_calls")
    some = [*_without_reasoning(messages)[-1]]
    if _words_of(message).strip():
        some[-1] = {**some[-1], "content": _STAND_IN}
    alone = _rendered(render, some)
    longer = _rendered(render, [*some, {"role": "tool" if calls else "user", "content": _STAND_IN}])
    return marks.stop_at(longer, len(alone)) if alone and longer and longer.startswith(alone) else ""


def _prefix_length(render: Render, messages: list[ChatMessage], prompt: Prompt, text: str) -> int | None:
    prefix = _rendered(render, messages, prompt)  # a template may reject a conversation that ends here
    return len(prefix) if prefix is not None and text.startswith(prefix) else None


def _find_by_stand_in(render: Render, messages: list[ChatMessage], index: int, text: str, marks: Marks) -> CharSpan:
    """The turn's content is what changes with its words. Its end mark is what follows when the turn is the last, or
    before the prompt for another one.

    Without words, the content is what changes if the message has words and nothing else.
    """
    message = _words_alone(messages[index])
    stand_in = _unused_words(text)
    last = [*messages[:index], {**message, "content": stand_in}]
    around = _around_stand_in(render, messages, index, message, text)
    closings = [each.partition(stand_in)[2] for each in (render(last, "none"), _before_prompt(render, last, marks))]
    if around is None:
        raise RenderFailure(
            f"assistant turn {index + 1} cannot be located in the rendered conversation; "
            "mark the assistant turns in the chat template with {% generation %}"
        )
    before, after = around
    results = [*messages[: index + 1], *({**each, "content": stand_in} for each in messages[index + 1 :])]
    if messages[index].get("tool_calls") and (other := _rendered(render, results)) is not None:
        start, shared = len(before), num_shared(other, text)
        if start <= shared < len(text) - len(after):  # the results of calls stand within the turn: it ends before them
            return start, marks.last_stop(text, (start, shared)) or start
    # What else a turn has may stand behind its words: its calls.
    shared = marks.num_shared(closings[0], after) if messages[index].get("tool_calls") else 0
    closing = max((len(each) for each in closings if each and after.startswith(each)), default=shared)
    return len(before), len(text) - len(after) + closing


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
        before = text[: num_shared(before, text)]
    fits = text.startswith(before) and text.endswith(after) and len(before) + len(after) <= len(text)
    return (before, after) if found and fits else None


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
    """One template, and another one for conversations with tools, rendered by transformers."""

    def __init__(
        self, template: str, variables: Mapping[str, object], *, tool_template: str | None = None, marks: Marks
    ) -> None:
        """`tool_template`: for conversations with tools; None: the same."""
        from transformers.utils import chat_template_utils

        self._template = template
        self._tool_template = template if tool_template is None else tool_template
        self._variables = variables
        self._marks = marks
        self._render_jinja = cast(
            Callable[..., tuple[list[str], list[list[CharSpan]]]], chat_template_utils.render_jinja_template
        )

    def answer(self, request: Mapping[str, object]) -> dict[str, object]:
        """The reply to one request."""
        messages, tools = cast(list[ChatMessage], request["messages"]), cast(list[object] | None, request["tools"])
        given = {"tools": tools, **cast(Mapping[str, object], request["variables"])}
        locate = cast(Mapping[str, object], request["locate"] or {})
        try:
            form, written, remarks = self._fitting(messages, given)

            def render(some: list[ChatMessage], prompt: Prompt) -> str:
                is_known = some is messages and prompt == "none"
                return written if is_known else self._render(form.of(some), given, prompt=prompt)[0]

            if locate.get("what") == "turns" and has_generation_tag(self._chosen(given)):
                text, spans = self._render(form.of(messages), given, marks=True)
                found = Found(text=text, spans=[(span[0], self._marks.own_end(text, span)) for span in spans])
            else:
                found = self._find(render, messages, locate)
            wanted = cast(list[int], request["muted"])
            muted = [span for index, span in self._turns(render, messages) if index in wanted] if wanted else []
            stop = find_own_stop(render, messages, found.text, self._marks) if locate.get("what") in _TRAINED else ""
        except RenderFailure as failure:
            return {"error": str(failure)}
        except MemoryError:
            return {"error": "the chat template needs too much memory for this conversation"}
        end = len(found.text)

        def stopped(span: CharSpan | None) -> CharSpan | None:
            """A span with the stop token that was added, if it ends there."""
            return (span[0], end + len(stop)) if span is not None and span[1] == end else span

        return {
            "text": found.text + stop,
            "spans": [*found.spans] if locate.get("what") == "words" else [*map(stopped, found.spans)],
            "quiet": [*found.quiet] or [None] * len(found.spans),
            "muted": [*map(stopped, muted)],
            "remarks": remarks,
            "skips_header": found.skips_header,
        }

    def _find(self, render: Render, messages: list[ChatMessage], locate: Mapping[str, object]) -> Found:
        match locate.get("what"):
            case "from":
                return find_completion(render, messages, cast(int, locate["message"]), self._marks)
            case "words":
                return find_words(render, messages, cast(list[int], locate["messages"]))
            case "prompt":
                return Found(text=render(messages, "plain"), spans=[])
            case "turns":
                return find_turns(render, messages, self._marks)
            case _:
                return Found(text=render(messages, "none"), spans=[])

    def _turns(self, render: Render, messages: list[ChatMessage]) -> list[tuple[int, CharSpan]]:
        """The assistant turns by their numbers, whether the template marks what the assistant wrote or not."""
        turns = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
        spans = cast(Sequence[CharSpan], find_turns(render, messages, self._marks).spans)
        return list(zip(turns, spans, strict=True))

    def _fitting(
        self, messages: list[ChatMessage], given: Mapping[str, object]
    ) -> tuple[Form, str, list[tuple[str, str]]]:
        """The form in which the template writes most of the messages, its text, and remarks on that.

        Arguments of tool calls are objects before they are JSON text, contents are texts before they are lists of one
        part. Raises RenderFailure if the template fails on all forms, or refuses a conversation.
        """
        failure: RenderFailure | None = None
        best: tuple[int, Form, str, list[tuple[str, str]]] | None = None
        for form in _forms(messages):
            if form.in_parts and _is_refusal(failure):
                break
            try:
                text = self._render(form.of(messages), given)[0]
            except RenderFailure as error:
                failure = failure or error
                continue
            remarks = remarks_on(messages, cast(list[object] | None, given["tools"]), text)
            num_lost = sum(kind == "lost" for kind, _ in remarks) + _has_foreign_values(form.of(messages), text)
            if best is None or num_lost < best[0]:
                best = num_lost, form, text, remarks
            if not num_lost:
                break
        if best is None:
            assert failure is not None
            raise failure
        return best[1:]

    def _chosen(self, given: Mapping[str, object]) -> str:
        return self._template if given["tools"] is None else self._tool_template

    def _render(
        self, messages: list[ChatMessage], given: Mapping[str, object], *, prompt: Prompt = "none", marks: bool = False
    ) -> tuple[str, list[CharSpan]]:
        """The text and, with `marks`, the characters of its `{% generation %}` blocks."""
        variables = {**self._variables, **given, **_THINKING.get(prompt, {})}
        try:
            rendered, spans = self._render_jinja(
                conversations=[messages],
                chat_template=self._chosen(given),
                add_generation_prompt=prompt != "none",
                return_assistant_tokens_mask=marks,
                **variables,
            )
        except MemoryError:
            raise
        except Exception as error:  # a template may raise anything: by raise_exception, a wrong type, bad syntax
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            if any(each.get("tool_calls") or each["role"] == "tool" for each in messages):
                raise RenderFailure(f"the chat template cannot write tool calls: {reason}") from error
            raise RenderFailure(f"the chat template fails on this conversation: {reason}") from error
        if len(rendered[0]) > MAX_RENDERED_CHARS:
            raise RenderFailure(f"the chat template renders more than {MAX_RENDERED_CHARS} characters")
        return rendered[0], spans[0] if marks else []


def main() -> None:
    """Answer requests until the parent closes the pipe."""
    setup = json.loads(sys.stdin.readline())
    signal.alarm(setup["start_seconds"])
    try:
        marks = Marks(setup["marks"], setup["stops"])
        tool_template = setup["tool_template"]
        template = ChatTemplate(setup["template"], setup["variables"], tool_template=tool_template, marks=marks)
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
