"""Reads the rows of CSV and TSV files: the first row names the columns, every value is text.

Invariants: memory stays within a few `MAX_ROW_BYTES`, whatever a file contains. A row with too few or too many values,
or with bytes that are not UTF-8, costs only itself. After a quote that does not close nobody knows where rows begin, so
it raises BadInput.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ratel_cli.data.lines import (
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """The lines of one row: a quoted value may contain line ends."""

    line: int
    raw: bytes


def read_csv(
    path: Path, label: str, *, delimiter: str, max_row_bytes: int = MAX_ROW_BYTES, progress: Progress = no_progress
) -> Iterator[Row | Reject]:
    """Read a file whose first row names the columns. `label` names the file in rows and messages.

    Blank lines are skipped. Quoting is that of RFC 4180: a value in double quotes may contain the delimiter, line ends
    and doubled quotes. Raises BadInput if the first row is unusable or a quote does not close, and OSError.
    """
    csv.field_size_limit(max(csv.field_size_limit(), max_row_bytes))
    columns: list[str] | None = None
    for record in _records(path, label, max_row_bytes, progress):
        try:
            values = _values(record, delimiter, max_row_bytes)
        except BadLine as bad:
            if columns is None:
                raise BadInput(f"{label}:{record.line}: the names of the columns: {bad}") from bad
            yield Reject(file=label, line=record.line, reason=str(bad))
            continue
        if not values:
            continue
        if columns is None:
            columns = _checked_columns(values, label, record.line)
        elif len(values) != len(columns):
            reason = f"{counted(len(values), 'value')} for {counted(len(columns), 'column')}"
            yield Reject(file=label, line=record.line, reason=reason)
        else:
            yield Row(file=label, line=record.line, record=dict(zip(columns, values, strict=True)))


def _records(path: Path, label: str, max_row_bytes: int, progress: Progress) -> Iterator[_Record]:
    """The rows as bytes. A row is complete when its quotes are paired: a doubled quote keeps the count even."""
    pending, start = b"", 0
    with open_after_bom(path, progress) as file:
        for line, raw, ended in bounded_lines(file, max_row_bytes):
            if not pending:
                start = line
            pending += raw
            is_cut = len(raw) > max_row_bytes and not ended
            if pending.count(b'"') % 2 == 0 or is_cut:
                yield _Record(line=start, raw=pending)
                pending = b""
            elif len(pending) > max_row_bytes:
                break
    if pending:
        raise BadInput(
            f"{label}:{start}: a quoted value begins here and does not end within {max_row_bytes} bytes",
            hint='close the quote; a quote inside a quoted value is written twice: ""',
        )


def _values(record: _Record, delimiter: str, max_row_bytes: int) -> list[str]:
    text = decode_line(record.raw, max_row_bytes)
    try:
        rows = list(csv.reader([text], delimiter=delimiter, strict=True))
    except csv.Error as error:
        raise BadLine(f"not CSV: {printable(str(error))}") from error
    return rows[0] if rows else []


def _checked_columns(names: list[str], label: str, line: int) -> list[str]:
    """The names of the columns, without white space around them. Raises BadInput."""
    columns = [name.strip() for name in names]
    double = next((name for name in columns if columns.count(name) > 1), None)
    if "" in columns or double is not None:
        what = f"{printable(double)!r} names two columns" if double else f"column {columns.index('') + 1} has no name"
        raise BadInput(f"{label}:{line}: {what}", hint="the first row of a CSV file must name its columns, each once")
    return columns
