"""The training loop with fakes: what it asks of the engine and the store, in which order, and where it stops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.errors import Diverged, EnvironmentFailure, Interrupted
from ratel_cli.hardware.host import peak_resident_bytes
from ratel_cli.training.metrics import StepMetrics
from ratel_cli.training.schedule import LearningRateSchedule
from tests.training.loop_fakes import BAD_TENSOR, SETTINGS, SLOT_BYTES, Run

INFINITE = (0.5, math.inf)


class StopAt:
    """Raises at the given call of `check_stop`, counted from 1."""

    def __init__(self, call: int) -> None:
        self.calls_left = call

    def __call__(self) -> None:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise Interrupted(2, "Stopped.")


def timeless(metrics: StepMetrics) -> tuple[object, ...]:
    return (metrics.step, metrics.loss, metrics.learning_rate, metrics.grad_norm, metrics.applied, metrics.eval_loss)


def test_a_step_is_committed_during_the_next_one_and_the_last_step_at_once() -> None:
    run = Run()
    run.run_all()
    overlapped = [event for step in (2, 3) for event in (f"run {step}", f"commit {step - 1}", f"report {step}")]
    assert run.events == ["run 1", "report 1", *overlapped, "run 4", "commit 3", "settle", "commit 4", "report 4"]
    progress = run.store.progress
    assert (progress.step, progress.updates, progress.tokens) == (4, 4, 4 * 10)
    assert (progress.loss_scale, progress.good_steps) == (65536.0, 0)


def test_the_first_step_is_recorded_and_another_engine_takes_over_from_it() -> None:
    recording = StepRecording()
    run, other = Run(recording=recording), Run()
    for metrics in run.loop.steps():
        run.events.append(f"report {metrics.step}")
        if metrics.step == 1:
            run.loop.follow(
                lambda: other.engine.take_over(run.engine, run.events),
                replace(SETTINGS, num_steps=2, predicted_seconds=9.0, planned_nvme_bytes=28),
            )
        foreseen = metrics.predicted_seconds, metrics.planned_nvme_bytes
        assert foreseen == ((0.125, 26) if metrics.step == 1 else (9.0, 28))
    assert run.events == ["run 1", "report 1", "take over", "run 2", "commit 1", "settle", "commit 2", "report 2"]
    assert (run.engine.recorded, other.engine.recorded) == ([recording], [None])
    assert run.store.progress.step == 2


def test_every_step_is_announced_before_it_is_committed() -> None:
    run = Run()
    run.run_all()
    assert [committed for committed, _ in run.announced] == [0, 1, 2, 3]
    assert [timeless(metrics) for _, metrics in run.announced] == [timeless(metrics) for metrics in run.reported]


def test_a_step_that_diverges_is_never_announced() -> None:
    run = Run(failing={1: INFINITE})
    with pytest.raises(Diverged):
        run.run_all()
    assert [metrics.step for _, metrics in run.announced] == [1]


def test_a_step_gets_its_own_rate_scale_and_batches() -> None:
    run = Run()
    run.run_all()
    schedule = LearningRateSchedule(scheduler="linear", peak=1e-3, num_warmup_steps=1, num_steps=4)
    assert run.engine.asked == [
        (step, step + 1, schedule.at(step), 1.0, (step, 100 + step, 200 + step)) for step in range(4)
    ]


def test_the_metrics_of_a_step() -> None:
    metrics = next(Run().loop.steps())
    assert (metrics.loss, metrics.grad_norm, metrics.learning_rate) == (0.5, 0.5, 0.0)
    assert (metrics.tokens, metrics.predicted_seconds) == (10, 0.125)
    assert 0 < metrics.host_peak_bytes <= peak_resident_bytes()
    assert (metrics.nvme_read_bytes, metrics.nvme_written_bytes) == (14, 12)
    assert metrics.bottleneck == "optimizer"
    assert metrics.forward_seconds + metrics.backward_seconds == pytest.approx(metrics.step_seconds)
    assert metrics.tokens_per_second == pytest.approx(10 / metrics.step_seconds)
    # Two micro-batches of 2 x 4: padding is computed too. 1 GFLOP per token, and three quarters of it are recomputed.
    assert metrics.tflops_model * metrics.step_seconds == pytest.approx(3 * 16 * 1e9 / 1e12)
    assert metrics.tflops_hardware * metrics.step_seconds == pytest.approx(3.75 * 16 * 1e9 / 1e12)
    assert metrics.eval_loss is None


@pytest.mark.parametrize("first", range(5))
def test_a_run_resumes_after_the_last_commit(first: int) -> None:
    uninterrupted = [timeless(metrics) for metrics in Run().loop.steps()]
    resumed = Run(step=first)
    assert [timeless(metrics) for metrics in resumed.loop.steps()] == uninterrupted[first:]
    assert resumed.store.progress.tokens == 40


def test_a_step_that_overflows_is_skipped_without_an_update() -> None:
    run = Run(scale_loss=True, failing={1: INFINITE, 2: (math.nan, math.nan)})
    found = run.run_all()
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


def test_a_resumed_run_uses_the_saved_loss_scale() -> None:
    run = Run(step=2, loss_scale=8.0, scale_loss=True)
    run.run_all()
    assert run.engine.asked[0][3] == 8.0
    assert run.store.progress.good_steps == 2


@pytest.mark.parametrize(
    ("outcome", "what"),
    [(INFINITE, f"the gradient norm is inf, first in {BAD_TENSOR}, "), ((math.nan, math.nan), "the loss is nan, ")],
)
def test_without_loss_scaling_a_step_that_is_not_finite_ends_the_run(outcome: tuple[float, float], what: str) -> None:
    run = Run(failing={2: outcome})
    with pytest.raises(
        Diverged, match=rf"step 3 \(samples 2, 102, 202\): {what}also when .* step 2 is saved$"
    ) as raised:
        run.run_all()
    assert raised.value.hint is not None and "float16" not in raised.value.hint
    assert run.events[-3:] == ["run 3", "commit 2", "run 3"]
    assert run.engine.asked[-1] == run.engine.asked[-2]
    assert run.store.progress.step == 2


def test_with_the_scale_exhausted_an_overflow_ends_the_run() -> None:
    run = Run(num_steps=9, loss_scale=4.0, scale_loss=True, failing=dict.fromkeys(range(9), INFINITE))
    with pytest.raises(Diverged, match=r"step 3 .*: the gradient norm is inf") as raised:
        run.run_all()
    assert raised.value.hint is not None and "bfloat16" in raised.value.hint
    assert [event for event in run.events if "commit" in event] == ["commit_progress 1", "commit_progress 2"]


@pytest.mark.parametrize(
    ("num_eval_batches", "groups"),
    [(1, [(1,)]), (2, [(1, 2)]), (3, [(1, 2), (3,)]), (4, [(1, 2), (3, 4)])],
)
def test_evaluation_takes_as_many_micro_batches_as_a_step(num_eval_batches: int, groups: list[tuple[int, ...]]) -> None:
    run = Run(num_eval_batches=num_eval_batches)
    found = run.run_all()
    assert run.engine.evaluated == groups
    # Of n micro-batches the i-th has i targets and a sum of losses of i^2.
    mean = sum(i**2 for i in range(num_eval_batches + 1)) / sum(range(num_eval_batches + 1))
    assert [metrics.eval_loss for metrics in found] == [None, None, None, mean]


@pytest.mark.parametrize(
    ("eval_steps", "evaluated"), [(None, [5]), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (9, [5])]
)
def test_evaluations_are_at_every_eval_steps_and_at_the_end(eval_steps: int | None, evaluated: list[int]) -> None:
    run = Run(num_steps=5, eval_steps=eval_steps, num_eval_batches=1)
    assert [metrics.step for metrics in run.loop.steps() if metrics.eval_loss is not None] == evaluated


def test_without_held_out_samples_there_is_no_evaluation() -> None:
    run = Run(eval_steps=1)
    assert all(metrics.eval_loss is None for metrics in run.loop.steps())
    assert "evaluate" not in run.events


def test_the_time_of_an_evaluation_does_not_count_for_the_next_step() -> None:
    found = Run(eval_steps=1, num_eval_batches=3).run_all()
    assert [metrics.busy_seconds["compute"] for metrics in found] == [0.0] * 4


@pytest.mark.parametrize(
    ("limit", "events"),
    [
        (1, ["pin 2", "unpin 2", "pin 4", "unpin 4", "pin 6"]),
        (2, ["pin 2", "pin 4", "unpin 2", "pin 6"]),
        (3, ["pin 2", "pin 4", "pin 6"]),
    ],
)
def test_a_save_drops_the_oldest_steps_first(limit: int, events: list[str]) -> None:
    run = Run(num_steps=7, save_steps=2, save_total_limit=limit)
    run.run_all()
    assert [event for event in run.events if "pin" in event] == events


def test_a_lower_limit_drops_all_surplus_steps() -> None:
    run = Run(step=6, pinned=(2, 4, 6), num_steps=8, save_steps=2, save_total_limit=1)
    run.run_all()
    assert [event for event in run.events if "pin" in event] == ["unpin 2", "unpin 4", "unpin 6", "pin 8"]


def test_a_save_follows_the_commit_at_once() -> None:
    run = Run(num_steps=2, save_steps=2, eval_steps=2, num_eval_batches=1)
    run.run_all()
    assert run.events[-5:] == ["settle", "commit 2", "pin 2", "evaluate", "report 2"]


def test_a_save_that_a_crash_prevented_is_done_at_the_start() -> None:
    run = Run(step=2, num_steps=3, save_steps=2)
    run.run_all()
    assert run.events == ["pin 2", "run 3", "settle", "commit 3", "report 3"]


@pytest.mark.parametrize(("step", "pinned"), [(0, ()), (2, (2,)), (3, (2,))])
def test_nothing_is_saved_twice_or_before_it_is_due(step: int, pinned: tuple[int, ...]) -> None:
    run = Run(step=step, pinned=pinned, num_steps=step, save_steps=2, save_total_limit=1)
    assert run.run_all() == []
    assert run.events == []


def test_after_commit_is_called_at_the_start_and_after_every_commit() -> None:
    run = Run(step=1, notes_commits=True, scale_loss=True, save_steps=1, failing={2: INFINITE})
    run.run_all()
    commits = [event for event in run.events if event.split()[0] in ("commit", "commit_progress", "after", "pin")]
    assert commits == [
        "pin 1",
        "after commit 1",
        "commit 2",
        "after commit 2",
        "pin 2",
        "commit_progress 3",
        "after commit 3",
        "pin 3",
        "commit 4",
        "after commit 4",
        "pin 4",
    ]


def test_every_step_is_traced() -> None:
    run = Run()
    run.run_all()
    assert [step for step, _ in run.traced] == [1, 2, 3, 4]
    assert all([span.resource for span in times.spans] == ["optimizer"] for _, times in run.traced)


def test_a_step_that_was_not_applied_is_saved_too() -> None:
    run = Run(num_steps=2, save_steps=2, scale_loss=True, failing={1: INFINITE})
    run.run_all()
    assert run.events[-3:] == ["commit_progress 2", "pin 2", "report 2"]


def test_the_run_ends_before_the_step_that_would_write_too_much() -> None:
    """Making the store wrote two slots and the import one; every step writes one more."""
    limit = (2 + 1 + 2) * SLOT_BYTES
    run = Run(max_bytes_written=limit)
    with pytest.raises(EnvironmentFailure, match=r"step 3 would write more than storage\.max_tb_written") as raised:
        run.run_all()
    assert [metrics.step for metrics in run.reported] == [1, 2]
    assert run.events[-3:] == ["report 2", "settle", "commit 2"]
    assert raised.value.hint is not None and "storage.max_tb_written" in raised.value.hint
    resumed = Run(step=2, max_bytes_written=limit)
    with pytest.raises(EnvironmentFailure):
        resumed.run_all()
    assert resumed.events == []


def test_the_steps_of_the_run_that_it_started_from_do_not_count() -> None:
    """The store was made at step 2, and holds one generation more."""
    run = Run(step=2, first_step=2, max_bytes_written=(2 + 1 + 1) * SLOT_BYTES)
    with pytest.raises(EnvironmentFailure, match="step 4 would write more"):
        run.run_all()
    assert [metrics.step for metrics in run.reported] == [3]


def test_writing_up_to_the_limit_is_allowed() -> None:
    assert len(list(Run(max_bytes_written=(2 + 1 + 4) * SLOT_BYTES).loop.steps())) == 4


def test_a_stop_between_steps_commits_the_step_before() -> None:
    run = Run(check_stop=StopAt(3))
    with pytest.raises(Interrupted):
        run.run_all()
    assert [metrics.step for metrics in run.reported] == [1, 2]
    assert run.events[-3:] == ["report 2", "settle", "commit 2"]


def test_a_stop_in_the_next_forward_commits_the_step_before() -> None:
    run = Run(failing={2: Interrupted(2, "Stopped.")})
    with pytest.raises(Interrupted):
        run.run_all()
    assert run.events[-4:] == ["report 2", "run 3", "settle", "commit 2"]


def test_a_stop_during_evaluation_still_reports_the_step() -> None:
    run = Run(num_steps=3, eval_steps=2, save_steps=2, num_eval_batches=4, check_stop=StopAt(2 + 3))
    with pytest.raises(Interrupted):
        run.run_all()
    assert [(metrics.step, metrics.eval_loss) for metrics in run.reported] == [(1, None), (2, None)]
    assert run.events[-5:] == ["settle", "commit 2", "pin 2", "evaluate", "report 2"]


def test_the_stop_is_checked_again_after_the_commit() -> None:
    """So its message can name the step that is committed by then."""
    committed: list[int] = []

    def check_stop() -> None:
        committed.append(run.store.progress.step)
        if len(committed) >= 3:
            raise Interrupted(2, f"Stopped at step {committed[-1]}.")

    run = Run(check_stop=check_stop)
    with pytest.raises(Interrupted, match="Stopped at step 2"):
        run.run_all()
    assert committed == [0, 0, 1, 2]


def test_a_step_that_fails_is_not_committed() -> None:
    run = Run(failing={1: EnvironmentFailure("no memory")})
    with pytest.raises(EnvironmentFailure, match="no memory"):
        run.run_all()
    assert run.events == ["run 1", "report 1", "run 2", "commit 1"]
