"""The training loop on fakes: what is asked of engine and store, in which order, and where it stops."""

from __future__ import annotations

import math

import pytest

from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.errors import Diverged, EnvironmentFailure, Interrupted
from ratel_cli.training.metrics import StepMetrics
from ratel_cli.training.schedule import LearningRateSchedule
from tests.training.loop_fakes import BAD_TENSOR, SLOT_BYTES, Run

INFINITE = (0.5, math.inf)


class StopAt:
    """Raises at the given call of `check_stop`, counted from 1."""

    def __init__(self, call: int) -> None:
        self.calls_left = call

    def __call__(self) -> None:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise Interrupted(2, "stopped by SIGINT")


def timeless(metrics: StepMetrics) -> tuple[object, ...]:
    return (metrics.step, metrics.loss, metrics.learning_rate, metrics.grad_norm, metrics.applied, metrics.eval_loss)


def test_every_applied_step_is_committed_beneath_the_next_one_and_the_last_at_once() -> None:
    run = Run()
    run.run_finetune()
    beneath = [event for step in (2, 3) for event in (f"run {step}", f"commit {step - 1}", f"report {step}")]
    assert run.events == ["run 1", "report 1", *beneath, "run 4", "commit 3", "settle", "commit 4", "report 4"]
    progress = run.store.progress
    assert (progress.step, progress.updates, progress.tokens) == (4, 4, 4 * 10)
    assert (progress.loss_scale, progress.good_steps) == (65536.0, 0)


def test_a_recorded_step_is_run_alone_and_committed() -> None:
    recording = StepRecording()
    run = Run(recording=recording, num_eval_batches=1)
    run.run_finetune()
    assert run.events == ["run 1", "settle", "commit 1", "report 1"]
    assert run.engine.recorded == [recording]
    assert run.store.progress.step == 1


def test_every_step_is_announced_before_it_is_committed() -> None:
    run = Run()
    run.run_finetune()
    assert [committed for committed, _ in run.announced] == [0, 1, 2, 3]
    assert [timeless(metrics) for _, metrics in run.announced] == [timeless(metrics) for metrics in run.reported]


def test_a_step_that_diverges_is_never_announced() -> None:
    run = Run(failing={1: INFINITE})
    with pytest.raises(Diverged):
        run.run_finetune()
    assert [metrics.step for _, metrics in run.announced] == [1]


def test_a_step_gets_what_belongs_to_it() -> None:
    run = Run()
    run.run_finetune()
    schedule = LearningRateSchedule(scheduler="linear", peak=1e-3, num_warmup_steps=1, num_steps=4)
    assert run.engine.asked == [
        (step, step + 1, schedule.at(step), 1.0, (step, 100 + step, 200 + step)) for step in range(4)
    ]


def test_what_is_reported() -> None:
    metrics = next(Run().loop.steps())
    assert (metrics.loss, metrics.grad_norm, metrics.learning_rate) == (0.5, 0.5, 0.0)
    assert (metrics.tokens, metrics.host_peak_bytes, metrics.predicted_seconds) == (10, 77, 0.125)
    assert (metrics.nvme_read_bytes, metrics.nvme_written_bytes) == (14, 12)
    assert metrics.bottleneck == "optimizer"
    assert metrics.forward_seconds + metrics.backward_seconds == pytest.approx(metrics.step_seconds)
    assert metrics.tokens_per_second == pytest.approx(10 / metrics.step_seconds)
    # Two micro-batches of 2 x 4: padding is computed as well. 1 GFLOP a token, three quarters of it twice.
    assert metrics.tflops_model * metrics.step_seconds == pytest.approx(3 * 16 * 1e9 / 1e12)
    assert metrics.tflops_hardware * metrics.step_seconds == pytest.approx(3.75 * 16 * 1e9 / 1e12)
    assert metrics.eval_loss is None


@pytest.mark.parametrize("first", range(5))
def test_a_run_goes_on_where_the_store_is(first: int) -> None:
    undisturbed = [timeless(metrics) for metrics in Run().loop.steps()]
    resumed = Run(step=first)
    assert [timeless(metrics) for metrics in resumed.loop.steps()] == undisturbed[first:]
    assert resumed.store.progress.tokens == 40


def test_an_overflow_moves_on_without_an_update() -> None:
    run = Run(scale_loss=True, failing={1: INFINITE, 2: (math.nan, math.nan)})
    found = run.run_finetune()
    assert [event for event in run.events if "commit" in event] == [
        "commit 1",
        "commit_progress 2",
        "commit_progress 3",
        "commit 4",
    ]
    assert [metrics.applied for metrics in found] == [True, False, False, True]
    assert [(step, update, scale) for step, update, _, scale, _ in run.engine.asked] == [
        (0, 1, 65536.0),
        (1, 2, 65536.0),
        (2, 2, 32768.0),
        (3, 2, 16384.0),
    ]
    progress = run.store.progress
    assert (progress.step, progress.updates, progress.loss_scale, progress.good_steps) == (4, 2, 16384.0, 1)


def test_a_resumed_run_has_the_loss_scale_of_before() -> None:
    run = Run(step=2, loss_scale=8.0, scale_loss=True)
    run.run_finetune()
    assert run.engine.asked[0][3] == 8.0
    assert run.store.progress.good_steps == 2


@pytest.mark.parametrize(
    ("outcome", "what"),
    [(INFINITE, f"the gradient norm is inf, first in {BAD_TENSOR}, "), ((math.nan, math.nan), "the loss is nan, ")],
)
def test_without_loss_scaling_a_step_that_is_not_finite_ends_the_run(outcome: tuple[float, float], what: str) -> None:
    run = Run(failing={2: outcome})
    with pytest.raises(Diverged, match=f"step 3: {what}and again when it was run again; .* step 2 stands") as raised:
        run.run_finetune()
    assert "(samples 2, 102, 202)" in raised.value.message
    assert raised.value.hint is not None and "float16" not in raised.value.hint
    assert run.events[-3:] == ["run 3", "commit 2", "run 3"]
    assert run.engine.asked[-1] == run.engine.asked[-2]
    assert run.store.progress.step == 2


def test_with_the_scale_exhausted_an_overflow_ends_the_run() -> None:
    run = Run(num_steps=9, loss_scale=4.0, scale_loss=True, failing=dict.fromkeys(range(9), INFINITE))
    with pytest.raises(Diverged, match="step 3: the gradient norm is inf") as raised:
        run.run_finetune()
    assert raised.value.hint is not None and "bfloat16" in raised.value.hint
    assert [event for event in run.events if "commit" in event] == ["commit_progress 1", "commit_progress 2"]


@pytest.mark.parametrize(
    ("num_eval_batches", "groups"),
    [(1, [(1,)]), (2, [(1, 2)]), (3, [(1, 2), (3,)]), (4, [(1, 2), (3, 4)])],
)
def test_evaluation_takes_as_many_micro_batches_as_a_step(num_eval_batches: int, groups: list[tuple[int, ...]]) -> None:
    run = Run(num_eval_batches=num_eval_batches)
    found = run.run_finetune()
    assert run.engine.evaluated == groups
    # Of n micro-batches the i-th has i targets and a sum of losses of i^2.
    mean = sum(i**2 for i in range(num_eval_batches + 1)) / sum(range(num_eval_batches + 1))
    assert [metrics.eval_loss for metrics in found] == [None, None, None, mean]


@pytest.mark.parametrize(
    ("eval_steps", "evaluated"), [(None, [5]), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (9, [5])]
)
def test_evaluation_comes_when_it_is_time_and_at_the_end(eval_steps: int | None, evaluated: list[int]) -> None:
    run = Run(num_steps=5, eval_steps=eval_steps, num_eval_batches=1)
    assert [metrics.step for metrics in run.loop.steps() if metrics.eval_loss is not None] == evaluated


def test_nothing_held_out_is_never_evaluated() -> None:
    run = Run(eval_steps=1)
    assert all(metrics.eval_loss is None for metrics in run.loop.steps())
    assert "evaluate" not in run.events


def test_the_time_of_an_evaluation_is_not_charged_to_the_next_step() -> None:
    found = Run(eval_steps=1, num_eval_batches=3).run_finetune()
    assert [metrics.busy_seconds["compute"] for metrics in found] == [0.0] * 4


@pytest.mark.parametrize(
    ("limit", "events"),
    [
        (1, ["pin 2", "unpin 2", "pin 4", "unpin 4", "pin 6"]),
        (2, ["pin 2", "pin 4", "unpin 2", "pin 6"]),
        (3, ["pin 2", "pin 4", "pin 6"]),
    ],
)
def test_saves_keep_the_newest_and_let_go_before_they_take(limit: int, events: list[str]) -> None:
    run = Run(num_steps=7, save_steps=2, save_total_limit=limit)
    run.run_finetune()
    assert [event for event in run.events if "pin" in event] == events


def test_a_lower_limit_lets_go_of_all_that_are_too_many() -> None:
    run = Run(step=6, pinned=(2, 4, 6), num_steps=8, save_steps=2, save_total_limit=1)
    run.run_finetune()
    assert [event for event in run.events if "pin" in event] == ["unpin 2", "unpin 4", "unpin 6", "pin 8"]


def test_a_save_comes_right_after_the_commit() -> None:
    run = Run(num_steps=2, save_steps=2, eval_steps=2, num_eval_batches=1)
    run.run_finetune()
    assert run.events[-5:] == ["settle", "commit 2", "pin 2", "evaluate", "report 2"]


def test_a_save_that_a_crash_left_out_is_made_up_for() -> None:
    run = Run(step=2, num_steps=3, save_steps=2)
    run.run_finetune()
    assert run.events == ["pin 2", "run 3", "settle", "commit 3", "report 3"]


@pytest.mark.parametrize(("step", "pinned"), [(0, ()), (2, (2,)), (3, (2,))])
def test_what_is_saved_or_not_due_is_left_alone(step: int, pinned: tuple[int, ...]) -> None:
    run = Run(step=step, pinned=pinned, num_steps=step, save_steps=2, save_total_limit=1)
    assert run.run_finetune() == []
    assert run.events == []


def test_commits_are_told_at_the_start_and_as_they_are_made() -> None:
    run = Run(step=1, tells_commits=True, scale_loss=True, save_steps=1, failing={2: INFINITE})
    run.run_finetune()
    told = [event for event in run.events if event.split()[0] in ("commit", "commit_progress", "told", "pin")]
    assert told == [
        "pin 1", "told 1", "commit 2", "told 2", "pin 2", "commit_progress 3", "told 3", "pin 3", "commit 4", "told 4",
        "pin 4",
    ]  # fmt: skip


def test_a_step_that_was_not_applied_is_saved_all_the_same() -> None:
    run = Run(num_steps=2, save_steps=2, scale_loss=True, failing={1: INFINITE})
    run.run_finetune()
    assert run.events[-3:] == ["commit_progress 2", "pin 2", "report 2"]


def test_writing_stops_before_the_step_that_would_be_too_much() -> None:
    """Making the store took two slots, the import one; each step takes one more."""
    limit = (2 + 1 + 2) * SLOT_BYTES
    run = Run(max_bytes_written=limit)
    with pytest.raises(EnvironmentFailure, match=r"step 3 would write more than storage\.max_tb_written") as raised:
        run.run_finetune()
    assert [metrics.step for metrics in run.reported] == [1, 2]
    assert run.events[-3:] == ["report 2", "settle", "commit 2"]
    assert raised.value.hint is not None and "storage.max_tb_written" in raised.value.hint
    resumed = Run(step=2, max_bytes_written=limit)
    with pytest.raises(EnvironmentFailure):
        resumed.run_finetune()
    assert resumed.events == []


def test_writing_up_to_the_limit_is_allowed() -> None:
    assert len(list(Run(max_bytes_written=(2 + 1 + 4) * SLOT_BYTES).loop.steps())) == 4


def test_a_stop_between_steps_leaves_the_last_commit() -> None:
    run = Run(check_stop=StopAt(3))
    with pytest.raises(Interrupted):
        run.run_finetune()
    assert [metrics.step for metrics in run.reported] == [1, 2]
    assert run.events[-3:] == ["report 2", "settle", "commit 2"]


def test_a_stop_in_the_next_forward_commits_what_was_reported() -> None:
    run = Run(failing={2: Interrupted(2, "stopped by SIGINT")})
    with pytest.raises(Interrupted):
        run.run_finetune()
    assert run.events[-4:] == ["report 2", "run 3", "settle", "commit 2"]


def test_a_stop_during_evaluation_still_reports_the_step() -> None:
    run = Run(num_steps=3, eval_steps=2, save_steps=2, num_eval_batches=4, check_stop=StopAt(2 + 3))
    with pytest.raises(Interrupted):
        run.run_finetune()
    assert [(metrics.step, metrics.eval_loss) for metrics in run.reported] == [(1, None), (2, None)]
    assert run.events[-5:] == ["settle", "commit 2", "pin 2", "evaluate", "report 2"]


def test_a_step_that_fails_is_not_committed() -> None:
    run = Run(failing={1: EnvironmentFailure("no memory")})
    with pytest.raises(EnvironmentFailure, match="no memory"):
        run.run_finetune()
    assert run.events == ["run 1", "report 1", "run 2", "commit 1"]
