"""Reports the steps of a run to the trackers in `report_to`, each in a process of its own; see `tracker_child`.

Invariants: a tracker never stops a run, whatever it does, and a step never waits for it. Only committed steps are
reported, so no step is reported twice after a crash. Without `report_to` nothing is started and nothing is sent.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

from ratel_cli.closing import Closing
from ratel_cli.commands import install_extras
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput, printable
from ratel_cli.run.files.run_directory import (
    EVENTS_NAME,
    EVENTS_SUFFIX,
    METRICS_NAME,
    log_name,
    record_name,
    run_directory,
)
from ratel_cli.run.train.tracker_child import MAX_VALUE_CHARS, Setup
from ratel_cli.training.metrics import STEP_FIGURES

_SLOW_SECONDS = 60.0
"""A tracker that takes no step for so long is named."""
_FINISH_SECONDS = 30.0
"""What all trackers together get at the end of a run, to send the rest."""
_STOP_SECONDS = 5.0
"""What they get if the user is waiting for the run to stop."""
_SILENT_SECONDS = 2.0
"""After this time the user gets to know what the run waits for."""
_LOOK_MILLISECONDS = 200
_EXIT_SECONDS = 5.0
"""How long a process may take to end when its output has ended."""
FIGURE_NAMES: Mapping[str, str] = {each.key: each.tracked_as for each in STEP_FIGURES if each.tracked_as is not None}
"""The names of figures in a tracker, by their keys in the file of metrics."""
_MAX_SETUP_BYTES = 60_000
"""A pipe takes 64 KiB at once, so that writing the setup waits for nobody."""


def check_trackers(config: RunConfig) -> None:
    """Raise BadInput for the trackers whose packages are missing."""
    missing = [tracker for tracker in config.report_to if not _is_installed(tracker)]
    if missing:
        raise BadInput(
            f"report_to: {' and '.join(missing)} cannot be used: not installed here",
            f"{install_extras(*missing)}, or set report_to: none",
        )


def _is_installed(package: str) -> bool:
    try:
        found = find_spec(package)
    except (ImportError, ValueError):
        return False
    return found is not None and found.origin is not None  # wandb leaves a directory of its name where runs begin


class Trackers(Closing):
    """The trackers of one run. Use as a context manager."""

    def __init__(
        self,
        config: RunConfig,
        log: RunLog,
        *,
        committed_step: int,
        is_stopping: Callable[[], bool] = lambda: False,
        slow_seconds: float = _SLOW_SECONDS,
        finish_seconds: float = _FINISH_SECONDS,
    ) -> None:
        """Start the processes, for a run that begins or resumes after `committed_step`.

        `is_stopping`: whether the user has asked the run to stop. Then `close` waits for a short time only.
        """
        self._log = log
        self._is_stopping = is_stopping
        self._finish_seconds = finish_seconds
        self._children = [
            _Child(_setup(config, tracker, committed_step), run_directory(config.output_dir), slow_seconds)
            for tracker in config.report_to
        ]
        self.report(committed_step)

    def report(self, step: int) -> None:
        """Report the steps up to `step`, whose lines are final. Returns at once."""
        for child in self._children:
            child.report(step)
        self._print_reports()

    def finish(self, step: int) -> None:
        """Report the steps up to the last one, and let the trackers finish. Returns at once. Idempotent."""
        self.report(step)
        for child in self._children:
            child.finish()

    def close(self) -> None:
        """Wait until the trackers have finished, for a while; then end them. Idempotent."""
        started = time.monotonic()
        while working := [child for child in self._children if child.finish()]:
            seconds = time.monotonic() - started
            limit = min(_STOP_SECONDS, self._finish_seconds) if self._is_stopping() else self._finish_seconds
            if seconds > limit:
                break
            if seconds > _SILENT_SECONDS:
                names = " and ".join(child.name for child in working)
                self._log.notice(f"waiting for {names} to finish, {limit:.0f} s at most")
            outputs = select.poll()  # unlike select, for any number of open files
            for child in working:
                outputs.register(child.output, select.POLLIN)
            outputs.poll(_LOOK_MILLISECONDS)
        for child in self._children:
            child.close()
        self._print_reports()
        self._children = []

    def _print_reports(self) -> None:
        for child in self._children:
            for text, is_warning in child.take_reports():
                (self._log.warn if is_warning else self._log.notice)(text)


class _Child:
    """The process of one tracker, seen from the run. Nothing here raises what the tracker or the system does wrong."""

    def __init__(self, setup: Setup, directory: Path, slow_seconds: float) -> None:
        self.name = setup.tracker
        self._log_path = directory / log_name(self.name)
        self._slow_seconds = slow_seconds
        self._reports: list[tuple[str, bool]] = []
        self._wanted = setup.committed_step
        self._written = self._sent = -1
        """Steps: to be reported, written to the child, and sent by it."""
        self._behind_since: float | None = None
        """When it was last known to work while it was behind; None if it is not behind."""
        self._received = b""
        self._is_over = self._has_finished = self._has_failed = self._was_slow = False
        self._process: subprocess.Popen[bytes] | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with self._log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(Path(__file__).with_name("tracker_child.py"))],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    bufsize=0,
                    start_new_session=True,  # Ctrl-C is for the run, which then lets the trackers finish
                )
        except OSError as error:
            self._is_over = True
            self._fail(f"{error.strerror or error}")
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self.output = self._process.stdin, self._process.stdout
        with suppress(OSError):  # a process that ended is noticed by the end of its output
            self._input.write(json.dumps(asdict(setup)).encode() + b"\n")
        for pipe in (self._input, self.output):
            os.set_blocking(pipe.fileno(), False)

    def report(self, step: int) -> None:
        """Report the steps up to `step`."""
        if self._is_over:
            return
        self._wanted = max(self._wanted, step)
        self._exchange()
        now = time.monotonic()
        if self._sent >= self._wanted:
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = now
        elif now - self._behind_since > self._slow_seconds and not self._was_slow:
            self._was_slow = True
            self._reports.append((f"report_to: {self.name} is behind; training does not wait for it", True))

    def finish(self) -> bool:
        """Close the input once the last step is written, so that the tracker finishes. Returns whether it still works.

        Waits for nothing.
        """
        if self._is_over:
            return False
        self._exchange()
        if self._written == self._wanted and not self._input.closed:
            self._input.close()
        return not (self._is_over or self._has_failed or self._has_finished)

    def close(self) -> None:
        """End the process if it has not finished. Idempotent."""
        if not (self._is_over or self._has_failed or self._has_finished):
            self._warn("did not finish in time; the next command sends what is missing")
        if self._process is not None:
            self._end(self._process)

    def take_reports(self) -> Iterator[tuple[str, bool]]:
        """What there is to say since the last call: texts, and whether each is a warning."""
        while self._reports:
            yield self._reports.pop(0)

    def _exchange(self) -> None:
        """Read what the child has written, and write the last step. Waits for nothing."""
        while (chunk := self._read()) is not None:
            self._received += chunk
            *lines, self._received = self._received.split(b"\n")
            for line in lines:
                self._take(json.loads(line))
            if not chunk:
                self._is_over = True
                if not (self._has_failed or self._has_finished):
                    self._fail("its process ended")
                return
        if self._written < self._wanted and not self._input.closed:
            with suppress(OSError):  # full: a later step is written instead; broken: the output ends too
                if self._input.write(json.dumps({"step": self._wanted}).encode() + b"\n") is not None:
                    self._written = self._wanted

    def _read(self) -> bytes | None:
        """What there is to read; empty at the end; None if there is nothing yet."""
        chunk: bytes | None = self.output.read(1 << 16)
        return chunk

    def _take(self, event: Mapping[str, object]) -> None:
        if "opened" in event:
            self._reports.append((f"report_to: {self.name}: {printable(str(event['opened']))}", False))
        if isinstance(event.get("step"), int):
            self._sent = int(str(event["step"]))
        self._has_finished = "finished" in event
        if "failed" in event:
            self._fail(printable(str(event["failed"])))
        self._behind_since = None

    def _fail(self, reason: str) -> None:
        self._has_failed = True
        self._warn(f"failed: {reason}; training goes on without it, and the next command sends what is missing")

    def _warn(self, what: str) -> None:
        self._reports.append((f"report_to: {self.name} {what} (see {self._log_path})", True))

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Close the pipes and wait for the process; one that has not finished is ended with those that it started."""
        for pipe in (self._input, self.output):
            pipe.close()
        try:
            process.wait(_EXIT_SECONDS if self._is_over or self._has_finished else 0)
        except subprocess.TimeoutExpired:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._is_over = True


def _setup(config: RunConfig, tracker: str, committed_step: int) -> Setup:
    directory = run_directory(config.output_dir)
    setup = Setup(
        tracker=tracker,
        metrics=os.path.abspath(directory / METRICS_NAME),
        record=os.path.abspath(directory / record_name(tracker)),
        events=os.path.abspath(directory / EVENTS_NAME),
        events_suffix=EVENTS_SUFFIX,
        name=config.run_name or config.output_dir.name or "run",
        is_named=config.run_name is not None,
        project=config.project,
        settings=dict(_flat(config.model_dump(mode="json", exclude_none=True))),
        committed_step=committed_step,
        figures=FIGURE_NAMES,
    )
    if len(json.dumps(asdict(setup))) > _MAX_SETUP_BYTES:
        return replace(setup, settings={})
    return setup


def _flat(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """The values by dotted keys, those in lists by their numbers. Long texts are cut."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield from _flat({str(number): each for number, each in enumerate(value)}, f"{name}.")
        else:
            yield name, value[:MAX_VALUE_CHARS] if isinstance(value, str) else value
