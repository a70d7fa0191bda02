"""CSV and TSV files: their rows with line numbers, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pandas  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratel_cli.data.files.csv_rows import read_csv
from ratel_cli.data.files.lines import Reject, Row
from ratel_cli.data.text.rows import DatasetSource
from ratel_cli.errors import BadInput
from tests.data.conftest import Load
from tests.tiers import examples


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
        (b'a,b\n1,2\n"x,y\n3,4\n', "f:3: a quoted value begins here and does not end within 64 bytes, or by line 4"),
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


def _in_pandas(path: Path, delimiter: str) -> list[dict[str, str]]:
    found = pandas.read_csv(path, sep=delimiter, dtype=str, keep_default_na=False)
    return [dict(row) for row in found.to_dict("records")]


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_a_quote_inside_a_value_is_a_character(tmp_path: Path, delimiter: str) -> None:
    lines = [f"question {number}{delimiter}answer {number}" for number in range(100)]
    lines[10], lines[90] = f'a 5" pipe{delimiter}five inches', f'bolts{delimiter}3" or 4"'
    content = f"prompt{delimiter}completion\n" + "\n".join(lines) + "\n"
    found = _read(tmp_path, content.encode(), delimiter=delimiter)
    assert [row.record for row in found if isinstance(row, Row)] == _in_pandas(tmp_path / "rows.csv", delimiter)
    assert len(found) == 100


_VALUES = st.text(st.sampled_from('ab ",\n\t5'), min_size=1, max_size=6)


@examples(60)
@given(
    rows=st.lists(st.tuples(_VALUES, _VALUES), min_size=1, max_size=6),
    delimiter=st.sampled_from([",", "\t"]),
    quotes=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_rows_are_those_that_pandas_reads(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], delimiter: str, quotes: list[bool]
) -> None:
    """Values with and without quotes around them. Those without have what needs none: quotes inside, too."""
    ways = iter(quotes)

    def written(value: str) -> str:
        if next(ways) or value.startswith('"') or {*value} & {delimiter, "\n"}:
            return '"' + value.replace('"', '""') + '"'
        return value

    path = tmp_path_factory.mktemp("csv") / "rows.csv"
    path.write_text("a" + delimiter + "b\n" + "".join(delimiter.join(map(written, row)) + "\n" for row in rows))
    found = list(read_csv(path, "f", delimiter=delimiter))
    assert [row.record for row in found if isinstance(row, Row)] == _in_pandas(path, delimiter)
    assert [row.record for row in found if isinstance(row, Row)] == [{"a": a, "b": b} for a, b in rows]


def test_rows_that_a_quote_too_many_swallows_are_counted(tmp_path: Path) -> None:
    """It begins a value, which ends with the next one: no valid row, so the lines between are bad rows, too."""
    lines = [
        *(f"{number},x" for number in range(20)),
        '"5 inches,x',
        *(f"{number},x" for number in range(30)),
        'a "b,x',
    ]
    found = _read(tmp_path, ("a,b\n" + "\n".join(lines) + "\n1,2\n").encode(), bound=1 << 20)
    rejects = [row for row in found if isinstance(row, Reject)]
    assert [row.line for row in rejects] == list(range(22, 53))
    assert rejects[0].reason == "not CSV: ',' expected after '\"'"
    assert {row.reason for row in rejects[1:]} == {"part of a value whose quote begins in line 22"}
    assert len(found) == 20 + 31 + 1


@pytest.mark.parametrize(("num_lines", "is_noted"), [(8, False), (9, True)])
def test_a_valid_row_of_lines_like_rows_is_reported_once(
    tmp_path: Path, load: Load, notices: list[str], num_lines: int, is_noted: bool
) -> None:
    row = '"one,x\n' + "".join(f"{number},x\n" for number in range(num_lines)) + 'two",x\n'
    found = [each for each in _read(tmp_path, f"a,b\n1,2\n{row * 2}".encode(), bound=1 << 20) if isinstance(each, Row)]
    note = (
        f"f:3: this row ends in line {num_lines + 4}, and all lines inside look like rows; if they are, line 3 "
        "has an unmatched quote"
    )
    assert [each.note for each in found] == [None, note if is_noted else None, None]
    path = tmp_path / "rows.csv"
    load(DatasetSource(path=str(path), type="completion", field="a"))
    assert [each for each in notices if "ends in line" in each] == (
        [note.replace("f:3", f"{path}:3", 1)] if is_noted else []
    )


def test_a_long_text_of_ordinary_lines_is_not_reported(tmp_path: Path) -> None:
    """Nor is one of a file with a single column, where each line looks like a row."""
    text = '"' + "a line, with a comma\nand one without\n" * 20 + '"'
    for content in (f"a,b\n{text},x\n", f"a\n{text}\n"):
        (row,) = _read(tmp_path, content.encode(), bound=1 << 20)
        assert isinstance(row, Row) and row.note is None
