"""Records out of JSON Lines, JSON and text files, each with the line it came from.

For `data/rows.py`. Invariant: memory stays within a few `MAX_ROW_BYTES` whatever the file holds; a bad
line costs that line only (it comes out as a `Reject`), while a JSON file that is broken in its middle cannot
be resumed and raises `BadInput`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ratel_cli.errors import BadInput, printable

MAX_ROW_BYTES = 8 << 20
"""One row at most: a tokenizer takes some 120 bytes of RAM per byte of one text (measured on a row of 12 MiB with
tokenizers 0.23), so this stays near 1 GiB."""

_CHUNK_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One record as it was read; columns are not checked yet."""

    file: str
    line: int
    record: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """One record that cannot be used, and why."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


def read_json_lines(path: Path, label: str, *, max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[Row | Reject]:
    """One object per line. Blank lines are no rows; CRLF and a byte order mark at the start are fine."""
    with _open_after_bom(path) as file:
        for line, raw, ended in _bounded_lines(file, max_row_bytes):
            try:
                text = _decode(raw, max_row_bytes)
                if text.strip(_SPACE):
                    yield Row(file=label, line=line, record=_parse(text, ended=ended))
            except _BadLine as bad:
                yield Reject(file=label, line=line, reason=str(bad))


def read_text_lines(path: Path, label: str, *, max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[Row | Reject]:
    """One sample per line, in a column named ``text``, as the `datasets` library reads text files."""
    with _open_after_bom(path) as file:
        for line, raw, _ in _bounded_lines(file, max_row_bytes):
            try:
                text = _decode(raw, max_row_bytes)
                if text.strip():
                    yield Row(file=label, line=line, record={"text": text.rstrip("\r\n")})
            except _BadLine as bad:
                yield Reject(file=label, line=line, reason=str(bad))


def read_json(path: Path, label: str, *, max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[Row | Reject]:
    """A JSON array of objects, objects one after another, or JSON Lines under another name."""
    if _looks_like_json_lines(path, max_row_bytes):
        yield from read_json_lines(path, label, max_row_bytes=max_row_bytes)
        return
    with _open_after_bom(path) as file:
        values = _JsonValues(file, label, max_row_bytes)
        for line, value in values.read():
            try:
                yield Row(file=label, line=line, record=_as_record(value))
            except _BadLine as bad:
                yield Reject(file=label, line=line, reason=str(bad))


def _open_after_bom(path: Path) -> BinaryIO:
    """Open a file behind its byte order mark, so that no bound on the first line counts the mark."""
    file = path.open("rb", buffering=_CHUNK_BYTES)
    if file.read(len(_BOM)) != _BOM:
        file.seek(0)
    return file


def _bounded_lines(file: BinaryIO, max_row_bytes: int) -> Iterator[tuple[int, bytes, bool]]:
    """(line number, bytes, whether a newline ended it). A longer line comes out one byte too long, the rest dropped."""
    line = 0
    while raw := file.readline(max_row_bytes + 1):
        line += 1
        ended = raw.endswith(b"\n")
        if len(raw) > max_row_bytes and not ended:
            while (rest := file.readline(_CHUNK_BYTES)) and not rest.endswith(b"\n"):
                pass
        yield line, raw, ended


class _BadLine(Exception):
    """Why one line is no row."""


def _decode(raw: bytes, max_row_bytes: int) -> str:
    if len(raw) > max_row_bytes:
        raise _BadLine(f"the line is longer than {max_row_bytes} bytes")
    if (at := raw.find(b"\0")) >= 0:
        raise _BadLine(f"a NUL byte at column {at + 1}")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _BadLine(f"not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}") from error


def _parse(text: str, *, ended: bool) -> dict[str, object]:
    try:
        return _as_record(json.loads(text.rstrip("\r\n")))
    except json.JSONDecodeError as error:
        what = "not JSON" if ended else "not JSON, and the file ends inside this line"
        raise _BadLine(f"{what}: {printable(error.msg)} at column {error.colno}") from error
    except (RecursionError, ValueError) as error:  # ValueError: an integer of thousands of digits
        raise _BadLine(f"not usable JSON: {printable(str(error))[:100]}") from error


def _as_record(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise _BadLine(f"a row must be an object, this is {json_name(value)}")
    return value


def json_name(value: object) -> str:
    """What a JSON value is called, for messages."""
    names = {bool: "a boolean", int: "a number", float: "a number", str: "text", list: "an array", dict: "an object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _looks_like_json_lines(path: Path, max_row_bytes: int) -> bool:
    with _open_after_bom(path) as file:
        for _, raw, _ in _bounded_lines(file, max_row_bytes):
            if raw.strip():
                break
        else:
            return False
    try:
        return isinstance(json.loads(raw), dict)
    except (ValueError, RecursionError):
        return False


class _JsonValues:
    """The values of one JSON text, decoded one at a time from a sliding window.

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
        """(line, value) for every element of the array, or for every value of a file without one."""
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
        """Skips white space; the character there, or the empty string at the end of the file."""
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
                raise self._broken(f"not usable JSON: {printable(str(error))[:100]}") from error
            if end < len(self._window) or not self._read_more(_CHUNK_BYTES):
                self._line += self._window.count("\n", self._at, end)
                self._at = end
                return value

    def _read_more(self, num_bytes: int) -> bool:
        """Drops what is done and appends to the window; False when the file has no more."""
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
        return BadInput(f"{self._label}:{self._line}: {what}", hint="JSON Lines (.jsonl) loses only the bad line")
