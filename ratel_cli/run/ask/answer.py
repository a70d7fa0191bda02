"""The answer to a question of `ratel plan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to one question."""

    key: str
    """In `--json`."""
    title: str
    lines: list[str]
    content: object
    draw: Callable[[Path], None] | None = None
    """Writes the answer as a picture, in place of the plan's curve."""
