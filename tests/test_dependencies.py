"""docs/dependencies.md has every package that Ratel needs; what the extras bring: tests/scripts/test_project.py."""

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
