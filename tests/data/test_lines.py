"""Reading JSON Lines, JSON and text files: every bad line is named, and a bad line costs only itself."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ratel_cli.data.files.lines import (
    MAX_ROW_BYTES,
    Reject,
    Row,
    read_json,
    read_json_lines,
    read_text_lines,
)
from ratel_cli.errors import BadInput


class Reader(Protocol):
    """One of the three functions under test."""

    def __call__(self, path: Path, label: str, *, max_row_bytes: int = ...) -> Iterator[Row | Reject]: ...


def _file(tmp_path: Path, content: bytes, name: str = "f.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


def _reasons(path: Path) -> list[str]:
    return [str(item) for item in read_json_lines(path, "f") if isinstance(item, Reject)]


BAD_LINES = [
    (b'{"text": "a"', "f:2: not JSON: Expecting ',' delimiter at column 13"),
    (b"hello", "f:2: not JSON: Expecting value at column 1"),
    (b'{"text": "a\0"}', "f:2: a NUL byte at column 12"),
    (b'{"text": "\xff"}', "f:2: not UTF-8: byte 0xff at column 11"),
    (b'["a"]', "f:2: a row must be an object, not an array"),
    (b"null", "f:2: a row must be an object, not null"),
    (b"true", "f:2: a row must be an object, not a boolean"),
    (b'"a"', "f:2: a row must be an object, not text"),
    (b"[" * 100_000, "f:2: not usable JSON: "),
    (b'{"text": ' + b"1" * 5000 + b"}", "f:2: not usable JSON: "),
]
"""Lines, and the reasons for which each is rejected as line 2 of a file `f`."""


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_a_bad_line_costs_itself_only(tmp_path: Path, line: bytes, reason: str) -> None:
    path = _file(tmp_path, b'{"n": 1}\n' + line + b'\n{"n": 3}\n')
    items = list(read_json_lines(path, "f"))
    assert items[0] == Row(file="f", line=1, record={"n": 1})
    assert items[2] == Row(file="f", line=3, record={"n": 3})
    assert isinstance(items[1], Reject)
    assert str(items[1]).startswith(reason)


def test_a_truncated_last_line_is_named(tmp_path: Path) -> None:
    path = _file(tmp_path, b'{"n": 1}\n{"text": "half of')
    assert _reasons(path) == [
        "f:2: not JSON, and the file ends inside this line: Unterminated string starting at at column 10"
    ]


def test_a_last_line_without_newline_is_a_row(tmp_path: Path) -> None:
    assert [item.line for item in read_json_lines(_file(tmp_path, b'{"n": 1}\n{"n": 2}'), "f")] == [1, 2]


def test_bom_crlf_and_blank_lines_are_fine(tmp_path: Path) -> None:
    path = _file(tmp_path, b'\xef\xbb\xbf{"n": 1}\r\n\r\n  \n{"n": "\xc3\xa9"}\r\n')
    rows = list(read_json_lines(path, "f"))
    assert rows == [Row(file="f", line=1, record={"n": 1}), Row(file="f", line=4, record={"n": "\u00e9"})]


def test_a_bom_elsewhere_is_rejected(tmp_path: Path) -> None:
    assert len(_reasons(_file(tmp_path, b'{"n": 1}\n\xef\xbb\xbf{"n": 2}\n'))) == 1


@pytest.mark.parametrize("read", [read_json_lines, read_text_lines, read_json])
def test_a_bom_does_not_count_against_the_bound(tmp_path: Path, read: Reader) -> None:
    """Once it did: the first line was cut 3 bytes early, and its rest became a line 2 that the file did not have."""
    line = b'{"n": 1}'
    path = _file(tmp_path, b"\xef\xbb\xbf" + line)
    assert [type(item) for item in read(path, "f", max_row_bytes=len(line))] == [Row]
    (reject,) = read_json_lines(path, "f", max_row_bytes=len(line) - 1)
    assert str(reject) == "f:1: the line is longer than 7 bytes"


@pytest.mark.parametrize("content", [b"", b"\n", b"\xef\xbb\xbf", b" \r\n\t"])
def test_an_empty_file_has_no_rows(tmp_path: Path, content: bytes) -> None:
    path = _file(tmp_path, content)
    assert list(read_json_lines(path, "f")) == []
    assert list(read_json(path, "f")) == []
    assert list(read_text_lines(path, "f")) == []


def test_a_huge_line_is_rejected_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "huge.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "')
        file.truncate(16 * MAX_ROW_BYTES)  # a sparse file: NUL bytes that take no space
        file.seek(0, 2)
        file.write(b'"}\n{"text": "after"}\n')
    tracemalloc.start()
    items = list(read_json_lines(path, "f"))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert str(items[0]) == f"f:1: the line is longer than {MAX_ROW_BYTES} bytes"
    assert items[1:] == [Row(file="f", line=2, record={"text": "after"})]
    assert peak_bytes < 3 * MAX_ROW_BYTES


@pytest.mark.parametrize(("num_bytes", "usable"), [(19, True), (20, True), (21, False), (50, False)])
@pytest.mark.parametrize("newline", [b"", b"\n"])
def test_the_bound_on_a_line_is_exact(tmp_path: Path, num_bytes: int, usable: bool, newline: bytes) -> None:
    line = b'{"t": "' + b"x" * (num_bytes - 9 - len(newline)) + b'"}' + newline
    assert len(line) == num_bytes
    (item,) = read_json_lines(_file(tmp_path, line), "f", max_row_bytes=20)
    assert isinstance(item, Row) == usable


def test_text_files_give_a_row_per_line(tmp_path: Path) -> None:
    path = _file(tmp_path, b"\xef\xbb\xbfone \r\n\n  \ntwo\n\xff\nthree", "f.txt")
    items = list(read_text_lines(path, "f"))
    assert [item.record["text"] for item in items if isinstance(item, Row)] == ["one ", "two", "three"]
    assert [str(item) for item in items if isinstance(item, Reject)] == ["f:5: not UTF-8: byte 0xff at column 1"]


@given(
    rows=st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=20) | st.integers()), max_size=12),
    indent=st.none() | st.integers(0, 3),
    separator=st.sampled_from([None, "\n", " "]),
)
def test_json_arrays_and_objects_in_a_row(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[dict[str, object]],
    indent: int | None,
    separator: str | None,
) -> None:
    """`separator` None: one array; else the objects one after another."""
    texts = [json.dumps(row, indent=indent, ensure_ascii=False) for row in rows]
    text = json.dumps(rows, indent=indent, ensure_ascii=False) if separator is None else separator.join(texts)
    if separator is not None and len(rows) > 1 and (separator == " " or len({"\n" in one for one in texts}) > 1):
        assume("\n" in texts[0])  # otherwise the first line would look like JSON Lines
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        return
    path = _file(tmp_path_factory.getbasetemp(), raw, "f.json")
    items = list(read_json(path, "f"))
    assert [item.record for item in items if isinstance(item, Row)] == rows
    assert len(items) == len(rows)


def test_json_rows_have_lines_across_chunks(tmp_path: Path) -> None:
    rows = [{"n": index, "text": "\u00e9" * 999} for index in range(3000)]  # 6 MB: several windows
    path = _file(tmp_path, json.dumps(rows, indent=1, ensure_ascii=False).encode(), "f.json")
    items = list(read_json(path, "f"))
    assert [item.record for item in items if isinstance(item, Row)] == rows
    assert [item.line for item in items] == [2 + 4 * index for index in range(3000)]


def test_values_of_a_json_array_that_are_no_objects_are_rejected(tmp_path: Path) -> None:
    items = list(read_json(_file(tmp_path, b'[\n{"n": 1},\n12,\n"x"\n]', "f.json"), "f"))
    assert [str(item) for item in items if isinstance(item, Reject)] == [
        "f:3: a row must be an object, not a number",
        "f:4: a row must be an object, not text",
    ]


BROKEN_JSON = [
    (b'[{"n": 1}, {"n"', "f:1: not JSON"),
    (b'[{"n": 1},\n{"n": x}]', "f:2: not JSON"),
    (b'[{"n": 1}', "f:1: the file ends inside the array"),
    (b'[{"n": 1} {"n": 2}]', "f:1: a comma or ] is missing"),
    (b'[{"n": 1}]\n{"n": 2}', "f:2: text after the end of the array"),
    (b'[{"n": "\xff"}]', "f:1: not UTF-8"),
]


@pytest.mark.parametrize(("content", "message"), BROKEN_JSON)
def test_a_broken_json_file_ends_the_run(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        list(read_json(_file(tmp_path, content, "f.json"), "f"))
    assert caught.value.message.startswith(message)


def test_a_json_row_beyond_the_bound_ends_the_run(tmp_path: Path) -> None:
    content = b'[{"n": "' + b"x" * (5 << 20) + b'"}]'
    with pytest.raises(BadInput, match="not JSON"):
        list(read_json(_file(tmp_path, content, "f.json"), "f", max_row_bytes=1 << 20))
