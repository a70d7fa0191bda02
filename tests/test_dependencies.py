"""docs/dependencies.md has every package that pyproject.toml names, each with its extra."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PAGE = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")


def name_of(requirement: str) -> str:
    return re.split(r"[\[>=<~! ]", requirement)[0]


def test_every_dependency_is_explained() -> None:
    assert re.findall(r"^\| `([\w-]+)` \| (?!`)", PAGE, flags=re.MULTILINE) == [*map(name_of, PROJECT["dependencies"])]


def test_every_extra_is_explained() -> None:
    extras = {(extra, name_of(each)) for extra, names in PROJECT["optional-dependencies"].items() for each in names}
    explained = set(re.findall(r"^\| `([\w-]+)` \| `([\w-]+)` \|", PAGE, flags=re.MULTILINE))
    assert explained == {pair for pair in extras if pair[0] not in ("test", "all")}
