"""Rows to conversations: messages in the forms that datasets have, and which of them have loss.

It knows OpenAI's and TRL's messages (`role`, `content`), ShareGPT's (`from`, `value`), pairs of prompt and completion,
and instructions with a history. Invariant: every message of a draft has a role, and content or tool calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ratel_cli.data.files.lines import json_name
from ratel_cli.data.files.media import is_media
from ratel_cli.data.text.chat_child import ChatMessage
from ratel_cli.data.text.drafts import ChatDraft, TrainOnEos, Unusable, of_type
from ratel_cli.errors import printable

_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "observation": "tool",
}
_TOOL_ROLES = {
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "tool_call": "function_call",
    "tool_calls": "function_call",
}
"""Names of roles that data sets have and chat templates do not."""
_FUNCTION_CALL = "function_call"
"""The role of a message whose content is a tool call as JSON. No chat template gets it."""
_WEIGHT = "weight"
"""OpenAI's key of a message: 1, or 0 for no loss on it."""
_CHOOSE = "`message_field_training: {}` makes it choose the turns that have loss"
_PARTS = "a turn has loss as a whole"
_MASK_KEYS = {
    **dict.fromkeys(("train", "training", "trainable", "loss", "loss_mask"), _CHOOSE),
    **dict.fromkeys(("train_detail", "training_detail"), _PARTS),
    "mask": "`message_field_training` names a key that is true for the turns that have loss",
}
"""Other tools' keys of a message that say whether it has loss, or which of its characters have; what to do here."""
_THINKING, _REASONING = "thinking", "reasoning_content"
"""The type of a part of a content that is a thought, and the key of it; the key that most chat templates read."""
_TEXT_PARTS = ("text", "input_text", "output_text")
_VARIABLES = "chat_template_kwargs"
"""TRL's column with what else the chat template gets."""


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
    drops_system_message: bool = False
    """Whether a conversation that begins with a system prompt of its own loses it."""
    roles_to_train: tuple[str, ...] | None = None
    train_on_eos: TrainOnEos | None = None
    training_key: str | None = None
    """The key of a message that says whether it has loss."""
    drops_media: bool = False
    """Whether images, video and sound among the parts of a message are left out. Otherwise they make it unusable."""
    closes_answers: bool = False
    """Whether answers that are compared end with an EOS token, whatever the template writes."""

    @property
    def chooses_turns(self) -> bool:
        """Whether the config, and not the chat template, says which turns have loss."""
        return not (self.roles_to_train is None and self.train_on_eos is None and self.training_key is None)

    def draft(
        self, record: Mapping[str, object], messages: list[ChatMessage], *, completion_from: int | None = None
    ) -> ChatDraft:
        """The conversation of a row with its marks of loss. Raises Unusable."""
        # Keys of messages that say in other tools which of them have loss, and that are not read.
        keys = {key for message in messages for key in _MASK_KEYS if key in message} - {self.training_key}
        remarks = tuple(("key", f"{key}; {_MASK_KEYS[key].format(key)}") for key in sorted(keys))
        # What else the chat template gets for this row: an object, or its JSON text.
        found = _structured(record, _VARIABLES)
        variables = {} if found is None else of_type(found, dict, f"{_VARIABLES!r} must be an object")
        muted: tuple[int, ...] = ()
        if self.training_key != _WEIGHT:  # of OpenAI, which are taken out
            weights = [message.pop(_WEIGHT, 1) for message in messages]
            muted = tuple(at for at, weight in enumerate(weights) if weight == 0)
        has_mute_answers = any(messages[index]["role"] == "assistant" for index in muted)
        draft = ChatDraft(
            messages=messages,
            tools=tools_in(record, self.tools),
            variables=variables,
            completion_from=completion_from,
            muted=muted,
            remarks=(*remarks, ("muted", "")) if has_mute_answers else remarks,
        )
        if completion_from is not None or not self.chooses_turns:
            return draft
        return replace(draft, trained=self._trained(messages, muted), train_on_eos=self.train_on_eos or "turn")

    def _trained(self, messages: list[ChatMessage], muted: tuple[int, ...]) -> tuple[int, ...]:
        """The messages that have loss, by their roles and by their own keys."""
        wanted = ("assistant",) if self.roles_to_train is None else self.roles_to_train
        roles = {self.roles.get(role, (_SHAREGPT_ROLES | _TOOL_ROLES).get(role, role)) for role in wanted}
        trained = []
        for index, message in enumerate(messages):
            flag = message.pop(self.training_key, None) if self.training_key is not None else None
            if flag is not None and not (isinstance(flag, bool) or flag in (0, 1)):
                raise Unusable(f"{printable(str(self.training_key))!r} of message {index + 1} must be true or false")
            if (message["role"] in roles if flag is None else flag) and index not in muted:
                trained.append(index)
        return tuple(trained)


def conversation(record: dict[str, object], column: str, options: TurnOptions) -> ChatDraft:
    """The messages in one column, behind the system prompt in another, if there is one. Raises Unusable."""
    return options.draft(record, with_system_prompt(record, options, messages_in(record, column, options)))


def instruction(record: dict[str, object], columns: tuple[str, ...], options: TurnOptions) -> ChatDraft:
    """Instruction and input as a user's turn, the output as the assistant's, behind earlier rounds. Raises Unusable.

    `columns`: those of instruction, input, output and, if there is one, history. As LLaMA-Factory reads its alpaca
    format: input follows the instruction on a line of its own, and the history is a list of pairs. If the input is the
    instruction's own column, there is no further input.
    """
    asked, answer = text_in(record, columns[0]), text_in(record, columns[2])
    extra = further_input(record, columns)
    earlier = history_in(record, columns[3]) if len(columns) > 3 else []
    turns = [*earlier, _turn("user", f"{asked}\n{extra}" if extra else asked), _turn("assistant", answer)]
    return options.draft(record, with_system_prompt(record, options, turns))


def question_and_answer(record: dict[str, object], columns: tuple[str, str], options: TurnOptions) -> ChatDraft:
    """A question as a user's turn, its answer as the assistant's. Raises Unusable."""
    question, answer = (text_in(record, column) for column in columns)
    turns = [_turn("user", question), _turn("assistant", answer)]
    return options.draft(record, with_system_prompt(record, options, turns))


def further_input(record: dict[str, object], columns: tuple[str, ...]) -> str:
    """The text in the second of these columns: instruction, input, output. Empty if there is none. Raises Unusable."""
    return "" if columns[1] == columns[0] or record.get(columns[1]) is None else text_in(record, columns[1])


def prompt_and_completion(record: dict[str, object], columns: tuple[str, str], options: TurnOptions) -> ChatDraft:
    """TRL's conversational prompt and completion: only the completion has loss. Raises Unusable."""
    prompt = messages_in(record, columns[0], options, role="user")
    completion = messages_in(record, columns[1], options, role="assistant")
    if prompt[-1]["role"] == "assistant":
        raise Unusable(f"{printable(columns[0])!r} ends with an assistant turn, so there is nothing to answer")
    before = with_system_prompt(record, options, prompt)
    return options.draft(record, [*before, *completion], completion_from=len(before))


def as_messages(value: object, options: TurnOptions) -> object:
    """The list of messages whose JSON text a value is, as CSV files and databases have it. Any other value as it is: an
    object, or a list of others, may be the answer itself."""
    with suppress(ValueError, RecursionError):
        found = json.loads(value) if isinstance(value, str) and value.lstrip()[:1] == "[" else None
        roles = {"role", "from", options.properties.get("role", "role")}
        contents = {"content", "value", "tool_calls", options.properties.get("content", "content")}
        if found and all(isinstance(each, dict) and each.keys() & roles and each.keys() & contents for each in found):
            return found
    return value


def messages_in(
    record: dict[str, object], column: str, options: TurnOptions, *, role: str | None = None
) -> list[ChatMessage]:
    """The messages in a column, checked, with our names of keys and roles. Raises Unusable.

    They may be JSON text. `role`: the column may also have one message, or the text of a message with this role.
    """
    if column not in record:
        raise Unusable(f"the field {printable(column)!r} is missing")
    turns = as_messages(record[column], options)
    if role is not None and isinstance(turns, str):
        return [_turn(role, checked_text(turns, column))]
    if role is not None and isinstance(turns, dict):
        turns = [turns]
    if not (listed := of_type(turns, list, f"{printable(column)!r} must be an array of messages")):
        raise Unusable("the conversation has no messages")
    return [_message(turn, f"message {index + 1}", options) for index, turn in enumerate(listed)]


def tools_in(record: Mapping[str, object], column: str) -> list[object] | None:
    """The tools of a row: an array, or its JSON text. Raises Unusable."""
    tools = _structured(record, column)
    return None if tools is None else of_type(tools, list, f"{printable(column)!r} must be an array") or None


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
    given = of_type(turn, dict, f"{where} must be an object")
    message: ChatMessage = {key: value for key, value in given.items() if value is not None}
    names = {} if "role" in message else {"role": "from", "content": "value"}
    for name, key in {**names, **options.properties}.items():
        if key != name and key in message:
            message[name] = message.pop(key)
            names[name] = key
    if "role" not in message:
        raise Unusable(f"{where} has no role")
    role = checked_text(message["role"], f"role of {where}")
    known = _SHAREGPT_ROLES | _TOOL_ROLES if "role" in names else _TOOL_ROLES
    message["role"] = options.roles.get(role, known.get(role, role))
    if message["role"] == _FUNCTION_CALL:
        message |= {"role": "assistant", "tool_calls": _calls(message.pop("content", None), where)}
    elif isinstance(message.get(_FUNCTION_CALL), dict):  # before OpenAI had tool calls
        message["tool_calls"] = [{"type": "function", "function": message.pop(_FUNCTION_CALL)}]
    message |= _thought_in(message, where)
    if "content" in message:
        message["content"] = content_text(message["content"], where, drops_media=options.drops_media)
    elif not message.get("tool_calls"):
        raise Unusable(f"{where} has no content")
    if options.training_key != _WEIGHT and message.get(_WEIGHT, 1) not in (0, 1):
        raise Unusable(f"the weight of {where} must be 0 or 1, not {printable(str(message[_WEIGHT]))}")
    return message


def _thought_in(message: Mapping[str, object], where: str) -> ChatMessage:
    """The reasoning that is the first part of a content, as Mistral has it, and the other parts; {} if there is none.

    Raises Unusable.
    """
    content = message.get("content")
    if message["role"] != "assistant" or not isinstance(content, list):
        return {}
    first = content[0] if content else None
    if not isinstance(first, dict) or first.get("type") != _THINKING:
        return {}
    if first.get("closed") is False or _REASONING in message:
        raise Unusable(f"{where} must have one complete reasoning block")
    return {_REASONING: content_text(first.get(_THINKING), f"the thought of {where}"), "content": content[1:]}


def content_text(content: object, where: str, *, drops_media: bool = False) -> str:
    """The text of a message: as it is, or its parts, one directly behind the other. Raises Unusable.

    `where` names the message. `drops_media`: images, video and sound among the parts are left out.
    """
    if not isinstance(content, list):
        return checked_text(content, f"content of {where}")
    texts = []
    for number, part in enumerate(content, start=1):
        place = f"part {number} of the content of {where}"
        kind = of_type(part, dict, f"{place} must be an object with a type and a text").get("type") or "text"
        if drops_media and is_media(str(kind)):
            continue
        if kind not in _TEXT_PARTS:
            way = "; `media: ignore` leaves it out" if is_media(str(kind)) else ""
            raise Unusable(f"{place} is of type {printable(str(kind))}; Ratel trains on text{way}")
        texts.append(checked_text(part.get("text"), f"text of {place}"))
    return "".join(texts)


def _calls(content: object, where: str) -> list[object]:
    """Tool calls from the JSON text of LLaMA-Factory's function calls: one object, or an array of them."""
    calls = _parsed(content if isinstance(content, str) else "", f"content of {where}")
    found: list[object] = []
    for item in calls if isinstance(calls, list) else [calls]:
        call = item.get("function", item) if isinstance(item, dict) else item
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise Unusable(f"{where} is no tool call: an object with name and arguments is needed")
        arguments = call.get("arguments", {})
        found.append({"type": "function", "function": {"name": call["name"], "arguments": arguments}})
    if not found:
        raise Unusable(f"{where} has no tool call")
    return found


def _structured(record: Mapping[str, object], column: str) -> object:
    """The value of a column, which may be its JSON text; None if it is empty. Raises Unusable."""
    value = record.get(column)
    return (_parsed(value, printable(column)) if value.strip() else None) if isinstance(value, str) else value


def _parsed(text: str, what: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unusable(f"{what!r} is not JSON") from error


def with_system_prompt(record: dict[str, object], options: TurnOptions, turns: list[ChatMessage]) -> list[ChatMessage]:
    """The turns behind the system prompt of all rows, which takes the place of their own, or behind that of a column.

    A column's is left out if it is empty, or if the conversation begins with one; or both are, if the config says so.
    Raises Unusable.
    """
    if options.system_prompt is not None:
        return [_turn("system", options.system_prompt), *(turn for turn in turns if turn["role"] != "system")]
    if options.drops_system_message:
        kept = turns[turns[0]["role"] == "system" :]
        if not kept:
            raise Unusable("the conversation has a system prompt alone")
        return kept
    if options.system is None or record.get(options.system) is None or turns[0]["role"] == "system":
        return turns
    prompt = text_in(record, options.system)
    return [_turn("system", prompt), *turns] if prompt.strip() else turns


def history_in(record: Mapping[str, object], column: str) -> list[ChatMessage]:
    """Earlier turns: pairs of question and answer; none if there is no such column. Raises Unusable."""
    name, turns = printable(column), list[ChatMessage]()
    rounds = of_type(_structured(record, column) or [], list, f"{name!r} must be an array of pairs")
    for number, pair in enumerate(rounds, start=1):
        if not isinstance(pair, list) or len(pair) != 2:
            raise Unusable(f"round {number} of {name!r} must be a pair of question and answer")
        question, answer = (checked_text(text, f"round {number} of {column}") for text in pair)
        turns += [_turn("user", question), _turn("assistant", answer)]
    return turns


def _turn(role: str, content: str) -> ChatMessage:
    return {"role": role, "content": content}
