"""The tables of other trainers' keys in `config/fates`: a key's default there, what 0 means, and what becomes of it.

Invariant: the columns `fate`, `ours` and `why` are what `ratel import` did with the row's example, and nothing is
decided by them (`scripts/write_fates.py`). `default` and `zero` are facts about the other trainer.
"""

from __future__ import annotations

import ast
import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ratel_cli.config.yaml.yaml_marks import Plain

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
    for tool, row in _rows().get(key, ()):
        outcome = RecordedOutcome(
            fate=row["fate"],
            written=_line(key, json.loads(row["example"])),
            given=", ".join(_line(*each) for each in json.loads(row["given"] or "{}").items()),
            ours=row["ours"],
            why=row["why"],
        )
        found.setdefault(outcome, []).append(tool)
    return found


def changes_nothing(key: str, value: Plain) -> bool:
    """Whether a key of other trainers with this value is as if it were not there, in each that has the key: it is a
    switch that is off, a number whose 0 means off, or the default."""
    rows = [row for tool, row in _rows().get(key, ()) if tool != "torchtune"]  # its keys are never by themselves
    defaults = [_literal(row["default"]) for row in rows]
    values = [*defaults, *(json.loads(row["example"]) for row in rows)] if rows else [value]
    is_number = any(isinstance(each, float) or (type(each) is int and rows) for each in values)
    if value is False or (type(value) is int and value == 0 and not is_number):  # of a switch, 0 is false
        return not any(each is True for each in defaults)
    if value == 0:
        return bool(rows) and all(
            row["zero"].startswith("off") or each == 0 for row, each in zip(rows, defaults, strict=True)
        )
    return bool(rows) and all(each == value and (each is True or value is not True) for each in defaults)


def _literal(source: str) -> object:
    """A default; its source text if Python computes it."""
    try:
        return ast.literal_eval(source)
    except (SyntaxError, ValueError):
        return f"source: {source}"


@cache
def _rows() -> Mapping[str, Sequence[tuple[str, dict[str, str]]]]:
    """By key: the rows of each tool."""
    found: dict[str, list[tuple[str, dict[str, str]]]] = {}
    for path in sorted(TABLES.glob("*.tsv")):
        with path.open(encoding="utf-8") as file:
            for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
                found.setdefault(row["key"], []).append((path.stem.replace("-v1", " v1"), row))
    return found


def _line(key: str, value: object) -> str:
    return f"{key}: {value if isinstance(value, str) else json.dumps(value)}"
