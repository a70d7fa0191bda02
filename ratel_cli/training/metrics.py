"""The metrics of a step; the file `run/metrics.jsonl`, which has one line for each step; and sums over a run.

Invariant: when a run begins, the file has exactly the steps that the store has. None is missing, because a line is
written before its step is committed. None is surplus, because a resume drops lines of steps after the last commit, and
a line that a crash cut short. If the file cannot be written, there is one warning and training continues.
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

from ratel_cli.closing import Closing
from ratel_cli.planning.step_time import RESOURCES, Resource


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """What is known about a step before it is committed. Each field is a key in the file."""

    step: int
    """Counted from 1."""
    loss: float
    """The mean over the step's target tokens."""
    learning_rate: float
    grad_norm: float
    tokens: int
    step_seconds: float
    """Without saves and evaluations. A part of the update may overlap with the next step instead."""
    forward_seconds: float
    backward_seconds: float
    """The rest of the step: head, backward, and stalls."""
    tokens_per_second: float
    tflops_model: float
    """Rate of the model FLOPs: three times the forward, recomputed operations not counted."""
    tflops_hardware: float
    """Rate of the hardware FLOPs: recomputed operations counted."""
    swapped_bytes: int
    """Activations that forward offloaded for backward, inputs of layers included."""
    nvme_read_bytes: int
    nvme_written_bytes: int
    gpu_peak_bytes: int
    host_peak_bytes: int
    bottleneck: Resource
    """The resource that was busy for the longest time."""
    busy_seconds: dict[Resource, float]
    """How long each resource was busy. These times overlap."""
    waited_seconds: dict[Resource, float]
    """How long the compute thread stalled, by the resource that it waited for. These times do not overlap."""
    predicted_seconds: float
    """The time of a step, as the plan predicted it."""
    applied: bool
    """False if the step was skipped because its gradients overflowed."""
    clipped: bool
    """True if the gradients were scaled down to `max_grad_norm`."""
    eval_loss: float | None
    """The mean over the target tokens of the held-out samples; None if the step was not evaluated."""

    def to_json(self) -> dict[str, object]:
        """The content of one line. Values that are not finite are null, as JSON has no NaN. None is left out."""
        values = {key: value for key, value in asdict(self).items() if value is not None}
        return {key: None if _not_finite(value) else value for key, value in values.items()}


class RunTotals:
    """Sums over the steps of a run.

    The first step is a warm-up: it loads code, takes memory and reads resident weights. So it counts only if there is
    no other step.
    """

    def __init__(self) -> None:
        self._num_added = 0
        self._start_over()

    def add(self, metrics: StepMetrics) -> None:
        """Add one step."""
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
        """Whether the sums do not contain the first step."""
        return self._num_added > 1

    def _start_over(self) -> None:
        self.num_steps = 0
        self.seconds = 0.0
        self.tokens = 0
        self.nvme_read_bytes = 0
        self.nvme_written_bytes = 0
        self.busy_seconds: dict[Resource, float] = dict.fromkeys(RESOURCES, 0.0)
        self.waited_seconds: dict[Resource, float] = dict.fromkeys(RESOURCES, 0.0)


class MetricsLog(Closing):
    """Appends to the file. The first write that fails is a warning, and the last: nothing is written after it."""

    def __init__(self, path: Path, *, committed_step: int, warn: Callable[[str], None]) -> None:
        """Drop the lines of steps after `committed_step`, if there are any."""
        self._path = path
        self._warn = warn
        self._file: FileIO | None = None
        self._num_bytes = 0
        self._last_step: int | None = None
        self._last_line = b""
        """The line that was written last, at the end of the file."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: the operating system has the line when `write` returns, and closing does not try to write
            # again what failed.
            path.touch()
            self._file = path.open("r+b", buffering=0)
            self._num_bytes = _bytes_up_to(path, committed_step)
            if path.is_file():
                self._file.truncate(self._num_bytes)
        except OSError as error:
            self._give_up(error)

    def write(self, metrics: StepMetrics) -> None:
        """Append the line of a new step, or replace the line of the last step when it was evaluated."""
        if self._file is None:
            return
        line = json.dumps(metrics.to_json(), allow_nan=False).encode() + b"\n"
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

    def _give_up(self, error: OSError) -> None:
        self._warn(f"{self._path}: cannot be written ({error.strerror}); training continues without it")
        self.close()


def _end_with(file: FileIO, offset: int, line: bytes) -> None:
    """Write the line at `offset` and end the file after it."""
    written = 0
    while written < len(line):  # a disk that is nearly full may take only a part
        written += os.pwrite(file.fileno(), line[written:], offset + written)
    file.truncate(offset + len(line))


def _bytes_up_to(path: Path, step: int) -> int:
    """The length of the part of the file that has complete lines of steps up to `step`, from its beginning."""
    num_bytes = 0
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                if not (line.endswith(b"\n") and _step_of(line) <= step):
                    break
                num_bytes += len(line)
    return num_bytes


def _step_of(line: bytes) -> float:
    """The step of a line; infinity if it is not a line of metrics."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
    return step if isinstance(step, int) else math.inf


def _not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
