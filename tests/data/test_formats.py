"""The type of a dataset, and every reason why a row does not fit it."""

from __future__ import annotations

import json

import pytest

from ratel_cli.data.sources.formats import RowFormat, decide_format
from ratel_cli.data.text.conversations import TurnOptions
from ratel_cli.data.text.drafts import ChatDraft, TextDraft, TokensDraft, Unusable
from ratel_cli.data.text.rows import DatasetSource
from ratel_cli.errors import BadInput

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("columns", "kind", "used"),
    [
        ("messages", "messages", ("messages",)),
        ("conversations", "messages", ("conversations",)),
        ("messages conversations", "messages", ("messages",)),
        ("messages text", "messages", ("messages",)),
        ("instruction output", "alpaca", ("instruction", "input", "output")),
        ("instruction input output text", "alpaca", ("instruction", "input", "output")),
        ("input_ids", "tokens", ("input_ids", "labels")),
        ("input_ids labels text", "tokens", ("input_ids", "labels")),
        ("text", "completion", ("text",)),
        ("text prompt completion", "prompt_completion", ("prompt", "completion")),
        ("messages prompt completion", "prompt_completion", ("prompt", "completion")),
        ("messages prompt", "messages", ("messages",)),
        ("prompt completion", "prompt_completion", ("prompt", "completion")),
        ("question answer", "question_answer", ("question", "answer")),
    ],
)
def test_auto_chooses_by_the_columns(columns: str, kind: str, used: tuple[str, ...]) -> None:
    record: dict[str, object] = dict.fromkeys(columns.split(), "x")
    found = decide_format(DatasetSource(path="p"), record, has_chat_template=True)
    assert (found.kind, found.columns) == (kind, used)
    for column in used[:1]:
        assert column in found.describe()


def test_questions_without_a_chat_template_become_alpaca() -> None:
    record: dict[str, object] = {"question": "q", "answer": "a"}
    found = decide_format(DatasetSource(path="p"), record, has_chat_template=False)
    assert (found.kind, found.columns) == ("alpaca", ("question", "input", "answer"))
    assert found.draft(record) == TextDraft(prompt=_alpaca("q"), answer="a")


BODY: dict[str, object] = {"body": "x"}
CHATS: dict[str, object] = {"turns": TURNS}
PAIRED = {**dict.fromkeys(("prompt", "completion", "text", "body"), "x"), **CHATS}
ALL = {**PAIRED, "messages": TURNS}


@pytest.mark.parametrize(
    ("keys", "record", "kind", "used"),
    [
        ({"type": "completion"}, BODY, "completion", ("text",)),
        ({"type": "completion", "field": "body"}, BODY, "completion", ("body",)),
        ({"field": "body"}, BODY, "completion", ("body",)),
        ({"type": "alpaca", "field_output": "answer"}, BODY, "alpaca", ("instruction", "input", "answer")),
        ({"type": "tokens"}, BODY, "tokens", ("input_ids", "labels")),
        ({"type": "chat_template", "field_messages": "turns"}, CHATS, "messages", ("turns",)),
        ({"field_messages": "turns"}, CHATS, "messages", ("turns",)),
        # A prompt and its completion come first, as in TRL, unless the type or other columns are the user's choice.
        ({}, ALL, "prompt_completion", ("prompt", "completion")),
        ({"type": "completion"}, ALL, "completion", ("text",)),
        ({"field": "body"}, PAIRED, "completion", ("body",)),
        ({"field_messages": "turns"}, ALL, "messages", ("turns",)),
        ({"field_instruction": "text", "field_output": "body"}, PAIRED, "alpaca", ("text", "input", "body")),
        ({"type": "chat_template"}, ALL, "messages", ("messages",)),
    ],
)
def test_settings_come_before_columns(
    keys: dict[str, str], record: dict[str, object], kind: str, used: tuple[str, ...]
) -> None:
    found = decide_format(DatasetSource(path="p", **keys), record, has_chat_template=True)  # type: ignore[arg-type]
    assert (found.kind, found.columns) == (kind, used)


def test_unknown_columns_are_named() -> None:
    with pytest.raises(BadInput, match="no dataset type fits the columns one, two") as caught:
        decide_format(DatasetSource(path="p"), {"one": 1, "two": 2}, has_chat_template=True)
    assert caught.value.hint is not None


@pytest.mark.parametrize(
    ("record", "what", "hint"),
    [
        ({"chosen": "a", "rejected": "b"}, "preference data .chosen and rejected", "field: chosen"),
        (
            {"prompt": "p", "chosen": TURNS, "rejected": TURNS},
            "preference data .chosen and rejected",
            "field_messages: chosen",
        ),
        ({"conversations": [], "kto_tag": True, "x": 1}, "marked good or bad", "type: chat_template"),
        ({"messages": TURNS, "label": False}, "marked good or bad", "type: chat_template"),
        (
            {"input": {}, "preferred_output": [], "non_preferred_output": []},
            "preferred and other answers",
            "prompt and",
        ),
        ({"instruction": "a", "kto_tag": True}, "marked good or bad", None),
        ({"prompt": "a", "completion": "b", "label": False}, "marked good or bad", None),
        ({"prompt": "a", "completions": ["b"], "labels": [True]}, "a label for each step", None),
    ],
)
def test_preference_data_is_named_as_such(record: dict[str, object], what: str, hint: str | None) -> None:
    with pytest.raises(BadInput, match=f"p: its rows are .*{what}.* (`rl: |Ratel trains no)") as caught:
        decide_format(DatasetSource(path="p"), record, has_chat_template=True)
    assert hint is None or hint in (caught.value.hint or "")


def test_the_chosen_answers_can_be_trained_on() -> None:
    record: dict[str, object] = {"chosen": TURNS, "rejected": TURNS}
    source = DatasetSource(path="p", type="chat_template", field_messages="chosen")
    assert decide_format(source, record, has_chat_template=True).columns == ("chosen",)


def test_conversations_need_a_chat_template() -> None:
    with pytest.raises(BadInput, match="no chat template"):
        decide_format(DatasetSource(path="p"), {"messages": TURNS}, has_chat_template=False)


def _alpaca(instruction: str, context: str = "") -> str:
    further = ", paired with an input that provides further context" if context else ""
    middle = f"### Input:\n{context}\n\n" if context else ""
    return (
        f"Below is an instruction that describes a task{further}. Write a response that appropriately completes "
        f"the request.\n\n### Instruction:\n{instruction}\n\n{middle}### Response:\n"
    )


@pytest.mark.parametrize("extra", [{}, {"input": None}, {"input": ""}, {"input": " "}, {"input": "{more}"}])
def test_alpaca_prompt(extra: dict[str, object]) -> None:
    record = {"instruction": "do {it}", "output": "done", **extra}
    context = "{more}" if extra.get("input") == "{more}" else ""
    draft = RowFormat(kind="alpaca", columns=("instruction", "input", "output")).draft(record)
    assert draft == TextDraft(prompt=_alpaca("do {it}", context), answer="done")


def test_sharegpt_turns_are_translated() -> None:
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "h", "weight": None},
        {"from": "gpt", "value": "g"},
        {"role": "tool", "content": "t", "name": "f"},
    ]
    draft = RowFormat(kind="messages", columns=("conversations",)).draft({"conversations": turns, "tools": [{"a": 1}]})
    assert draft == ChatDraft(
        messages=[
            {"role": "system", "content": "s"},
            {"role": "user", "content": "h"},
            {"role": "assistant", "content": "g"},
            {"role": "tool", "content": "t", "name": "f"},
        ],
        tools=[{"a": 1}],
    )


def test_a_turn_may_have_tool_calls_and_no_content() -> None:
    calls = [{"function": {"name": "f", "arguments": {}}}]
    turns = [{"role": "assistant", "content": None, "tool_calls": calls}]
    draft = RowFormat(kind="messages", columns=("messages",)).draft({"messages": turns, "tools": None})
    assert draft == ChatDraft(messages=[{"role": "assistant", "tool_calls": calls}], tools=None)


def test_tokens_without_labels_have_loss_everywhere() -> None:
    token_format = RowFormat(kind="tokens", columns=("input_ids", "labels"))
    expected = TokensDraft(input_ids=[1, 2], labels=[1, 2])
    assert token_format.draft({"input_ids": [1, 2]}) == expected
    assert token_format.draft({"input_ids": [1, 2], "labels": None}) == expected


ALPACA = RowFormat(kind="alpaca", columns=("instruction", "input", "output"))
TEXT = RowFormat(kind="completion", columns=("text",))
PAIR = RowFormat(kind="prompt_completion", columns=("prompt", "completion"))
CHAT = RowFormat(kind="messages", columns=("messages",))
QUESTION = RowFormat(kind="question_answer", columns=("question", "answer"))
TOKENS = RowFormat(kind="tokens", columns=("input_ids", "labels"))
CHAT_PAIR = RowFormat(kind="chat_completion", columns=("prompt", "completion"))
ROUNDS = RowFormat(
    kind="instruction",
    columns=("instruction", "input", "output", "history"),
    turns=TurnOptions(system="system"),
)
FLAGGED = RowFormat(kind="messages", columns=("messages",), turns=TurnOptions(training_key="train"))
UNPROMPTED = RowFormat(kind="messages", columns=("messages",), turns=TurnOptions(drops_system_message=True))
CALLS = RowFormat(kind="messages", columns=("messages",), turns=TurnOptions(roles={"call": "function_call"}))
DO: dict[str, object] = {"instruction": "a", "output": "b"}
_NO_CALL = "message 1 is no tool call: an object with name and arguments is needed"


REASONS: list[tuple[RowFormat, dict[str, object], str]] = [
    (TEXT, {}, "the field 'text' is missing"),
    (TEXT, {"text": None}, "'text' must be text, not null"),
    (TEXT, {"text": 1}, "'text' must be text, not a number"),
    (TEXT, {"text": "\ud800"}, "'text' contains half of a surrogate pair"),
    (PAIR, {"prompt": "a"}, "the field 'completion' is missing"),
    (PAIR, {"prompt": TURNS, "completion": "x"}, "'prompt' must be text, not an array"),
    (QUESTION, {"question": "a"}, "the field 'answer' is missing"),
    (ALPACA, {"instruction": "a"}, "the field 'output' is missing"),
    (ALPACA, {"instruction": ["a"], "output": "b"}, "'instruction' must be text, not an array"),
    (ALPACA, {**DO, "input": {}}, "'input' must be text, not an object"),
    (CHAT, {}, "the field 'messages' is missing"),
    (CHAT, {"messages": "a"}, "'messages' must be an array of messages, not text"),
    (CHAT, {"messages": []}, "the conversation has no messages"),
    (CHAT, {"messages": ["a"]}, "message 1 must be an object, not text"),
    (CHAT, {"messages": [TURNS[0], {"content": "a"}]}, "message 2 has no role"),
    (CHAT, {"messages": [{"role": 1, "content": "a"}]}, "'role of message 1' must be text, not a number"),
    (CHAT, {"messages": [{"from": [], "value": "a"}]}, "'role of message 1' must be text, not an array"),
    (CHAT, {"messages": [{"role": "user"}]}, "message 1 has no content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [1]}]},
        "part 1 of the content of message 1 must be an object with a type and a text, not a number",
    ),
    (CHAT, {"messages": TURNS, "tools": 7}, "'tools' must be an array, not a number"),
    (CHAT, {"messages": TURNS, "tools": "{}"}, "'tools' must be an array, not an object"),
    (CHAT, {"messages": TURNS, "tools": "x"}, "'tools' is not JSON"),
    (CHAT, {"messages": TURNS, "tools": "[" * 100_000}, "'tools' is not JSON"),
    (CHAT_PAIR, {"prompt": TURNS[:1]}, "the field 'completion' is missing"),
    (CHAT_PAIR, {"prompt": 7, "completion": TURNS}, "'prompt' must be an array of messages, not a number"),
    (CHAT_PAIR, {"prompt": TURNS[:1], "completion": []}, "the conversation has no messages"),
    (
        CHAT_PAIR,
        {"prompt": TURNS, "completion": TURNS[1:]},
        "'prompt' ends with an assistant turn, so there is nothing to answer",
    ),
    (ROUNDS, {**DO, "history": "x"}, "'history' is not JSON"),
    (ROUNDS, {**DO, "history": [["x", "y"], ["x"]]}, "round 2 of 'history' must be a pair of question and answer"),
    (ROUNDS, {**DO, "history": [["x", 7]]}, "'round 1 of history' must be text, not a number"),
    (ROUNDS, {**DO, "system": 7}, "'system' must be text, not a number"),
    (FLAGGED, {"messages": [{**TURNS[0], "train": "yes"}]}, "'train' of message 1 must be true or false"),
    (UNPROMPTED, {"messages": [{"role": "system", "content": "s"}]}, "the conversation has a system prompt alone"),
    (CALLS, {"messages": [{"from": "call", "value": "f()"}]}, "'content of message 1' is not JSON"),
    (CALLS, {"messages": [{"from": "call", "value": "7"}]}, _NO_CALL),
    (CALLS, {"messages": [{"from": "call", "value": '[{"name": 7}]'}]}, _NO_CALL),
    (CALLS, {"messages": [{"from": "call", "value": "[]"}]}, "message 1 has no tool call"),
    (TOKENS, {"labels": [1]}, "the field 'input_ids' is missing"),
    (TOKENS, {"input_ids": "1 2"}, "'input_ids' must be an array of token ids, not text"),
    (TOKENS, {"input_ids": [1, 2.0]}, "'input_ids' must contain only whole numbers"),
    (TOKENS, {"input_ids": [1, True]}, "'input_ids' must contain only whole numbers"),
    (TOKENS, {"input_ids": [1, 2**31]}, "'input_ids' contains a number that cannot be a token id"),
    (TOKENS, {"input_ids": [1, 2], "labels": [1]}, "'labels' and 'input_ids' have different lengths, 1 and 2"),
    (TOKENS, {"input_ids": [1], "labels": [-101]}, "'labels' contains a number that cannot be a token id"),
]


@pytest.mark.parametrize(("row_format", "record", "reason"), REASONS)
def test_reasons(row_format: RowFormat, record: dict[str, object], reason: str) -> None:
    with pytest.raises(Unusable) as caught:
        row_format.draft(record)
    assert str(caught.value) == reason


_QUESTION, _ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
_WITH_JSON: list[tuple[dict[str, object], dict[str, object]]] = [
    ({"messages": [_QUESTION, _ANSWER]}, {}),
    ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, {}),
    (
        {"turns": [{"who": "user", "content": "Hi"}, {"who": "assistant", "content": "Hello"}]},
        {"field_messages": "turns", "message_property_mappings": {"role": "who"}},
    ),
    ({"prompt": [_QUESTION], "completion": [_ANSWER]}, {}),
    ({"asked": [_QUESTION], "reply": [_ANSWER]}, {"field_prompt": "asked", "field_completion": "reply"}),
    ({"prompt": [_QUESTION], "chosen": [_ANSWER], "rejected": [{**_ANSWER, "content": "Go"}]}, {"compares": "pairs"}),
    ({"messages": [_QUESTION, _ANSWER], "label": True}, {"compares": "verdicts"}),
    (
        {
            "messages": [_QUESTION, _ANSWER],
            "tools": [{"name": "f"}],
            "chat_template_kwargs": {"enable_thinking": False},
        },
        {"type": "chat_template"},
    ),
    (
        {"instruction": "Hi", "output": "Hello", "history": [["One", "Two"]]},
        {"type": "chat_template", "field_history": "history"},
    ),
]


@pytest.mark.parametrize(("record", "keys"), _WITH_JSON)
def test_arrays_may_be_their_json_text(record: dict[str, object], keys: dict[str, object]) -> None:
    """As in CSV files, and in what databases export."""
    source = DatasetSource(path="f", **keys)  # type: ignore[arg-type]
    as_text: dict[str, object] = {
        column: value if isinstance(value, str | bool) else json.dumps(value) for column, value in record.items()
    }
    formats = [decide_format(source, each, has_chat_template=True) for each in (record, as_text)]
    assert formats[0] == formats[1]
    assert formats[0].draft(record) == formats[1].draft(as_text)


@pytest.mark.parametrize(
    "text",
    [
        "Hi",
        "[]",
        "[1]",
        '[{"a": 1}]',
        '{"a": 1}',
        "[{'role': 'user', 'content': 'Hi'}]",
        "[",
        '[{"role": "user"}]',
        '{"from": "Berlin", "to": "Paris"}',
        '{"role": "assistant", "content": "x"}',
        '[{"from": "a", "to": "b"}]',
    ],
)
def test_other_texts_are_no_messages(text: str) -> None:
    """Nor is JSON text that is to be learned as it is."""
    messages = decide_format(DatasetSource(path="f"), {"messages": text}, has_chat_template=True)
    with pytest.raises(Unusable, match="'messages' must be an array of messages, not text"):
        messages.draft({"messages": text})
    pair = {"prompt": text, "completion": text}
    assert decide_format(DatasetSource(path="f"), pair, has_chat_template=True).kind == "prompt_completion"


def test_json_of_messages_is_text_where_the_type_says_so() -> None:
    record: dict[str, object] = {"prompt": json.dumps([_QUESTION]), "completion": json.dumps([_ANSWER])}
    found = decide_format(DatasetSource(path="f", type="completion"), record, has_chat_template=True)
    draft = found.draft(record)
    assert isinstance(draft, TextDraft) and (draft.prompt, draft.answer) == (record["prompt"], record["completion"])
