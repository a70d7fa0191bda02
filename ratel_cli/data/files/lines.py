"""Reads the rows of JSON Lines, JSON and text files, each with its line number.

Invariants: memory stays within a few `MAX_ROW_BYTES`, whatever a file contains. A bad line costs only that line: it
becomes a `Reject`. A JSON file that is broken in the middle cannot be read further, so it raises BadInput.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ratel_cli.errors import BadInput, excerpt, printable
from ratel_cli.input_files import open_to_read
from ratel_cli.progress import no_progress

MAX_ROW_BYTES = 8 << 20
"""The most bytes of one row. A tokenizer takes about 120 bytes of RAM for each byte of a text (measured on a row of
12 MiB with tokenizers 0.23), so a row takes at most about 1 GiB."""

Progress = Callable[[int], None]
"""Called with the bytes of each part of a file that was read."""

_CHUNK_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row as it was read. Its columns are not checked yet."""

    file: str
    """The name for messages, printable."""
    line: int
    """Counted from 1. In parquet files and hub datasets, the number of the row."""
    record: dict[str, object]
    note: str | None = None
    """What the user should know about the row; None: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """One row that cannot be used, and the reason."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


def read_json_lines(
    path: Path, label: str, *, max_row_bytes: int = MAX_ROW_BYTES, progress: Progress = no_progress
) -> Iterator[Row | Reject]:
    """Read a file with one JSON object in each line. `label` names the file in rows and messages.

    Blank lines are skipped. CRLF and a byte order mark at the start are accepted. Raises OSError, and BadInput if a
    compressed file is damaged; so do the other readers.
    """
    return _read_lines(
        path,
        label,
        max_row_bytes,
        progress,
        lambda text, ended: _parse(text, ended=ended) if text.strip(_SPACE) else None,
    )


def read_text_lines(
    path: Path, label: str, *, max_row_bytes: int = MAX_ROW_BYTES, progress: Progress = no_progress
) -> Iterator[Row | Reject]:
    """Read a file with one sample in each line, into the column `text`, as the `datasets` library does.

    Blank lines are skipped. Raises OSError.
    """
    return _read_lines(
        path, label, max_row_bytes, progress, lambda text, _: {"text": text.rstrip("\r\n")} if text.strip() else None
    )


def _read_lines(
    path: Path,
    label: str,
    max_row_bytes: int,
    progress: Progress,
    record_of: Callable[[str, bool], dict[str, object] | None],
) -> Iterator[Row | Reject]:
    """`record_of` gets the text of a line, and whether a newline ends it; None: the line is no row."""
    with open_after_bom(path, progress) as file:
        for line, raw, ended in bounded_lines(file, max_row_bytes):
            try:
                record = record_of(decode_line(raw, max_row_bytes), ended)
                if record is not None:
                    yield Row(file=label, line=line, record=record)
            except BadLine as bad:
                yield Reject(file=label, line=line, reason=str(bad))


def read_text_file(
    path: Path, label: str, *, max_row_bytes: int = MAX_ROW_BYTES, progress: Progress = no_progress
) -> Iterator[Row | Reject]:
    """Read a whole file as one sample, into the column `text`. An empty file has none. Raises OSError."""
    with open_after_bom(path, progress) as file:
        raw = file.read(max_row_bytes + 1)
    try:
        text = decode_line(raw, max_row_bytes, unit="file")
        if text.strip():
            yield Row(file=label, line=1, record={"text": text})
    except BadLine as bad:
        yield Reject(file=label, line=1, reason=str(bad))


def read_json(
    path: Path, label: str, *, max_row_bytes: int = MAX_ROW_BYTES, progress: Progress = no_progress
) -> Iterator[Row | Reject]:
    """Read a file with a JSON array of objects, with objects one after another, or with JSON Lines.

    Raises BadInput if the JSON is broken or a value is longer than `max_row_bytes`, and OSError.
    """
    with open_after_bom(path) as file:
        first = next((raw for _, raw, _ in bounded_lines(file, max_row_bytes) if raw.strip()), b"")
    if is_object(first):
        yield from read_json_lines(path, label, max_row_bytes=max_row_bytes, progress=progress)
        return
    with open_after_bom(path, progress) as file:
        values = _JsonValues(file, label, max_row_bytes)
        for line, value in values.read():
            try:
                yield Row(file=label, line=line, record=_as_record(value))
            except BadLine as bad:
                yield Reject(file=label, line=line, reason=str(bad))


def open_after_bom(path: Path, progress: Progress = no_progress) -> BinaryIO:
    """Open a file behind its byte order mark, so that no bound on the first line counts the mark."""
    file = open_to_read(path, progress=progress)
    try:
        if file.peek(len(_BOM)).startswith(_BOM):
            file.read(len(_BOM))
    except BaseException:
        file.close()
        raise
    return file


def bounded_lines(file: BinaryIO, max_row_bytes: int) -> Iterator[tuple[int, bytes, bool]]:
    """Yield (line number, bytes, whether a newline ends it). A longer line is cut one byte after the bound."""
    line = 0
    while raw := file.readline(max_row_bytes + 1):
        line += 1
        ended = raw.endswith(b"\n")
        if len(raw) > max_row_bytes and not ended:
            while (rest := file.readline(_CHUNK_BYTES)) and not rest.endswith(b"\n"):
                pass
        yield line, raw, ended


class BadLine(Exception):
    """Why a line is not a row."""


def decode_line(raw: bytes, max_row_bytes: int, *, unit: str = "line") -> str:
    if len(raw) > max_row_bytes:
        raise BadLine(f"the {unit} is longer than {max_row_bytes} bytes")
    place = "column" if unit == "line" else "byte"
    if (at := raw.find(b"\0")) >= 0:
        raise BadLine(f"a NUL byte at {place} {at + 1}")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadLine(f"not UTF-8: byte 0x{raw[error.start]:02x} at {place} {error.start + 1}") from error


def _parse(text: str, *, ended: bool) -> dict[str, object]:
    try:
        return _as_record(json.loads(text.rstrip("\r\n")))
    except json.JSONDecodeError as error:
        what = "not JSON" if ended else "not JSON, and the file ends inside this line"
        raise BadLine(f"{what}: {printable(error.msg)} at column {error.colno}") from error
    except (RecursionError, ValueError) as error:  # ValueError: an integer of thousands of digits
        raise BadLine(f"not usable JSON: {excerpt(str(error), 100)}") from error


def _as_record(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise BadLine(f"a row must be an object, not {json_name(value)}")
    return value


def json_name(value: object) -> str:
    """What kind of JSON value this is, for messages: `a number`, `text`, `null` and so on."""
    names = {bool: "a boolean", int: "a number", float: "a number", str: "text", list: "an array", dict: "an object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def is_object(text: str | bytes) -> bool:
    """Whether this is the JSON text of an object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


class _JsonValues:
    """The values of one JSON text, decoded one at a time from a sliding window of the file.

    Not `ijson` (3.6.0 with yajl2_c, tried 2026-11): it reports no line of a value, puts no bound on one value (64 MiB
    of text are read whole, and 100,000 open brackets cost it gigabytes), rejects NaN and 1e999, which `json` reads
    from JSON Lines, and turns half of a surrogate pair into "?" without a word: a changed row instead of a rejected
    one.
    """

    def __init__(self, file: BinaryIO, label: str, max_row_bytes: int) -> None:
        self._file = file
        self._label = label
        self._max_row_bytes = max_row_bytes
        self._decoder = json.JSONDecoder()
        self._window = ""
        self._at = 0
        self._line = 1
        self._tail = b""
        self._ended = False

    def read(self) -> Iterator[tuple[int, object]]:
        """Yield (line, value) for every element of the array, or for every value if the file has no array."""
        in_array = self._next_char() == "["
        if in_array:
            self._at += 1
        first = True
        while (char := self._next_char()) != "":
            if in_array and char == "]":
                self._at += 1
                if self._next_char() != "":
                    raise self._broken("text after the end of the array")
                return
            if in_array and not first:
                if char != ",":
                    raise self._broken("a comma or ] is missing between two rows")
                self._at += 1
                self._next_char()
            first = False
            line = self._line
            yield line, self._value()
        if in_array:
            raise self._broken("the file ends inside the array")

    def _next_char(self) -> str:
        """Skip white space. Returns the character that follows, or the empty string at the end of the file."""
        while True:
            while self._at < len(self._window) and self._window[self._at] in _SPACE:
                self._line += self._window[self._at] == "\n"
                self._at += 1
            if self._at < len(self._window):
                return self._window[self._at]
            if not self._read_more(_CHUNK_BYTES):
                return ""

    def _value(self) -> object:
        while True:
            try:
                value, end = self._decoder.raw_decode(self._window, self._at)
            except json.JSONDecodeError as error:
                pending_chars = len(self._window) - self._at
                if pending_chars <= self._max_row_bytes and self._read_more(max(_CHUNK_BYTES, pending_chars)):
                    continue
                self._line += self._window.count("\n", self._at, error.pos)
                raise self._broken(f"not JSON: {printable(error.msg)}") from error
            except (RecursionError, ValueError) as error:
                raise self._broken(f"not usable JSON: {excerpt(str(error), 100)}") from error
            if end < len(self._window) or not self._read_more(_CHUNK_BYTES):
                self._line += self._window.count("\n", self._at, end)
                self._at = end
                return value

    def _read_more(self, num_bytes: int) -> bool:
        """Drop what is decoded and append to the window. Returns False if the file has no more."""
        if self._ended:
            return False
        raw = self._tail + self._file.read(num_bytes)
        self._ended = len(raw) < num_bytes + len(self._tail)
        self._tail = b""
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            if self._ended or error.start < len(raw) - 3:
                raise self._broken("not UTF-8") from error
            self._tail = raw[error.start :]
            text = raw[: error.start].decode("utf-8")
        self._window = self._window[self._at :] + text
        self._at = 0
        return text != ""

    def _broken(self, what: str) -> BadInput:
        return BadInput(
            f"{self._label}:{self._line}: {what}",
            hint="repair the file, or convert it to JSON Lines (.jsonl), where only bad lines are rejected",
        )
