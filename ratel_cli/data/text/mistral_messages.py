"""Conversations as mistral-common takes them: OpenAI's messages and tools, and ids of tool calls that it allows.

Invariant: only keys that are known cross; a conversation that is right for OpenAI's API is right for mistral-common.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ratel_cli.data.files.remarks import Remark
from ratel_cli.data.text.chat_child import REASONING_KEYS, ChatMessage
from ratel_cli.data.text.drafts import Unusable, of_type
from ratel_cli.errors import printable

_KEYS: Mapping[str, tuple[str, ...]] = {
    "system": ("role", "content"),
    "user": ("role", "content"),
    "assistant": ("role", "content", "tool_calls"),
    "tool": ("role", "content", "tool_call_id", "name"),
}
"""By role: the keys of a message that mean something to mistral-common."""
_CALL_ID = re.compile(r"[a-zA-Z0-9]{9}")
_NO_PARAMETERS: Mapping[str, object] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class MistralRequest:
    """A conversation for mistral-common."""

    messages: list[dict[str, object]]
    tools: list[dict[str, object]] | None
    remarks: tuple[Remark, ...] = ()
    """What was changed."""


def request_of(messages: Sequence[ChatMessage], tools: Sequence[object] | None) -> MistralRequest:
    """A conversation, as mistral-common takes it. Raises Unusable."""
    converted = [_message(message, f"message {number}") for number, message in enumerate(messages, start=1)]
    return MistralRequest(
        messages=converted,
        tools=[_tool(tool, f"tool {number}") for number, tool in enumerate(tools, start=1)] if tools else None,
        remarks=(("ids", ""),) if _set_ids(converted) else (),
    )


def _message(message: ChatMessage, where: str) -> dict[str, object]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _KEYS:
        raise Unusable(f"{where}: mistral-common has no role {printable(str(role))}")
    found = {key: message[key] for key in _KEYS[role] if message.get(key) is not None}
    calls = found.get("tool_calls")
    if calls is not None:
        listed = of_type(calls, list, f"the tool calls of {where} must be an array")
        found["tool_calls"] = [
            dict(of_type(call, dict, f"a tool call of {where} must be an object")) for call in listed
        ]
    thought = next((each for key in REASONING_KEYS if (each := message.get(key))), None)
    if role == "assistant" and isinstance(thought, str):
        text = found.get("content")
        chunks: list[object] = [{"type": "thinking", "thinking": thought}]
        found["content"] = [*chunks, {"type": "text", "text": text}] if text else chunks
    elif calls and not found.get("content"):
        found.pop("content", None)
    return found


def _tool(tool: object, where: str) -> dict[str, object]:
    """A tool, or the function that it has."""
    written = of_type(tool, dict, f"{where} must be an object")
    function = of_type(written.get("function", written), dict, f"{where} must be an object")
    found = {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}
    return {"type": "function", "function": {"parameters": _NO_PARAMETERS, **found}}


def _set_ids(messages: Sequence[dict[str, object]]) -> bool:
    """Give each tool call an id of nine letters and digits, and each result that of its call. Returns whether ids of
    the conversation were replaced, and not only added.

    An id is a hash, for a model writes random ones; the same conversation gets the same.
    """
    new: dict[object, str] = {}
    waiting: list[str] = []
    number, is_replaced = 0, False
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            waiting = []
            for call in calls:
                number += 1
                written = call.get("id")
                is_right = isinstance(written, str) and _CALL_ID.fullmatch(written) is not None
                call["id"] = written if is_right else hashlib.sha256(f"{number} {written}".encode()).hexdigest()[:9]
                is_replaced |= not is_right and written is not None
                if written is not None:
                    new[str(written)] = call["id"]
                waiting.append(call["id"])
        elif message["role"] == "tool":
            written = message.get("tool_call_id")
            if written is not None and str(written) in new:
                message["tool_call_id"] = new[str(written)]
            elif written is None and waiting:
                message["tool_call_id"] = waiting[0]
            if message.get("tool_call_id") in waiting:
                waiting.remove(str(message["tool_call_id"]))
    return is_replaced
