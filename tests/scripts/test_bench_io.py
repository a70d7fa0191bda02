"""The benchmark of the I/O queue runs, prints its table, ends with JSON, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ratel_cli.errors import EnvironmentFailure
from ratel_cli.io.queue import open_queue

SCRIPT = "scripts.bench.io"


@pytest.mark.nightly
def test_smoke(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    try:
        open_queue("io_uring", notice=pytest.fail).close()
    except EnvironmentFailure as refusal:
        pytest.skip(refusal.message)
    command = [sys.executable, "-m", SCRIPT, "--smoke", "--directory", tmp_path]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    report = json.loads(run.stdout.splitlines()[-1])
    results = report["results"]
    measured = {(result["name"], result["mode"]) for result in results}
    assert measured >= {
        (name, mode) for name in ("c loop", "ratel io_uring", "ratel threads") for mode in ("read", "write", "mixed")
    }
    assert all(result["seconds"] > 0 and 0 < result["fraction_of_best"] < 100 for result in results)
    for mode in ("read", "write", "mixed"):
        assert any(result["fraction_of_best"] == 1.0 for result in results if result["mode"] == mode)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_without_a_ceiling_there_is_no_result(tmp_path: Path) -> None:
    """Neither a compiler nor fio is on an empty PATH."""
    command = [sys.executable, "-m", SCRIPT, "--smoke", "--directory", tmp_path]
    environment = {**os.environ, "PATH": str(tmp_path)}
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert run.returncode == 1
    assert "c loop takes no part: cc is not installed" in run.stdout
    assert "nothing to compare with" in run.stderr and "Traceback" not in run.stderr


def test_a_directory_without_space_is_reported_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", SCRIPT, "--directory", tmp_path, "--span-gib", str(1 << 20)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 1
    assert "needs 1024 TiB" in run.stderr and "Traceback" not in run.stderr
    assert list(tmp_path.iterdir()) == []
