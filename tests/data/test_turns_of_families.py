"""Where the turns of the families' chat templates begin and end, and which stop token each teaches.

The templates are those that TRL has, read from its package, and ours of further shapes. The oracle renders each
conversation with and without each turn.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import cast

import pytest
import trl
from transformers.utils.chat_template_utils import render_jinja_template

from ratel_cli.data.text.chat_child import ChatMessage, ChatTemplate, Marks
from tests.data.turn_oracle import Message, turns
from tests.data.turn_templates import FAMILIES, Family
from tests.tiers import sample

TEMPLATES = Path(trl.__file__).with_name("chat_templates")
STOPS = {
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek": ("<\uff5cend\u2581of\u2581sentence\uff5c>",),
    "diffusion_gemma": ("<turn|>", "<|tool_response>"),
    "gemma": ("<end_of_turn>", "<eos>"),
    "gemma4": ("<turn|>", "<|tool_response>"),
    "glm4moe": ("<|user|>", "<|observation|>", "<|endoftext|>"),
    "gptoss": ("<|return|>", "<|call|>"),
    "idefics3": ("<end_of_utterance>",),
    "lfm2": ("<|im_end|>",),
    "llama3": ("<|eot_id|>", "<|eom_id|>"),
    "llava_next": ("</s>",),
    "muse_glimmer": ("<|eot|>",),
    "nemotron": ("<|im_end|>",),
    "phi3": ("<|end|>", "<|endoftext|>"),
    "qwen": ("<|im_end|>", "<|endoftext|>"),
    "smolvlm": ("<end_of_utterance>",),
}
"""By the beginning of a template's name in TRL: what `eos_token_id` of such a model's generation_config.json lists."""


def _of_trl(path: Path) -> Family:
    name = path.stem.removesuffix("_training")
    stops = STOPS[max((each for each in STOPS if name.startswith(each)), key=len)]
    return Family(
        template=path.read_text(encoding="utf-8"),
        stops=stops,
        ends=("<|end|>",) if name == "gptoss" else (),
        adds={"user": "<|user|>", "tool": "<|observation|>"} if name == "glm4moe" else {},
        header={"llava_next": "", "diffusion_gemma": "<|turn>model\n"}.get(name),
        variables={"bos_token": "<bos>", "eos_token": stops[-1]},
    )


ALL = FAMILIES | {
    path.stem: _of_trl(path) for path in sorted(TEMPLATES.glob("*.jinja")) if not path.stem.endswith("_training")
}
CALLS = [{"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"city": "Zparis", "n": 3}}}]
TOOLS: list[object] = [{
    "type": "function",
    "function": {
        "name": "look",
        "description": "looks",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "where"}}},
    },
}]  # fmt: skip


def said(role: str, content: str, **others: object) -> Message:
    return {"role": role, "content": content, **others}


ASK, MORE = said("user", "Zask"), said("user", "Zmore")
ONE, TWO, CALL = said("assistant", "Zone"), said("assistant", "Ztwo"), said("assistant", "", tool_calls=CALLS)
RESULT = said("tool", "Zresult", tool_call_id="call00001", name="look")
THINKS: dict[str, object] = {"reasoning_content": "Zwhy"}
CONVERSATIONS: dict[str, list[Message]] = {
    "one turn": [ASK, ONE],
    "several": [ASK, ONE, MORE, TWO, said("user", "Zagain"), said("assistant", "Zthree")],
    "system": [said("system", "Zsystem"), ASK, ONE, MORE, TWO],
    "tools": [ASK, CALL, RESULT, ONE, MORE, TWO],
    "two calls": [ASK, CALL, RESULT, CALL, RESULT, ONE],
    "thinking": [ASK, ONE | THINKS, MORE, TWO | THINKS],
    "thinking before a call": [ASK, CALL | THINKS, RESULT, ONE | THINKS, MORE, TWO],
    "words before a call": [ASK, CALL | {"content": "Zlook"}, RESULT, ONE],
    "last: a call": [ASK, CALL],
    "last: thinking": [ASK, ONE, MORE, TWO | THINKS],
}


PROMPTS = {
    "quiet": {"enable_thinking": False, "thinking": False},
    "thinks": {"enable_thinking": True, "thinking": True},
}
FORGETS_TO_STOP = "deepseek_r1_distill"
"""Its template writes no stop token behind a single call."""


class Unfit(Exception):
    """A template refuses a conversation, or leaves out a part of it."""


Form = tuple[bool, bool, str | None]
"""Whether contents are lists of parts and arguments are JSON text, and what calls without words have as content."""


@functools.cache
def _forms(calls: bool) -> tuple[Form, ...]:
    return tuple(
        (in_parts, as_text, blank)
        for in_parts in (False, True)
        for as_text in ((False, True) if calls else (False,))
        for blank in (("", None) if calls else ("",))
    )


def in_form(messages: list[Message], form: Form) -> list[Message]:
    """The messages in a form that a template may read."""
    in_parts, as_text, blank = form
    given = cast(list[Message], json.loads(json.dumps(messages)))
    for message in given:
        for call in cast(list[dict[str, dict[str, object]]], message.get("tool_calls", [])):
            if as_text:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            message["content"] = message["content"] or blank
        if in_parts and isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
    return given


def rendered(family: Family, messages: list[Message], form: Form, *, prompt: str, has_tools: bool) -> str:
    """What the family's template makes of messages in a form, and of the prompt for the next turn."""
    texts, _ = render_jinja_template(
        conversations=[in_form(messages, form)],
        tools=TOOLS if has_tools else None,
        chat_template=family.template,
        add_generation_prompt=prompt != "none",
        **family.variables,
        **PROMPTS.get(prompt, {}),
    )
    return cast(str, texts[0])


def fitting(family: Family, messages: list[Message]) -> Form:
    """The form in which the template writes all that it is given. Raises Unfit."""
    has_calls = any("tool_calls" in each for each in messages)
    wanted = [cast(str, each["content"]) for each in messages] + (["Zparis", "look"] if has_calls else [])
    for form in _forms(has_calls):
        try:
            text = rendered(family, messages, form, prompt="none", has_tools=has_calls)
        except Exception:  # noqa: BLE001  a template may raise anything
            continue
        is_foreign = "'type': 'text'" in text or '"type": "text"' in text or "{'city'" in text or '\\"city' in text
        if all(words in text for words in wanted) and not is_foreign and not (form[2] is None and "None" in text):
            return form
    raise Unfit


def answer(family: Family, messages: list[Message]) -> dict[str, object]:
    """Ratel's answer: the text and the spans of its turns, or an error."""
    marks = {*re.findall(r"<[^<>\s'\"{}]+>|\]~b\]|\[e~\[|\[\|[a-z]+\|\]", family.template), *family.stops, *family.ends}
    template = ChatTemplate(family.template, family.variables, marks=Marks(sorted(marks), family.stops))
    tools = TOOLS if any("tool_calls" in each for each in messages) else None
    given = cast(list[ChatMessage], json.loads(json.dumps(messages)))
    return template.answer(
        {"messages": given, "tools": tools, "variables": {}, "locate": {"what": "turns"}, "muted": []}
    )


def _is_stopped(family: Family, turn: str) -> bool:
    return turn.rstrip().endswith(family.stops)


@pytest.mark.parametrize("name", sample(ALL, every=7))
def test_a_turn_is_what_the_model_must_write(name: str) -> None:
    family, num_found = ALL[name], 0
    for what, messages in CONVERSATIONS.items():
        reply, has_calls = answer(family, messages), any("tool_calls" in each for each in messages)
        if has_calls and name == FORGETS_TO_STOP:
            continue
        try:
            form = fitting(family, messages)
        except Unfit:
            remarks = cast(list[tuple[str, str]], reply.get("remarks", []))
            assert "error" in reply or "lost" in {kind for kind, _ in remarks}, what
            continue

        def render(some: list[Message], prompt: str, form: Form = form, has_tools: bool = has_calls) -> str:
            return rendered(family, some, form, prompt=prompt, has_tools=has_tools)

        assert "error" not in reply, (what, reply)
        text = render(messages, "none")
        expected = turns(render, messages, stops=family.stops, ends=family.ends, header=family.header)
        added = ""
        if not _is_stopped(family, text[slice(*expected[-1])]):
            added = family.adds.get("tool" if "tool_calls" in messages[-1] else "user", "")
            expected[-1] = expected[-1][0], len(text) + len(added)
        whole = cast(str, reply["text"])
        found = [
            (start, start + len(whole[start:end].rstrip())) for start, end in cast(list[list[int]], reply["spans"])
        ]
        assert whole == text + added, what
        assert [whole[slice(*span)] for span in found] == [whole[slice(*span)] for span in expected], what
        assert found == expected, what
        written = [whole[slice(*span)] for span in found]
        assert all(each.rstrip().endswith((*family.stops, *family.ends)) for each in written), (what, written)
        num_found += 1
    assert num_found >= 2, "the template refuses nearly everything"
