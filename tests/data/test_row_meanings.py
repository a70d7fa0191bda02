"""Keys and columns that change what a row means in other tools: each is used, or there is a word about it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import cast

import datasets  # type: ignore[import-untyped]
import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
import pytest

from ratel_cli.data.files.lines import Row
from ratel_cli.data.files.remarks import sentences
from ratel_cli.data.sources.formats import decide_format
from ratel_cli.data.text.drafts import ChatDraft, Draft, TextDraft, TokensDraft, Unusable
from ratel_cli.data.text.prompts import read_prompts
from ratel_cli.data.text.rows import DatasetSource, open_source
from ratel_cli.errors import BadInput
from tests.data.conftest import CHATML, Load, read_rejects
from tests.data.mask_oracle import marked_samples
from tests.data.test_forms import CALL, END, WITH_CALLS, A, T, U, char_tokenizer, message, rows, samples_of

MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QA = [message("user", "a"), message("assistant", "b")]
TWO = [*QA, message("user", "c"), message("assistant", "d")]


def draft(record: dict[str, object], **keys: object) -> Draft:
    source = DatasetSource(path="p", **keys)  # type: ignore[arg-type]
    return decide_format(source, record, has_chat_template=True).draft(record)


@pytest.fixture
def check(load: Load, tmp_path: Path) -> Callable[..., None]:
    """That the samples of these rows are the marked texts."""

    def check_samples(
        records: list[object],
        *marked: str,
        template: str = CHATML,
        keys: Mapping[str, object] = MappingProxyType({}),
        **settings: object,
    ) -> None:
        (tmp_path / "a.jsonl").write_text(rows(*records))
        source = DatasetSource(path=str(tmp_path / "a.jsonl"), **keys)  # type: ignore[arg-type]
        data = load(source, tokenizer=char_tokenizer(template, eos="<|im_end|>"), sequence_len=512, **settings)
        assert samples_of(data) == marked_samples(*marked)

    return check_samples


def weighted(*weights: object) -> dict[str, object]:
    """Two rounds, whose answers have these weights."""
    answers = iter(weights)
    return {"messages": [each if each["role"] == "user" else {**each, "weight": next(answers)} for each in TWO]}


@pytest.mark.parametrize(
    ("settings", "marked"),
    [
        ({}, f"{U}a{END}\n{A}b{END}\n{U}c{END}\n{A}⟦d{END}\n⟧"),
        ({"template": MARKED}, f"{U}a{END}\n{A}b{END}\n{U}c{END}\n{A}⟦d{END}⟧\n"),
        ({"train_on_inputs": True}, f"⟦{U}a{END}\n{A}⟧b{END}\n⟦{U}c{END}\n{A}d{END}\n⟧"),
        (
            {"keys": {"type": "chat_template", "roles_to_train": ("assistant",), "train_on_eos": "all"}},
            f"{U}a⟦{END}⟧\n{A}b{END}\n{U}c⟦{END}⟧\n{A}⟦d{END}⟧\n",
        ),
    ],
)
def test_a_weight_of_0_is_no_loss(
    check: Callable[..., None], notices: list[str], settings: dict[str, object], marked: str
) -> None:
    """OpenAI's key of a message, with every way in which a mask is found."""
    check([weighted(0, 1)], marked, **settings)
    assert "messages with `weight: 0` have no loss in 1 of 1 conversations" in notices


def test_a_weight_in_a_completion(check: Callable[..., None]) -> None:
    row = {"prompt": TWO[:1], "completion": [{**TWO[1], "weight": 0.0}, *TWO[2:]]}
    check([row], f"{U}a{END}\n{A}b{END}\n⟦{U}c{END}\n{A}d{END}\n⟧")


@pytest.mark.parametrize("weights", [(1, 1), (None, True), (1.0, None)])
def test_a_weight_of_1_changes_nothing(check: Callable[..., None], weights: tuple[object, object]) -> None:
    check([weighted(*weights)], f"{U}a{END}\n{A}⟦b{END}\n⟧{U}c{END}\n{A}⟦d{END}\n⟧")


@pytest.mark.parametrize(("weight", "shown"), [(0.5, "0.5"), (2, "2"), ("0", "0"), (-1, "-1"), ([], "[]")])
def test_other_weights_are_rejected(weight: object, shown: str) -> None:
    with pytest.raises(Unusable, match=f"the weight of message 2 must be 0 or 1, not {shown}".replace("[", r"\[")):
        draft(weighted(weight, 1))


def test_weights_of_prompts_say_nothing() -> None:
    record: dict[str, object] = {"messages": [{**QA[0], "weight": 0}, {**QA[1], "weight": 1}]}
    assert draft(record).remarks == ()


def test_a_key_of_ones_own_that_is_named_weight() -> None:
    found = draft(weighted(0, 1), type="chat_template", message_field_training="weight")
    assert isinstance(found, ChatDraft) and (found.trained, found.muted) == ((3,), ())


@pytest.mark.parametrize("key", ["train", "training", "loss", "loss_mask", "mask", "train_detail"])
def test_keys_that_choose_turns_elsewhere_are_named(key: str) -> None:
    record: dict[str, object] = {"messages": [QA[0], {**QA[1], key: False}]}
    found = draft(record)
    (line,) = sentences(dict.fromkeys(found.remarks, 3), 9)
    assert line.startswith(f"the key {key} of messages is not read in 3 of 9 conversations: ")
    assert draft(record, type="chat_template", message_field_training=key).remarks == ()


IMAGE = {"type": "image_url", "image_url": {"url": "x.png"}}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "a"}], "a"),
        ([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}], "a b"),
        ([{"type": "input_text", "text": "a"}, {"type": "text", "text": ""}, {"text": "b"}], "ab"),
        ([], ""),
    ],
)
def test_content_in_parts_is_joined(content: list[object], text: str) -> None:
    found = draft({"messages": [{"role": "user", "content": content}, QA[1]]})
    assert isinstance(found, ChatDraft) and found.messages[0]["content"] == text


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (
            IMAGE,
            "part 2 of the content of message 1 is of type image_url; Ratel trains on text; `media: ignore` leaves",
        ),
        ({"type": "thinking", "thinking": "x"}, "part 2 of the content of message 1 is of type thinking; Ratel trains"),
        ({"type": "text"}, "'text of part 2 of the content of message 1' must be text, not null"),
        ("b", "part 2 of the content of message 1 must be an object with a type and a text, not text"),
    ],
)
def test_a_part_that_is_no_text_names_its_type(part: object, reason: str) -> None:
    with pytest.raises(Unusable) as caught:
        draft({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}, QA[1]]})
    assert str(caught.value).startswith(reason)


def test_prompts_in_parts(tmp_path: Path) -> None:
    """`ratel generate` reads messages as training does."""
    path = tmp_path / "prompts.jsonl"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    path.write_text(rows({"messages": [{"role": "user", "content": parts}]}))
    assert read_prompts(path) == [[message("user", "ab")]]
    path.write_text(rows({"messages": [{"role": "user", "content": [*parts, IMAGE]}]}))
    with pytest.raises(BadInput, match=r"prompts\.jsonl:1: part 3 of the content of message 1 is of type image_url"):
        read_prompts(path)


SHAREGPT = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cat."}]
MEDIA: dict[str, dict[str, object]] = {
    "LLaVA": {"image": "a.jpg", "conversations": SHAREGPT},
    "LLaMA-Factory": {"images": ["a.jpg"], "instruction": "<image>What?", "output": "A cat."},
    "video": {"videos": ["a.mp4"], "messages": QA},
    "sound": {"audio": {"path": "a.wav"}, "messages": QA},
    "TRL": {"images": ["a.jpg"], "prompt": QA[:1], "completion": QA[1:]},
    "a processor's output": {"input_ids": [1, 2], "pixel_values": [[0.5]]},
}


@pytest.mark.parametrize("name", MEDIA)
def test_rows_with_images_are_rejected(name: str) -> None:
    with pytest.raises(BadInput, match="its rows have images, video or sound") as caught:
        draft(MEDIA[name])
    assert caught.value.hint == "to train on their text alone, set media: ignore in the dataset"


def test_one_row_with_an_image_costs_that_row(load: Load, tmp_path: Path) -> None:
    good = {"messages": QA}
    marked = {"messages": [message("user", "Look: <image>"), QA[1]]}
    (tmp_path / "a.jsonl").write_text(
        rows(good, *[good] * 299, {"image": "x", **good}, marked, {"image": None, **good})
    )
    load(tmp_path / "a.jsonl")
    (one, two) = read_rejects(tmp_path)
    assert one[1] == 301 and one[2].startswith("the row has an image, video or sound (image); Ratel trains on text: `m")
    assert two[1] == 302 and two[2].startswith(
        "a text has a placeholder of an image, video or sound, such as <image>; "
    )


def test_the_text_alone_of_rows_with_images() -> None:
    llava = draft(MEDIA["LLaVA"], media="ignore")
    assert isinstance(llava, ChatDraft) and llava.messages[0]["content"] == "What is it?"
    factory = draft(MEDIA["LLaMA-Factory"], media="ignore")
    assert isinstance(factory, TextDraft) and "\nWhat?\n" in factory.prompt
    parts = draft(
        {"messages": [{"role": "user", "content": [IMAGE, {"type": "text", "text": "a"}]}, QA[1]]}, media="ignore"
    )
    assert isinstance(parts, ChatDraft) and parts.messages[0]["content"] == "a"
    for each in (llava, factory, parts):
        assert list(sentences(dict.fromkeys(each.remarks, 2), 3)) == [
            "images, video and sound of 2 of 3 rows are left out, because of `media: ignore`"
        ]


def test_a_tag_is_no_mark_and_a_column_of_plain_text_is_no_image() -> None:
    tag = draft({"messages": [message("user", "What does <image> do in SVG?"), QA[1]]})
    assert isinstance(tag, ChatDraft) and tag.remarks == ()
    text = draft({"text": "<image> is a tag", "image": "a.jpg"})
    assert isinstance(text, TextDraft) and text.answer == "<image> is a tag"
    assert [kind for kind, _ in text.remarks] == ["unread"]


FIELD = {"field_completion": "chosen"}
CHOSEN_BEHIND_PROMPTS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "texts": ({"prompt": "Q", "chosen": "C", "rejected": "R"}, {**FIELD}),
    "texts as turns": ({"prompt": "Q", "chosen": "C", "rejected": "R"}, {"type": "chat_template", **FIELD}),
    "a question": ({"question": "Q", "chosen": "C", "rejected": "R"}, {"field_prompt": "question", **FIELD}),
    "messages": (
        {"prompt": [message("user", "Q")], "chosen": [message("assistant", "C")], "rejected": []},
        {**FIELD},
    ),
    "LLaMA-Factory": (
        {
            "conversations": [{"from": "human", "value": "Q"}],
            "chosen": {"from": "gpt", "value": "C"},
            "rejected": {"from": "gpt", "value": "R"},
        },
        {"field_prompt": "conversations", **FIELD},
    ),
    "whole conversations": (
        {"prompt": "Q", "chosen": [message("user", "Q"), message("assistant", "C")], "rejected": []},
        {"type": "chat_template", "field_messages": "chosen"},
    ),
}


@pytest.mark.parametrize("name", CHOSEN_BEHIND_PROMPTS)
def test_chosen_answers_with_their_prompts(name: str) -> None:
    """The hint for preference data names keys that keep the prompt, and no word of the rejected answers is trained."""
    record, keys = CHOSEN_BEHIND_PROMPTS[name]
    with pytest.raises(BadInput, match="preference data") as caught:
        draft(record)
    for key, value in keys.items():
        assert f"{key}: {value}" in (caught.value.hint or "")
    found = draft(record, **keys)
    if isinstance(found, TextDraft):
        assert (found.prompt, found.answer) == ("Q", "C")
    else:
        assert isinstance(found, ChatDraft)
        assert [each["content"] for each in found.messages] == ["Q", "C"]
        assert found.completion_from in (None, 1)
    assert "R" not in json.dumps([found.messages if isinstance(found, ChatDraft) else found.answer])


@pytest.mark.parametrize(
    ("record", "keys", "words"),
    [
        ({"messages": QA, "system": "be"}, {}, "the column system of 2 of 3 rows is not read: `field_system: system` "),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, {}, "the column history of 2 of 3 rows is not"),
        ({"instruction": "a", "output": "b", "tools": "[1]"}, {}, "the column tools of 2 of 3 rows is not read: only "),
        (
            {"messages": QA, "functions": [{"name": "f"}]},
            {},
            "the column functions of 2 of 3 rows is not read: `field_",
        ),
        ({"messages": QA, "chosen": QA, "rejected": QA}, {}, "the column chosen of 2 of 3 rows is not read: "),
        (
            {"messages": QA, "label": True},
            {"type": "chat_template"},
            "the column label of 2 of 3 rows is not read: without `rl: kto`, good",
        ),
        ({"messages": QA, "weight": 0.5}, {}, "the column weight of 2 of 3 rows is not read: rows have no weights "),
    ],
)
def test_columns_that_are_not_read_are_named(record: dict[str, object], keys: dict[str, object], words: str) -> None:
    found = draft(record, **keys)
    assert next(iter(sentences(dict.fromkeys(found.remarks, 2), 3))).startswith(words)


@pytest.mark.parametrize(
    ("record", "keys"),
    [
        ({"messages": QA, "system": ""}, {}),
        ({"messages": QA, "system": "be"}, {"field_system": "system"}),
        ({"messages": QA, "system": "be"}, {"system_prompt": "be kind"}),
        ({"messages": QA, "id": 7, "source": "x", "weight": 1}, {}),
        ({"text": "a", "label": True}, {}),
    ],
)
def test_columns_that_are_read_or_mean_nothing_are_not(record: dict[str, object], keys: dict[str, object]) -> None:
    assert draft(record, **keys).remarks == ()


@pytest.mark.parametrize(
    ("record", "ids", "labels"),
    [
        ({"completion_mask": [0, 0, 1, 1]}, [5, 6, 7, 8], [-100, -100, 7, 8]),
        ({"assistant_masks": [0, 1, 1, 0]}, [5, 6, 7, 8], [-100, 6, 7, -100]),
        ({"assistant_masks": [0, 1, 1, 0], "completion_mask": [0, 0, 1, 1]}, [5, 6, 7, 8], [-100, -100, 7, -100]),
        ({"labels": [1, 2, 3, 4], "completion_mask": [0, 0, 0, 1]}, [5, 6, 7, 8], [1, 2, 3, 4]),
        ({"attention_mask": [0, 1, 1, 1]}, [6, 7, 8], [6, 7, 8]),
        ({"attention_mask": [1, 1, 0, 0], "labels": [5, 6, -100, -100]}, [5, 6], [5, 6]),
        ({"position_ids": [0, 1, 2, 3], "seq_lengths": [4]}, [5, 6, 7, 8], [5, 6, 7, 8]),
    ],
)
def test_masks_of_token_rows(record: dict[str, object], ids: list[int], labels: list[int]) -> None:
    assert draft({"input_ids": [5, 6, 7, 8], **record}) == TokensDraft(input_ids=ids, labels=labels)


@pytest.mark.parametrize("record", [{"position_ids": [0, 1, 0, 1]}, {"seq_lengths": [2, 2]}])
def test_rows_with_several_packed_samples_are_rejected(record: dict[str, object]) -> None:
    with pytest.raises(Unusable, match="the row has several packed samples"):
        draft({"input_ids": [5, 6, 7, 8], **record})


AS_TEXT = {"name": "f", "arguments": '{"x": 1}'}
CALLS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "ShareGPT": ({"from": "function_call", "value": CALL}, {"from": "observation", "value": "o"}),
    "roles of other tools": (message("tool_call", CALL), message("tool_response", "o")),
    "several calls, each as OpenAI has them": (
        message("tool_calls", f'[{{"type": "function", "function": {CALL}}}]'),
        message("tool", "o"),
    ),
    "OpenAI before tool calls": (
        {"role": "assistant", "content": None, "function_call": AS_TEXT},
        message("function", "o", name="f"),
    ),
    "arguments as text": (message("assistant", "", tool_calls=[{"function": AS_TEXT}]), message("tool", "o")),
}
"""A turn with a call, and the one with its result."""


@pytest.mark.parametrize("name", CALLS)
def test_function_calls_are_trained_as_answers(check: Callable[..., None], name: str) -> None:
    """With `type: auto` and no other key; arguments as text and as an object are the same call."""
    start, end = QA
    key = "messages"
    if name == "ShareGPT":
        key, start, end = "conversations", {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}
    marked = f'{U}a{END}\n{A}⟦[f{{"x": 1}}]{END}\n⟧{T}o{END}\n{A}⟦b{END}\n⟧'
    check([{key: [start, *CALLS[name], end]}], marked, template=WITH_CALLS)


@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}'])
@pytest.mark.parametrize("takes", ["{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}"])
def test_arguments_fit_the_template(check: Callable[..., None], arguments: object, takes: str) -> None:
    """A template that takes objects gets an object, one that takes text gets text."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    template = WITH_CALLS.replace("{{ c.function.arguments | tojson }}", takes)
    row = {"messages": [QA[0], {"role": "assistant", "tool_calls": [call]}]}
    check([row], f'{U}a{END}\n{A}⟦[f{{"x": 1}}]{END}\n⟧', template=template)


SHOWS_ALL = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tool_row(name: str, parameters: object, arguments: object) -> dict[str, object]:
    call = {"function": {"name": name, "arguments": arguments}}
    tool = {"function": {"name": name, "parameters": parameters}}
    return {"messages": [QA[0], {"role": "assistant", "content": "", "tool_calls": [call]}], "tools": [tool]}


@pytest.mark.full
def test_keys_that_arrow_pads_do_not_reach_the_template(load: Load, tmp_path: Path) -> None:
    """Two tools with other parameters share a struct in Parquet, which has all keys of both."""
    written = [
        tool_row("f", {"x": {"type": "int", "enum": [None, 1]}}, {"x": 1}),
        tool_row("g", {"y": {"type": "str"}}, {"y": "z"}),
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(written), tmp_path / "a.parquet")
    padded = pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert padded[0]["tools"][0]["function"]["parameters"]["y"] is None
    (tmp_path / "a.jsonl").write_text(rows(*written))
    tokenizer = char_tokenizer(SHOWS_ALL, eos="<|im_end|>")
    found = [
        samples_of(load(tmp_path / name, tokenizer=tokenizer, sequence_len=512)) for name in ("a.parquet", "a.jsonl")
    ]
    assert found[0] == found[1]
    oracle = []
    for row in written:
        messages, tools = cast(list[dict[str, str]], row["messages"]), cast(list[dict[str, object]], row["tools"])
        oracle.append(tokenizer.apply_chat_template(messages, tools=tools, return_dict=False))
    assert [ids for ids, _ in found[0]] == oracle


def test_keys_that_arrow_pads_in_rows_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    padded = tool_row("f", {"x": {"enum": [None, 1]}, "y": None}, {"x": 1, "y": None})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [padded])
    source = open_source(DatasetSource(path="owner/name"), notice=lambda text: None, is_stream=True)
    (row,) = source.read()
    assert isinstance(row, Row) and row.record == tool_row("f", {"x": {"enum": [None, 1]}}, {"x": 1})


def test_a_null_in_json_stays(load: Load, tmp_path: Path) -> None:
    row = tool_row("f", {"x": {"default": None}}, {"x": None})
    (tmp_path / "a.jsonl").write_text(rows(row))
    tokenizer = char_tokenizer(SHOWS_ALL, eos="<|im_end|>")
    ((ids, _),) = samples_of(load(tmp_path / "a.jsonl", tokenizer=tokenizer, sequence_len=512))
    text = tokenizer.decode(ids).replace(" ", "")
    assert '"default":null' in text and '"arguments":{"x":null}' in text


def test_what_a_row_gives_to_the_template(check: Callable[..., None]) -> None:
    """TRL's column `chat_template_kwargs`."""
    template = CHATML.replace("assistant\n{% endif %}", "assistant\n{% if tone %}{% endif %}{% endif %}")
    template = "{% if tone is defined %}{{ tone }}{% endif %}" + template
    turns = f"{U}a{END}\n{A}⟦b{END}\n⟧"
    toned = {"messages": QA, "chat_template_kwargs": {"tone": "x"}}
    check([toned, {"messages": QA}], f"x{turns}", turns, template=template)
    with pytest.raises(Unusable, match="'chat_template_kwargs' is not JSON"):
        draft({"messages": QA, "chat_template_kwargs": "x"})


@pytest.mark.parametrize("role", ["critic", "user"])
def test_a_turn_that_the_template_drops_is_told(load: Load, tmp_path: Path, notices: list[str], role: str) -> None:
    template = (
        "{% for m in messages %}{% if m.role in ('user', 'assistant') and m.content != 'drop me' %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (tmp_path / "a.jsonl").write_text(rows({"messages": [message(role, "drop me"), *QA]}))
    load(tmp_path / "a.jsonl", tokenizer=char_tokenizer(template, eos=END))
    (line,) = [each for each in notices if "leaves out" in each]
    assert line.startswith(f"the chat template leaves out text of {role} messages in 1 of 1 conversations; ")
    assert ("`roles`" in line) == (role == "critic")
