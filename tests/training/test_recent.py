"""The last steps of a run: where their time went, when the run ends, and the curve of the losses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratel_cli.planning.time.step_time import RESOURCES
from ratel_cli.training.history import recent_rate, recent_seconds
from ratel_cli.training.recent import LossCurve, RecentSteps
from tests.report.test_run import IDLE, METRICS


def steps(*, num_steps: int = 100, step: int = 0) -> RecentSteps:
    return RecentSteps(num_steps=num_steps, step=step, predicted_seconds=3.0, now=1000.0)


def add(recent: RecentSteps, seconds: float, *, between: float = 0.0, **changes: object) -> None:
    """Add a step that took so long, and that began so long after the one before."""
    metrics = replace(METRICS, step=recent.step + 1, step_seconds=seconds, **changes)  # type: ignore[arg-type]
    recent.add(metrics, recent.since + between + seconds)


def test_before_the_first_step_the_prediction_counts() -> None:
    recent = steps(step=40)
    assert (recent.step, recent.last, recent.step_seconds, recent.tokens_per_second) == (40, None, 3.0, 0.0)
    assert recent.seconds_left(1000.0) == 60 * 3.0
    assert recent.seconds_left(1001.0) == 60 * 3.0 - 1.0
    assert recent.seconds_left(1100.0) == 59 * 3.0, "a step that takes longer than predicted is about to end"
    assert [recent.sums.busy(resource) for resource in RESOURCES] == [0.0] * len(RESOURCES)
    assert recent.sums.moved_per_second("nvme read") == 0.0
    assert all(share == 0 for share in recent.sums.stalls().values())


def test_the_time_left_is_that_of_the_whole_run() -> None:
    """Resumed at step 40 of 100: the first step is a warm-up, and evaluations between steps count."""
    recent = steps(step=40)
    add(recent, 50.0)
    assert recent.seconds_left(recent.since) == 59 * 50.0
    for _ in range(4):
        add(recent, 2.0, between=1.0)
    assert (recent.step, recent.step_seconds) == (45, 2.0)
    assert recent.seconds_left(recent.since) == 55 * 3.0
    assert recent.seconds_left(recent.since + 0.5) == 55 * 3.0 - 0.5


def test_nothing_is_left_after_the_last_step() -> None:
    recent = steps(num_steps=1)
    add(recent, 4.0)
    assert recent.seconds_left(recent.since + 9) == 0.0


def test_a_run_that_becomes_faster_is_believed() -> None:
    recent = steps(num_steps=1000)
    for _ in range(50):
        add(recent, 10.0)
    for _ in range(16):
        add(recent, 1.0)
    assert recent.step_seconds == 1.0


def test_speed_is_that_which_status_shows() -> None:
    """One slow step among the last ones makes them no slower."""
    recent = steps()
    for seconds in (50.0, *[2.0] * 30, 60.0):
        add(recent, seconds)
    of_run = [replace(METRICS, step=number, step_seconds=2.0) for number in range(2, 33)]
    of_run[-1] = replace(of_run[-1], step_seconds=60.0)
    assert recent.step_seconds == recent_seconds(of_run) == 2.0
    assert recent.tokens_per_second == recent_rate(of_run)


def test_shares_and_rates_are_those_of_the_last_steps_together() -> None:
    recent = steps()
    add(recent, 100.0, busy_seconds=IDLE | {"compute": 100.0})
    add(recent, 1.0, busy_seconds=IDLE | {"compute": 1.0, "nvme read": 2.0}, waited_seconds=IDLE | {"up": 0.5})
    add(recent, 3.0, busy_seconds=IDLE | {"compute": 1.0}, waited_seconds=IDLE | {"optimizer": 1.5, "up": 0.1})
    assert recent.sums.busy("compute") == 0.5
    assert recent.sums.busy("nvme read") == 0.5
    assert list(recent.sums.stalls().items())[:2] == [("optimizer", 0.375), ("up", pytest.approx(0.15))]
    assert recent.tokens_per_second == 500.0
    assert recent.sums.moved_per_second("nvme read") == 7e9
    assert recent.sums.moved_per_second("nvme write") == 6e9
    assert recent.sums.moved_per_second("compute") == 0.0


def test_no_resource_is_busier_than_the_clock() -> None:
    recent = steps()
    add(recent, 1.0, busy_seconds=IDLE | {"nvme read": 1.2})
    assert recent.sums.busy("nvme read") == 1.0


@pytest.mark.parametrize("count", [0, 1, 2, 3, 511, 512, 513, 1024, 5000])
@pytest.mark.parametrize("most", [1, 7, 60, 512])
def test_a_curve_of_any_length(count: int, most: int) -> None:
    """A straight line stays one, from about the first loss to about the last."""
    curve = LossCurve()
    for number in range(count):
        curve.add(float(number))
    points = curve.points(most)
    assert len(points) <= most
    assert points == sorted(points)
    if count <= most and count < 512:
        assert points == [float(number) for number in range(count)]
    if count:
        width = max(1.0, count / min(most, 256))
        assert (points[0], points[-1]) == (pytest.approx(0, abs=width), pytest.approx(count - 1, abs=width))


@given(st.lists(st.floats(0, 100), min_size=1, max_size=300), st.integers(1, 100))
def test_a_curve_stays_between_its_losses(losses: list[float], most: int) -> None:
    curve = LossCurve()
    for loss in losses:
        curve.add(loss)
    points = curve.points(most)
    assert len(points) == min(most, len(losses))
    assert min(losses) - 1e-9 <= min(points) <= max(points) <= max(losses) + 1e-9


def test_losses_that_are_not_finite_are_left_out() -> None:
    curve = LossCurve()
    for loss in (1.0, math.nan, math.inf, 3.0):
        curve.add(loss)
    assert curve.points(10) == [1.0, 3.0]
