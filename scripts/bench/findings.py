"""What a series of measurements finds, each guarded by itself, and kept as it comes.

Invariant: a measurement that fails, or for which there is no time, is named with its reason and ends nothing else;
whatever ends the process, the file has what was measured before.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
_REASON_LENGTH = 160


@dataclass(slots=True, kw_only=True)
class Findings:
    """What was found."""

    seconds: float = 0.0
    results: dict[str, object] = field(default_factory=dict)
    """By the name of a measurement."""
    failures: dict[str, str] = field(default_factory=dict)
    """Reasons, by the name of a measurement."""
    left_out: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    """What a person reads."""
    tables: dict[str, str] = field(default_factory=dict)
    """Long ones, such as of kernels, by their titles."""


class Report:
    """Findings while they come, in a file that is written again after each measurement."""

    def __init__(self, path: Path | None = None, *, seconds: float = math.inf, is_tiny: bool = False) -> None:
        """`path`: None keeps them in memory alone. `seconds`: after this time nothing more is started. `is_tiny`: sizes
        that show only that it runs."""
        self.is_tiny = is_tiny
        self.findings = Findings()
        self._path, self._start, self._end = path, time.perf_counter(), time.perf_counter() + seconds
        self._save()

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._end - time.perf_counter())

    def measure(self, name: str, work: Callable[[], T], *, needs_seconds: float = 0.0) -> T | None:
        """What `work` returns, which is kept; None if it fails, or if less time is left than it needs."""
        if self.seconds_left <= needs_seconds:
            self.leave_out(name, "no time left")
            return None
        try:
            found = work()
        except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever it is, the others go on)
            self.findings.failures[name] = reason_of(error)
            found = None
        else:
            self.findings.results[name] = found
        self._save()
        _free_memory()
        return found

    def measure_entry(self, name: str, context: AbstractContextManager[T], *, needs_seconds: float = 0.0) -> T | None:
        """What a context gives when it is entered, which is not kept; None as for `measure`. The caller leaves it."""
        entered: list[T] = []

        def enter() -> str:
            entered.append(context.__enter__())
            return "there"

        self.measure(name, enter, needs_seconds=needs_seconds)
        return entered[0] if entered else None

    def leave_out(self, name: str, reason: str) -> None:
        """Note that something is not measured."""
        self.findings.left_out[name] = reason
        self._save()

    def fail(self, name: str, reason: str) -> None:
        """Note that something failed."""
        self.findings.failures[name] = reason
        self._save()

    def line(self, text: str) -> None:
        """Add a line that a person reads."""
        self.findings.lines.append(text)
        self._save()

    def table(self, title: str, text: str) -> None:
        """Keep a long table."""
        self.findings.tables[title] = text
        self._save()

    def _save(self) -> None:
        self.findings.seconds = time.perf_counter() - self._start
        if self._path is None:
            return
        written = self._path.with_suffix(".new")
        written.write_text(json.dumps(asdict(self.findings), default=_plain), encoding="utf-8")
        os.replace(written, self._path)


def read_findings(path: Path) -> Findings:
    """What a file has; nothing if it was never written."""
    return Findings(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else Findings()


def reason_of(error: BaseException) -> str:
    """One line."""
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"[:_REASON_LENGTH]


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value)


def _free_memory() -> None:
    """Give back what a failed measurement held, so that the next one has it."""
    torch = sys.modules.get("torch")
    gc.collect()
    if torch is not None and torch.accelerator.is_available():
        torch.accelerator.empty_cache()
