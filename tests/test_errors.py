"""The tree of errors is the one at the top of errors.py, with its exit codes; and texts for messages."""

from __future__ import annotations

import re
import signal

import pytest

from ratel_cli import errors
from ratel_cli.errors import BadInput, DoesNotFit, Interrupted, RankKilled, RatelError, excerpt, first_line, printable


def all_errors() -> list[type[RatelError]]:
    found, waiting = [], [RatelError]
    while waiting:
        found.append(waiting.pop())
        waiting.extend(found[-1].__subclasses__())
    return sorted((each for each in found if each.__module__ == errors.__name__), key=lambda each: each.__name__)


def test_the_drawing_is_the_tree() -> None:
    """Names, codes and parents; two have a code that depends on the signal."""
    codes = {Interrupted: "130/143", RankKilled: "137"}
    assert errors.__doc__ is not None
    drawn: dict[str, tuple[str, str | None]] = {}
    above: list[tuple[int, str]] = []
    for indent, name, code in re.findall(r"^( {4,})(\w+) +([\d/]+)  ", errors.__doc__, flags=re.MULTILINE):
        above = [(depth, parent) for depth, parent in above if depth < len(indent)]
        drawn[name] = (code, above[-1][1] if above else None)
        above.append((len(indent), name))
    assert drawn == {
        each.__name__: (
            codes.get(each, str(each.exit_code)),
            None if each is RatelError else each.__mro__[1].__name__,
        )
        for each in all_errors()
    }


@pytest.mark.parametrize("kind", [each for each in all_errors() if each not in (DoesNotFit, Interrupted, RankKilled)])
def test_message_and_hint(kind: type[RatelError]) -> None:
    error = kind("what happened", "what to do")
    assert (str(error), error.message, error.hint) == ("what happened", "what happened", "what to do")
    assert kind("what happened").hint is None


def test_what_does_not_fit_says_by_how_much() -> None:
    error = DoesNotFit("too large", "raise the limit", shortfall_bytes=4096)
    assert (error.message, error.hint, error.shortfall_bytes) == ("too large", "raise the limit", 4096)


def test_bad_input_carries_every_finding() -> None:
    second, third = BadInput("second"), BadInput("third", "a hint")
    error = BadInput("first", others=(second, third))
    assert error.others == (second, third)
    assert second.others == ()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_has_its_own_exit_code(number: int, code: int) -> None:
    error = Interrupted(number, "stopped")
    assert (error.signal_number, error.exit_code, error.hint) == (number, code, None)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("plain, with accents: éß漢", "plain, with accents: éß漢"),
        ("two\nlines\r\tand", "two\\nlines\\r\\tand"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("\x9b2J", "\\x9b2J"),
        ("right\u202eleft", "right\\u202eleft"),
        ("half \udc80", "half \\udc80"),
        ("\u2028", "\\u2028"),
        ("no-break\xa0space", "no-break\\xa0space"),
        ("\U000e0001", "\\U000e0001"),
    ],
)
def test_a_character_that_cannot_be_printed_becomes_an_escape(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_an_excerpt_is_cut() -> None:
    assert excerpt("a\n" * 3, 6) == "a\\n" * 3
    assert excerpt("a\n" * 3, 5) == "a\\na\\na..."


@pytest.mark.parametrize(
    ("error", "line"),
    [(ValueError("one\ntwo"), "one"), (ValueError(""), "ValueError"), (ValueError("\n \n\x1bx\n"), "\\x1bx")],
)
def test_the_first_line_of_a_foreign_error(error: Exception, line: str) -> None:
    assert first_line(error) == line
