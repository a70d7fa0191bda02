"""A key of a dataset that its type does not read changes no row, and one that it reads changes some row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import pytest

from ratel_cli.data.sources.formats import decide_format
from ratel_cli.data.text.drafts import ComparedDraft, Unusable
from ratel_cli.data.text.rows import Compares, DatasetSource, DatasetType
from ratel_cli.dataset_keys import KEYS_OF_ROWS, types_that_read, unread_for_type
from ratel_cli.errors import BadInput

Record = Mapping[str, object]
DEFAULTS = {each.name: each.default for each in fields(DatasetSource)}
ASKED = {"role": "user", "content": "a", "note": "c", "train": True}
ANSWER = {"role": "assistant", "content": "b", "note": "d", "train": False}
SYSTEM = {"role": "system", "content": "e"}
TURNS = [SYSTEM, ASKED, ANSWER]
OTHERS: Sequence[object] = ("z", "c1", True, TURNS, [ASKED], [ANSWER], [["q", "a"]], [{"name": "tool"}])
"""What the column that a key may name has."""
VALUES: Mapping[str, object] = {
    "system_prompt": "be kind",
    "drop_system_message": True,
    "message_property_mappings": {"content": "note"},
    "roles": {"tool": ("user",)},
    "roles_to_train": ("user",),
    "train_on_eos": "all",
    "message_field_training": "train",
}
"""Of keys that name no column, a value that is no default."""
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
PAIR_OF_TURNS = {"messages": [ASKED], "chosen": [ANSWER], "rejected": [ANSWER]}
ALPACA = {"instruction": "a", "input": "x", "output": "b"}
TEXTS = {"prompt": "a", "completion": "b"}
ROWS: Mapping[tuple[DatasetType, Compares | None], Sequence[Record]] = {
    ("completion", None): [{"text": "a"}, TEXTS],
    ("alpaca", None): [ALPACA],
    ("chat_template", None): [
        {"messages": TURNS}, {"prompt": [ASKED], "completion": [ANSWER]}, ALPACA, {"question": "a", "answer": "b"}
    ],
    ("tokens", None): [{"input_ids": [1, 2]}],
    ("mlm", None): [{"text": "a"}],
    ("classification", None): [{"text": "a", "label": "c0"}],
    ("seq2seq", None): [TEXTS],
    ("completion", "pairs"): [
        PAIR, PAIR_OF_TURNS, {**PAIR_OF_TURNS, "messages": [SYSTEM, ASKED]},
        {"instruction": "a", "input": "x", "chosen": "b", "rejected": "c"},
    ],
    ("chat_template", "pairs"): [
        PAIR, PAIR_OF_TURNS, {**PAIR_OF_TURNS, "messages": [SYSTEM, ASKED]},
        {"instruction": "a", "input": "x", "chosen": "b", "rejected": "c"},
    ],
    ("chat_template", "verdicts"): [
        {"prompt": "a", "completion": "b", "label": True}, {"messages": TURNS, "label": True},
        {"instruction": "a", "input": "x", "completion": "b", "label": True},
    ],
}  # fmt: skip


def read(source: DatasetSource, record: Record) -> str:
    """What becomes of a row, without remarks."""
    try:
        found = decide_format(source, dict(record), has_chat_template=True)
        draft = replace(found.draft(dict(record)), remarks=())
        if isinstance(draft, ComparedDraft):
            draft = replace(draft, answers=tuple(replace(each, remarks=()) for each in draft.answers))
        return repr((found.kind, draft))
    except (BadInput, Unusable) as error:
        return str(error)


def changes(source: DatasetSource, key: str, records: Sequence[Record]) -> bool:
    """Whether another value of a key changes any row."""
    changed = replace(source, **{key: VALUES.get(key, "other")})
    rows = [{**record, **more} for record in records for more in [{}, *({"other": each} for each in OTHERS)]]
    return any(read(changed, row) != read(source, row) for row in rows)


@pytest.mark.parametrize(("name", "compares"), ROWS)
def test_what_is_rejected_changes_no_row_and_what_is_not_changes_some(
    name: DatasetType, compares: Compares | None
) -> None:
    source = DatasetSource(path="p", type=name, compares=compares, labels=("c0", "c1"))
    keys = sorted(frozenset[str]().union(*KEYS_OF_ROWS.values()))
    changing = {key for key in keys if changes(source, key, ROWS[name, compares])}
    unread = unread_for_type(dict.fromkeys(keys, "other"), DEFAULTS, name, compares=compares)
    assert set(keys) - set(unread) == changing


@pytest.mark.parametrize(
    ("keys", "record", "unread"),
    [
        ({"field_system": "system"}, {"text": "a"}, "field_system has"),
        ({"roles_to_train": ("user",), "roles": {"user": ("x",)}}, TEXTS, "roles, roles_to_train have"),
        ({"roles_to_train": ("user",)}, {"prompt": [ASKED], "completion": [ANSWER]}, "roles_to_train has"),
        ({"roles_to_train": ("user",)}, {"messages": TURNS}, ""),
        ({"field_messages": "chats"}, {"text": "a"}, "field_messages has"),
        ({"field_history": "h"}, ALPACA, "field_history has"),
        ({"field_history": "h", "type": "chat_template"}, ALPACA, ""),
        ({"field": "body"}, {"input_ids": [1]}, "field has"),
        ({"field_instruction": "question"}, {"question": "a", "answer": "b"}, "field_instruction has"),
        ({"compares": "pairs", "field": "body"}, PAIR, "field has"),
        ({"compares": "pairs", "roles": {"user": ("x",)}}, PAIR, "roles has"),
        ({"compares": "pairs", "roles": {"user": ("x",)}}, PAIR_OF_TURNS, ""),
    ],
)  # fmt: skip
def test_what_is_set_and_not_read_is_named(keys: dict[str, object], record: Record, unread: str) -> None:
    source = replace(DatasetSource(path="p"), **keys)
    said = decide_format(source, dict(record), has_chat_template=True).describe()
    assert said.endswith(f"; {unread} no effect here") if unread else "no effect here" not in said


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("field_system", ("chat_template", "alpaca")),
        ("field", ("completion", "mlm", "classification")),
        ("field_chosen", ()),
        ("split", ("completion", "chat_template", "alpaca", "mlm", "classification", "seq2seq")),
    ],
)
def test_the_types_that_read_a_key(key: str, names: tuple[str, ...]) -> None:
    assert types_that_read(key) == names
