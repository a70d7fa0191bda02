"""What `ratel status` prints: a row for each run, or all of it as JSON.

Invariant: nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Literal

from ratel_cli.report.words.plan import aligned
from ratel_cli.training.metrics import STEP_FIGURES
from ratel_cli.units import format_bytes, format_rate_number, format_wait

RunState = Literal["running", "in use", "finished", "stopped", "killed", "not begun", "no store", "damaged"]
STATES: dict[RunState, str] = {
    "running": "a process trains it, or exports its model",
    "in use": "another command has its store open",
    "finished": "all steps are done and the model is exported",
    "stopped": "no process trains it; the same command resumes it",
    "killed": "its process ended without closing the store; the same command resumes it",
    "not begun": "it has no steps and no store",
    "no store": "it is not finished, and its store is not there, or was deleted with `ratel clean --store`",
    "damaged": "its config cannot be read",
}
"""What each state means."""
_KEYS = [each.key for each in STEP_FIGURES if each.in_status]
_COLUMNS = [(each.key, each.column, each.status_words) for each in STEP_FIGURES if each.status_words is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """One run, as its files show it."""

    output_dir: Path
    state: RunState
    step: int = 0
    """Steps done: of a run that trains those that are recorded, else those that the store has."""
    num_steps: int | None = None
    """Steps of the whole run; None if that is not known."""
    steps_per_epoch: int | None = None
    """Steps of one epoch; None if that is not known."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Figures that are `in_status`, by key: the value of the last step that has each, among the recent ones."""
    tokens_per_second: float | None = None
    """The speed of the run (`training.history.recent_rate`)."""
    seconds_left: float | None = None
    """Seconds until the last step, at the speed of the recent steps; saves and evaluations not counted."""
    ended_early: bool = False
    """Whether its evaluations ended it before its last step."""
    best_step: int | None = None
    """The step with the best evaluation; None if the config does not compare them."""
    last_step_at: datetime | None = None
    """When the last step was recorded."""
    store_bytes: int = 0
    store_deleted: bool = False
    """Whether the user had the store deleted, with `ratel clean --store`."""
    output_bytes: int = 0
    """All files in the output directory."""
    pid: int | None = None
    """The process that has the store open."""
    problem: str | None = None
    """What cannot be read."""


def status_lines(runs: Sequence[RunStatus], *, now: datetime) -> list[str]:
    """The lines of a table with a row for each run."""
    headings = ("state", "step", *(column for _, column, _ in _COLUMNS), "tokens/s", "left", "last step", "disk", "run")
    return aligned([headings, *(_row(each, now) for each in runs)])


def status_to_json(runs: Sequence[RunStatus]) -> dict[str, object]:
    """The content that `ratel status --json` prints."""
    return {
        "runs": [
            {
                "run": str(each.output_dir),
                "state": each.state,
                "step": each.step,
                "num_steps": each.num_steps,
                **{key: _finite(each.figures.get(key)) for key in _KEYS},
                "tokens_per_second": each.tokens_per_second,
                "seconds_left": each.seconds_left,
                "ended_early": each.ended_early,
                "best_step": each.best_step,
                "last_step_at": None if each.last_step_at is None else each.last_step_at.isoformat(timespec="seconds"),
                "store_bytes": each.store_bytes,
                "store_deleted": each.store_deleted,
                "output_bytes": each.output_bytes,
                "pid": each.pid,
                "problem": each.problem,
            }
            for each in runs
        ]
    }


def step_words(step: int, num_steps: int | None) -> str:
    """The steps that are done, of how many."""
    return str(step) if num_steps is None else f"{step}/{num_steps}"


def epoch_words(step: int, num_steps: int | None, steps_per_epoch: int | None) -> str:
    """The epoch that a step belongs to, of how many; empty for a run of one epoch, or if that is not known."""
    if num_steps is None or steps_per_epoch is None or num_steps <= steps_per_epoch:
        return ""
    num_epochs = -(-num_steps // steps_per_epoch)
    return f"epoch {min(num_epochs, max(1, -(-step // steps_per_epoch)))}/{num_epochs}"


def _row(each: RunStatus, now: datetime) -> tuple[str, ...]:
    done = [
        step_words(each.step, each.num_steps),
        epoch_words(each.step, each.num_steps, each.steps_per_epoch),
        "" if each.best_step is None else f"best {each.best_step}",
    ]
    return (
        _state_words(each),
        ", ".join(filter(None, done)),
        *(_or_dash(each.figures.get(key), words) for key, _, words in _COLUMNS),
        _or_dash(each.tokens_per_second, format_rate_number),
        _or_dash(None if each.ended_early else each.seconds_left, lambda left: format_wait(left) if left else "-"),
        "-" if each.last_step_at is None else f"{format_wait(max(0.0, (now - each.last_step_at).total_seconds()))} ago",
        format_bytes(each.store_bytes + each.output_bytes),
        str(each.output_dir),
    )


def _state_words(each: RunStatus) -> str:
    state = f"{each.state} early" if each.ended_early and each.state == "finished" else each.state
    if not each.store_deleted:
        return state
    return "store deleted" if each.state == "no store" else f"{state}, store deleted"


def _or_dash(value: float | None, words: Callable[[float], str]) -> str:
    known = _finite(value)
    return "-" if known is None else words(known)


def _finite(value: float | None) -> float | None:
    return None if value is None or not isfinite(value) else value
