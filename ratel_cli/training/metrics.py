"""`run/metrics.jsonl`: one object for each step, in order, also across resumed runs; and their sums.

`training.loop` makes the metrics; `run.finetune` logs them, and adds them up for the end of the run.
Invariant: whenever a run begins, the file holds the steps that the store holds. No step less: a line is
in the file before its step is committed, which happens beneath the next step's forward. No step more: on
resume, lines of steps after the last commit are dropped, and a line that a crash cut short. A log that
cannot be written is no reason to stop training: one warning, and training goes on.
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

from ratel_cli.engine.telemetry import RESOURCES, Resource


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """What is known of one step when it is decided whether it applies."""

    step: int
    """Counted from 1, as people do."""
    loss: float
    """Mean over the step's valid tokens."""
    learning_rate: float
    grad_norm: float
    tokens: int
    step_seconds: float
    """Until the step was decided; saves and evaluations are not in it. Updates may run on beneath the next."""
    forward_seconds: float
    backward_seconds: float
    """All the rest of the step: head, backward, and what it waited for."""
    tokens_per_second: float
    tflops_model: float
    """Of the model's own operations, 3 forwards; recomputation is not counted."""
    tflops_hardware: float
    """With recomputation."""
    swapped_bytes: int
    """Offloaded in forward for backward, layers' inputs included."""
    nvme_read_bytes: int
    nvme_written_bytes: int
    gpu_peak_bytes: int
    host_peak_bytes: int
    bottleneck: Resource
    """What had work for most of the time."""
    busy_seconds: dict[Resource, float]
    """For how long each resource had work. They overlap: that is the point of them."""
    waited_seconds: dict[Resource, float]
    """For how long the compute thread stood still, by what it waited for. These never overlap."""
    predicted_seconds: float
    applied: bool
    eval_loss: float | None
    """Mean over the held-out samples' targets, if the step was followed by an evaluation."""

    def to_json(self) -> dict[str, object]:
        """One line of the log. JSON has no NaN: what is not finite is null; what was not measured is absent."""
        values = {key: value for key, value in asdict(self).items() if value is not None}
        return {key: None if _not_finite(value) else value for key, value in values.items()}


class RunTotals:
    """Sums over the steps of a run.

    The first step warms up (code is loaded, memory is taken, what stays in memory is read), so it counts
    only as long as there is no other.
    """

    def __init__(self) -> None:
        self._num_added = 0
        self._start_over()

    def add(self, metrics: StepMetrics) -> None:
        """Count a step; each once."""
        self._num_added += 1
        if self._num_added == 2:
            self._start_over()
        self.num_steps += 1
        self.seconds += metrics.step_seconds
        self.tokens += metrics.tokens
        self.nvme_read_bytes += metrics.nvme_read_bytes
        self.nvme_written_bytes += metrics.nvme_written_bytes
        for resource in RESOURCES:
            self.busy_seconds[resource] += metrics.busy_seconds[resource]
            self.waited_seconds[resource] += metrics.waited_seconds[resource]

    @property
    def leaves_out_first(self) -> bool:
        """Whether a step that warmed up is missing from the sums."""
        return self._num_added > 1

    def _start_over(self) -> None:
        self.num_steps = 0
        self.seconds = 0.0
        self.tokens = 0
        self.nvme_read_bytes = 0
        self.nvme_written_bytes = 0
        self.busy_seconds: dict[Resource, float] = dict.fromkeys(RESOURCES, 0.0)
        self.waited_seconds: dict[Resource, float] = dict.fromkeys(RESOURCES, 0.0)


class MetricsLog:
    """Appends to one file. `warn` is told once if that fails, and nothing more is written then."""

    def __init__(self, path: Path, *, committed_step: int, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self._file: FileIO | None = None
        self._num_bytes = 0
        self._last_step: int | None = None
        self._last_line = b""
        """What this log has written last: the end of the file."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: a step is with the operating system when `write` returns, and a failed write leaves
            # nothing behind that closing would try again.
            path.touch()
            self._file = path.open("r+b", buffering=0)
            self._num_bytes = _bytes_up_to(path, committed_step)
            if path.is_file():
                self._file.truncate(self._num_bytes)
        except OSError as error:
            self._give_up(error)

    def write(self, metrics: StepMetrics) -> None:
        """Append a new step, before it is committed; or replace the line of the last one, when more is known."""
        if self._file is None:
            return
        line = json.dumps(metrics.to_json(), allow_nan=False).encode() + b"\n"
        replaced = self._last_line if metrics.step == self._last_step else b""
        start = self._num_bytes - len(replaced)
        try:
            _end_with(self._file, start, line)
        except OSError as error:
            with contextlib.suppress(OSError):  # what was there before has its place on the disk
                _end_with(self._file, start, replaced)
            self._give_up(error)
        self._num_bytes = start + len(line)
        self._last_step, self._last_line = metrics.step, line

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


def _end_with(file: FileIO, offset: int, line: bytes) -> None:
    """Make the line the last one of the file, at `offset`."""
    written = 0
    while written < len(line):  # a disk that is nearly full takes a part
        written += os.pwrite(file.fileno(), line[written:], offset + written)
    file.truncate(offset + len(line))


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
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
    return step if isinstance(step, int) else math.inf


def _not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
