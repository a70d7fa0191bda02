"""What a run knows of itself and no other file has: how many steps it will have, with which software, who computes it.

It is in `run/run.json`, written when training begins and when the plan changes.

Invariant: a reader gets the facts or None; a damaged file says nothing. Nothing heavy is imported.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from ratel_cli.json_fields import read_file_as

FACTS_NAME: Final = "run.json"
_FORMAT_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The facts of the command that trained last."""

    num_steps: int
    """Steps of the whole run."""
    first_step: int
    """The step that the command resumed after; 0 if it began the run."""
    num_samples: int
    """Samples of the data."""
    num_tokens: int
    """Tokens of one epoch."""
    software: str
    """Versions, and the instruction set or the GPU."""
    started: str
    """When training began: local time to the second."""
    pid: int
    """The process that trained, as the lock of its store names it."""
    steps_per_epoch: int | None = None
    """Steps of one epoch; None if the run was trained with a version that did not write it."""
    rounds_up: bool = False
    """Whether a part of a step in the length of run or warm-up counts as a step. False: the run began with a version
    that rounded the run to the nearest step, and the warm-up by `warmup_ratio` down."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end answers of the data, though the base model does not stop at them."""
    ended_early_at: int | None = None
    """The step after which evaluations ended the run; None if it has not ended, or at its last step."""
    exported_step: int | None = None
    """The step that was exported as the best one that is saved, which may be the last one; None if the last one was
    exported because no step is the best, or if there is no export yet."""

    def to_json(self) -> dict[str, object]:
        """The content of the file."""
        return {"format_version": _FORMAT_VERSION, **asdict(self)}


def read_facts(run_dir: Path) -> RunFacts | None:
    """The facts in the directory of a run's own files; None if there are none."""
    return read_file_as(RunFacts, run_dir / FACTS_NAME)
