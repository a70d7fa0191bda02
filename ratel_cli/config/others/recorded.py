"""What `ratel import` does with each key of other trainers, as the tables in `config/fates` record it.

Invariant: a row is what `ratel import` did with its example; nothing is decided here (`scripts/write_fates.py`).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TABLES = Path(__file__).parents[1] / "fates"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOutcome:
    """What becomes of one key with one value."""

    fate: str
    """`kept`, `translated`, `dropped`, `decision` (the user decides), `refused`, or `parts`: its own keys have rows."""
    written: str
    """The key with its value."""
    given: str
    """Other keys that it needs, each with its value; empty if none."""
    ours: str
    """What it is read as; empty if it is not."""
    why: str

    @property
    def words(self) -> str:
        """What becomes of it, as a sentence without its end."""
        if self.fate == "parts":
            return "each of its own keys is read, or not, by itself"
        if self.fate != "translated":
            return self.why
        given = f", with `{self.given}`," if self.given else ""
        return f"`{self.written}`{given} is read as `{self.ours}`" + (f": {self.why}" if self.why else "")


def outcomes_of(key: str) -> dict[RecordedOutcome, list[str]]:
    """What becomes of a key of other trainers, each with those that have it; empty if none does."""
    found: dict[RecordedOutcome, list[str]] = {}
    for tool, row in _rows():
        if row["key"] == key:
            outcome = RecordedOutcome(
                fate=row["fate"],
                written=_line(key, json.loads(row["example"])),
                given=", ".join(_line(*each) for each in json.loads(row["given"] or "{}").items()),
                ours=row["ours"],
                why=row["why"],
            )
            found.setdefault(outcome, []).append(tool)
    return found


@cache
def _rows() -> tuple[tuple[str, dict[str, str]], ...]:
    return tuple(_read())


def _read() -> Iterator[tuple[str, dict[str, str]]]:
    for path in sorted(TABLES.glob("*.tsv")):
        with path.open(encoding="utf-8") as file:
            for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
                yield path.stem.replace("-v1", " v1"), row


def _line(key: str, value: object) -> str:
    return f"{key}: {value if isinstance(value, str) else json.dumps(value)}"
