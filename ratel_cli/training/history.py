"""The steps of a run, read back from `run/metrics.jsonl`.

The file may be written by a run that is training, end in half a line after a crash, or come from an earlier version.

Invariant: every line that is a step is returned, in the order of the steps; each other line is counted, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from ratel_cli.errors import IntegrityFailure
from ratel_cli.training.metrics import StepMetrics
from ratel_cli.training.metrics_log import step_in
from ratel_cli.units import counted

_TAIL_BYTES = 1 << 16
RECENT_STEPS = 20
"""How many steps the speed of a run is taken from, wherever it is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The steps that a run has recorded."""

    steps: tuple[StepMetrics, ...] = ()
    """Each step once, in their order."""
    num_unreadable: int = 0
    """Lines that are no step of a run, or are not as they were written."""
    is_cut_short: bool = False
    """Whether the last line is only half written, as after a crash or while a run writes it."""

    def up_to(self, step: int) -> History:
        """The history without the steps after `step`."""
        return replace(self, steps=tuple(each for each in self.steps if each.step <= step))


def read_history(path: Path) -> History:
    """All steps in the file; none if there is no file. Raises OSError if it cannot be read."""
    return _parsed(path.read_bytes()) if path.is_file() else History()


def read_recent(path: Path) -> History:
    """The last steps in the file: at least 20 if it has as many. Raises OSError if it cannot be read."""
    if not path.is_file():
        return History()
    with path.open("rb") as file:
        end, num_bytes = path.stat().st_size, _TAIL_BYTES
        while True:
            start = max(0, end - num_bytes)
            file.seek(start)
            content = file.read()
            history = _parsed(content.partition(b"\n")[2] if start else content)
            if start == 0 or len(history.steps) >= RECENT_STEPS:
                return history
            num_bytes *= 4


def recent_seconds(steps: Sequence[StepMetrics]) -> float | None:
    """The median time of the last steps; None without steps. The first step of a run is a warm-up."""
    seconds = [each.step_seconds for each in steps if each.step > 1] or [each.step_seconds for each in steps]
    return median(seconds[-RECENT_STEPS:]) if seconds else None


def recent_rate(steps: Sequence[StepMetrics]) -> float | None:
    """The speed of a run, wherever it is shown: tokens of the last 20 steps by the time of these steps; None without.

    The first step of a run is a warm-up. Time between steps, as of saves and evaluations, does not count.
    """
    recent = ([each for each in steps if each.step > 1] or list(steps))[-RECENT_STEPS:]
    seconds = sum(each.step_seconds for each in recent)
    return sum(each.tokens for each in recent) / seconds if seconds else None


def finite_mean(values: Iterable[float]) -> float | None:
    """The mean of the values that are finite; None if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None


def check_best_is_known(path: Path, history: History) -> None:
    """Raise IntegrityFailure if lines of the file cannot be read: one of them may be that of the best step."""
    if history.num_unreadable:
        raise IntegrityFailure(
            f"{path}: {counted(history.num_unreadable, 'damaged line')}: the best step is not known",
            "export a saved step by its number: `ratel export CONFIG --step STEP -o DIR`; or train on without a best "
            "step: load_best_model_at_end: false",
        )


def _parsed(content: bytes) -> History:
    *lines, rest = content.split(b"\n")
    found: dict[int, StepMetrics] = {}
    num_unreadable = 0
    for step in map(step_in, filter(bytes.strip, lines)):
        if step is None:
            num_unreadable += 1
        else:
            found[step.step] = step  # a step that was run again counts as it was run last
    return History(
        steps=tuple(found[number] for number in sorted(found)),
        num_unreadable=num_unreadable,
        is_cut_short=bool(rest.strip()),
    )
