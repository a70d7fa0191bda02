"""Every number of the README stands in the claim of a record; every record has its form (docs/records/README.md)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
RECORDS = sorted(path for path in (ROOT / "docs" / "records").glob("*.md") if path.name != "README.md")
KINDS = ("measured", "planned", "counted", "definition")
KEYS = ("kind", "claims", "rule", "command", "machine", "raw")


def record(path: Path) -> dict[str, Any]:
    """The head of a record."""
    _, head, _ = path.read_text(encoding="utf-8").split("---\n", maxsplit=2)
    content = yaml.safe_load(head)
    assert isinstance(content, dict)
    return content


def prose(markdown: str) -> str:
    """The words without blocks of code, targets of links, bold type, and how lines are broken. Commands and keys in
    backquotes are no figures, unless a claim quotes them."""
    text = re.sub(r"^( *)```.*?^\1```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("**", "")
    return " ".join(text.split())


def without_record(text: str, claims: list[str]) -> list[str]:
    """What is left of the prose around numbers once all claims are taken out, the longest first."""
    for claim in sorted(claims, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.,-]){re.escape(claim)}(?!\w)", " ", text)
    text = re.sub(r"`[^`]*`", " ", text)
    return re.findall(r".{0,30}\d.{0,30}", text)


README = prose((ROOT / "README.md").read_text(encoding="utf-8"))
CLAIMS = [claim for path in RECORDS for claim in record(path)["claims"]]


def test_every_figure_has_a_record() -> None:
    assert without_record(README, CLAIMS) == []


def test_a_figure_without_a_record_is_found() -> None:
    assert without_record(prose("It is **1.28** times\nas [fast](x1.md)."), ["1.2 times"]) == [
        "It is 1.28 times as fast."
    ]
    assert without_record("1.28 times, 11.28 times", ["1.28 times"]) == [" , 11.28 times"]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_it_has_the_form(path: Path) -> None:
    found = record(path)
    is_measured = found["kind"] == "measured"
    assert [*found] == [*KEYS[:-1], *(["date"] if is_measured else []), "raw"]
    assert found["kind"] in KINDS and all(found[key] for key in KEYS[:-1])
    assert [claim for claim in found["claims"] if claim not in README] == [], "the README does not say so any more"
    assert [name for name in found["raw"] if not (ROOT / name).is_file()] == []
    assert found["raw"] or not is_measured or "no raw log" in path.read_text()


def test_all_records_are_in_the_list() -> None:
    listed = re.findall(r"\]\(([a-z0-9-]+)\.md\)", (ROOT / "docs" / "records" / "README.md").read_text())
    assert sorted(listed) == [path.stem for path in RECORDS]
