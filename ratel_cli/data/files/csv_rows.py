"""Reads the rows of CSV and TSV files: the first row names the columns, every value is text.

Python's `csv` decides what a quote means: it begins a value only where the value begins, as in RFC 4180. Invariants:
memory stays within a few `MAX_ROW_BYTES` for any file. A row with fewer or more values than columns, or with
bytes that are not UTF-8, costs only itself. After a quote that does not close nobody knows where rows begin, so it
raises BadInput. Rows that a quote too many makes part of a value are counted as bad rows, or reported.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ratel_cli.data.files.lines import (
    MAX_ROW_BYTES,
    BadLine,
    Progress,
    Reject,
    Row,
    bounded_lines,
    decode_line,
    open_after_bom,
)
from ratel_cli.errors import BadInput, printable
from ratel_cli.progress import no_progress
from ratel_cli.units import counted

_FEW_LINES = 8
"""Most lines inside one row that may all look like rows of their own by chance, such as a table in a text."""


def read_csv(
    path: Path, label: str, *, delimiter: str, max_row_bytes: int = MAX_ROW_BYTES, progress: Progress = no_progress
) -> Iterator[Row | Reject]:
    """Read a file whose first row names the columns. `label` names the file in rows and messages.

    Blank lines are skipped. Quoting is that of RFC 4180: a value in double quotes may contain the delimiter, line ends
    and doubled quotes. Raises BadInput if the first row is unusable or a quote does not close, and OSError.
    """
    csv.field_size_limit(max(csv.field_size_limit(), max_row_bytes))
    columns: list[str] = []
    is_noted = False
    for line, raw_lines, values in _records(path, label, delimiter, max_row_bytes, progress):
        if not columns:
            if isinstance(values, BadLine):
                raise BadInput(f"{label}:{line}: the names of the columns: {values}") from values
            columns = _checked_columns(values, label, line)
            continue
        inside = enumerate(raw_lines[1:-1], start=line + 1)
        like_rows = [each for each, raw in inside if raw.count(delimiter.encode()) == len(columns) - 1]
        if isinstance(values, BadLine) or len(values) != len(columns):
            needed = counted(len(columns), "column")
            reason = str(values) if isinstance(values, BadLine) else f"{counted(len(values), 'value')} for {needed}"
            yield Reject(file=label, line=line, reason=reason)
            for each in like_rows:
                yield Reject(file=label, line=each, reason=f"part of a value whose quote begins in line {line}")
            continue
        note = None
        if not is_noted and len(columns) > 1 and _FEW_LINES < len(like_rows) == len(raw_lines) - 2:
            is_noted = True
            note = (
                f"{label}:{line}: this row ends in line {line + len(raw_lines) - 1}, and all lines inside look "
                f"like rows; if they are, line {line} has an unmatched quote"
            )
        yield Row(file=label, line=line, record=dict(zip(columns, values, strict=True)), note=note)


def _records(
    path: Path, label: str, delimiter: str, max_row_bytes: int, progress: Progress
) -> Iterator[tuple[int, list[bytes], list[str] | BadLine]]:
    """The first line of each row, all its lines, and its values or why it cannot be used."""
    line, num_bytes, is_at_end = 0, 0, False
    of_row: list[bytes] = []

    def lines(file: BinaryIO) -> Iterator[str]:
        """The lines of the file. More than one for a row are taken only while a quoted value is open."""
        nonlocal line, num_bytes, is_at_end
        for number, raw, _ in bounded_lines(file, max_row_bytes):
            of_row.append(raw)
            line, num_bytes = number, num_bytes + len(raw)
            yield "" if len(raw) > max_row_bytes else raw.decode("utf-8", "surrogateescape")  # rejected below
            if num_bytes > max_row_bytes:
                break
        is_at_end = True

    with open_after_bom(path, progress) as file:
        reader = csv.reader(lines(file), delimiter=delimiter, strict=True)
        while True:
            of_row, num_bytes = [], 0
            values: list[str] | BadLine
            try:
                values = next(reader)
                decode_line(b"".join(of_row), max_row_bytes)
            except StopIteration:
                return
            except BadLine as bad:
                values = bad
            except csv.Error as error:
                values = BadLine(f"not CSV: {printable(str(error))}")
            if is_at_end:
                raise BadInput(
                    f"{label}:{line - len(of_row) + 1}: a quoted value begins here and does not end within "
                    f"{max_row_bytes} bytes, or by line {line}",
                    hint='close the quote; a quote inside a quoted value is written twice: ""',
                )
            if values:
                yield line - len(of_row) + 1, of_row, values


def _checked_columns(names: list[str], label: str, line: int) -> list[str]:
    """The names of the columns, without white space around them. Raises BadInput."""
    columns = [name.strip() for name in names]
    double = next((name for name in columns if columns.count(name) > 1), None)
    if "" in columns or double is not None:
        what = f"{printable(double)!r} names two columns" if double else f"column {columns.index('') + 1} has no name"
        raise BadInput(f"{label}:{line}: {what}", hint="the first row of a CSV file must name its columns, each once")
    return columns
