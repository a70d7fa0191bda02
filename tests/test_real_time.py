"""A test in real time has four tries, longer ones if it likes; other failures than of assertions have one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest
from tests.real_time import in_real_time, of_this_try

tried = []

@in_real_time
def test_passes_the_fourth_time(request):
    tried.append(of_this_try(request, (1.0, 2.0, 4.0)))
    assert len(tried) == 4

def test_was_longer_each_time():
    assert tried == [1.0, 2.0, 4.0, 4.0]

@in_real_time
def test_always_fails():
    assert False

@in_real_time
def test_breaks():
    raise ValueError
"""


def test_four_tries(tmp_path: Path) -> None:
    (tmp_path / "test_drawn.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "--config-file", "pyproject.toml", str(tmp_path / "test_drawn.py")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    last = run.stdout.splitlines()[-1]
    assert "2 failed, 2 passed, 6 rerun" in last, run.stdout
