"""Ctrl-C and SIGTERM end the commands that do not train with an exit code and one line, without a trace."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ratel_cli.cli.app import main

CODES = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
STOPPED = "Stopped. Run the same command again."


def start(*arguments: str, cache: Path) -> subprocess.Popen[str]:
    """Start `ratel` with its own cache directory, so that nothing is cached."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-m", "ratel_cli", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def wait_until_it_sleeps(process: subprocess.Popen[str]) -> None:
    """Return when the process waits for something. One that the kernel has yet to run does not sleep."""
    deadline = time.monotonic() + 300
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)


@contextmanager
def held_up(fifo: Path, reader: subprocess.Popen[str]) -> Iterator[None]:
    """Hold up a process while it reads a pipe that nobody writes to."""
    deadline = time.monotonic() + 300
    while True:
        try:
            writer = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
            break
        except OSError as error:
            assert error.errno == errno.ENXIO, "nobody reads yet"
        assert reader.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    try:
        yield
    finally:
        os.close(writer)


@pytest.mark.parametrize(("number", "code"), CODES)
def test_plan(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """A signal while the command reads its config."""
    config = tmp_path / "run.yaml"
    os.mkfifo(config)
    with start("plan", str(config), cache=tmp_path) as process, held_up(config, process):
        wait_until_it_sleeps(process)  # a signal between opening and reading is noticed only when something was read
        process.send_signal(number)
        _, stderr = process.communicate(timeout=300)
    assert (process.returncode, stderr.splitlines()) == (code, [STOPPED])


@pytest.mark.parametrize(("number", "code"), [CODES[0], pytest.param(*CODES[1], marks=pytest.mark.nightly)])
def test_profile(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """A signal while the command measures."""
    with start("profile", "--storage", str(tmp_path), cache=tmp_path / "cache") as process:
        assert process.stderr is not None
        while "measuring" not in process.stderr.readline():
            assert process.poll() is None
        time.sleep(0.2)
        process.send_signal(number)
        stderr = process.stderr.read()
        assert process.wait(timeout=300) == code
    assert "Traceback" not in stderr
    assert stderr.splitlines()[-1] == STOPPED
    assert list(tmp_path.iterdir()) == [], "nothing was cached, and nothing is left"


@pytest.mark.full
def test_ctrl_c_again_and_again(tmp_path: Path) -> None:
    """Until the process has ended: what closes then is not interrupted."""
    with start("profile", "--storage", str(tmp_path), cache=tmp_path / "cache") as process:
        assert process.stderr is not None
        while "measuring" not in process.stderr.readline():
            assert process.poll() is None
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.01)
        stderr = process.stderr.read()
    assert process.returncode == 130 and "Traceback" not in stderr and "ignored" not in stderr, stderr


def test_the_earlier_handler_is_installed_again(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert main(["plan", str(tmp_path / "none.yaml")]) == 2
    assert signal.getsignal(signal.SIGTERM) == before
