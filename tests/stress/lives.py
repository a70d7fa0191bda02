"""The life of one run: started, disturbed by a signal, started again, and at last left to end.

After each disturbance the store is opened. Its step must be at least the step from before, and at least what the run
had reported. Invariant: nothing here depends on how long a phase takes. Disturbances are timed by the files that the
run writes, and counted by the phase that they hit.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from random import Random
from statistics import median
from typing import Literal

from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import open_queue
from ratel_cli.model.export.card import PICTURE_NAME
from ratel_cli.model.files.marker import MARKER_NAME
from ratel_cli.store.store import Store
from tests.e2e.runs import NO_STORE, Config, file_hash, wait

Phase = Literal["reading", "importing", "training", "exporting", "over"]

NUM_STEPS = 16
CHANGES: dict[str, object] = {
    "max_steps": NUM_STEPS,
    "gradient_accumulation_steps": 1,
    "lr_scheduler": "cosine",
    "warmup_steps": 3,
    "warmup_ratio": None,
    "save_steps": 6,
    "save_total_limit": 2,
    "dtype": "bfloat16",
}
AIMS: Mapping[Phase, tuple[float, float]] = {
    "reading": (0.02, 0.25),
    "importing": (0.0, 0.03),
    "training": (0.0, 0.15),
    "exporting": (0.0, 0.01),
}
"""For each phase, the least and the most seconds from its first sign to the disturbance."""
_TIMELESS = ("step", "loss", "learning_rate", "grad_norm", "tokens", "applied")
_TIMED = (MARKER_NAME, PICTURE_NAME)
"""Exported files that have times: those of the files, and those of the steps."""
_POLL_SECONDS = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Everything that a run leaves and that does not depend on time."""

    state: str
    """Hash of the current generation: master weights and moments."""
    saved_steps: tuple[int, ...]
    exported: Mapping[str, str]
    """Hash of every file of the model's directory."""
    loss_log: tuple[Mapping[str, object], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """One signal, and its effect."""

    phase: Phase
    """The phase that it hit."""
    code: int
    exit_seconds: float
    """From the signal until the process had ended."""
    recovery_seconds: float | None
    """From the start of the process until it resumed at the last commit; None if that did not happen."""
    stderr: str


class Life:
    """One run in its own directory."""

    def __init__(self, config: Config, random: Random) -> None:
        self.config = config
        self._random = random
        self._committed = NO_STORE
        self._started = 0.0
        """When the current process was started, by the clock of the file system."""

    @property
    def directory(self) -> Path:
        return self.config.parent

    def disturb(self, number: int, aim: Phase) -> Disturbance:
        """Start or resume the run, and send the signal in the phase `aim`, or later."""
        self._stderr.unlink(missing_ok=True)
        self._started, started = time.time(), time.monotonic()
        process = self.config.start()
        recovered = self._wait_for(aim, process)
        time.sleep(self._random.uniform(*AIMS[aim]))
        sent = time.monotonic()
        if process.is_alive():
            assert process.pid is not None
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)
        code = wait(process)
        ended = time.monotonic()
        self._check()
        return Disturbance(
            phase=self._phase(code),
            code=code,
            exit_seconds=ended - sent,
            recovery_seconds=None if recovered is None else recovered - started,
            stderr=self._stderr.read_text(encoding="utf-8") if self._stderr.exists() else "",
        )

    def kill_at(self, point: str, count: int) -> None:
        """Start or resume the run, and kill it at a failpoint of the store, the `count`-th time it gets there."""
        code = wait(self.config.start(kill_at=f"{point}:{count}"))
        assert code == -signal.SIGKILL, (point, count, code)
        self._check()

    @property
    def num_steps_left(self) -> int:
        return NUM_STEPS - max(self._committed, 0)

    def end(self) -> Outcome:
        """Let the run end, check it, remove its directory, and return its outcome."""
        assert wait(self.config.start()) == 0, self._stderr.read_text(encoding="utf-8")
        self._check()
        assert self._committed == NUM_STEPS
        outcome = outcome_of(self.config)
        shutil.rmtree(self.directory)
        return outcome

    @property
    def _stderr(self) -> Path:
        return self.directory / "stderr.txt"

    def _wait_for(self, aim: Phase, process: ForkServerProcess) -> float | None:
        """Wait for a sign of the phase. Returns when the run resumed at its last commit, if that was seen."""
        recovered = None
        wanted_lines = max(self._committed, 0) + self._random.randint(1, 5)
        while process.is_alive() and not self._shows(aim, wanted_lines):
            if (
                recovered is None
                and self._stderr.exists()
                and "resuming from step" in self._stderr.read_text(encoding="utf-8")
            ):
                recovered = time.monotonic()
            time.sleep(_POLL_SECONDS)
        return recovered

    def _shows(self, aim: Phase, wanted_lines: int) -> bool:
        match aim:
            case "importing":
                return self._is_touched(self.config.store)
            case "training":
                log = self.config.output / "run" / "metrics.jsonl"
                return self._is_touched(log) and len(_log_lines(self.config)) >= min(wanted_lines, NUM_STEPS)
            case "exporting":
                return any(map(self._is_touched, self.config.output.glob(".export*")))
            case _:
                return self._stderr.exists()

    def _is_touched(self, path: Path) -> bool:
        """True if the current process has written the file. A file from before is no sign."""
        try:
            return path.stat().st_mtime >= self._started
        except FileNotFoundError:
            return False

    def _check(self) -> None:
        """No committed step is lost: not the last one that was seen, and not one that another step was built on."""
        step, num_announced = self.config.committed_step, len(_log_lines(self.config))
        assert self._committed <= step, "the store went back"
        assert num_announced - 1 <= step, "a step was built on one that is lost"
        assert step <= num_announced, "a step was committed before it was announced"
        self._committed = step

    def _phase(self, code: int) -> Phase:
        """The phase in which the process ended."""
        if code == 0:
            return "over"
        if self._committed == NO_STORE:
            return "importing" if self.config.store.exists() else "reading"
        lines = self._stderr.read_text(encoding="utf-8").splitlines() if self._stderr.exists() else []
        if not any(line.startswith("output ") for line in lines):
            return "reading"
        # The summary of the steps comes between the last of them and the export.
        exports = any(line.startswith("mean of") or "steps are done" in line for line in lines)
        return "exporting" if exports else "training"


def outcome_of(config: Config) -> Outcome:
    """What the run left."""
    state, saved_steps = _state(config)
    return Outcome(
        state=state,
        saved_steps=saved_steps,
        exported={
            path.name: file_hash(path) for path in config.output.iterdir() if path.is_file() and path.name not in _TIMED
        },
        loss_log=tuple(
            {key: value for key, value in json.loads(line).items() if key in _TIMELESS} for line in _log_lines(config)
        ),
    )


def report(disturbances: Iterable[Disturbance]) -> str:
    """How many disturbances hit each phase, and how long exits and recoveries took."""
    disturbances = list(disturbances)
    phases = Counter(each.phase for each in disturbances)
    seconds = sorted(each.recovery_seconds for each in disturbances if each.recovery_seconds is not None)
    exits = sorted(each.exit_seconds for each in disturbances)
    lines = [
        f"{sum(phases.values())} disturbances: " + ", ".join(f"{phases[phase]} {phase}" for phase in (*AIMS, "over")),
        f"ended after {median(exits):.3f} s (median), {exits[-1]:.3f} s at most",
    ]
    if seconds:
        lines.append(
            f"resumed {len(seconds)} times after {median(seconds):.2f} s (median), {seconds[-1]:.2f} s at most"
        )
    return "\n".join(lines)


def _log_lines(config: Config) -> list[bytes]:
    """The whole lines of metrics.jsonl."""
    path = config.output / "run" / "metrics.jsonl"
    content = path.read_bytes() if path.exists() else b""
    return content[: content.rfind(b"\n") + 1].splitlines()


def _state(config: Config) -> tuple[str, tuple[int, ...]]:
    """The hash of every field of every block of the current generation, and the saved steps."""
    digest = hashlib.sha256()
    with (
        open_queue("threads", notice=lambda text: None) as queue,
        Store.open([config.store.parent], queue=queue, identity=None) as store,
        BufferPool(None) as pool,
    ):
        for block, num_elements in enumerate(each.num_elements for each in store.blocks):
            for each in store.blocks[block].record.fields:
                with pool.lease(each.num_bytes(num_elements), "the state") as lease:
                    store.current().read(block, each.name, 0, num_elements, lease.memory).wait()
                    digest.update(lease.memory)
        return digest.hexdigest(), store.pinned_steps
