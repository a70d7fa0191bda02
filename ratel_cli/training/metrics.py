"""The metrics of a step; the file `run/metrics.jsonl`, which has one line for each step; and sums over a run.

Invariant: when a run begins, the file has exactly the steps that the store has. None is missing, because a line is
written before its step is committed. None is surplus, because a resume drops lines of steps after the last commit, and
a line that a crash cut short. If the file cannot be written, there is one warning and training continues.

The best step is chosen by this file, so a line ends with a checksum of itself (XXH3-64). Lines of earlier versions have
none. A line that was changed is no step any more: it stays, with all that follow it, and is reported.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path

import xxhash

from ratel_cli.closing import Closing
from ratel_cli.json_fields import read_as
from ratel_cli.planning.time.step_time import RESOURCES, Resource
from ratel_cli.units import counted

_CHECKSUM = re.compile(rb', "checksum": "([0-9a-f]{16})"\}\s*$')
"""How a line ends."""
_NO_GRADIENT_STEPS = 10
"""A single step may have no gradient at all, as one whose rows are all cut off before their answers."""


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
    num_alloc_retries: int | None = None
    """How often since the command began torch found no GPU memory in one piece and gave its cache back: 0 in a run that
    is planned well. None without a GPU."""
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
    eval_loss: float | None = None
    """The mean over the target tokens of the held-out samples; None if the step was not evaluated."""
    eval_accuracy: float | None = None
    """The share of the held-out samples that a classifier gave their class; None for other models."""
    slowest_rank: int | None = None
    """The rank that waited for the others least, so that they waited for it; None for one rank alone."""
    slowest_bottleneck: Resource | None = None
    """What was busy for the longest time there, of its own resources."""
    preferences: dict[str, float] | None = None
    """Rewards and more of answers that are compared, by TRL's names: means over the step's micro-batches. None where
    none are."""
    eval_preferences: dict[str, float] | None = None
    """Rewards and more, as in `preferences`, of the held-out samples; None if the step was not evaluated."""

    def preference(self, name: str) -> float:
        """A figure of answers that are compared, such as `rewards/margins`; NaN if there is none."""
        return math.nan if self.preferences is None else self.preferences.get(name, math.nan)

    @property
    def shown_eval_loss(self) -> float | None:
        """`eval_loss` where a curve or a table can show it; None if it is not finite, too."""
        return self.eval_loss if self.eval_loss is not None and math.isfinite(self.eval_loss) else None

    def to_json(self) -> dict[str, object]:
        """The content of one line. Values that are not finite are null, as JSON has no NaN. None is left out."""
        values = {key: value for key, value in asdict(self).items() if value is not None}
        return {key: _finite(value) for key, value in values.items()}

    @classmethod
    def from_json(cls, content: object) -> StepMetrics:
        """The step of one line. What was not finite is NaN. Raises ValueError for anything that is no step."""
        step = read_as(cls, _with_nan(content))
        by_resource = step.busy_seconds.keys(), step.waited_seconds.keys()
        if step.step < 1 or not step.step_seconds > 0 or any(each != {*RESOURCES} for each in by_resource):
            raise ValueError("not a step")
        return step


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


class RunTotals:
    """Sums over the steps of a run.

    The first step is a warm-up: it loads code, takes memory and reads resident weights. So it counts only if there is
    no other step.
    """

    def __init__(self) -> None:
        self._num_added = 0
        self.all_written_bytes = 0
        """Bytes that all steps wrote to NVMe, the first one included."""
        self._start_over()

    def add(self, metrics: StepMetrics) -> None:
        """Add one step."""
        self._num_added += 1
        self.all_written_bytes += metrics.nvme_written_bytes
        if self._num_added == 2:
            self._start_over()
        self.num_steps += 1
        self.seconds += metrics.step_seconds
        self.tokens += metrics.tokens
        self.nvme_read_bytes += metrics.nvme_read_bytes
        self.nvme_written_bytes += metrics.nvme_written_bytes
        if metrics.slowest_rank is not None and metrics.slowest_bottleneck is not None:
            self.slowest[metrics.slowest_rank, metrics.slowest_bottleneck] += 1
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
        self.slowest = Counter[tuple[int, Resource]]()
        """By rank and its bottleneck, in how many steps it was the slowest."""


class StepWarnings:
    """Warns of what steps show to be wrong.

    Of GPU memory once, at the first step for which torch had to give its cache back; of gradients when as many steps in
    a row had none as no healthy run has.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._has_warned_of_memory = False
        self._num_without_gradient = 0
        """Steps since the last one that had a gradient."""

    def note(self, metrics: StepMetrics) -> None:
        """Look at one step."""
        self._num_without_gradient = 0 if metrics.grad_norm else self._num_without_gradient + 1
        if self._num_without_gradient == _NO_GRADIENT_STEPS:
            self._warn(
                f"step {metrics.step}: the gradient norm was 0 in the last {_NO_GRADIENT_STEPS} steps, so the model "
                "learns nothing; `ratel data CONFIG` shows which tokens have loss, and the config what is frozen"
            )
        if metrics.num_alloc_retries and not self._has_warned_of_memory:
            self._has_warned_of_memory = True
            self._warn(
                f"step {metrics.step}: GPU memory was full or fragmented, and the GPU paused "
                f"{counted(metrics.num_alloc_retries, 'time')} until some was free; lower limits.gpu_memory if other "
                "programs use this GPU, otherwise micro_batch_size"
            )


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


def _finite(value: object) -> object:
    """The value, also within a mapping, with None for what is not finite."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _with_nan(value: object) -> object:
    """The value with NaN for null, also within a mapping."""
    if isinstance(value, dict):
        return {key: _with_nan(each) for key, each in value.items()}
    return math.nan if value is None else value
