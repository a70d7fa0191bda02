"""The rows of `ratel import`: what became of each key of another trainer's config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol


class ImportedKey(Protocol):
    """What became of one key."""

    @property
    def written(self) -> str: ...
    @property
    def value(self) -> str: ...
    @property
    def fate(self) -> str: ...
    @property
    def ours(self) -> str: ...
    @property
    def reason(self) -> str: ...


_WORDS = {
    "kept": "kept",
    "translated": "translated",
    "noted": "dropped",
    "ignored": "dropped",
    "undecided": "decide",
    "impossible": "impossible",
}


def import_rows(tool: str, outcomes: Sequence[ImportedKey]) -> list[tuple[str, str]]:
    """Rows of a word and a text: what is kept and what changes nothing in one row each, everything else by itself."""
    already = " already; nothing needs a translation" if tool == "Ratel" else ""
    return [("from", f"a config of {tool}{already}"), *_rows(outcomes)]


def _rows(outcomes: Sequence[ImportedKey]) -> Iterator[tuple[str, str]]:
    kept = [outcome.written for outcome in outcomes if outcome.fate == "kept"]
    if kept:
        yield "kept", ", ".join(kept)
    for outcome in outcomes:
        if outcome.fate == "translated":
            remark = f" ({outcome.reason})" if outcome.reason else ""
            yield _WORDS[outcome.fate], f"{_written(outcome)}  ->  {outcome.ours}{remark}"
    quiet = [outcome.written for outcome in outcomes if outcome.fate == "ignored"]
    if quiet:
        yield "dropped", f"{', '.join(quiet)}: {'it has' if len(quiet) == 1 else 'they have'} no effect here"
    for fate in ("noted", "undecided", "impossible"):
        for outcome in outcomes:
            if outcome.fate == fate:
                yield _WORDS[fate], f"{_written(outcome)}: {outcome.reason}"


def _written(outcome: ImportedKey) -> str:
    return " ".join(f"{outcome.written}: {outcome.value}".rstrip(": ").split())
