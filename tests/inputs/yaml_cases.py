"""Malformed configs: the healthy run's `run.yaml`, damaged.

The configs of `tests/config/rejections.txt`, which has their exact messages; a list and a mapping as the value of every
key; and wrong contents and wrong places of the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ratel_cli.config.others.aliases import SECTIONS, TOP
from tests.config.test_rejections import blocks
from tests.inputs.cases import MalformedInput, RunFiles, no_line

_SECTIONS = [name for name in SECTIONS if name != TOP]


def cases() -> Iterator[MalformedInput]:
    yield from _kinds()
    for number, (text, [first, *_]) in enumerate(blocks()):
        message = first.removeprefix("run.yaml").partition(" | ")[0]
        yield _whole(f"wrong, number {number}", text.encode(), re.escape(message))
    yield from _bombs()
    yield from _files()


def _line(text: str, message: str, name: str) -> MalformedInput:
    """A line appended to the healthy config."""

    def damage(inputs: RunFiles) -> int:
        inputs.settings.pop(text.partition(":")[0], None)
        return inputs.add_lines(text)

    return MalformedInput(name=name, damage=damage, message=message)


def _kinds() -> Iterator[MalformedInput]:
    """A list and a mapping as the value of every key."""
    for key in SECTIONS[TOP].model_fields:
        yield _line(f"{key}: [7]", rf"`{key}(\.\w+)*`", f"a list as {key}")
        yield _line(f"{key}: {{no_such: 7}}", rf"`{key}(\.\w+)*`|`no_such`", f"a mapping as {key}")
    for section in _SECTIONS:
        for key in SECTIONS[section].model_fields:
            outer, *inner = section.split(".")
            value = f"{{{key}: [[7]]}}"
            for name in reversed(inner):
                value = f"{{{name}: {value}}}"
            value = f"[{value}]" if section == "datasets" else value
            message = rf"`{re.escape(section)}(\.\d)?\.{key}(\.\w+)*`"
            yield _line(f"{outer}: {value}", message, f"a list as {section}.{key}")


def _bombs() -> Iterator[MalformedInput]:
    laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 12)
    )
    merges = "m0: &m0 {a: 1}\n" + "".join(f"m{i}: &m{i} {{<<: [*m{i - 1}, *m{i - 1}]}}\n" for i in range(1, 30))
    yield _whole("a bomb of aliases", laughs.encode(), "more than 10000 values")
    yield _whole(
        "a bomb of merges", merges.encode(), "more than 10000 values|nested more than 20 levels deep|unknown key"
    )
    for opening in ("[", "{", "- ", "a: {"):
        yield _whole(
            f"10000 times {opening!r}", (opening * 10_000).encode(), "nested more than 20 levels deep|not valid YAML"
        )
    yield _whole("20000 keys", "".join(f"k{i}: 1\n" for i in range(20_000)).encode(), "more than 10000 values")
    yield _whole("a number of 10000 digits", b"seed: " + b"1" * 10_000, "cannot be read as int")
    yield _whole("300 KiB of spaces", b" " * (300 << 10), "larger than 256 KiB")
    yield _whole("a binary file", bytes(range(256)) * 8, "")


def _whole(name: str, content: bytes, message: str) -> MalformedInput:
    """Another content of the config file."""

    def damage(inputs: RunFiles) -> None:
        inputs.text = content

    return MalformedInput(name=f"config that is {name}", damage=no_line(damage), message=f"run.yaml.*({message})")


def _files() -> Iterator[MalformedInput]:
    for name, content, message in (
        ("empty", b"", "the file is empty"),
        ("Latin-1", b"base_model: caf\xe9\n", r":1:16: not UTF-8 text \(byte 0xe9\)"),
        ("UTF-16", "base_model: x\n".encode("utf-16"), "not UTF-8 text|not allowed in YAML"),
        ("with an escape", b"seed: 1\x1b[2J", r"the character U\+001B is not allowed"),
    ):
        yield _whole(name, content, message)

    def directory(inputs: RunFiles) -> None:
        inputs.config.mkdir()

    def missing(inputs: RunFiles) -> None:
        inputs.arguments = [str(inputs.directory / "run.yml"), *inputs.arguments]

    def loop(inputs: RunFiles) -> None:
        os.symlink("loop.yaml", inputs.directory / "loop.yaml")
        _ask_for(inputs, "loop.yaml")

    yield MalformedInput(
        name="config that is a directory",
        damage=no_line(directory),
        message="run.yaml: not the output directory of a run",
    )
    yield MalformedInput(
        name="config in the place of an override", damage=no_line(missing), message="not a `key=value` argument"
    )
    yield MalformedInput(
        name="config that is a link to itself", damage=no_line(loop), message="loop.yaml: cannot be read"
    )
    for file_name, message in {
        "gone.yaml": "gone.yaml: no such file",
        "a\x1b[2Jb.yaml": r"a\\x1b\[2Jb.yaml: no such file",
        "a" * 300: "cannot be read: File name too long",
        "a/" * 3000: "cannot be read: File name too long",
        "run.yaml/x": "cannot be read: Not a directory",
        "\udcff.yaml": r"\\udcff.yaml: no such file",
    }.items():
        shown = repr(file_name[:20])
        yield MalformedInput(
            name=f"config called {shown}",
            damage=no_line(lambda inputs, file_name=file_name: _ask_for(inputs, file_name)),
            message=message,
        )


def _ask_for(inputs: RunFiles, file_name: str) -> None:
    inputs.asks_for = inputs.directory / file_name
