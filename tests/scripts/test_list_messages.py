"""The list of messages: what kinds of text it finds, and that it finds those of the package."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scripts.list_messages import ROOT, as_line, messages_in

_SOURCE = '''
"""A module's docstring is no message."""

class RatelError(Exception): ...
class TooSmall(RatelError): ...

HINTS = {"key": "try another value"}

def check(log, path, size):
    """Nor is a function's."""
    if not size:
        message = f"{path}: is empty"
        raise TooSmall(message, "write a line " + "into it" if path else None)
    log.notice("one" if size == 1 else "more")
    log.say(f"read {size:.2f} bytes of {', '.join(['a file', path])}")
    return size["key"]

def rows(size) -> list[tuple[str, str]]:
    return [("size", f"{size} bytes"), ("rest", _rest(size))]
'''


def test_messages_are_found_with_their_kinds() -> None:
    found = [as_line(message, with_line_number=False) for message in messages_in({"a.py": _SOURCE})]
    assert sorted(found) == sorted(
        [
            "a.py: error: {path}: is empty",
            "a.py: hint: write a line into it",
            "a.py: note: one",
            "a.py: note: more",
            "a.py: line: read {size} bytes of {', '.join(['a file', path])}",
            "a.py: text: a file",
            "a.py: text: try another value",
            "a.py: row: size  {size} bytes",
            "a.py: row: rest  {_rest(size)}",
        ]
    )


def test_each_message_has_its_line() -> None:
    [message] = messages_in({"a.py": 'def f(log):\n    log.say(\n        "two words"\n    )\n'})
    assert as_line(message) == "a.py:3: line: two words"


@pytest.mark.full
@pytest.mark.parametrize("arguments", [[], ["--without-lines"]])
def test_the_package_is_listed(arguments: list[str]) -> None:
    command = [sys.executable, "scripts/list_messages.py", *arguments]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    assert len(printed) > 500
    assert all(line.startswith("ratel_cli/") for line in printed)
    assert any(line.endswith(": help: Print the version and exit.") for line in printed)


def test_an_unknown_argument_shows_the_usage() -> None:
    command = [sys.executable, "scripts/list_messages.py", "--unknown"]
    rejected = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert rejected.returncode == 2
    assert "--without-lines" in rejected.stderr
