"""Malformed training data: bad lines and rows, those of the tests of `tests/data`, and files without rows."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping

from ratel_cli.data.files.lines import MAX_ROW_BYTES
from tests.data.test_formats import ALPACA, CHAT, REASONS, TEXT, TOKENS
from tests.data.test_lines import BAD_LINES, BROKEN_JSON
from tests.inputs.cases import MalformedInput, RunFiles, no_line

_HEALTHY = b'{"text": "What is a list?"}\n'
_TYPES = ((TEXT, "completion"), (ALPACA, "alpaca"), (CHAT, "chat_template"), (TOKENS, "tokens"))
_UNUSABLE = {
    '{"input_ids": []}': "the row has no tokens",
    '{"input_ids": [1, 1000000]}': "'input_ids' contains 1000000; the tokenizer has ids 0 to",
    '{"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}': "all masked: no token has loss",
}
"""Of tokens, what is found when they are encoded."""


def cases() -> Iterator[MalformedInput]:
    too_long = b'{"text": "' + b"a" * (MAX_ROW_BYTES + 1) + b'"}'
    lines = [
        *BAD_LINES,
        (b"<html>", "f:2: not JSON"),
        (too_long, f"f:2: the line is longer than {MAX_ROW_BYTES} bytes"),
    ]
    for number, (line, reason) in enumerate(lines):
        yield _line(f"{number}, {line[:40]!r}", line, re.escape(reason.partition(" ")[2]))
    for number, (row_format, record, reason) in enumerate(REASONS):
        for each, kind in _TYPES:
            if each == row_format:
                yield _only(f"of type {kind}, {number}", json.dumps(record), re.escape(reason), type=kind)
    for row, reason in _UNUSABLE.items():
        yield _only(f"of type tokens, {row}", row, reason, type="tokens")
    for number, (content, message) in enumerate(BROKEN_JSON):
        yield _file(f"JSON, {number}", "rows.json", content, f"rows.json{re.escape(message.removeprefix('f'))}")
    yield _file("JSON of no objects", "rows.json", b'\n\n["a"]', "rows.json:3: a row must be an object, not text")
    yield from _files()
    yield from _places()


def _line(name: str, line: bytes, message: str) -> MalformedInput:
    """One bad line among good ones."""

    def damage(inputs: RunFiles) -> int:
        inputs.data(_HEALTHY * 3 + line + b"\n" + _HEALTHY * 2)
        return 4

    return MalformedInput(name=f"line {name}", damage=damage, message=message)


def _only(name: str, row: str, message: str, **keys: object) -> MalformedInput:
    """A bad line that is the only line of the file."""

    def damage(inputs: RunFiles) -> int:
        inputs.data(f"{row}\n".encode(), **keys)  # type: ignore[arg-type]
        return 1

    return MalformedInput(name=f"row {name}", damage=damage, message=message)


def _file(
    name: str, file_name: str, content: bytes, message: str, keys: Mapping[str, object] | None = None
) -> MalformedInput:
    def damage(inputs: RunFiles) -> None:
        inputs.data(content, name=file_name, **(keys or {}))  # type: ignore[arg-type]

    return MalformedInput(name=f"data that is {name}", damage=no_line(damage), message=message)


def _files() -> Iterator[MalformedInput]:
    nothing = "no samples: no rows were read from"
    for name, content in {
        "empty": b"",
        "blank lines": b"\n \n\r\n",
        "a byte order mark": b"\xef\xbb\xbf",
    }.items():
        yield _file(name, "rows.jsonl", content, nothing)
        yield _file(f"{name}, as text", "rows.txt", content, nothing)
    cut = _HEALTHY + b'{"text": "half of'
    yield _file("cut in its last line", "rows.jsonl", cut, "rows.jsonl:2: .*the file ends inside this line")
    yield _file("text that is not UTF-8", "rows.txt", b"good\n\xff\n", r"rows.txt:2: not UTF-8: byte 0xff at column 1")
    yield _file("text with a NUL", "rows.txt", b"good\na\0b\n", "rows.txt:2: a NUL byte at column 2")
    for content in (b"", b"PAR1", b"PAR1" + bytes(99) + b"PAR1"):
        yield _file(f"parquet of {len(content)} bytes", "rows.parquet", content, "not a usable parquet file")
    yield _file("of one line of JSON, called rows.csv", "rows.csv", _HEALTHY, "no rows were read")
    for suffix in ("xlsx", "gz", "zst", "arrow", "pkl", "py", "JSONLINES", ""):
        file_name = f"rows.{suffix}".rstrip(".")
        yield _file(f"called {file_name}", file_name, _HEALTHY, "this type of file cannot be read|no such file")
    unknown = json.dumps({"a": 1, "\x1b[2J": 2}).encode() + b"\n"
    message = r"no dataset type fits the columns a, \\x1b\[2J"
    yield _file("of unknown columns", "rows.jsonl", unknown, message, {"type": "auto"})
    yield _file("of a column that is not there", "rows.jsonl", _HEALTHY, "'body' is missing", {"field": "body"})

    def hold_out(inputs: RunFiles) -> None:
        inputs.data(_HEALTHY * 2)
        inputs.settings["val_set_size"] = 2

    yield MalformedInput(
        name="data that is held out whole", damage=no_line(hold_out), message="leaves nothing to train on"
    )


def _places() -> Iterator[MalformedInput]:
    def place(name: str, path: str, message: str) -> MalformedInput:
        def damage(inputs: RunFiles) -> None:
            here = inputs.directory
            (here / "hollow").mkdir()
            os.mkfifo(here / "pipe.jsonl")
            (here / "loop.jsonl").symlink_to("loop.jsonl")
            (here / "gone.jsonl").symlink_to("nowhere.jsonl")
            (here / "folder.jsonl").mkdir()
            inputs.train_on(path.replace("HERE", str(here)), type="completion")

        return MalformedInput(name=f"data in {name}", damage=no_line(damage), message=message)

    yield place("no file", "HERE/none.jsonl", "none.jsonl: no such file")
    yield place("an empty directory", "HERE/hollow", "there are no data files in this directory")
    yield place("a directory with a data file's name", "HERE/folder.jsonl", "there are no data files in this directory")
    yield place("a FIFO", "HERE/pipe.jsonl", "pipe.jsonl: not a regular file")
    yield place("a device", "/dev/zero", "/dev/zero: not a regular file")
    yield place("a dangling link", "HERE/gone.jsonl", "gone.jsonl: no such file")
    yield place("a link to itself", "HERE/loop.jsonl", "loop.jsonl: ")
    yield place("no match", "HERE/*.parquet", "no file matches")
    yield place("a malformed pattern", "HERE/[.jsonl", "no such file|no file matches")
    yield place("a file inside a file", "HERE/run.yaml/rows.jsonl", "rows.jsonl: no such file")
    yield place("a name too long", "HERE/" + "a" * 300 + ".jsonl", r"a\.jsonl: ")
    yield place("a path too long", "HERE/" + "a/" * 3_000 + "rows.jsonl", "rows.jsonl: ")
    yield place("a URL", "https://example.org/rows.jsonl", "rows.jsonl: an address is no path")
    yield place("a name with escapes", "HERE/\u202e.jsonl", r"\\u202e.jsonl: no such file")
