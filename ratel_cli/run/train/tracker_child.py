"""The child process that reports a run's steps to one tracker: tensorboard, wandb, mlflow or trackio.

A tracker is a large package that talks to a network: it may fail, hang, print, take memory, or stay when the program
ends. So each has a process of its own. The file `metrics.jsonl` is the queue between the two: the run says up to which
step its lines are final, and this process reads and sends them. Nothing is lost while a tracker is slow.

Invariants: this file imports nothing of ours; steps are sent in order; what was sent is recorded after each step, so
that the next process of the same run goes on behind it. Only JSON crosses the pipes, one line each way:

 1. run  -> child   the fields of `Setup`
 2. child -> run    {"opened": place}, where the user finds the run
 3. run  -> child   {"step": N}: the lines up to step N are final; again after each step, until the input ends
 4. child -> run    {"step": N}: the lines up to step N are sent; and at last {"finished": true}
    or, at any time, {"failed": reason}

Standard output of the tracker goes to standard error, which is a log file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Protocol

MAX_VALUE_CHARS = 500
"""The most that MLflow takes for a parameter."""
_QUIET_ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
}
"""These packages report nothing about their own use, unless the user's environment says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the child is started with."""

    tracker: str
    metrics: str
    """The path of the file with the rows."""
    record: str
    """The path of the file that says what was sent."""
    events: str
    """The directory for the files of tensorboard."""
    events_suffix: str
    """How the names of these files end."""
    name: str
    """What the run is called."""
    is_named: bool
    """Whether the user gave this name, so that it comes before the environment's."""
    project: str | None
    settings: dict[str, object]
    """The run's config, by dotted keys."""
    committed_step: int
    """The step that the run begins or resumes after. If later ones were sent, the run went back, and a new one begins
    in the tracker."""
    figures: Mapping[str, str]
    """The names of figures in the tracker, by their keys in the file; others are `step/` and the key."""


class Tracker(Protocol):
    """A run in a tracker."""

    place: str
    """Where the user finds it."""
    run: str
    """By what the same run is opened again."""
    sent_step: int
    """The last step that the tracker itself has; 0 if it cannot say."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send one step."""

    def finish(self) -> None:
        """Send the rest, and end the run."""


class TensorBoard:
    """Event files, as torch's SummaryWriter writes them."""

    def __init__(self, setup: Setup, _run: str | None, sent_step: int) -> None:
        events = import_module("tensorboard.compat.proto.event_pb2")
        self._event = events.Event
        self._summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        writer = import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter
        self._writer = writer(setup.events, filename_suffix=setup.events_suffix)
        self.place, self.run, self.sent_step = setup.events, setup.events, 0
        # TensorBoard drops what earlier files have of the steps from here on.
        start = events.SessionLog(status=events.SessionLog.START)
        self._writer.add_event(self._event(wall_time=time.time(), step=sent_step + 1, session_log=start))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        parts = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=parts)))
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases. WANDB_MODE, WANDB_PROJECT and the like count."""

    def __init__(self, setup: Setup, run: str | None, _sent_step: int) -> None:
        self._run = import_module("wandb").init(
            project=setup.project,
            name=_name(setup, "WANDB_NAME"),
            id=run or os.environ.get("WANDB_RUN_ID") or _new_id(),
            resume="allow",
            config=setup.settings,
            allow_val_change=True,
        )
        self.run = str(self._run.id)
        self.place = str(self._run.url or self._run.dir)
        self.sent_step = 0  # it drops steps that it has

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        self._run.finish()


class MlFlow:
    """MLflow. MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and the like count."""

    def __init__(self, setup: Setup, run: str | None, _sent_step: int) -> None:
        self._mlflow = mlflow = import_module("mlflow")
        if setup.project is not None and run is None:
            mlflow.set_experiment(setup.project)
        name = _name(setup, "MLFLOW_RUN_NAME")
        opened = mlflow.start_run(run_id=run) if run is not None else mlflow.start_run(run_name=name)
        self.run = str(opened.info.run_id)
        self.place = f"{mlflow.get_tracking_uri()}, run {self.run}"
        self.sent_step = 0
        if run is None:
            values = {key: str(value)[:MAX_VALUE_CHARS] for key, value in setup.settings.items()}
            mlflow.log_params(values)
        else:
            history = mlflow.MlflowClient().get_metric_history(self.run, setup.figures["learning_rate"])
            self.sent_step = max((metric.step for metric in history), default=0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def finish(self) -> None:
        self._mlflow.end_run()


class Trackio:
    """Trackio. TRACKIO_PROJECT, TRACKIO_SPACE_ID and the like count."""

    def __init__(self, setup: Setup, run: str | None, _sent_step: int) -> None:
        self._trackio = trackio = import_module("trackio")
        project = setup.project or os.environ.get("TRACKIO_PROJECT") or "ratel"
        # Its runs are known by their names.
        self.run = run or f"{setup.name}-{_new_id()}"
        trackio.init(project=project, name=self.run, config=setup.settings, resume="allow")
        self.place, self.sent_step = f"project {project}, run {self.run}", 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def finish(self) -> None:
        self._trackio.finish()


TRACKERS: Mapping[str, Callable[[Setup, str | None, int], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MlFlow,
    "trackio": Trackio,
}


class Rows:
    """The rows of the file, read once, in order, as far as they are final."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._num_bytes = 0
        """Bytes of the rows that were read."""

    def up_to(self, step: int) -> Iterator[dict[str, object]]:
        """The next rows, those of later steps left out. None while there is no file: the run makes it."""
        if not os.path.exists(self._path):
            return
        with open(self._path, "rb") as file:
            file.seek(self._num_bytes)
            for line in file:
                row = json.loads(line) if line.endswith(b"\n") else None
                if not isinstance(row, dict) or row["step"] > step:
                    return
                self._num_bytes += len(line)
                yield row


def values_of(row: Mapping[str, object], figures: Mapping[str, str]) -> dict[str, float]:
    """The numbers of a row by the names that they have in a tracker: those of `Setup.figures`. Texts and what is not
    finite are left out."""
    values: dict[str, float] = {}
    for key, value in row.items():
        if key == "step":
            continue
        name = figures.get(key, f"step/{key}")
        parts = (
            {f"{name}/{part}": each for part, each in value.items()} if isinstance(value, Mapping) else {name: value}
        )
        for part, each in parts.items():
            if isinstance(each, int | float) and math.isfinite(each):
                values[part.replace(" ", "_")] = float(each)
    return values


def _report(setup: Setup, steps: Iterator[int], tell: Callable[[Mapping[str, object]], None]) -> None:
    """Phases 2 to 4."""
    run, sent = _read_record(setup.record)
    if sent > setup.committed_step:
        run, sent = None, 0
    tracker = TRACKERS[setup.tracker](setup, run, sent)
    sent = max(sent, tracker.sent_step)
    _write_record(setup.record, tracker.run, sent)
    tell({"opened": tracker.place})
    rows = Rows(setup.metrics)
    for step in steps:
        for row in rows.up_to(step):
            number = row["step"]
            if isinstance(number, int) and number > sent:
                tracker.log(number, values_of(row, setup.figures))
                _write_record(setup.record, tracker.run, number)
                sent = number
        tell({"step": step})
    tracker.finish()
    tell({"finished": True})


def _read_record(path: str) -> tuple[str | None, int]:
    """The tracker's run, and the last step that was sent to it."""
    try:
        values = json.loads(Path(path).read_bytes())
        return str(values["run"]), int(values["step"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None, 0


def _write_record(path: str, run: str, step: int) -> None:
    new = f"{path}.new"
    Path(new).unlink(missing_ok=True)  # a link would be followed
    with open(new, "x", encoding="utf-8") as file:
        file.write(json.dumps({"run": run, "step": step}) + "\n")
    os.replace(new, path)


def _name(setup: Setup, variable: str) -> str | None:
    """The run's name; None if the environment has one and the user gave no other."""
    return None if variable in os.environ and not setup.is_named else setup.name


def _new_id() -> str:
    return uuid.uuid4().hex[:8]


def main() -> int:
    """Report one run to one tracker. Returns the exit code."""
    # The pipes get other numbers, so that a tracker that prints or asks for something does not use them.
    requests, output = os.fdopen(os.dup(0), encoding="utf-8"), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    os.nice(5)
    for name, value in _QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)

    def tell(event: Mapping[str, object]) -> None:
        with contextlib.suppress(OSError):  # the run was killed; what it has committed is sent all the same
            os.write(output, json.dumps(event).encode() + b"\n")

    values = json.loads(requests.readline())
    setup = Setup(**{field.name: values[field.name] for field in fields(Setup)})
    try:
        _report(setup, (json.loads(line)["step"] for line in requests), tell)
    except BaseException as error:  # noqa: BLE001 - whatever a tracker raises, the run goes on
        traceback.print_exc()
        tell({"failed": " ".join(f"{type(error).__name__}: {error}".split())[:MAX_VALUE_CHARS]})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
