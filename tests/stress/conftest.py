"""The base model and the data of the end-to-end tests, one undisturbed run, and lives to disturb."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random
from typing import Protocol

import pytest

from tests.e2e.conftest import _deterministic_like_a_run, base, rows
from tests.e2e.runs import write_config
from tests.stress.lives import CHANGES, Life, Outcome, outcome_of

__all__ = ["_deterministic_like_a_run", "base", "rows"]


class Begin(Protocol):
    def __call__(self, random: Random) -> Life: ...


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, base: Path, rows: Path) -> Outcome:
    """The outcome of an undisturbed run."""
    config = write_config(tmp_path_factory.mktemp("undisturbed"), base=base, rows=rows, **CHANGES)
    config.succeed()
    return outcome_of(config)


@pytest.fixture
def begin(tmp_path: Path, base: Path, rows: Path) -> Begin:
    """Starts a life in a new directory."""
    numbers = itertools.count()

    def new_life(random: Random) -> Life:
        return Life(write_config(tmp_path / str(next(numbers)), base=base, rows=rows, **CHANGES), random)

    return new_life
