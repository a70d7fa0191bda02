"""Tests of what passes in real time: a busy machine may fail them at the wrong moment, so they get four tries."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

in_real_time = pytest.mark.flaky(reruns=3, only_rerun=["AssertionError"])
"""A mark for tests whose assertions depend on how long something takes by the machine's own clock.

A test that needs no clock, or can have one of its own, needs no mark: that is better. What is marked fails all four
times if the program is wrong.
"""


def of_this_try(request: pytest.FixtureRequest, durations: Sequence[float]) -> float:
    """One of the durations, a longer one in each try of the test, for tests that choose how long something lasts.

    What a busy machine takes for the same work is a smaller share of a longer time.
    """
    return durations[min(getattr(request.node, "execution_count", 1), len(durations)) - 1]
