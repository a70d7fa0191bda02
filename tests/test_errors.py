"""The tree of errors: every one has the exit code that is drawn at the top of the file, and says what to do."""

from __future__ import annotations

import re
import signal

import pytest

from ratel_cli import errors
from ratel_cli.errors import BadInput, DoesNotFit, Interrupted, RatelError


def all_errors() -> list[type[RatelError]]:
    found, waiting = [], [RatelError]
    while waiting:
        found.append(waiting.pop())
        waiting.extend(found[-1].__subclasses__())
    return sorted((each for each in found if each.__module__ == errors.__name__), key=lambda each: each.__name__)


def test_the_drawing_is_the_tree() -> None:
    """Names, codes and parents; Interrupted's code depends on the signal."""
    assert errors.__doc__ is not None
    drawn: dict[str, tuple[str, str | None]] = {}
    above: list[tuple[int, str]] = []
    for indent, name, code in re.findall(r"^( {4,})(\w+) +([\d/]+)  ", errors.__doc__, flags=re.MULTILINE):
        above = [(depth, parent) for depth, parent in above if depth < len(indent)]
        drawn[name] = (code, above[-1][1] if above else None)
        above.append((len(indent), name))
    assert drawn == {
        each.__name__: (
            "130/143" if each is Interrupted else str(each.exit_code),
            None if each is RatelError else each.__mro__[1].__name__,
        )
        for each in all_errors()
    }


@pytest.mark.parametrize("kind", [each for each in all_errors() if each not in (DoesNotFit, Interrupted)])
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
    assert (error.signal_number, error.signal_exit_code, error.hint) == (number, code, None)
