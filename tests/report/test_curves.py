"""The picture of a run's curves: of any length, with gaps, and without the user's settings."""

from __future__ import annotations

import math
import struct
import sys
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from ratel_cli.report.page.curves import _widen, can_draw_curves, draw_curves
from ratel_cli.report.page.step_curves import step_curves
from ratel_cli.training.metrics import StepMetrics
from tests.training.test_metrics import metrics

Figure = pytest.importorskip("matplotlib.figure").Figure


def history(num_steps: int, **changed: object) -> list[StepMetrics]:
    """A run whose loss falls, with an evaluation every tenth step. `changed`: of the last step."""
    rows = [
        replace(
            metrics(step),
            loss=1 + 2 * math.exp(-step / num_steps * 3) + 0.2 * math.sin(step * 2.4) ** 3,
            learning_rate=2e-5 * (1 + math.cos(step / num_steps * math.pi)) / 2,
            grad_norm=0.7 + 0.3 * math.sin(step * 1.7),
            eval_loss=None if step % 10 else 1.1 + 2 * math.exp(-step / num_steps * 3),
        )
        for step in range(1, num_steps + 1)
    ]
    return [*rows[:-1], replace(rows[-1], **changed)]  # type: ignore[arg-type]


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


@pytest.mark.full
@pytest.mark.parametrize("num_steps", [1, 2, 60, 5000])
def test_runs_of_any_length(num_steps: int) -> None:
    drawn = history(num_steps)
    png = draw_curves(drawn, name="my-run")
    assert size_of(png) == (960, 792)
    assert len(png) < 200_000
    assert draw_curves(drawn, name="my-run") == png, "the same history gives the same bytes"


@pytest.mark.parametrize(
    "changed", [{"loss": math.nan}, {"eval_loss": math.nan}, {"loss": 1e30, "grad_norm": math.inf}]
)
def test_steps_without_a_value(changed: dict[str, object]) -> None:
    assert size_of(draw_curves(history(20, **changed), name="my-run")) == (960, 792)


def test_no_finite_loss_at_all() -> None:
    steps = [replace(metrics(step), loss=math.nan, grad_norm=math.nan) for step in (1, 2, 3)]
    assert size_of(draw_curves(steps, name="my-run")) == (960, 792)


def test_the_picture_has_the_name_of_its_run() -> None:
    """As it is: what matplotlib takes for a formula is a name like any other."""
    steps = history(2)
    pictures = {draw_curves(steps, name=name) for name in ("my-run", "other", "run $\\frac{1$")}
    assert len(pictures) == 3 and {size_of(each) for each in pictures} == {(960, 792)}


@pytest.mark.full
def test_the_users_settings_have_no_influence() -> None:
    import matplotlib

    drawn = history(20)
    before = draw_curves(drawn, name="my-run")
    with matplotlib.rc_context({"axes.facecolor": "black", "lines.linewidth": 9, "figure.dpi": 10}):
        assert draw_curves(drawn, name="my-run") == before
        assert matplotlib.rcParams["axes.facecolor"] == "black", "they are as they were"


def test_what_is_drawn() -> None:
    """The same on the page, in the terminal and in the picture, with the values of the steps."""
    drawn = [replace(each, clipped=each.step == 2) for each in history(4)]
    curves = {each.shape.name: each for each in step_curves(drawn, {"RAM": 3 << 20})}
    assert list(curves) == ["Learning rate", "Gradient norm", "Speed", "Step time", "RAM", "Written"]
    assert curves["Step time"].values == [each.step_seconds for each in drawn]
    assert curves["Step time"].second == [each.predicted_seconds for each in drawn]
    assert (curves["RAM"].limit, curves["Speed"].limit) == (3.0, None)
    assert curves["Gradient norm"].marks == [False, True, False, False]
    assert curves["Gradient norm"].caption == "Gradient norm, 25 % of steps clipped"
    written = curves["Written"].values
    assert written[2] / written[0] == pytest.approx(3), "what all steps have written, not each"
    with_gpu = [replace(each, gpu_peak_bytes=3 << 30) for each in drawn]
    of_gpu = {each.shape.name: each for each in step_curves(with_gpu)}
    assert list(of_gpu)[5:8] == ["GPU memory", "Compute", "Stalled"]
    assert of_gpu["GPU memory"].caption == "GPU memory, GiB, peak so far" and of_gpu["GPU memory"].values == [3.0] * 4
    unknown = [replace(each, predicted_seconds=math.nan) for each in drawn]
    assert not any(each.second for each in step_curves(unknown))


@pytest.mark.parametrize(("first", "count"), [(1, 1), (1, 2), (1, 4), (7, 3), (1, 12), (1, 90), (500, 700)])
def test_ticks_of_the_picture_are_steps(first: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not 2.5, and at least one on each axis."""
    drawn: list[list[float]] = []
    figure = import_module("matplotlib.figure").Figure

    class Kept(figure):  # type: ignore[misc, valid-type]
        def add_subplot(self, *arguments: object) -> object:
            axes = super().add_subplot(*arguments)
            kept.append(axes)
            return axes

    kept: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure", Kept)
    draw_curves([replace(metrics(step), eval_loss=1.0) for step in range(first, first + count)], name="my-run")
    for axes in kept:
        low, high = axes.get_xlim()
        drawn.append([tick for tick in axes.get_xticks() if low <= tick <= high])
    assert len(drawn) == 7
    for ticks in drawn:
        assert ticks and all(tick == int(tick) and first <= tick < first + count for tick in ticks)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_draw_curves()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not can_draw_curves()


@pytest.mark.parametrize(
    ("low", "high", "shown"), [(930.5, 931.5, (837.86, 1024.14)), (0.0, 5.0, None), (0.0, 0.0, None)]
)
def test_an_axis_shows_how_little_a_value_changes(low: float, high: float, shown: tuple[float, float] | None) -> None:
    axes = Figure().add_subplot()
    axes.set_ylim(low, high or 1.0)
    before = axes.get_ylim()
    _widen(axes)
    assert axes.get_ylim() == pytest.approx(shown or before, abs=0.02)
