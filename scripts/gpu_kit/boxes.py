"""Runs each part in a process of its own, within a time box.

Parts are forked from a server that has imported what all of them need, and no GPU: importing takes longer than some of
the measurements. What a part and the programs it starts write goes to one log.

Invariant: a part that hangs, crashes or takes too long is ended with all it started, and the next one begins.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path

from scripts.bench.findings import Findings, Report, read_findings, reason_of

_OVERTIME = 1.25
"""How much longer than its box a part may take before it is ended: it starts nothing new, but finishes."""
PRELOADED = (
    "torch",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "peft",
    "scripts.bench.ratel_run",
)
_REASON_BYTES = 400
_POISONED = 77
"""Exit code of a process that was forked from one that had touched the GPU: it can use none. Parts are spawned then."""
_POISONED_FAILURE = {"the part": "forked from a process that had touched the GPU"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of the kit."""

    name: str
    seconds: float
    """Its time box on a GPU."""
    function: str
    """What runs it, as `module:name`: a function of a Report."""


class PartRunner:
    """Runs parts one after another."""

    def __init__(self, folder: Path, *, is_tiny: bool, preloaded: Sequence[str] = PRELOADED) -> None:
        """`folder`: for what parts leave. `preloaded`: what is imported once for all of them."""
        self._folder, self._is_tiny = folder, is_tiny
        forked = multiprocessing.get_context("forkserver")
        forked.set_forkserver_preload(list(preloaded))
        self._processes: ForkServerContext | SpawnContext = forked

    @property
    def log(self) -> Path:
        """What all parts have written."""
        return self._folder / "log.txt"

    def run(self, part: Part, *, seconds: float, most_seconds: float) -> Findings:
        """The findings of a part that should take `seconds`, and is ended after `most_seconds`."""
        started = self._start(part, seconds=seconds, most_seconds=most_seconds)
        if started.failures == _POISONED_FAILURE:
            self._processes = multiprocessing.get_context("spawn")
            started = self._start(part, seconds=seconds, most_seconds=most_seconds)
        return started

    def _start(self, part: Part, *, seconds: float, most_seconds: float) -> Findings:
        path = self._folder / f"{part.name}.json"
        arguments = (part.function, path, self.log, seconds, self._is_tiny)
        process = self._processes.Process(target=_run, args=arguments, name=part.name)
        log_start = self.log.stat().st_size if self.log.exists() else 0
        process.start()
        try:
            process.join(min(_OVERTIME * seconds + 5.0, most_seconds))
            is_late = process.is_alive()
        finally:
            _end(process.pid)
            process.kill()
            process.join()
        found = read_findings(path)
        if is_late:
            found.failures["the part"] = "ended at its time limit"
        elif process.exitcode == _POISONED:
            found.failures.update(_POISONED_FAILURE)
        elif process.exitcode:
            found.failures["the part"] = f"ended with exit code {process.exitcode}: {self._last_words(log_start)}"
        return found

    def _last_words(self, start: int) -> str:
        written = self.log.read_bytes()[start:] if self.log.exists() else b""
        lines = written[-_REASON_BYTES:].decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it wrote nothing"


def _end(leader: int | None) -> None:
    """End a part's process with all that it started."""
    if leader is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


def _run(function: str, path: Path, log: Path, seconds: float, is_tiny: bool) -> None:
    """The main program of a part's process."""
    os.setsid()
    with log.open("ab", buffering=0) as into:
        os.dup2(into.fileno(), sys.stdout.fileno())
        os.dup2(into.fileno(), sys.stderr.fileno())
    print(f"--- {function}", flush=True)
    if "torch" in sys.modules and sys.modules["torch"].cuda._is_in_bad_fork():
        sys.exit(_POISONED)
    report = Report(path, seconds=seconds, is_tiny=is_tiny)
    module, _, name = function.partition(":")
    try:
        run: Callable[[Report], None] = getattr(import_module(module), name)
        run(report)
    except Exception as error:
        report.fail("the part", reason_of(error))
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
