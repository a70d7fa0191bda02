"""Random files give rows and rejects with their lines, or a BadInput. Random rows give drafts or reasons."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ratel_cli.data.files.csv_rows import read_csv
from ratel_cli.data.files.lines import Reject, Row, read_json, read_json_lines, read_text_file, read_text_lines
from ratel_cli.data.sources.formats import decide_format
from ratel_cli.data.text.drafts import Unusable
from ratel_cli.data.text.rows import Compares, DatasetSource, DatasetType
from ratel_cli.errors import BadInput
from tests.json_values import json_values
from tests.tiers import examples

QUICK = examples(200)
CSV, TSV = (partial(read_csv, delimiter=delimiter) for delimiter in ",\t")
COLUMNS = (
    "text", "messages", "conversations", "instruction", "input", "output", "prompt", "completion", "question",
    "answer", "input_ids", "labels", "tools", "chosen", "rejected", "role", "content", "from", "value", "tool_calls",
    "label",
)  # fmt: skip
VALUES = json_values(st.sampled_from(COLUMNS), texts=st.text(st.characters(), max_size=8))
OPTIONS: list[dict[str, object]] = [
    {},
    {
        "field_system": "text",
        "field_history": "messages",
        "field_tools": "text",
        "message_property_mappings": {"role": "value", "content": "text"},
        "roles": {"function_call": ("", "0"), "user": ("1",)},
        "roles_to_train": ("user",),
        "message_field_training": "labels",
    },
]
PIECES = st.sampled_from(
    [
        *(bytes([byte]) for byte in b'{}[],:"-1\n \0\xc3\xff'),
        *(b"\r\n", b"\xef\xbb\xbf", b"\\u", b"\\ud800", b"1e999", b"NaN", b"null", b"true", b"1" * 4400),
        *(b'{"text": "a"}', b'"text"', b"a,b", b'""'),
    ]
)


@QUICK
@given(
    content=st.lists(PIECES, max_size=30).map(b"".join) | st.binary(max_size=60),
    bound=st.sampled_from([8, 64, 1 << 20]),
)
@example(content=b"\xef\xbb\xbf{\\ud800", bound=8)  # the byte order mark was counted against the bound
def test_any_file(tmp_path: Path, content: bytes, bound: int) -> None:
    path = tmp_path / "rows"
    path.write_bytes(content)
    num_lines = content.count(b"\n") + 1
    for read in (read_json_lines, read_text_lines, read_text_file, read_json, CSV, TSV):
        try:
            items = list(read(path, "label", max_row_bytes=bound))
        except BadInput as error:
            assert read in (read_json, CSV, TSV) and error.message.startswith("label:") and error.message.isprintable()
            continue
        for item in items:
            assert item.file == "label" and 1 <= item.line <= num_lines
            assert isinstance(item, Row) or (isinstance(item, Reject) and item.reason.isprintable())
        if read is not read_json:
            lines = [item.line for item in items]
            assert lines == sorted(set(lines)), "no line is read twice"


@QUICK
@given(
    first=st.dictionaries(st.sampled_from(COLUMNS), VALUES), record=st.dictionaries(st.sampled_from(COLUMNS), VALUES)
)
@pytest.mark.parametrize("kind", ["auto", "completion", "chat_template", "alpaca", "tokens"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("compares", [None, "pairs", "verdicts"])
def test_any_record(
    kind: DatasetType,
    options: dict[str, object],
    compares: Compares | None,
    first: dict[str, object],
    record: dict[str, object],
) -> None:
    """The first row decides the format. The second is read with it."""
    try:
        source = DatasetSource(path="p", type=kind, compares=compares, **options)  # type: ignore[arg-type]
        row_format = decide_format(source, first, has_chat_template=True)
    except BadInput as error:
        is_named = any(each in error.message for each in ("preference data", "good or bad", "process reward model"))
        assert (kind == "auto" or compares or is_named) and error.message.isprintable()
        return
    for each in (first, record):
        try:
            draft = row_format.draft(each)
        except Unusable as unusable:
            assert str(unusable).isprintable() and len(str(unusable)) < 200
            continue
        assert row_format.describe().isprintable()
        assert draft is not None


@QUICK
@given(record=st.dictionaries(st.text(max_size=4), VALUES))
def test_any_columns(record: dict[str, object]) -> None:
    with pytest.raises(BadInput) as caught:
        decide_format(
            DatasetSource(path="p"), {f"x{key}": value for key, value in record.items()}, has_chat_template=True
        )
    assert caught.value.message.isprintable()
    assert json.dumps(caught.value.hint)
