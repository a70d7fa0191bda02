"""CSV and TSV files: their rows with line numbers, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratel_cli.data.csv_rows import read_csv
from ratel_cli.data.lines import Reject, Row
from ratel_cli.errors import BadInput


def _read(tmp_path: Path, content: bytes, *, delimiter: str = ",", bound: int = 64) -> list[Row | Reject]:
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    return list(read_csv(path, "f", delimiter=delimiter, max_row_bytes=bound))


def test_rows_have_the_lines_where_they_begin(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbftext, b \r\n"one\r\ntwo",x\r\n\r\n"a ""q"", b",\r\nc,d'
    found = [(row.line, row.record) for row in _read(tmp_path, content) if isinstance(row, Row)]
    assert found == [
        (2, {"text": "one\r\ntwo", "b": "x"}),
        (5, {"text": 'a "q", b', "b": ""}),
        (6, {"text": "c", "b": "d"}),
    ]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"a,b\n", b"a,b"])
def test_a_file_without_rows(tmp_path: Path, content: bytes) -> None:
    assert _read(tmp_path, content) == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"x", "1 value for 2 columns"),
        (b"x,y,z", "3 values for 2 columns"),
        (b'"x"y,z', "not CSV: ',' expected after '\"'"),
        (b"x,\xff", "not UTF-8: byte 0xff at column 3"),
        (b"x,\0", "a NUL byte at column 3"),
        (b"x," + b"y" * 63, "the line is longer than 64 bytes"),
    ],
)
def test_a_bad_row_costs_only_itself(tmp_path: Path, line: bytes, reason: str) -> None:
    found = _read(tmp_path, b"a,b\n1,2\n" + line + b"\n3,4\n")
    assert found == [
        Row(file="f", line=2, record={"a": "1", "b": "2"}),
        Reject(file="f", line=3, reason=reason),
        Row(file="f", line=4, record={"a": "3", "b": "4"}),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,a\n", "f:1: 'a' names two columns"),
        (b"a, ,b\n", "f:1: column 2 has no name"),
        (b"a,\xff\n1,2\n", "f:1: the names of the columns: not UTF-8"),
        (b'a,b\n1,2\n"x,y\n3,4\n', "f:3: a quoted value begins here and does not end within 64 bytes"),
        (b'a,b\n"x\n' + b"1,2\n" * 100 + b'"\n', "f:2: a quoted value begins here and does not end within 64 bytes"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        _read(tmp_path, content)


def test_a_long_value(tmp_path: Path) -> None:
    """Longer than the limit that Python's module starts with."""
    (row,) = _read(tmp_path, b"text\n" + b"x" * 200_000 + b"\n", bound=1 << 20)
    assert isinstance(row, Row) and row.record == {"text": "x" * 200_000}
