"""The AdamW benchmark runs, prints its table, and ends with JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from ratel_cli import _native

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_adamw.py"


def test_smoke() -> None:
    run = subprocess.run([sys.executable, SCRIPT, "--smoke"], capture_output=True, text=True, timeout=100, check=True)
    lines = run.stdout.splitlines()
    report = json.loads(lines[-1])
    names = {result["name"] for result in report["results"]}
    isas = _native.supported_isas()
    assert names == {f"{kind} {isa}" for kind in ("stream", "adamw") for isa in isas} | {
        "torch fused",
        "torch three passes",
    }
    assert all(result["seconds"] > 0 for result in report["results"])
    assert len(lines) == len(report["results"]) + 3
