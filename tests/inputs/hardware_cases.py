"""Malformed hardware files for `ratel plan`: those of `tests/config/test_hardware_file.py`, and more of each key."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from tests.config.test_hardware_file import LINES, WRONG_FILES, WRONG_LINES, with_line
from tests.inputs.cases import MalformedInput, RunFiles, no_line

_WRONG = ("fast", "-1", "[1]", "{a: 1}", "true", "null", ".nan", "1e999", "3 parsecs", "12 bananas/s")


def cases() -> Iterator[MalformedInput]:
    section = ""
    for number, line in enumerate(LINES.splitlines(), start=1):
        key, _, value = line.strip().partition(": ")
        if not value:
            section = key.removesuffix(":")
        elif key != "name":
            for wrong in _WRONG:
                content, name = with_line(number, f"  {key}: {wrong}"), f"hardware with {section}.{key}: {wrong}"
                yield _plan_for(name, content.encode(), rf"`({section}\.)?{key}(\.\w+)*`", number)
            message = rf":\d+:\d+: `{section}\.{key}` is missing|`{section}` needs `{key}`"
            yield _plan_for(f"hardware without {section}.{key}", with_line(number, "").encode(), message)
    for at, (number, line, error) in enumerate(WRONG_LINES):
        yield _plan_for(
            f"hardware that is wrong, {at}",
            with_line(number, line).encode(),
            f":{re.escape(error.partition(' | ')[0])}",
        )
    for at, (text, error) in enumerate(WRONG_FILES):
        message = re.escape(error.removeprefix("hw.yaml"))
        yield _plan_for(f"hardware that is none, {at}", text.encode(), f"hardware.yaml{message}")
    yield _plan_for("hardware that is not UTF-8", b"gpu: \xff", "hardware.yaml.*not UTF-8 text")

    def directory(inputs: RunFiles) -> None:
        path = inputs.plan_for(b"")
        os.unlink(path)
        path.mkdir()

    def gone(inputs: RunFiles) -> None:
        os.unlink(inputs.plan_for(b""))

    for name, put, message in (("a directory", directory, "is a directory"), ("not there", gone, "no such file")):
        yield MalformedInput(name=f"hardware that is {name}", damage=no_line(put), message=f"hardware.yaml: {message}")


def _plan_for(name: str, content: bytes, message: str, line: int | None = None) -> MalformedInput:
    def damage(inputs: RunFiles) -> int | None:
        inputs.plan_for(content)
        return line

    return MalformedInput(name=name, damage=damage, message=message)
