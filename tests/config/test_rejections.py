"""The messages for wrong and for doubtful configs, word for word. `rejections.txt` and `warnings.txt` are the corpora.

A block is a config and all messages about it. `| ` starts a line of a complete file, `+ ` a line that follows the two
lines of a minimal config. Messages stand without the file's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.config.config_loading import MINIMAL, Complain, Load

REJECTIONS = Path(__file__).with_name("rejections.txt")
WARNINGS = Path(__file__).with_name("warnings.txt")


def blocks(corpus: Path = REJECTIONS) -> Iterator[tuple[str, list[str]]]:
    """The text and the expected messages of each block."""
    for block in corpus.read_text().rstrip("\n").split("\n\n"):
        text, messages = "", []
        for line in block.split("\n"):
            if line[:1] in ("|", "+"):
                text = (text or (MINIMAL if line[0] == "+" else "")) + line[2:] + "\n"
            elif line.startswith(("error: ", "warning: ")):
                messages.append("run.yaml:" + line.partition(": ")[2])
            else:
                messages[-1] += " | " + line.removeprefix("hint: ")
        yield text, messages


@pytest.mark.parametrize(("text", "errors"), list(blocks()))
def test_every_error_is_reported_at_once_at_its_place(complain: Complain, text: str, errors: list[str]) -> None:
    assert complain(text) == errors


@pytest.mark.parametrize(("text", "warnings"), list(blocks(WARNINGS)))
def test_every_doubt_is_a_warning_at_its_place(load: Load, text: str, warnings: list[str]) -> None:
    assert list(load(text).notices) == warnings


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
