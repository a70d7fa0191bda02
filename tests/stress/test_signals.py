"""SIGINT and SIGTERM at any time of a run's life: it ends soon, with the right exit code, and loses nothing."""

from __future__ import annotations

import os
import re
import signal
from random import Random

import pytest

from tests.e2e.runs import wait
from tests.stress.conftest import Begin
from tests.stress.lives import Disturbance, Outcome, Phase, report

pytestmark = [pytest.mark.stress, pytest.mark.nightly]

NUM_SIGNALS = 50
AT_MOST_SECONDS = 60.0
A_LIFE: tuple[Phase, ...] = (
    "reading",
    "importing",
    "reading",
    "importing",
    "training",
    "training",
    "reading",
    "training",
    "exporting",
    "exporting",
)
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def test_stopped_at_any_time(begin: Begin, undisturbed: Outcome) -> None:
    random = Random(1)
    disturbances: list[Disturbance] = []
    while sum(each.code != 0 for each in disturbances) < NUM_SIGNALS:
        life = begin(random)
        for aim in A_LIFE:
            number = random.choice(list(CODES))
            stopped = life.disturb(number, aim)
            disturbances.append(stopped)
            assert stopped.code in (CODES[number], 0), stopped
            assert "Traceback" not in stopped.stderr
            assert stopped.exit_seconds < AT_MOST_SECONDS
            last_line = stopped.stderr.splitlines()[-1]
            message = re.fullmatch(
                r"Stopped(\.| at step \d+ \(saved\)\.) Run the same command (again|to continue)\.", last_line
            )
            assert (message is not None) == (stopped.code != 0), stopped.stderr
            if stopped.phase == "over":
                break
        assert life.end() == undisturbed
    print(f"\n{report(disturbances)}")
    phases = {each.phase for each in disturbances}
    assert phases >= {"reading", "importing", "training"}
    assert phases & {"exporting", "over"}, "signals are checked between blocks, and the rest of an export is short"


def test_a_second_signal_ends_it_at_once(begin: Begin, undisturbed: Outcome) -> None:
    """Both arrive before the run can check: the second does not wait for an orderly end."""
    life = begin(Random(2))
    process = life.config.start()
    life.config.wait_for_step(3, process)
    assert process.pid is not None
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        os.kill(process.pid, number)
    assert wait(process) == 143
    assert "Stopped" not in life.config.stderr
    assert life.end() == undisturbed
