"""Rows to conversations: messages in the forms that datasets have, and which of them have loss.

It knows OpenAI's and TRL's messages (`role`, `content`), ShareGPT's (`from`, `value`), pairs of prompt and completion,
and instructions with a history. Invariant: every message of a draft has a role, and content or tool calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from ratel_cli.data.chat_child import ChatMessage
from ratel_cli.data.drafts import ChatDraft, TrainOnEos, Unusable
from ratel_cli.data.lines import json_name
from ratel_cli.errors import printable

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "observation": "tool"}
_FUNCTION_CALL = "function_call"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOptions:
    """What the config says about the messages of a dataset."""

    properties: Mapping[str, str] = field(default_factory=dict)
    """By property of a message, such as role and content: the key that the rows use."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """By role as written: the role for the chat template. `function_call`: the content is a tool call as JSON."""
    tools: str = "tools"
    """The column with the tools."""
    system: str | None = None
    """The column with a system prompt; None: no column."""
    system_prompt: str | None = None
    """The system prompt of all conversations, in place of their own; None: they have their own."""
    roles_to_train: tuple[str, ...] | None = None
    train_on_eos: TrainOnEos | None = None
    training_key: str | None = None
    """The key of a message that says whether it has loss."""

    @property
    def chooses_turns(self) -> bool:
        """Whether the config, and not the chat template, says which turns have loss."""
        return not (self.roles_to_train is None and self.train_on_eos is None and self.training_key is None)

    def draft(self, messages: list[ChatMessage], tools: list[object] | None) -> ChatDraft:
        """The conversation with its marks of loss. Raises Unusable."""
        if not self.chooses_turns:
            return ChatDraft(messages=messages, tools=tools)
        roles = {self._role(role) for role in self.roles_to_train or ("assistant",)}
        trained = []
        for index, message in enumerate(messages):
            flag = message.pop(self.training_key, None) if self.training_key is not None else None
            if flag is not None and not (isinstance(flag, bool) or flag in (0, 1)):
                raise Unusable(f"{printable(str(self.training_key))!r} of message {index + 1} must be true or false")
            if message["role"] in roles if flag is None else flag:
                trained.append(index)
        return ChatDraft(
            messages=messages, tools=tools, trained=tuple(trained), train_on_eos=self.train_on_eos or "turn"
        )

    def _role(self, written: str) -> str:
        return self.roles.get(written, _ROLES.get(written, written))


def conversation(record: dict[str, object], column: str, options: TurnOptions) -> ChatDraft:
    """The messages in one column, behind the system prompt in another, if there is one. Raises Unusable."""
    turns = with_system_prompt(record, options, messages_in(record, column, options))
    return options.draft(turns, tools_in(record, options.tools))


def instruction(record: dict[str, object], columns: tuple[str, ...], options: TurnOptions) -> ChatDraft:
    """Instruction and input as a user's turn, the output as the assistant's, behind earlier rounds. Raises Unusable.

    `columns`: those of instruction, input, output and, if there is one, history. As LLaMA-Factory reads its alpaca
    format: input follows the instruction on a line of its own, and the history is a list of pairs. If the input is the
    instruction's own column, there is no further input.
    """
    asked, answer = text_in(record, columns[0]), text_in(record, columns[2])
    extra = further_input(record, columns)
    earlier = _history(record, columns[3]) if len(columns) > 3 else []
    turns = [*earlier, _turn("user", f"{asked}\n{extra}" if extra else asked), _turn("assistant", answer)]
    return options.draft(with_system_prompt(record, options, turns), tools_in(record, options.tools))


def further_input(record: dict[str, object], columns: tuple[str, ...]) -> str:
    """The text in the second of these columns: instruction, input, output. Empty if there is none. Raises Unusable."""
    return "" if columns[1] == columns[0] or record.get(columns[1]) is None else text_in(record, columns[1])


def prompt_and_completion(record: dict[str, object], columns: tuple[str, str], options: TurnOptions) -> ChatDraft:
    """TRL's conversational prompt and completion: only the completion has loss. Raises Unusable."""
    prompt, completion = (messages_in(record, column, options) for column in columns)
    if prompt[-1]["role"] == "assistant":
        raise Unusable(f"{printable(columns[0])!r} ends with an assistant turn, so there is nothing to answer")
    messages = with_system_prompt(record, options, prompt)
    return ChatDraft(
        messages=[*messages, *completion], tools=tools_in(record, options.tools), completion_from=len(messages)
    )


def messages_in(record: dict[str, object], column: str, options: TurnOptions) -> list[ChatMessage]:
    """The messages in a column, checked, with our names of keys and roles. Raises Unusable."""
    if column not in record:
        raise Unusable(f"the field {printable(column)!r} is missing")
    turns = record[column]
    if not isinstance(turns, list):
        raise Unusable(f"{printable(column)!r} must be an array of messages, not {json_name(turns)}")
    if not turns:
        raise Unusable("the conversation has no messages")
    return [_message(turn, f"message {index + 1}", options) for index, turn in enumerate(turns)]


def tools_in(record: dict[str, object], column: str) -> list[object] | None:
    """The tools of a row: an array, or its JSON text. Raises Unusable."""
    tools = record.get(column)
    if isinstance(tools, str) and tools.strip():
        tools = _parsed(tools, printable(column))
    if tools is None or tools == "":
        return None
    if isinstance(tools, list):
        return tools or None
    raise Unusable(f"{printable(column)!r} must be an array, not {json_name(tools)}")


def text_in(record: dict[str, object], column: str) -> str:
    """The text in a column. Raises Unusable."""
    if column not in record:
        raise Unusable(f"the field {printable(column)!r} is missing")
    return checked_text(record[column], column)


def checked_text(value: object, what: str) -> str:
    """The value, if it is text that UTF-8 can represent. `what` names it. Raises Unusable."""
    if not isinstance(value, str):
        raise Unusable(f"{printable(what)!r} must be text, not {json_name(value)}")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise Unusable(f"{printable(what)!r} contains half of a surrogate pair") from None
    return value


def _message(turn: object, where: str, options: TurnOptions) -> ChatMessage:
    """Check role and content, and rename keys such as ShareGPT's `from` and `value`. Others stay, for the template."""
    if not isinstance(turn, dict):
        raise Unusable(f"{where} must be an object, not {json_name(turn)}")
    message: ChatMessage = {key: value for key, value in turn.items() if value is not None}
    names = {} if "role" in message else {"role": "from", "content": "value"}
    for name, key in {**names, **options.properties}.items():
        if key != name and key in message:
            message[name] = message.pop(key)
            names[name] = key
    if "role" not in message:
        raise Unusable(f"{where} has no role")
    role = checked_text(message["role"], f"role of {where}")
    message["role"] = options.roles.get(role, _ROLES.get(role, role) if "role" in names else role)
    if "content" in message:
        checked_text(message["content"], f"content of {where}")
    elif not message.get("tool_calls"):
        raise Unusable(f"{where} has no content")
    if message["role"] == _FUNCTION_CALL and _FUNCTION_CALL in options.roles.values():
        return {"role": "assistant", "tool_calls": _calls(message.get("content"), where)}
    return message


def _calls(content: object, where: str) -> list[object]:
    """Tool calls from the JSON text of LLaMA-Factory's function calls: one object, or an array of them."""
    calls = _parsed(content if isinstance(content, str) else "", f"content of {where}")
    found: list[object] = []
    for call in calls if isinstance(calls, list) else [calls]:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise Unusable(f"{where} is no tool call: an object with name and arguments is needed")
        arguments = call.get("arguments", {})
        found.append({"type": "function", "function": {"name": call["name"], "arguments": arguments}})
    if not found:
        raise Unusable(f"{where} has no tool call")
    return found


def _parsed(text: str, what: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unusable(f"{what!r} is not JSON") from error


def with_system_prompt(record: dict[str, object], options: TurnOptions, turns: list[ChatMessage]) -> list[ChatMessage]:
    """The turns behind the system prompt of all rows, which takes the place of their own, or behind that of a column.

    A column's is left out if it is empty, or if the conversation begins with one. Raises Unusable.
    """
    if options.system_prompt is not None:
        return [_turn("system", options.system_prompt), *(turn for turn in turns if turn["role"] != "system")]
    if options.system is None or record.get(options.system) is None or turns[0]["role"] == "system":
        return turns
    prompt = text_in(record, options.system)
    return [_turn("system", prompt), *turns] if prompt.strip() else turns


def _history(record: dict[str, object], column: str) -> list[ChatMessage]:
    rounds = record.get(column) or []
    name = printable(column)
    if not isinstance(rounds, list):
        raise Unusable(f"{name!r} must be an array of pairs, not {json_name(rounds)}")
    turns: list[ChatMessage] = []
    for number, pair in enumerate(rounds, start=1):
        if not isinstance(pair, list) or len(pair) != 2:
            raise Unusable(f"round {number} of {name!r} must be a pair of question and answer")
        question, answer = (checked_text(text, f"round {number} of {column}") for text in pair)
        turns += [_turn("user", question), _turn("assistant", answer)]
    return turns


def _turn(role: str, content: str) -> ChatMessage:
    return {"role": role, "content": content}
