"""SIGKILL at any time of a run's life, and at every failpoint of a commit: no committed step is ever lost.

`RATEL_STRESS_KILLS` is the number of kills: a thousand for `make stress`, by default fifty.
"""

from __future__ import annotations

import os
import signal
from random import Random

import pytest

from ratel_cli.store.barrier import FAILPOINTS
from tests.stress.conftest import Begin
from tests.stress.lives import Disturbance, Outcome, Phase, report

pytestmark = [pytest.mark.stress, pytest.mark.nightly]

NUM_KILLS = int(os.environ.get("RATEL_STRESS_KILLS", "50"))
A_LIFE: tuple[Phase, ...] = (
    "reading",
    "importing",
    "importing",
    "reading",
    "training",
    "training",
    "training",
    "reading",
    "training",
    "exporting",
    "exporting",
)
_MOST_COUNTS = 3


@pytest.mark.timeout(900 + 8 * NUM_KILLS)
def test_killed_at_any_time(begin: Begin, undisturbed: Outcome) -> None:
    """The phases in this order, in one life after another. Every life ends with the undisturbed outcome."""
    random = Random(NUM_KILLS)
    disturbances: list[Disturbance] = []
    while _num_kills(disturbances) < NUM_KILLS:
        life = begin(random)
        disturbances += [life.disturb(signal.SIGKILL, aim) for aim in A_LIFE]
        assert life.end() == undisturbed
    print(f"\n{report(disturbances)}")
    assert {each.code for each in disturbances} <= {-signal.SIGKILL, 0}
    assert {each.phase for each in disturbances} >= {"reading", "importing", "training", "exporting"}
    assert any(each.recovery_seconds is not None for each in disturbances)


def _num_kills(disturbances: list[Disturbance]) -> int:
    """The kills that hit a run which had not ended."""
    return sum(each.code == -signal.SIGKILL for each in disturbances)


@pytest.mark.timeout(900 + 8 * NUM_KILLS)
def test_killed_at_every_failpoint(begin: Begin, undisturbed: Outcome) -> None:
    """First the failpoints of creating a store, each the first time; then those of commits, at a random time."""
    random = Random(NUM_KILLS)
    for _ in range(max(1, NUM_KILLS // 100)):
        life = begin(random)
        for point in sorted(FAILPOINTS, key=lambda point: not point.startswith("create.")):
            if life.num_steps_left <= _MOST_COUNTS:
                assert life.end() == undisturbed
                life = begin(random)
            life.kill_at(point, 1 if point.startswith("create.") else random.randint(1, _MOST_COUNTS))
        assert life.end() == undisturbed
