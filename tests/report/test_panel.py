"""The panel of a run that trains on a terminal: what it says, and that it fits."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratel_cli.report.words.panel import Panel, PanelFacts
from ratel_cli.units import GIB
from tests.real_time import in_real_time
from tests.report.test_run import IDLE, METRICS

NOW = datetime(2026, 11, 23, 14, 0, tzinfo=UTC)
FACTS = PanelFacts(
    num_steps=20,
    first_step=2,
    has_gpu=False,
    host_limit_bytes=48 * GIB,
    gpu_limit_bytes=None,
    store_bytes=182 * GIB,
    free_bytes=lambda: 700 * GIB,
    written_bytes=10**12,
    state_bytes=10**9,
    max_bytes_written=None,
)
WITH_GPU = replace(FACTS, has_gpu=True, gpu_limit_bytes=24 * GIB)
STEP = replace(METRICS, host_peak_bytes=12 * GIB, gpu_peak_bytes=20 * GIB)


class Made:
    """A panel with a clock that only the test moves."""

    def __init__(self, facts: PanelFacts = FACTS, *, earlier: tuple[float, ...] = (), ascii_only: bool = False) -> None:
        self.now = 100.0
        self.is_stopping = False
        self.panel = Panel(
            facts,
            predicted_seconds=5.0,
            earlier_losses=earlier,
            is_stopping=lambda: self.is_stopping,
            ascii_only=ascii_only,
            clock=lambda: self.now,
            local_time=lambda: NOW,
        )

    def step(self, number: int, **changes: object) -> None:
        self.now += 4.0
        self.panel.show(replace(STEP, step=number, **changes))  # type: ignore[arg-type]

    def lines(self, width: int = 60) -> list[str]:
        return [line.plain for line in self.panel.lines(width)]


def bar(share: float, cells: int) -> str:
    return "\u2501" * round(share * cells) + "\u2500" * (cells - round(share * cells))


def test_a_step_of_a_resumed_run() -> None:
    made = Made(earlier=(4.0, 3.0))
    made.step(3, busy_seconds=IDLE | {"compute": 3.84, "nvme read": 2.0, "nvme write": 0.4, "optimizer": 0.04})
    made.now += 1.0
    assert made.lines() == [
        "",
        f"step 3/20 {bar(0.15, 44)}  15 %",
        "67 s left  step 4: 1 s of about 4.00 s  ends 14:01",
        "loss 2.3457  \u2588\u2584\u2581",
        "250 tokens/s  norm 0.988  lr 1.50e-05",
        f"CPU compute  {bar(0.96, 30)}  96 %",
        f"NVMe read    {bar(0.5, 30)}  50 %  3.50 GB/s",
        f"NVMe write   {bar(0.1, 30)}  10 %  3.00 GB/s",
        f"optimizer    {bar(0.01, 30)}   1 %",
        "stalled 4 %  NVMe read 3 %  optimizer 1 %",
        "RAM 12.0 GiB of 48.0 GiB",
        "NVMe 182 GiB taken, 700 GiB free  written 1.01 TB",
    ]


def test_before_the_first_step() -> None:
    lines = Made().lines()
    assert lines[1].startswith("step 2/20 ")
    assert lines[2] == "90 s left  step 3: 0 s of about 5.00 s  ends 14:01"
    assert lines[3:5] == ["loss  ", "tokens/s after the first step"]
    assert Made(earlier=(2.0, 1.0)).lines()[3] == "loss  \u2588\u2581"
    assert len(lines) == len(Made(WITH_GPU).lines()) - 2
    assert not [line for each in (FACTS, WITH_GPU) for line in Made(each).lines() if "RAM" in line or "GiB of" in line]


def test_the_epoch_of_the_step_that_runs() -> None:
    made = Made(replace(FACTS, steps_per_epoch=5))
    assert made.lines(80)[2].endswith("  ends 14:01  epoch 1/4")
    for number in range(3, 21):
        made.step(number)
    assert made.lines(80)[2].endswith("  epoch 4/4"), "there is no step 21"


def test_a_step_that_takes_longer_than_expected() -> None:
    made = Made()
    made.now += 7.4
    assert made.lines()[2].startswith("85 s left  step 3: 7 s, expected 5.00 s  ")


def test_a_gpu_has_a_link_and_memory_of_its_own() -> None:
    made = Made(WITH_GPU)
    made.step(3)
    lines = made.lines()
    assert [line.split("  ")[0] for line in lines[5:11]] == [
        "GPU compute",
        "upload",
        "download",
        "NVMe read",
        "NVMe write",
        "optimizer",
    ]
    assert lines[-2] == "RAM 12.0 GiB of 48.0 GiB  GPU 20.0 GiB of 24.0 GiB"


def test_evaluations_stay_on_the_panel() -> None:
    made = Made()
    made.step(3)
    made.panel.show_work("evaluating after step 3")
    assert made.lines()[2] == "evaluating after step 3  68 s left  ends 14:01"
    made.panel.show_work(None)
    made.panel.show_evaluation(3, 1.5)
    assert made.lines()[4] == "250 tokens/s  eval loss 1.5000 after step 3  norm 0.988"
    assert made.lines(80)[4].endswith("  lr 1.50e-05")


def test_the_margin_of_answers_that_are_compared_is_on_the_panel() -> None:
    made = Made()
    made.panel.show(replace(METRICS, preferences={"rewards/margins": 0.125}))
    assert made.lines(80)[4].startswith("250 tokens/s  margin 0.1250  norm 0.988")


def test_a_request_to_stop_is_confirmed() -> None:
    """The step that is computed does not count: the run stops within it."""
    made = Made()
    made.is_stopping = True
    both = ["stopping at the next block; resume repeats step 3", "Ctrl-C again ends at once"]
    assert made.lines(80)[2] == "; ".join(both)
    for width in (50, 60):
        assert made.lines(width)[2:4] == both, "nothing is cut off"
    made.panel.show_work("evaluating after step 2")
    assert made.lines()[2] == "stopping soon; Ctrl-C again ends at once"
    made.panel.show_work(None)
    made.step(20)
    assert made.lines()[2] == "stopping soon; Ctrl-C again ends at once"


def test_fast_steps_are_not_followed() -> None:
    made = Made()
    for number in (3, 4, 5):
        made.step(number, step_seconds=0.5)
    assert made.lines()[2] == "60 s left  ends 14:01  0.50 s per step"


def test_a_limit_of_what_is_written_counts_what_goes_to_the_store() -> None:
    made = Made(replace(FACTS, max_bytes_written=10**12 + 4 * 10**9))
    made.step(3)
    made.step(4)
    assert made.lines()[-1] == "NVMe 182 GiB taken, 700 GiB free  written 1.00 TB of 1.00 TB"


def test_a_run_of_days_ends_on_a_day() -> None:
    made = Made(replace(FACTS, num_steps=10**6))
    made.step(3)
    made.step(4)
    assert made.lines(80)[2] == "46 d 7 h left  step 5: 0 s of about 4.00 s  ends Fri 08 Jan 21:06"
    assert made.lines(60)[2] == "46 d 7 h left  step 5: 0 s of about 4.00 s"


def test_the_last_step() -> None:
    made = Made(replace(FACTS, num_steps=3))
    made.step(3)
    lines = made.lines()
    assert lines[1].endswith(" 100 %")
    assert lines[2].startswith("0 s left  ends 14:00")


def test_without_unicode_it_is_ascii() -> None:
    made = Made(ascii_only=True)
    made.step(3)
    made.step(4, loss=1.0)
    assert all(line.isascii() for line in made.lines())
    assert "####" in made.lines()[1]


def test_handing_over_a_row_makes_no_words() -> None:
    """All work is done by the thread that draws: until then the panel has nothing but the row."""
    made = Made()
    before = made.lines()
    made.now -= 4.0
    made.step(3)
    assert made.panel._steps.step == 2
    assert made.lines() != before
    assert made.panel._steps.step == 3


@given(
    width=st.integers(1, 200),
    step=st.integers(0, 10**7),
    loss=st.floats(0, 1e9),
    seconds=st.floats(1e-3, 1e6),
    shares=st.floats(0, 1.5),
    has_gpu=st.booleans(),
    is_evaluated=st.booleans(),
)
def test_no_line_is_wider_than_the_terminal(
    width: int, step: int, loss: float, seconds: float, shares: float, has_gpu: bool, is_evaluated: bool
) -> None:
    made = Made(replace(WITH_GPU if has_gpu else FACTS, num_steps=10**7, first_step=max(0, step - 1)))
    made.step(
        step,
        loss=loss,
        step_seconds=seconds,
        clipped=True,
        busy_seconds=dict.fromkeys(IDLE, shares * seconds),
        waited_seconds=dict.fromkeys(IDLE, shares * seconds / 6),
    )
    if is_evaluated:
        made.panel.show_evaluation(step, loss)
    assert [line for line in made.lines(width) if len(line) > width] == []


@in_real_time
def test_the_panel_costs_a_step_next_to_nothing() -> None:
    """Measured: a row takes 2 us of the loop's thread, a drawing 0.5 ms of another one."""
    made = Made(WITH_GPU)
    start = time.thread_time()
    for _ in range(1000):
        made.panel.show(STEP)
    assert (time.thread_time() - start) / 1000 < 2e-4
    made.lines()
    start = time.thread_time()
    for _ in range(20):
        made.lines()
    assert (time.thread_time() - start) / 20 * 4 < 0.1, "a tenth of a core at four drawings a second"


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_height_does_not_depend_on_the_width(width: int) -> None:
    made = Made(WITH_GPU)
    assert len(made.lines(width)) == 13, "no memory before the first step"
    made.step(3)
    assert len(made.lines(width)) == 14
