"""The file `run/metrics.jsonl`, which has one line for each step of a run.

Invariant: when a run begins, the file has exactly the steps that the store has. None is missing, because a line is
written before its step is committed. None is surplus, because a resume drops lines of steps after the last commit, and
a line that a crash cut short. If the file cannot be written, there is one warning and training continues.

The best step is chosen by this file, so a line ends with a checksum of itself (XXH3-64). Lines of earlier versions have
none. A line that was changed is no step any more: it stays, with all that follow it, and is reported.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import xxhash

from ratel_cli.closing import Closing
from ratel_cli.training.metrics import StepMetrics
from ratel_cli.units import counted

_CHECKSUM = re.compile(rb', "checksum": "([0-9a-f]{16})"\}\s*$')
"""How a line ends."""


def line_of(metrics: StepMetrics) -> bytes:
    """The line of a step, with its checksum."""
    content = json.dumps(metrics.to_json(), allow_nan=False).encode()
    return content[:-1] + f', "checksum": "{xxhash.xxh3_64_hexdigest(content)}"}}\n'.encode()


def step_in(line: bytes) -> StepMetrics | None:
    """The step in a line; None if the line is no step, or is not as it was written."""
    end = _CHECKSUM.search(line)
    if end is not None and xxhash.xxh3_64_hexdigest(line[: end.start()] + b"}").encode() != end[1]:
        return None
    try:
        return StepMetrics.from_json(json.loads(line))
    except (ValueError, RecursionError):
        return None


class MetricsLog(Closing):
    """Appends to the file. The first write that fails is a warning, and the last: nothing is written after it."""

    def __init__(self, path: Path, *, committed_step: int, warn: Callable[[str], None]) -> None:
        """Drop the lines of steps after `committed_step`, if there are any. Lines that are damaged are a warning."""
        self._path = path
        self._warn = warn
        self._file: FileIO | None = None
        self._num_bytes = 0
        self._last_step: int | None = None
        self.earlier_losses: list[float] = []
        """Losses of the steps that were in the file already, in order."""
        self._last_line = b""
        """The line of the last step, at the end of the file; empty if it has none."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: the operating system has the line when `write` returns, and closing does not try to write
            # again what failed.
            path.touch()
            self._file = path.open("r+b", buffering=0)
            self._keep_up_to(committed_step)
            if path.is_file():
                self._file.truncate(self._num_bytes)
        except OSError as error:
            self._give_up(error)

    def write(self, metrics: StepMetrics) -> None:
        """Append the line of a new step, or replace the line of the last step when it was evaluated."""
        if self._file is None:
            return
        line = line_of(metrics)
        replaced = self._last_line if metrics.step == self._last_step else b""
        start = self._num_bytes - len(replaced)
        try:
            _end_with(self._file, start, line)
        except OSError as error:
            with contextlib.suppress(OSError):  # the earlier content already has space on the disk
                _end_with(self._file, start, replaced)
            self._give_up(error)
        self._num_bytes = start + len(line)
        self._last_step, self._last_line = metrics.step, line

    def close(self) -> None:
        """Close the file. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _keep_up_to(self, committed_step: int) -> None:
        """Find the part of the file that has the lines of steps up to `committed_step`. Each step has a line, so lines
        without a readable step stay while steps are missing."""
        self._last_step = committed_step
        damaged, missing = list[int](), committed_step
        with self._path.open("rb") as file:
            for number, line in enumerate(file if self._path.is_file() else (), 1):
                step = step_in(line)
                missing = missing - 1 if step is None else committed_step - step.step
                if missing < 0 or not line.endswith(b"\n"):
                    break
                self._num_bytes += len(line)
                if step is None:
                    damaged.append(number)
                else:
                    self.earlier_losses.append(step.loss)
                self._last_line = line if step is not None and missing == 0 else b""
        if damaged:
            self._warn(
                f"{self._path}:{damaged[0]}: {counted(len(damaged), 'damaged line')}; the metrics of these steps are "
                "lost; none of them can be chosen as the best step"
            )

    def _give_up(self, error: OSError) -> None:
        self._warn(f"{self._path}: cannot be written ({error.strerror}); training continues without it")
        self.close()


def _end_with(file: FileIO, offset: int, line: bytes) -> None:
    """Write the line at `offset` and end the file after it."""
    written = 0
    while written < len(line):  # a disk that is nearly full may take only a part
        written += os.pwrite(file.fileno(), line[written:], offset + written)
    file.truncate(offset + len(line))
