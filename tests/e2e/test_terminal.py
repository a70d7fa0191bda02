"""What a person sees of a run on a terminal of 60, 80 and 140 columns, from a pseudo-terminal and a screen of our own.

The run is a process whose stderr is the terminal. Its screen is looked at while it trains and when it is over.
"""

from __future__ import annotations

import codecs
import ctypes
import fcntl
import multiprocessing
import os
import pty
import re
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from threading import Thread

import pytest
import torch

from ratel_cli.cli.app import main
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import Config, measured_briefly
from tests.real_time import in_real_time
from tests.terminal import Screen
from tests.tiers import sample

WIDTHS = sample((60, 80, 140), every=3)
ROWS = 50


class Session:
    """A run on a terminal. `seen` has the screen each time that the cursor was below all lines.

    One write may arrive in parts. After a part of a panel the cursor is still among the lines of the one before.
    """

    def __init__(self, config: Path, *arguments: str, columns: int) -> None:
        self.master, self._slave = pty.openpty()
        self.screen = Screen(columns, ROWS)
        self.seen: list[list[str]] = []
        self._set_size(columns)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["ratel_cli.run.train.finetune", "tests.e2e.runs"])
        self.process: ForkServerProcess = context.Process(
            target=_run_child, args=(str(config), arguments, dict(os.environ), os.ttyname(self._slave))
        )
        self.process.start()
        self._reader = Thread(target=self._read)
        self._reader.start()

    def resize(self, columns: int) -> None:
        """Make the terminal narrower or wider."""
        self._set_size(columns)
        self.screen.resize(columns)

    def wait_for(self, condition: Callable[[list[str]], bool]) -> None:
        """Return when the screen is as the condition says."""
        deadline = time.monotonic() + 300
        while not condition(self.screen.lines):
            assert self.process.is_alive() and time.monotonic() < deadline, self.screen.lines
            time.sleep(0.002)

    def wait_for_writes(self, number: int) -> None:
        """Return when the panel has been drawn that often."""
        before = len(self.seen)
        self.wait_for(lambda lines: len(self.seen) >= before + number)

    def end(self) -> int:
        """The exit code, when all that was written has been read."""
        self.process.join(300)
        assert self.process.exitcode is not None, "the run does not end"
        os.close(self._slave)
        self._reader.join()
        os.close(self.master)
        return self.process.exitcode

    def _set_size(self, columns: int) -> None:
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")()
        while True:
            try:
                part = os.read(self.master, 1 << 16)
            except OSError:  # nobody has the terminal open any more
                return
            if not part:
                return
            self.screen.write(decoder.decode(part))
            lines = self.screen.lines
            if self.screen.cursor == (len(lines), 0):
                self.seen.append(lines)


def _run_child(config: str, arguments: Sequence[str], environment: Mapping[str, str], terminal: str) -> None:
    torch.set_num_threads(1)
    os.environ.clear()  # a fork server has the environment of the test that started it
    os.environ.update(environment)
    with Path(terminal).open("w", encoding="utf-8", buffering=1) as stderr:
        os.dup2(stderr.fileno(), 2)
        sys.stderr = stderr
        with measured_briefly():
            code = main(["finetune", config, *arguments])
        for number in (signal.SIGINT, signal.SIGTERM):  # the command is over: later signals are not meant for it
            signal.signal(number, signal.SIG_IGN)
        sys.exit(code)


@contextmanager
def session(config: Config, *arguments: str, columns: int = 80) -> Iterator[Session]:
    """Start a run on a terminal; the test ends it."""
    running = Session(config, *arguments, columns=columns)
    try:
        yield running
    finally:
        if running.process.is_alive():
            running.process.kill()
            running.end()


def panels(running: Session) -> list[list[str]]:
    """The panel each time that it was on the screen, from the empty line above it to its last line."""
    found = []
    for lines in running.seen:
        starts = [number for number, line in enumerate(lines) if re.match(r"step \d+/\d+ [\u2500\u2501]+ ", line)]
        if starts and lines[-1].startswith("NVMe "):
            found.append(lines[starts[-1] - 1 :])
    return found


def state_of(process: int) -> str:
    """The letter by which the kernel names what a process does."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0]


def assert_no_panel(lines: list[str]) -> None:
    """Nothing of the panel and of a bar is left."""
    assert [line for line in lines if "\u2500" in line or "\u2501" in line or line.startswith("CPU compute")] == []


@pytest.mark.full
@pytest.mark.parametrize("columns", WIDTHS)
def test_a_run(make_config: MakeConfig, columns: int) -> None:
    config = make_config(save_steps=2, save_total_limit=1, val_set_size=0.1, eval_steps=3, max_steps=6)
    with session(config, columns=columns) as running:
        assert running.end() == 0
    lines = running.screen.lines
    assert_no_panel(lines)
    losses = {line["step"]: line for line in config.metrics}
    assert [line for line in lines if line.startswith(("saved ", "eval loss "))] == [
        "saved step 2",
        f"eval loss {losses[3]['eval_loss']:.4f} after step 3",
        "saved step 4 in place of step 2",
        "saved step 6 in place of step 4",
        f"eval loss {losses[6]['eval_loss']:.4f} after step 6",
    ]
    [last] = [line for line in lines if line.startswith("step ") and "/6 " in line]
    assert last.startswith(f"step 6/6  loss {losses[6]['loss']:.4f}  ")
    assert len(last) <= columns
    assert panels(running)
    for panel in panels(running):
        assert len(panel) == (11 if panel[1].startswith("step 0/") else 12), panel
        assert all(len(line) < columns for line in panel), panel
        assert panel[0] == "" and "/6 " in panel[1]
        assert [line.split("  ")[0] for line in panel[5:9]] == ["CPU compute", "NVMe read", "NVMe write", "optimizer"]


@pytest.mark.full
def test_the_panel_begins_with_the_prediction_of_the_run(make_config: MakeConfig) -> None:
    """Not with that of the step that is recorded, which offloads nothing."""
    with session(make_config(), columns=140) as running:
        assert running.end() == 0
    opening = " ".join(" ".join(running.screen.lines).split())
    predicted = re.search(r" predicted ([\d.]+ m?s) per step", opening)
    first = re.search(r"([\d.]+ m?s)( per step|  ends)", panels(running)[0][2])
    assert panels(running)[0][1].startswith("step 0/4 ")
    assert predicted and first and first[1] == predicted[1], panels(running)[0]


@pytest.mark.full
def test_a_resumed_run_counts_the_steps_of_the_run(make_config: MakeConfig) -> None:
    config = make_config(max_steps=3)
    with session(config) as running:
        assert running.end() == 0
    with session(config, "max_steps=5") as resumed:
        assert resumed.end() == 0
    counts = [panel[1].split()[1] for panel in panels(resumed)]
    assert counts and set(counts) <= {"3/5", "4/5", "5/5"}
    assert counts[0] == "3/5"
    assert any(line.startswith("step 5/5  loss ") for line in resumed.screen.lines)
    assert_no_panel(resumed.screen.lines)


@pytest.mark.parametrize("columns", sample((60, 80), every=2))
def test_ctrl_c(make_config: MakeConfig, columns: int) -> None:
    config = make_config(max_steps=100_000)
    with session(config, columns=columns) as running:
        running.wait_for(lambda lines: any(line.startswith("step 1") and "/100000 " in line for line in lines))
        os.kill(running.process.pid or 0, signal.SIGINT)
        assert running.end() == 130
    lines = running.screen.lines
    step = config.metrics[-1]["step"]
    number = next(number for number, line in enumerate(lines) if line.startswith("Stopped at "))
    said = " ".join(line.strip() for line in lines[number:])
    assert said == f"Stopped at step {step} (saved). Run the same command to continue."
    assert max(map(len, lines[number:])) <= columns
    assert lines[number - 1].startswith(f"step {step}/100000  loss ")
    assert_no_panel(lines)


@pytest.mark.full
def test_ctrl_c_twice(make_config: MakeConfig) -> None:
    """Both arrive before the run can check, so it ends at once. The prompt of the shell comes on a line of its own."""
    config = make_config(max_steps=100_000)
    with session(config) as running:
        running.wait_for(lambda lines: any(re.match(r"step [1-9]\d*/100000 ", line) for line in lines))
        process = running.process.pid or 0
        os.kill(process, signal.SIGSTOP)
        while state_of(process) != "T":  # the signal takes effect when each of its threads has seen it
            time.sleep(0.001)
        # To the main thread: of two signals to the process, another thread may take one and handle it later.
        for number in (signal.SIGINT, signal.SIGTERM):
            assert ctypes.CDLL(None).tgkill(process, process, number) == 0
        os.kill(process, signal.SIGCONT)
        assert running.end() == 143
    lines = running.screen.lines
    assert lines[-1] == "Ended at once. Every committed step is saved."
    assert lines[-2].startswith("NVMe "), "the panel stays as it was"
    assert running.screen.cursor == (len(lines), 0)


@pytest.mark.full
def test_a_run_that_fails(make_config: MakeConfig) -> None:
    """The limit of what may be written ends it after some steps."""
    config = make_config(max_steps=100_000, storage={"engine": "threads", "max_tb_written": 2e-5})
    with session(config, columns=140) as running:
        assert running.end() == 3
    lines = running.screen.lines
    assert_no_panel(lines)
    assert any("more than storage.max_tb_written allows" in line for line in lines)
    assert lines[-1].startswith("hint: increase storage.max_tb_written")
    assert panels(running)


@pytest.mark.full
@in_real_time
def test_a_terminal_that_is_resized(make_config: MakeConfig) -> None:
    config = make_config(max_steps=100_000)
    with session(config, columns=140) as running:
        for columns in (60, 120, 80, 30, 100):
            running.wait_for(lambda lines: any(line.startswith("RAM ") for line in lines[-3:]))
            running.resize(columns)
            running.wait_for_writes(2)
        os.kill(running.process.pid or 0, signal.SIGINT)
        assert running.end() == 130
    assert_no_panel(running.screen.lines)
