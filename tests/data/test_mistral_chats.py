"""Conversations that mistral-common encodes: tokens and masks, against its own encoder and brute force."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratel_cli.data.files.remarks import sentences
from ratel_cli.data.samples.samples import Encoded
from ratel_cli.data.sources.encode import SampleEncoder
from ratel_cli.data.text.conversations import TurnOptions, conversation
from ratel_cli.data.text.drafts import ChatDraft, ComparedDraft, TrainOnInputs, Unusable
from ratel_cli.data.text.mistral_tokenizer import MistralTokenizer
from ratel_cli.data.text.prompts import Prompt, encode_prompts
from ratel_cli.errors import BadInput
from ratel_cli.sizes import IGNORED_TARGET
from tests.data.mistral_oracle import Message, mask_by_prefixes, mask_of_words, prompt, turns, whole
from tests.mistral_vocabularies import MADE, save_vocabulary
from tests.tiers import examples

VERSIONS = ("v1", "v2", "v3", "v7", *MADE)
TOOL: Message = {
    "type": "function",
    "function": {"name": "w", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
SYSTEM: Message = {"role": "system", "content": "Be brief."}
ASK: Message = {"role": "user", "content": "What is 2 + 2?"}
ANSWER: Message = {"role": "assistant", "content": "It is 4."}
CALL: Message = {
    "role": "assistant",
    "tool_calls": [{"id": "abcDEF123", "type": "function", "function": {"name": "w", "arguments": '{"a": 1}'}}],
}
RESULT: Message = {"role": "tool", "content": '{"sun": true}', "tool_call_id": "abcDEF123"}
THOUGHT: Message = {
    "role": "assistant",
    "content": [{"type": "thinking", "thinking": "Two pairs."}, {"type": "text", "text": "It is 4."}],
}

Vocabulary = Callable[[str], Path]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """The file of the vocabulary of a version."""
    return cache(lambda version: save_vocabulary(tmp_path_factory.mktemp("vocabulary"), version))


@pytest.fixture(scope="module")
def tokenizer(vocabulary: Vocabulary) -> Callable[[str], MistralTokenizer]:
    return cache(lambda version: MistralTokenizer(vocabulary(version)))


Tokenizers = Callable[[str], MistralTokenizer]


def draft_of(messages: Sequence[Message], options: TurnOptions | None = None, **columns: object) -> ChatDraft:
    """The draft of a row with these messages."""
    record = {"messages": json.loads(json.dumps(messages)), **columns}
    return conversation(record, "messages", options or TurnOptions())


def encode(
    tokenizer: MistralTokenizer, draft: ChatDraft | ComparedDraft, *, train_on_inputs: TrainOnInputs = False
) -> Encoded | Unusable:
    with SampleEncoder(tokenizer, sequence_len=4096, train_on_inputs=train_on_inputs) as encoder:
        return encoder.encode([draft])[0]


def ids_and_mask(answer: Encoded | Unusable) -> tuple[list[int], list[bool]]:
    assert isinstance(answer, Encoded), str(answer)
    (sample,) = answer.samples
    mask = sample.labels != IGNORED_TARGET
    assert (sample.labels[mask] == sample.input_ids[mask]).all()
    return sample.input_ids.tolist(), mask.tolist()


def reason(answer: Encoded | Unusable) -> str:
    assert isinstance(answer, Unusable)
    return str(answer)


def said(answer: Encoded | Unusable) -> list[str]:
    """The notices about one row."""
    assert isinstance(answer, Encoded), str(answer)
    return list(sentences(dict.fromkeys(answer.remarks, 1), 1))


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1, max_size=12).filter(str.strip)


@st.composite
def conversations(draw: st.DrawFn, *, calls: bool) -> list[Message]:
    """Turns of all roles, several of one role behind each other, and calls of tools with their results."""
    found: list[Message] = [{"role": "system", "content": draw(TEXTS)} for _ in range(draw(st.integers(0, 1)))]
    for number in range(draw(st.integers(1, 3))):
        found += [{"role": "user", "content": draw(TEXTS)} for _ in range(draw(st.integers(1, 2)))]
        if calls and draw(st.booleans()):
            ids = [f"call{number}{at:04}" for at in range(draw(st.integers(1, 2)))]
            functions = [{"name": "w", "arguments": json.dumps({"a": draw(TEXTS)})} for _ in ids]
            made = zip(ids, functions, strict=True)
            found.append(
                {"role": "assistant", "tool_calls": [{"id": each, "function": function} for each, function in made]}
            )
            found += [{"role": "tool", "content": draw(TEXTS), "tool_call_id": each} for each in reversed(ids)]
        found += [{"role": "assistant", "content": draw(TEXTS)} for _ in range(draw(st.integers(1, 2)))]
    return found


@pytest.mark.parametrize("version", [*VERSIONS, pytest.param("v3 tekken", marks=pytest.mark.full)])
@examples(20)
@given(data=st.data())
def test_tokens_and_masks_of_any_conversation(
    vocabulary: Vocabulary, tokenizer: Tokenizers, version: str, data: st.DataObject
) -> None:
    has_calls = version not in ("v1", "v2")
    messages = data.draw(conversations(calls=has_calls))
    tools = [TOOL] if has_calls else None
    path = vocabulary(version)
    ids, mask = ids_and_mask(encode(tokenizer(version), draft_of(messages, tools=tools)))
    assert ids == whole(path, messages, tools)
    assert [token for token, has_loss in zip(ids, mask, strict=True) if has_loss] == [
        token for turn in turns(path, messages) for token in turn
    ]
    if version == "v13":  # the other ones write tools, or system prompts, into the last user's turn
        assert mask == mask_by_prefixes(path, messages, tools)


@pytest.mark.parametrize("version", [*VERSIONS, "v3 tekken"])
def test_a_turn_begins_where_its_prompt_ends(vocabulary: Vocabulary, tokenizer: Tokenizers, version: str) -> None:
    path, messages = vocabulary(version), [ASK, ANSWER, {"role": "user", "content": "[INST] </s>"}, ANSWER]
    ids, mask = ids_and_mask(encode(tokenizer(version), draft_of(messages)))
    assert (ids, mask) == (whole(path, messages), mask_by_prefixes(path, messages))
    notices: list[str] = []
    asked = cast(list[Prompt], [messages[:3], "What is 2 + 2?"])
    found = encode_prompts(tokenizer(version), asked, raw=False, notice=notices.append)
    assert found == [prompt(path, messages[:3]), prompt(path, [ASK])]
    assert found[0] == ids[: len(found[0])] and not notices


def test_a_conversation_may_begin_with_the_assistant(vocabulary: Vocabulary, tokenizer: Tokenizers) -> None:
    for version in VERSIONS:
        for messages in ([SYSTEM, ANSWER, ASK, ANSWER], [SYSTEM, ASK, ANSWER]):
            ids, mask = ids_and_mask(encode(tokenizer(version), draft_of(messages)))
            assert ids == whole(vocabulary(version), messages)
            trained = [token for token, has_loss in zip(ids, mask, strict=True) if has_loss]
            assert trained == turns(vocabulary(version), [ANSWER])[0] * (len(messages) // 2)


def test_train_on_inputs(vocabulary: Vocabulary, tokenizer: Tokenizers) -> None:
    messages = [SYSTEM, ASK, ANSWER]
    ids, mask = ids_and_mask(encode(tokenizer("v13"), draft_of(messages), train_on_inputs=True))
    assert ids == whole(vocabulary("v13"), messages) and all(mask)


def with_roles(*roles: str, eos: str = "none") -> TurnOptions:
    return TurnOptions(roles_to_train=roles, train_on_eos=eos)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", ["v3", "v7", "v11", "v13"])
@pytest.mark.parametrize("role", ["user", "assistant", "system", "tool"])
def test_the_words_of_a_role(vocabulary: Vocabulary, tokenizer: Tokenizers, version: str, role: str) -> None:
    messages = [ASK, ANSWER, {"role": "user", "content": "And 3 + 3?"}, CALL, RESULT, {**ANSWER, "content": "6, sir"}]
    if role == "system":
        if version == "v3":
            return  # see below
        messages = [SYSTEM, *messages]
    ids, mask = ids_and_mask(encode(tokenizer(version), draft_of(messages, with_roles(role))))
    path = vocabulary(version)
    assert ids == whole(path, messages)
    expected = [False] * len(ids)
    for index, message in enumerate(messages):
        if message["role"] == role and message is not CALL:
            found = mask_of_words(path, messages, index)
            if version == "v3" and role == "tool":  # its text stands within JSON that is between the marks
                first, end = found.index(True), len(found) - found[::-1].index(True)
                assert all(mask[first:end]) and not mask[0] and mask.count(True) < 40
                return
            expected = [one or other for one, other in zip(expected, found, strict=True)]
    if role == "assistant":  # calls cannot be replaced by words: they are all of their turn but its last token
        before, behind = whole(path, messages[:4])[:-1], prompt(path, messages[:3])
        at = len(behind)
        expected[at : len(before)] = [True] * (len(before) - at)
    assert mask == expected


@pytest.mark.parametrize(
    ("eos", "expected"),
    [("none", ["It is 4.", "It is 4."]), ("turn", ["It is 4.</s>"] * 2), ("last", ["It is 4.", "It is 4.</s>"])],
)
def test_eos_tokens(tokenizer: Tokenizers, eos: str, expected: list[str]) -> None:
    assert trained_texts(tokenizer("v13"), [ASK, ANSWER, ASK, ANSWER], with_roles("assistant", eos=eos)) == expected


def trained_texts(tokenizer: MistralTokenizer, messages: Sequence[Message], options: TurnOptions) -> list[str]:
    """The texts of the tokens with loss that follow each other."""
    ids, mask = ids_and_mask(encode(tokenizer, draft_of(messages, options)))
    found: list[list[int]] = [[]]
    for token, has_loss in zip(ids, mask, strict=True):
        if has_loss:
            found[-1].append(token)
        elif found[-1]:
            found.append([])
    return [
        tokenizer.decode(each, skip_special_tokens=False, clean_up_tokenization_spaces=False) for each in found if each
    ]


def test_eos_tokens_of_turns_without_loss(tokenizer: Tokenizers) -> None:
    options = with_roles("user", eos="all")
    assert trained_texts(tokenizer("v13"), [ASK, ANSWER], options) == ["What is 2 + 2?", "</s>"]
    muted = [ASK, {**ANSWER, "weight": 0}, ASK, ANSWER]
    assert trained_texts(tokenizer("v13"), muted, options) == ["What is 2 + 2?"] * 2 + ["</s>"]
    assert trained_texts(tokenizer("v13"), muted[:2], with_roles("user", eos="last")) == ["What is 2 + 2?"]


def test_a_key_of_a_message_chooses_it(tokenizer: Tokenizers) -> None:
    messages = [ASK, {**ANSWER, "train": False}, {**ASK, "train": True}, {**ANSWER, "content": "Four."}]
    found = trained_texts(tokenizer("v13"), messages, TurnOptions(training_key="train"))
    assert found == ["What is 2 + 2?", "Four.</s>"]


def test_a_message_of_weight_0_has_no_loss(vocabulary: Vocabulary, tokenizer: Tokenizers) -> None:
    messages = [ASK, {**ANSWER, "weight": 0}, ASK, {**ANSWER, "content": "Four."}]
    assert trained_texts(tokenizer("v13"), messages, TurnOptions()) == ["Four.</s>"]
    _, mask = ids_and_mask(encode(tokenizer("v13"), draft_of(messages), train_on_inputs=True))
    assert mask.count(False) == len(turns(vocabulary("v13"), [ANSWER])[0])


def test_messages_that_are_joined_have_the_same_loss(tokenizer: Tokenizers) -> None:
    for messages, options in (
        ([ASK, {**ANSWER, "weight": 0}, ANSWER], TurnOptions()),
        ([ASK, {**ANSWER, "train": False}, ANSWER], TurnOptions(training_key="train")),
    ):
        expected = "mistral-common joins the messages 2 to 3, so all of them have loss or none has"
        assert reason(encode(tokenizer("v13"), draft_of(messages, options))) == expected


def test_versions_that_write_system_prompts_into_a_users_turn(tokenizer: Tokenizers) -> None:
    expected = "this version of the tokenizer writes the system prompt into a user's turn: both have loss or neither"
    for role in ("user", "system"):
        assert reason(encode(tokenizer("v3"), draft_of([SYSTEM, ASK, ANSWER], with_roles(role)))) == expected
    both = trained_texts(tokenizer("v3"), [SYSTEM, ASK, ANSWER], with_roles("user", "system"))
    assert both == ["Be brief.\n\nWhat is 2 + 2?"]
    assert trained_texts(tokenizer("v3"), [SYSTEM, ASK, ANSWER], with_roles("assistant")) == ["It is 4."]


def test_a_version_without_marks(tokenizer: Tokenizers) -> None:
    expected = "this version of the tokenizer has no marks around user turns, so they cannot have loss"
    assert reason(encode(tokenizer("v1"), draft_of([ASK, ANSWER], with_roles("user")))) == expected


def test_version_2_leaves_out_earlier_calls(vocabulary: Vocabulary, tokenizer: Tokenizers) -> None:
    messages = [ASK, CALL, RESULT, ANSWER, ASK, CALL, RESULT, ANSWER]
    for options in (TurnOptions(), with_roles("assistant", "tool", eos="turn")):
        answer = encode(tokenizer("v2"), draft_of(messages, options, tools=[TOOL]))
        ids, mask = ids_and_mask(answer)
        assert ids == whole(vocabulary("v2"), messages, [TOOL])
        call, turn = turns(vocabulary("v2"), [CALL])[0], turns(vocabulary("v2"), [ANSWER])[0]
        trained = [token for token, has_loss in zip(ids, mask, strict=True) if has_loss]
        assert trained[: len(turn) + len(call)] == turn + call and trained[-len(turn) :] == turn
        (notice,) = said(answer)
        assert notice == (
            "this version of the tokenizer leaves out tool calls, and what they return, before the last user turn in 1 "
            "of 1 conversations, as it does in a prompt"
        )
    assert not said(encode(tokenizer("v3"), draft_of(messages, tools=[TOOL])))


def test_a_prompt_and_its_completion(vocabulary: Vocabulary, tokenizer: Tokenizers) -> None:
    for version in VERSIONS:
        draft = ChatDraft(messages=[dict(ASK), dict(ANSWER), dict(ASK), dict(ANSWER)], tools=None, completion_from=3)
        ids, mask = ids_and_mask(encode(tokenizer(version), draft))
        before = prompt(vocabulary(version), [ASK, ANSWER, ASK])
        assert mask == [at >= len(before) for at in range(len(ids))]
    joined = ChatDraft(messages=[dict(ASK), dict(ANSWER), dict(ANSWER)], tools=None, completion_from=2)
    expected = "mistral-common joins the end of the prompt and the beginning of the completion"
    assert reason(encode(tokenizer("v13"), joined)) == expected


def test_answers_that_are_compared(vocabulary: Vocabulary, tokenizer: Tokenizers) -> None:
    answers = tuple(
        ChatDraft(
            messages=[dict(ASK), {"role": "assistant", "content": text}], tools=None, completion_from=1, is_closed=True
        )
        for text in ("4", "five")
    )
    found = encode(tokenizer("v13"), ComparedDraft(answers=answers))
    assert isinstance(found, Encoded)
    expected = [whole(vocabulary("v13"), each.messages) for each in answers]
    assert [sample.input_ids.tolist() for sample in found.samples] == expected


CALLS: tuple[Message, ...] = (
    {"role": "assistant", "tool_calls": [{"id": "call_1", "function": {"name": "w", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "sun", "tool_call_id": "call_1"},
)


@pytest.mark.parametrize("version", ["v3", "v7", "v11", "v13"])
def test_ids_of_calls_that_are_not_allowed(vocabulary: Vocabulary, tokenizer: Tokenizers, version: str) -> None:
    answer = encode(tokenizer(version), draft_of([ASK, *CALLS, ANSWER]))
    ids, _ = ids_and_mask(answer)
    assert said(answer) == [
        "ids of tool calls are replaced in 1 of 1 conversations: mistral-common takes those of nine letters and digits"
    ]
    new = "ea2e877e7"  # of sha256
    call = {"id": new, "type": "function", "function": {"name": "w", "arguments": '{"a": 1}'}}
    allowed = [ASK, {"role": "assistant", "tool_calls": [call]}, {**CALLS[1], "tool_call_id": new}, ANSWER]
    assert ids == whole(vocabulary(version), allowed)
    missing = [ASK, {"role": "function_call", "content": '[{"name": "w", "arguments": {}}, {"name": "w"}]'}]
    results = [{"role": "tool", "content": text} for text in ("sun", "rain")]
    answer = encode(tokenizer(version), draft_of([*missing, *results, ANSWER]))
    ids_and_mask(answer)
    assert not said(answer)


@pytest.mark.parametrize(
    "tool",
    [{"name": "w", "description": "d"}, {**TOOL, "strict": True}, {"function": {"name": "w", "description": "d"}}],
)
def test_tools_in_other_forms(vocabulary: Vocabulary, tokenizer: Tokenizers, tool: Message) -> None:
    ids, _ = ids_and_mask(encode(tokenizer("v13"), draft_of([ASK, ANSWER], tools=[tool])))
    assert ids == whole(vocabulary("v13"), [ASK, ANSWER], [TOOL])


def test_a_thought_is_reasoning_for_chat_templates_too() -> None:
    (_, message) = draft_of([ASK, THOUGHT]).messages
    assert message == {"role": "assistant", "content": "It is 4.", "reasoning_content": "Two pairs."}
    with pytest.raises(Unusable, match="of type thinking"):
        draft_of([{**THOUGHT, "role": "user"}, ANSWER])


def test_thoughts(vocabulary: Vocabulary, tokenizer: Tokenizers) -> None:
    messages = [ASK, THOUGHT, ASK, THOUGHT]
    expected = whole(vocabulary("v13"), messages), mask_by_prefixes(vocabulary("v13"), messages)
    assert ids_and_mask(encode(tokenizer("v13"), draft_of(messages))) == expected
    for key in ("reasoning_content", "reasoning", "thinking"):
        same = [ASK, {**ANSWER, key: "Two pairs."}] * 2
        assert ids_and_mask(encode(tokenizer("v13"), draft_of(same))) == expected
    alone = {"role": "assistant", "content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}]}
    found = trained_texts(tokenizer("v13"), [ASK, alone], TurnOptions())
    assert found == ["[THINK]Hm.[/THINK]</s>"]
    refused = reason(encode(tokenizer("v7"), draft_of(messages)))
    assert refused.startswith("mistral-common rejects the conversation: ") and "Think" in refused


@pytest.mark.parametrize(
    "message",
    [
        {**THOUGHT, "content": [{"type": "thinking", "thinking": "a", "closed": False}]},
        {**THOUGHT, "reasoning_content": "b"},
    ],
)
def test_thoughts_that_cannot_be_written(message: Message) -> None:
    with pytest.raises(Unusable, match="message 2 must have one complete reasoning block"):
        draft_of([ASK, message])


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([ASK], "mistral-common rejects the conversation: Expected last role Assistant for finetuning but got user"),
        ([{"role": "critic", "content": "x"}, ANSWER], "message 1: mistral-common has no role critic"),
        (
            [ASK, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
            "mistral-common rejects the conversation: 1 validation error for ToolCall function.name Field required",
        ),
        ([ASK, {"role": "assistant", "tool_calls": ["f"]}], "a tool call of message 2 must be an object, not text"),
        (
            [ASK, {"role": "assistant", "tool_calls": {"f": 1}}],
            "the tool calls of message 2 must be an array, not an object",
        ),
    ],
)
def test_conversations_that_are_rejected(tokenizer: Tokenizers, messages: list[Message], expected: str) -> None:
    assert reason(encode(tokenizer("v13"), draft_of(messages))) == expected


def test_tools_and_results_that_are_rejected(tokenizer: Tokenizers) -> None:
    assert (
        reason(encode(tokenizer("v13"), draft_of([ASK, ANSWER], tools=["w"]))) == "tool 1 must be an object, not text"
    )
    alone = encode(tokenizer("v13"), draft_of([ASK, {"role": "tool", "content": "x"}, ANSWER]))
    assert reason(alone).startswith("mistral-common rejects the conversation: ")


def test_what_a_template_would_get_is_noted(tokenizer: Tokenizers) -> None:
    answer = encode(tokenizer("v13"), draft_of([ASK, ANSWER], chat_template_kwargs={"enable_thinking": False}))
    assert said(answer) == [
        "the column chat_template_kwargs of 1 of 1 rows is not read: mistral-common has no chat template"
    ]


def test_prompts_that_cannot_be_answered(tokenizer: Tokenizers) -> None:
    for asked, expected in (
        ([dict(ASK), dict(ANSWER)], "mistral-common rejects the conversation: Expected last role User or Tool"),
        ([{"role": "critic", "content": "x"}], "message 1: mistral-common has no role critic"),
    ):
        with pytest.raises(BadInput, match=f"^prompt 1: {expected}"):
            encode_prompts(tokenizer("v13"), [asked], raw=False, notice=print)


def test_a_package_that_puts_conversations_together_otherwise(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MistralTokenizer(vocabulary("v1"))
    other = SimpleNamespace(encode_chat_completion=lambda request: SimpleNamespace(tokens=[1, 2]))
    monkeypatch.setattr(made, "_library", other)
    made._blocks.clear()
    draft = draft_of([ASK, ANSWER])
    wanted = "the messages cannot be located in what mistral-common makes of the conversation"
    assert reason(encode(made, draft)) == wanted
    whole_library = MistralTokenizer(vocabulary("v1"))
    encode_all = whole_library._library.encode_chat_completion
    cut = SimpleNamespace(
        encode_chat_completion=lambda request: SimpleNamespace(tokens=encode_all(request).tokens[:-1])
    )
    monkeypatch.setattr(whole_library, "_library", cut)
    with pytest.raises(BadInput, match="puts conversations together in a way that Ratel does not know"):
        encode(whole_library, draft)
