"""How torch's idle threads wait is set before torch is loaded, and what the user has set stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = """
import json, subprocess, sys
if "--torch" in sys.argv:
    sys.modules["torch"] = sys  # as if it were loaded
import ratel_cli
program = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith(('GOMP', 'OMP'))}))"
subprocess.run([sys.executable, "-c", program], check=True)
"""
"""What a process sees that one of Ratel's has started."""


@pytest.mark.parametrize(
    ("given", "arguments", "expected"),
    [
        ({}, [], {"GOMP_SPINCOUNT": "2000"}),
        ({"GOMP_SPINCOUNT": "7"}, [], {"GOMP_SPINCOUNT": "7"}),
        ({"GOMP_SPINCOUNT": ""}, [], {"GOMP_SPINCOUNT": ""}),
        ({"OMP_WAIT_POLICY": "active"}, [], {"OMP_WAIT_POLICY": "active"}),
        ({"OMP_NUM_THREADS": "1"}, [], {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "2000"}),
        ({}, ["--torch"], {}),
    ],
)
def test_what_child_processes_see(given: dict[str, str], arguments: list[str], expected: dict[str, str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env={"PATH": os.environ["PATH"], **given},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ended.stdout) == expected
