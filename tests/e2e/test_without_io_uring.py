"""A run where a container's filter of system calls forbids io_uring: it says so once, and its bits are the same."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import Config
from tests.io.without_io_uring import ERROR

_SAID = "io_uring is not available here: {}; transfers use threads, with the same results"


@pytest.mark.parametrize(
    "error",
    [pytest.param(errno.EPERM, marks=pytest.mark.full), pytest.param(errno.ENOSYS, marks=pytest.mark.nightly)],
    ids=["not permitted", "unknown"],
)
def test_a_run_falls_back_to_threads_and_says_so_once(make_config: MakeConfig, plain_run: Config, error: int) -> None:
    """The filter is a real one, in a process of its own. `plain_run` has threads by its config."""
    config = make_config(storage={"engine": "auto"})
    command = [sys.executable, "-m", "tests.io.without_io_uring", "ratel", "finetune", str(config)]
    variables = {**os.environ, ERROR: str(error)}
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, cwd=root, env=variables, check=False, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    words = " ".join(ended.stderr.split())
    assert words.count(_SAID.format(os.strerror(error))) == 1
    config.assert_same_result(plain_run)
