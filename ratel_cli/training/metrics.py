"""`run/metrics.jsonl`: one object for each step, in order, also across resumed runs.

Written by `cli.training_run` with what `training.loop` reports. Invariant: whenever a run begins, the
file holds the steps that the store holds. No step less: a line is written before its step is committed,
and again afterwards, when the times are complete. No step more: on resume, lines of steps after the
last commit are dropped, and a line that a crash cut short. A log that cannot be written is no reason to
stop training: one warning, and training goes on.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

from ratel_cli.engine.telemetry import Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """What is known of one step when it has ended."""

    step: int
    """Counted from 1, as people do."""
    loss: float
    """Mean over the step's valid tokens."""
    learning_rate: float
    grad_norm: float
    tokens: int
    step_seconds: float
    """Until the step was committed; saves and evaluations are not in it."""
    forward_seconds: float
    backward_seconds: float
    """All the rest of the step: head, backward, update, commit."""
    tokens_per_second: float
    tflops_model: float
    """Of the model's own operations, 3 forwards; recomputation is not counted."""
    tflops_hardware: float
    """With recomputation."""
    nvme_read_bytes: int
    nvme_written_bytes: int
    gpu_peak_bytes: int
    host_peak_bytes: int
    bottleneck: Cause
    """What the compute thread spent most time on."""
    seconds_by_cause: dict[Cause, float]
    predicted_seconds: float
    applied: bool
    eval_loss: float | None
    """Mean over the held-out samples' targets, if the step was followed by an evaluation."""

    def to_json(self) -> dict[str, object]:
        """One line of the log. JSON has no NaN: what is not finite is null; what was not measured is absent."""
        values = {key: value for key, value in asdict(self).items() if value is not None}
        return {key: None if _not_finite(value) else value for key, value in values.items()}


class MetricsLog:
    """Appends to one file. `warn` is told once if that fails, and nothing more is written then."""

    def __init__(self, path: Path, *, committed_step: int, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self._file: FileIO | None = None
        self._good_bytes = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: a step is with the operating system when `write` returns, and a failed write leaves
            # nothing behind that closing would try again.
            path.touch()
            self._file = path.open("r+b", buffering=0)
            self._good_bytes = _bytes_up_to(path, committed_step)
            if path.is_file():
                self._file.truncate(self._good_bytes)
        except OSError as error:
            self._give_up(error)

    def announce(self, metrics: StepMetrics) -> None:
        """Append a step that is about to be committed. `write` replaces the line."""
        self._put(json.dumps(metrics.to_json(), allow_nan=False).encode() + b"\n")

    def write(self, metrics: StepMetrics) -> None:
        """Append a step that is committed."""
        line = json.dumps(metrics.to_json(), allow_nan=False).encode() + b"\n"
        self._put(line)
        self._good_bytes += len(line)

    def _put(self, line: bytes) -> None:
        """Make this the last line. It goes over the one that was announced, so that there is always one."""
        if self._file is None:
            return
        try:
            written = 0
            while written < len(line):  # a disk that is nearly full takes a part
                written += os.pwrite(self._file.fileno(), line[written:], self._good_bytes + written)
            self._file.truncate(self._good_bytes + len(line))
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._good_bytes)
            self._give_up(error)

    def close(self) -> None:
        """Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _give_up(self, error: OSError) -> None:
        self._warn(f"{self._path}: cannot be written ({error.strerror}); training goes on without it")
        self.close()


def _bytes_up_to(path: Path, step: int) -> int:
    """Length of the file's beginning that holds whole lines of steps up to `step`."""
    num_bytes = 0
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                if not (line.endswith(b"\n") and _step_of(line) <= step):
                    break
                num_bytes += len(line)
    return num_bytes


def _step_of(line: bytes) -> float:
    """Infinity for what is no line of ours."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
    return step if isinstance(step, int) else math.inf


def _not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
