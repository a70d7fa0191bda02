"""Parts of a kit that go wrong, each in its own way, for tests/scripts/test_gpu_kit.py."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from scripts.bench.findings import Report

SLEEP = "import time; time.sleep(600)"


def works(report: Report) -> None:
    report.measure("a number", lambda: 7)
    report.line("all is well")


def fails_in_one(report: Report) -> None:
    report.measure("a quotient", lambda: 1 // 0)
    report.measure("a number", lambda: 7)
    report.line("the others go on")


def raises(report: Report) -> None:
    report.measure("a number", lambda: 7)
    raise OSError("no such GPU")


def crashes(report: Report) -> None:
    report.measure("a number", lambda: 7)
    print("the driver is gone", flush=True)
    os._exit(9)


def hangs(report: Report) -> None:
    """With a process of its own, whose number it notes."""
    child = subprocess.Popen([sys.executable, "-c", SLEEP])
    report.measure("child", lambda: child.pid)
    written = Path(os.environ["KIT_FOLDER"], "started.new")
    written.write_text(str(child.pid))
    written.replace(written.with_suffix(""))
    time.sleep(600)


def talks(report: Report) -> None:
    for number in range(20):
        report.line(f"line {number}")
