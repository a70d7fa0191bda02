"""Tests see one environment, whatever the caller's is; the slowest of them are kept as a file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.environment import restored

ROOT = Path(__file__).parents[1]
HOSTILE = {
    "TERM": "dumb", "COLUMNS": "20", "LINES": "3", "NO_COLOR": "1", "FORCE_COLOR": "1", "LANG": "tr_TR", "LC_ALL": "C",
    "TZ": "Asia/Kathmandu", "HOME": "/", "XDG_CACHE_HOME": "/proc", "OMP_NUM_THREADS": "7", "PYTHONUNBUFFERED": "1",
    "RATEL_KILL_AT": "commit.written:1", "RATEL_FORCE_ISA": "none", "HF_TOKEN": "a secret", "WANDB_MODE": "online",
}  # fmt: skip
PROGRAM = """
import json, os, time
from tests.environment import fix
fix()
print(json.dumps([dict(os.environ), time.tzname[0], os.umask(0)]))
"""


def seen_with(variables: dict[str, str], *, umask: int) -> list[object]:
    """What a test process sees whose caller has these variables: variables, time zone, umask."""
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, env=variables, umask=umask, cwd=ROOT, capture_output=True, text=True, check=True)
    seen: list[object] = json.loads(ended.stdout)
    variables = seen[0]  # type: ignore[assignment]
    assert variables.pop("HOME") not in ("/", os.environ["HOME"])
    return seen


def test_the_caller_decides_nothing() -> None:
    path = {"PATH": os.environ["PATH"]}
    assert seen_with({**path, **HOSTILE}, umask=0o077) == seen_with(path, umask=0o022)


def test_what_one_test_changes_no_other_sees() -> None:
    before, directory = dict(os.environ), Path.cwd()
    with restored():
        assert not Path(os.environ["XDG_CACHE_HOME"]).exists()
        os.environ.pop("PATH")
        os.environ.update(TZ="Asia/Kathmandu", COLUMNS="20")
        time.tzset()
        os.umask(0o077)
        os.chdir("/")
    assert (dict(os.environ), Path.cwd(), time.tzname[0]) == (before, directory, "UTC")
    assert os.umask(0o022) == 0o022


def test_each_test_has_a_cache_of_its_own() -> None:
    caches = []
    for _ in range(2):
        with restored():
            caches.append(Path(os.environ["XDG_CACHE_HOME"]))
            caches[-1].mkdir()
    assert caches[0] != caches[1]
    assert not any(cache.exists() for cache in caches)


def test_the_slowest_tests_are_kept(tmp_path: Path) -> None:
    """Also when the file of an earlier session is there."""
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = testing\n")
    (tmp_path / "testing").mkdir()
    (tmp_path / "testing" / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "testing" / "test_two.py").write_text(
        "import time\ndef test_long():\n    time.sleep(0.2)\n\ndef test_short():\n    pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--slowest=kept/slowest.txt"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for _ in range(2):
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = (tmp_path / "kept" / "slowest.txt").read_text().splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines] == [
        "testing/test_two.py::test_long",
        "testing/test_two.py::test_short",
        "all 2 tests",
    ]
    assert float(lines[0].split()[0]) >= 0.2
    assert set(re.findall(r"--slowest.", (ROOT / "Makefile").read_text())) == {"--slowest="}
