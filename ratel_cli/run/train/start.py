"""Where a run begins: what `--resume` and `--overwrite-store` ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from ratel_cli.errors import BadInput

_MOST_DIGITS: Final = 18
"""Most digits of a step: it fits into 64 bits."""


@dataclass(frozen=True, slots=True)
class Resume:
    """After the last committed step, if there is a store; else at the beginning."""


@dataclass(frozen=True, slots=True)
class GoBack:
    """After a saved step. Later ones are dropped."""

    step: int


@dataclass(frozen=True, slots=True)
class StartOver:
    """At the beginning, whatever is there."""

    replaces_others: bool = False
    """Whether a store that another run made is replaced too."""


Start: TypeAlias = Resume | GoBack | StartOver


def start_of(resume: str, *, overwrite_store: bool = False) -> Start:
    """The start that the options ask for. `resume` is `auto`, `no` or the number of a saved step. Raises BadInput."""
    if resume == "auto":
        return Resume()
    if resume == "no":
        return StartOver(replaces_others=overwrite_store)
    if resume.isascii() and resume.isdigit() and len(resume) <= _MOST_DIGITS:
        return GoBack(int(resume))
    raise BadInput(
        f"argument '--resume {resume}': must be `auto`, `no` or the number of a saved step",
        "--resume auto resumes from the last committed step, --resume no starts over",
    )
