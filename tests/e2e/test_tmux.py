"""Runs in a real terminal, tmux: what is on its screen and in its history while a run trains, is stopped and resumed.

Some terminals keep what is erased, or wrap what they show before they report a new size. The screen of our own in
`tests/terminal.py` does neither. `RATEL_KEEP_RECORDINGS` keeps what was seen, to read it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.conftest import MakeConfig
from tests.recordings import keep

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]

REPOSITORY = Path(__file__).parents[2]
WIDTHS = [pytest.param(60, marks=pytest.mark.nightly), 80, pytest.param(140, marks=pytest.mark.nightly)]
ROWS = 12
"""As many as the panel has lines, so that it reaches the top of the screen."""
COMMAND = (
    "import sys; from ratel_cli.cli.app import main; from tests.e2e.runs import measured_briefly\n"
    "with measured_briefly(): code = main(sys.argv[1:])\n"
    "sys.exit(code)"
)
PANEL = (
    r"step \d+/\d+ [\u2500\u2501]",
    r"loss \d",
    r"[\d.]+ tokens/s  norm",
    r"CPU compute  [\u2500\u2501]",
    r"RAM \d",
)
"""How lines of the panel begin, and no others do."""


class Pane:
    """A shell in tmux."""

    def __init__(self, directory: Path, columns: int, rows: int) -> None:
        self._socket = directory / "socket"
        (directory / "conf").write_text(
            'set -g history-limit 5000\nset -g default-terminal "screen-256color"\nset -g status off\n'
        )
        self._size = ("-x", str(columns), "-y", str(rows))
        environment = "PS1='$ ' LANG=C.UTF-8 OMP_NUM_THREADS=1 sh"
        self._tmux("-u", "-f", str(directory / "conf"), "new-session", "-d", *self._size, environment)
        self.wait_for(lambda lines: lines[-1:] == ["$"])

    def run(self, *command: object) -> None:
        """Type a command of `ratel`, which says at its end with which exit code it has ended."""
        script = self._socket.with_name("command")
        words = shlex.join([sys.executable, "-c", COMMAND, *map(str, command)])
        script.write_text(f"trap : INT\ncd {shlex.quote(str(REPOSITORY))}\n{words}\necho ended with $?\n")
        self.press(f"sh {script}", "Enter")

    def press(self, *keys: str) -> None:
        """Press keys, by their names in tmux."""
        self._tmux("send-keys", *keys)

    def resize(self, columns: int, rows: int) -> None:
        """Make the terminal narrower or wider."""
        self._tmux("resize-window", "-x", str(columns), "-y", str(rows))

    @property
    def lines(self) -> list[str]:
        """All that was shown, from the first line of the history on, without empty lines at the end."""
        return self._captured("-S", "-")

    @property
    def screen(self) -> list[str]:
        """What is on the screen."""
        return self._captured()

    def wait_for(self, condition: Callable[[list[str]], object]) -> list[str]:
        """All lines, once they are as the condition says."""
        deadline = time.monotonic() + 60
        while not condition(lines := self.lines):
            assert time.monotonic() < deadline, "\n".join(lines)
            time.sleep(0.05)
        return lines

    def close(self) -> None:
        """End the shell and all that runs in it."""
        self._tmux("kill-server")

    def _captured(self, *arguments: str) -> list[str]:
        shown = self._tmux("capture-pane", "-p", *arguments)
        return [line.rstrip() for line in shown.rstrip().split("\n")]

    def _tmux(self, *arguments: str) -> str:
        environment = {
            key: value for key, value in os.environ.items() if key not in ("TMUX", "NO_COLOR", "FORCE_COLOR")
        }
        command = ["tmux", "-S", str(self._socket), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


@contextmanager
def pane(columns: int, rows: int) -> Iterator[Pane]:
    """A shell in tmux, which ends with the `with` statement."""
    with tempfile.TemporaryDirectory(prefix="tmux-") as directory:  # a socket's path must be short
        opened = Pane(Path(directory), columns, rows)
        try:
            yield opened
        finally:
            opened.close()


def num_panels(lines: Sequence[str]) -> int:
    """How often the panel is there; if some of its lines are there more often, how often these are."""
    return max(sum(re.match(begin, line) is not None for line in lines) for begin in PANEL)


def trained(lines: Sequence[str]) -> int:
    """The step that the panel shows; 0 without a panel."""
    steps = [int(match[1]) for line in lines if (match := re.match(r"step (\d+)/\d+ [\u2500\u2501]", line))]
    return max(steps, default=0)


def record(name: str, screens: Sequence[list[str]]) -> None:
    """Keep some screens, one below the other."""
    keep(name, "\n\n----\n\n".join("\n".join(lines) for lines in screens).encode())


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_session(make_config: MakeConfig, columns: int) -> None:
    """A run trains, is stopped by Ctrl-C, and resumes to its end. One panel is shown, and none stays."""
    config = make_config(max_steps=100_000, save_steps=5, save_total_limit=1)
    with pane(columns, ROWS) as opened:
        opened.run("finetune", config)
        for step in (10, 20, 30):  # with what is printed above it
            seen = opened.wait_for(lambda lines, step=step: trained(lines) >= step)  # type: ignore[misc]
            assert num_panels(seen) == 1, "\n".join(seen)
        assert all(len(line) <= columns for line in seen)
        opened.press("C-c")
        stopped = opened.wait_for(lambda lines: "ended with 130" in lines)
        assert num_panels(stopped) == 0, "\n".join(stopped)
        words = " ".join(" ".join(stopped[-8:]).split())
        match = re.search(r"Stopped at step (\d+) \(saved\)\. Run the same command to continue\.", words)
        assert match is not None, words
        said = next(number for number, line in enumerate(stopped) if line.startswith("Stopped at "))
        assert max(map(len, stopped[said:])) < columns, "no word of the sentence is cut"
        step = int(match[1])
        last = step + 200
        opened.run("finetune", config, f"max_steps={last}")
        resumed = opened.wait_for(lambda lines: trained(lines) > step)
        assert num_panels(resumed) == 1, "\n".join(resumed)
        ended = opened.wait_for(lambda lines: "ended with 0" in lines)
        assert num_panels(ended) == 0, "\n".join(ended)
        assert sum(line.startswith(f"step {last}/{last}  loss ") for line in ended) == 1
        record(f"tmux-{columns}.txt", [seen, stopped, resumed, ended])


@pytest.mark.parametrize("seconds", [0.0, 0.1, 1.0])
def test_a_terminal_that_is_resized(make_config: MakeConfig, seconds: float) -> None:
    """However fast its size changes: no line of an earlier panel stays."""
    config = make_config(max_steps=100_000, save_steps=5, save_total_limit=1)
    with pane(100, 50) as opened:
        opened.run("finetune", config)
        opened.wait_for(lambda lines: trained(lines) >= 10)
        for columns in (60, 100, 60, 100, 80, 60, 140, 80, 60):
            opened.resize(columns, 50)
            time.sleep(seconds)
        at = trained(opened.lines)
        settled = opened.wait_for(lambda lines: trained(lines) > at + 20)
        assert num_panels(settled) == 1, "\n".join(settled)
        assert all(len(line) <= 60 for line in settled[-12:])
        opened.press("C-c")
        ended = opened.wait_for(lambda lines: "ended with 130" in lines)
        assert num_panels(ended) == 0, "\n".join(ended)
        record(f"tmux-resized-{seconds}.txt", [settled, ended])
