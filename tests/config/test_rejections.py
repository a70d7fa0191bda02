"""The messages for wrong configs, word for word. `rejections.txt` is the corpus.

A block is a config and all messages about it. `| ` starts a line of a complete file, `+ ` a line that follows the two
lines of a minimal config. Errors stand without the file's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.config.config_loading import MINIMAL, Complain

CORPUS = Path(__file__).with_name("rejections.txt")


def blocks() -> Iterator[tuple[str, list[str]]]:
    """The text and the expected errors of each block."""
    for block in CORPUS.read_text().rstrip("\n").split("\n\n"):
        text, errors = "", []
        for line in block.split("\n"):
            if line[:1] in ("|", "+"):
                text = (text or (MINIMAL if line[0] == "+" else "")) + line[2:] + "\n"
            elif line.startswith("error: "):
                errors.append("run.yaml:" + line.removeprefix("error: "))
            else:
                errors[-1] += " | " + line.removeprefix("hint: ")
        yield text, errors


@pytest.mark.parametrize(("text", "errors"), list(blocks()))
def test_every_error_is_reported_at_once_at_its_place(complain: Complain, text: str, errors: list[str]) -> None:
    assert complain(text) == errors


@pytest.mark.full
@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "1:1: the file is empty"),
        ("a: 1\nb: \x00\n", "2:4: the character U+0000 is not allowed in YAML"),
        ("a: 1\nb: \x1b[2J\n", "2:4: the character U+001B is not allowed in YAML"),
        ("[" * 3000, "1:1: nested more than 20 levels deep"),
        ("[" * 22 + "]" * 22, "1:22: nested more than 20 levels deep"),
    ],
)
def test_texts_that_the_corpus_cannot_hold(complain: Complain, text: str, error: str) -> None:
    assert complain(text) == [f"run.yaml:{error}"]
