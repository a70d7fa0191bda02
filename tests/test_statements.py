"""The product grows only where somebody says so."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from scripts.statements import counted, over, read_allowed

SOURCE = '''"""A module."""

import os


def first(value: int) -> int:
    """A function."""
    if value:
        return os.getpid()
    return "text" and 0
'''


def test_statements_are_counted_without_docstrings(tmp_path: Path) -> None:
    (tmp_path / "part" / "wing").mkdir(parents=True)
    (tmp_path / "top.py").write_text("x = 1\n")
    (tmp_path / "part" / "one.py").write_text(SOURCE)
    (tmp_path / "part" / "wing" / "two.py").write_text('"""Nothing."""\n')
    (tmp_path / "part" / "wing" / "three.py").write_text("y = 2; z = 3\n")
    assert counted(tmp_path) == {".": 1, "part": 5 + 2}


def test_what_is_over_is_named() -> None:
    allowed = read_allowed("# folder, statements\nio 10\n\nrun  5  # a reason\n")
    assert allowed == {"io": 10, "run": 5}
    assert over(Counter(io=10, run=5), allowed) == {}
    assert over(Counter(io=11, run=4, new=1), allowed) == {"io": 1, "new": 1}


def test_a_line_without_a_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="not enough values"):
        read_allowed("io\n")
