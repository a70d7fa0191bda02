"""Malformed training data: bad lines, bad columns, and files without rows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping

from ratel_cli.data.files.lines import MAX_ROW_BYTES
from tests.inputs.cases import MalformedInput, RunFiles, no_line

_HEALTHY = b'{"text": "What is a list?"}\n'
_LINES = {
    b'{"text": "a"': r"not JSON: Expecting ',' delimiter at column 13",
    b"{'text': 'a'}": "not JSON: .* at column 2",
    b'{"text": "a",}': "not JSON",
    b'{"text": "a"} {"text": "b"}': "not JSON: Extra data",
    b'{"text": "a\tb"}': "not JSON: Invalid control character",
    b'{"text": "a\x1b[2J"}': "not JSON: Invalid control character",
    b'{"text": "\\x41"}': "not JSON: Invalid",
    b'{"text": "a\0"}': "a NUL byte at column 12",
    b"\0" * 100: "a NUL byte at column 1",
    b'{"text": "\xff"}': "not UTF-8: byte 0xff at column 11",
    b'{"text": "caf\xe9"}': "not UTF-8: byte 0xe9 at column 14",
    '{"text": "a"}'.encode("utf-16-le"): "a NUL byte",
    b'\xef\xbb\xbf{"text": "a"}': "not JSON",
    b"hello": "not JSON: Expecting value at column 1",
    b"text: hello": "not JSON",
    b"text,label": "not JSON",
    b"<html>": "not JSON",
    b"# comment": "not JSON",
    b"{": "not JSON",
    b"}": "not JSON",
    b'"a"': "a row must be an object, not text",
    b'["a"]': "a row must be an object, not an array",
    b"7": "a row must be an object, not a number",
    b"NaN": "a row must be an object, not a number",
    b"null": "a row must be an object, not null",
    b"true": "a row must be an object, not a boolean",
    b"{}": "the field 'text' is missing",
    b'{"Text": "a"}': "the field 'text' is missing",
    b'{"text": null}': "'text' must be text, not null",
    b'{"text": 7}': "'text' must be text, not a number",
    b'{"text": ["a"]}': "'text' must be text, not an array",
    b'{"text": {"a": "b"}}': "'text' must be text, not an object",
    b'{"text": true}': "'text' must be text, not a boolean",
    b'{"text": ""}': "the text to train on is empty",
    b'{"text": " \\n\\t "}': "the text to train on is empty",
    b'{"text": "\\ud800"}': "half of a surrogate pair",
    b'{"text": "a", "text": 7}': "'text' must be text, not a number",
    b"[" * 100_000: "not usable JSON",
    b'{"text": ' + b"1" * 5_000 + b"}": "not usable JSON",
    b'{"text": "' + b"a" * (MAX_ROW_BYTES + 1) + b'"}': f"the line is longer than {MAX_ROW_BYTES} bytes",
}
_COLUMNS: dict[str, dict[str, str]] = {
    "alpaca": {
        '{"instruction": "a"}': "the field 'output' is missing",
        '{"output": "a"}': "the field 'instruction' is missing",
        '{"instruction": 7, "output": "a"}': "'instruction' must be text",
        '{"instruction": "a", "output": null}': "'output' must be text",
        '{"instruction": "a", "output": "b", "input": 7}': "'input' must be text",
        '{"instruction": "a", "output": ""}': "the text to train on is empty",
    },
    "chat_template": {
        "{}": "the field 'messages' is missing",
        '{"messages": null}': "'messages' must be an array of messages, not null",
        '{"messages": "a"}': "'messages' must be an array of messages, not text",
        '{"messages": []}': "the conversation has no messages",
        '{"messages": [7]}': "message 1 must be an object, not a number",
        '{"messages": [{"role": "user"}]}': "message 1 has no content",
        '{"messages": [{"content": "a"}]}': "message 1 has no role",
        '{"messages": [{"role": 7, "content": "a"}]}': "'role of message 1' must be text",
        '{"messages": [{"role": "user", "content": 7}]}': "'content of message 1' must be text",
        '{"messages": [{"role": "user", "content": ["a"]}]}': "part 1 of the content of message 1 must be an object",
        '{"messages": [{"role": "user", "content": "\\udfff"}]}': "half of a surrogate pair",
        '{"messages": [{"role": "user", "content": "a"}], "tools": 7}': "'tools' must be an array",
        '{"conversations": [{"from": 7, "value": "a"}]}': "'role of message 1' must be text",
        '{"conversations": [{"from": "human"}]}': "message 1 has no content",
        '{"question": "a"}': "the field 'messages' is missing",
    },
    "tokens": {
        "{}": "the field 'input_ids' is missing",
        '{"input_ids": "1 2"}': "'input_ids' must be an array of token ids",
        '{"input_ids": []}': "the row has no tokens",
        '{"input_ids": [1]}': "all masked: no token has loss",
        '{"input_ids": [1.5, 2]}': "must contain only whole numbers",
        '{"input_ids": [true, 2]}': "must contain only whole numbers",
        '{"input_ids": [[1], 2]}': "must contain only whole numbers",
        '{"input_ids": [1, null]}': "must contain only whole numbers",
        '{"input_ids": [1, -1]}': "'input_ids' contains -1; the tokenizer has ids 0 to",
        '{"input_ids": [1, 1000000]}': "'input_ids' contains 1000000; the tokenizer has ids 0 to",
        '{"input_ids": [1, 99999999999999999999]}': "contains a number that cannot be a token id",
        '{"input_ids": [1, 2], "labels": [1]}': "'labels' and 'input_ids' have different lengths, 1 and 2",
        '{"input_ids": [1, 2], "labels": "x"}': "'labels' must be an array of token ids",
        '{"input_ids": [1, 2], "labels": [1, -5]}': "'labels' contains -5",
        '{"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}': "all masked: no token has loss",
    },
}
_JSON = {
    b'[{"text": "a"}, {"text"': ":1: not JSON",
    b'[{"text": "a"},\n{"text": x}]': ":2: not JSON",
    b'[{"text": "a"}': ":1: the file ends inside the array",
    b'[{"text": "a"} {"text": "b"}]': ":1: a comma or ] is missing",
    b'[{"text": "a"}]\n{"text": "b"}': ":2: text after the end of the array",
    b'[{"text": "\xff"}]': ":1: not UTF-8",
    b"[" * 10_000: ":1: not (usable )?JSON",
    b'[{"text": ' + b"1" * 5_000 + b"}]": ":1: not usable JSON",
    b'[7, {"text": "a"}]': ":1: a row must be an object, not a number",
    b'\n\n["a"]': ":3: a row must be an object, not text",
    b"[]": "no samples: no rows were read from",
    b"7": ":1: a row must be an object, not a number",
}


def cases() -> Iterator[MalformedInput]:
    for number, (line, message) in enumerate(_LINES.items()):
        yield _line(f"{number}, {line[:40]!r}", line, message)
    for kind, rows in _COLUMNS.items():
        for row, message in rows.items():
            yield _only(f"of type {kind}, {row}", row.encode() + b"\n", message, type=kind)
    for number, (content, message) in enumerate(_JSON.items()):
        yield _file(f"JSON {number}, {content[:40]!r}", "rows.json", content, f"rows.json{message}|{message}")
    yield from _files()
    yield from _places()


def _line(name: str, line: bytes, message: str) -> MalformedInput:
    """One bad line among good ones."""

    def damage(inputs: RunFiles) -> int:
        inputs.data(_HEALTHY * 3 + line + b"\n" + _HEALTHY * 2)
        return 4

    return MalformedInput(name=f"line {name}", damage=damage, message=message)


def _only(name: str, content: bytes, message: str, **keys: object) -> MalformedInput:
    """A bad line that is the only line of the file."""

    def damage(inputs: RunFiles) -> int:
        inputs.data(content, **keys)  # type: ignore[arg-type]
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
