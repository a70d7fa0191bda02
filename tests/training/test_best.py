"""The best step and early stopping, against transformers' callback, its Trainer and its rotation of checkpoints."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest
from transformers import EarlyStoppingCallback, IntervalStrategy, Trainer, TrainerControl, TrainerState
from transformers.trainer_utils import SaveStrategy, rotate_checkpoints

from ratel_cli.errors import Interrupted
from ratel_cli.training.best import BestRule, MetricName
from ratel_cli.training.metrics import StepMetrics
from tests.training.loop_fakes import Run

NUM_STEPS, EVERY = 12, 2
LOSSES = (1.0, 1.25, 1.5, 1.75, 2.0)
ODD = (math.nan, math.inf, -math.inf)


class TrainerLike:
    """What transformers does with the evaluations of a run that saves whenever it evaluates."""

    def __init__(self, directory: Path, rule: BestRule, *, limit: int) -> None:
        self._directory, self._limit = directory, limit
        self._args = SimpleNamespace(
            metric_for_best_model=rule.metric,
            greater_is_better=rule.is_greater_better,
            save_strategy=SaveStrategy.STEPS,
            eval_strategy=IntervalStrategy.STEPS,
            load_best_model_at_end=True,
        )
        self.state, self.control = TrainerState(), TrainerControl()
        patience = rule.patience if rule.patience is not None else 1 << 30
        self._callback = EarlyStoppingCallback(patience, rule.threshold)

    def evaluated(self, step: int, value: float) -> None:
        """In the order of `Trainer._maybe_log_save_evaluate`."""
        self.state.global_step, metrics = step, {f"eval_{self._args.metric_for_best_model}": value}
        self._callback.on_evaluate(cast("Any", self._args), self.state, self.control, metrics=metrics)
        Trainer._determine_best_metric(cast("Any", SimpleNamespace(args=self._args, state=self.state)), metrics, None)
        checkpoint = self._directory / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        best = self._directory / f"checkpoint-{self.state.best_global_step}"
        if best.exists():
            self.state.best_model_checkpoint = str(best)
        rotate_checkpoints(str(self._directory), self._limit, self.state.best_model_checkpoint)

    @property
    def saved_steps(self) -> tuple[int, ...]:
        """The steps whose checkpoints are there."""
        return tuple(sorted(int(each.name.partition("-")[2]) for each in self._directory.glob("checkpoint-*")))


def of_trainer(directory: Path, rule: BestRule, losses: dict[int, float], *, limit: int = 1) -> TrainerLike:
    trainer = TrainerLike(directory, rule, limit=limit)
    for step, value in losses.items():
        trainer.evaluated(step, value)
        if trainer.control.should_training_stop:
            break
    return trainer


@pytest.mark.parametrize("patience", [None, 1, 2, 3])
@pytest.mark.parametrize("threshold", [0.0, 0.25, 0.5])
@pytest.mark.parametrize("is_greater_better", [False, True])
def test_the_rule_is_that_of_transformers(
    tmp_path: Path, patience: int | None, threshold: float, *, is_greater_better: bool
) -> None:
    rule = BestRule(patience=patience, threshold=threshold, is_greater_better=is_greater_better, saves_best=True)
    draw, ended = random.Random(1), set[bool]()
    for number in range(60):
        values = {step: draw.choice(LOSSES if number % 3 else (*LOSSES, *ODD)) for step in range(1, 9)}
        trainer = of_trainer(tmp_path / str(number), rule, values)
        found = rule.best_so_far(())
        for step, value in values.items():
            found = found.after(rule, step, value)
            if found.ends(rule):
                break
        assert found.ends(rule) is trainer.control.should_training_stop
        assert step == trainer.state.global_step
        assert (found.step, found.value) == (trainer.state.best_global_step or None, trainer.state.best_metric)
        ended.add(found.ends(rule))
    assert (True in ended) is (patience is not None)


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("patience", [None, 1, 2])
def test_a_loop_ends_where_trainer_ends_and_keeps_the_steps_that_it_keeps(
    tmp_path: Path, limit: int, patience: int | None
) -> None:
    rule, draw = BestRule(patience=patience, saves_best=True), random.Random(2)
    for number in range(25):
        losses = {step: draw.choice(LOSSES) for step in range(EVERY, NUM_STEPS + 1, EVERY)}
        trainer = of_trainer(tmp_path / str(number), rule, losses, limit=limit)
        run = a_run(losses, rule, save_steps=EVERY, save_total_limit=limit)
        run.store.num_slots = 2 + max(limit, 2)  # as RunConfig.num_saved_generations has it
        run.run_all()
        assert run.store.progress.step == trainer.state.global_step
        assert run.loop.best.step == trainer.state.best_global_step
        assert run.loop.ends_early is trainer.control.should_training_stop
        assert run.store.pinned_steps == trainer.saved_steps, (number, losses)


def test_a_loop_without_saves_keeps_the_best_step_alone() -> None:
    losses = dict(zip(range(2, 13, 2), (2.0, 1.5, 1.75, 1.25, 1.25, 3.0), strict=True))
    run = a_run(losses, BestRule(saves_best=True))
    run.store.num_slots = 3
    run.run_all()
    assert run.store.pinned_steps == (8,) and run.loop.best.step == 8 and not run.loop.ends_early
    assert run.saved == [(2, ()), (4, ()), (8, ())]


def test_the_best_step_between_two_saves_goes_when_there_is_a_better_one() -> None:
    losses = dict(zip(range(2, 13, 2), (2.0, 1.5, 1.75, 1.25, 1.5, 1.75), strict=True))
    run = a_run(losses, BestRule(saves_best=True), save_steps=6, save_total_limit=2)
    run.store.num_slots = 4
    pinned = [run.store.pinned_steps for _ in run.loop.steps()]
    assert pinned[1::2] == [(2,), (4,), (4, 6), (6, 8), (6, 8), (8, 12)]


def test_early_stopping_alone_saves_nothing() -> None:
    run = a_run(dict.fromkeys(range(2, 13, 2), 1.0), BestRule(patience=2))
    run.run_all()
    assert (run.store.progress.step, run.store.pinned_steps, run.loop.ends_early) == (6, (), True)
    assert (run.loop.best.step, run.loop.best.num_without_gain) == (2, 2)


@pytest.mark.parametrize("first", range(NUM_STEPS + 1))
@pytest.mark.parametrize("is_evaluated", [True, False])
def test_a_run_that_resumes_ends_as_one_that_was_not_killed(first: int, *, is_evaluated: bool) -> None:
    """Also if it was killed before its last step was evaluated, which is made up for."""
    losses = dict(zip(range(2, 13, 2), (2.0, 1.5, 1.75, 1.25, 1.5, 1.75), strict=True))
    rule = BestRule(patience=2, saves_best=True)
    whole = a_run(losses, rule, save_steps=4, save_total_limit=2)
    pinned: dict[int, tuple[int, ...]] = {0: ()}
    for metrics in whole.loop.steps():
        whole.reported.append(metrics)
        pinned[metrics.step] = whole.store.pinned_steps
    done = whole.reported[:first]
    before = pinned[max((step for step in pinned if step <= first), default=0)]
    if done and not is_evaluated:
        done[-1] = replace(done[-1], eval_loss=None)
        before = pinned[max(step for step in pinned if step < first)]
    run = a_run(losses, rule, save_steps=4, save_total_limit=2, step=first, pinned=before, earlier=done)
    found = run.run_all()
    assert [metrics.eval_loss for metrics in found] == [metrics.eval_loss for metrics in whole.reported[first:]]
    assert run.loop.best == whole.loop.best and run.loop.ends_early
    assert run.store.pinned_steps == whole.store.pinned_steps
    again = [metrics.eval_loss for metrics in run.evaluated_again]
    assert again == ([] if is_evaluated or first % 2 or not first else [losses[first]])


@pytest.mark.parametrize("save_steps", [None, 4])
def test_the_result_is_the_best_step_of_those_that_are_saved(save_steps: int | None) -> None:
    """Whatever the store has lost before the run resumes: all saved steps, or the best one."""
    draw, lost, kept = random.Random(3), 0, 0
    for number in range(120):
        losses = {step: draw.choice(LOSSES) for step in range(EVERY, NUM_STEPS + 1, EVERY)}
        rule = BestRule(saves_best=True, is_greater_better=draw.random() < 0.5)
        whole = a_run(losses, rule, save_steps=save_steps, save_total_limit=2)
        first = draw.randrange(1, NUM_STEPS + 1)
        done = whole.run_all()[:first]
        pinned = tuple(step for step in range(EVERY, first + 1, EVERY) if draw.random() < 0.2)[:2]
        run = a_run(
            losses,
            rule,
            save_steps=save_steps,
            save_total_limit=2,
            step=first,
            pinned=pinned,
            earlier=done,
            num_slots=4,
        )
        run.run_all()
        sign = -1 if rule.is_greater_better else 1
        known = {step: sign * losses[step] for step in losses if step in pinned or step >= first}
        wanted = min(known, key=lambda step: (known[step], step))
        assert run.loop.best_saved.step == wanted and wanted in run.store.pinned_steps, number
        before = {step: sign * losses[step] for step in losses if step <= first}
        best = min(before, key=lambda step: (before[step], step), default=None)
        is_lost = best is not None and best not in (first, *pinned)
        assert [step for step, _ in run.lost] == [best] * is_lost
        assert (run.loop.best_saved.step == run.loop.best.step) is (run.loop.best.step in known)
        lost, kept = lost + is_lost, kept + (not is_lost)
    assert min(lost, kept) > 20


def test_a_lost_best_step_still_counts_for_the_patience() -> None:
    losses = dict(zip(range(2, 13, 2), (1.0, 2.0, 1.75, 1.5, 1.25, 1.0), strict=True))
    rule = BestRule(patience=3, saves_best=True)
    whole = a_run(losses, rule)
    whole.run_all()
    assert (whole.store.progress.step, whole.store.pinned_steps) == (8, (2,))
    run = a_run(losses, rule, step=4, earlier=whole.reported[:4])
    run.run_all()
    assert (run.store.progress.step, run.lost) == (8, [(2, 4)])
    assert (run.loop.best.step, run.loop.best_saved.step, run.store.pinned_steps) == (2, 8, (8,))
    ended = a_run(losses, rule, step=8, earlier=whole.reported)
    ended.run_all()
    assert (ended.loop.best_saved.step, ended.store.pinned_steps) == (8, (8,)), "saved when the loop begins"


def test_without_a_saved_evaluation_no_step_is_the_best_until_the_next_one() -> None:
    whole = a_run(dict.fromkeys(range(2, 13, 2), 1.0), BestRule(saves_best=True))
    whole.run_all()
    run = a_run({12: 2.0}, BestRule(saves_best=True), step=11, earlier=whole.reported[:11])
    assert run.loop.best_saved.step is None
    run.run_all()
    assert (run.lost, run.loop.best_saved.step, run.store.pinned_steps) == ([(2, None)], 12, (12,))


def test_patience_alone_has_no_best_step_as_the_result() -> None:
    run = a_run(dict.fromkeys(range(2, 13, 2), 1.0), BestRule(patience=9))
    run.run_all()
    assert (run.loop.best.step, run.loop.best_saved.step) == (2, None)


def test_steps_that_the_user_had_saved_stay_while_the_store_has_slots() -> None:
    losses = dict(zip(range(2, 13, 2), (3.0, 3.0, 2.0, 1.75, 1.5, 1.75), strict=True))
    rule = BestRule(saves_best=True)
    done = a_run(losses, BestRule(patience=99)).run_all()[:5]
    roomy = a_run(losses, rule, step=5, pinned=(2, 4), earlier=done, num_slots=5)
    roomy.run_all()
    assert (roomy.store.pinned_steps, roomy.saved) == ((2, 4, 10), [(6, ()), (8, ()), (10, ())])
    for changes in ({"num_slots": 4}, {"num_slots": 5, "num_copied": 1}):
        tight = a_run(losses, rule, step=5, pinned=(2, 4), earlier=done, **changes)
        tight.run_all()
        assert (tight.store.pinned_steps, tight.saved[0]) == ((4, 10), (6, (2,))), (
            "2 was the best: it is replaced first"
        )
    again = a_run(losses, rule, step=7, pinned=(2, 4, 6), earlier=a_run(losses, rule).run_all()[:7], num_slots=5)
    again.run_all()
    assert again.store.pinned_steps == (2, 4, 10), "6 may be the user's, but goes first"


@pytest.mark.parametrize("first", range(NUM_STEPS + 1))
def test_a_run_whose_evaluations_are_not_finite_ends_where_it_would_have(first: int) -> None:
    """Their records are read from the file, which has no NaN."""
    losses = dict(zip(range(2, 13, 2), (math.nan, 2.0, math.nan, math.inf, math.nan, 1.0), strict=True))
    rule = BestRule(patience=3, saves_best=True)
    whole = a_run(losses, rule)
    whole.run_all()
    assert (whole.store.progress.step, whole.loop.best.step, whole.store.pinned_steps) == (10, 4, (4,))
    done = [StepMetrics.from_json(json.loads(json.dumps(each.to_json()))) for each in whole.reported[:first]]
    run = a_run(losses, rule, step=min(first, 10), pinned=(4,) if first >= 4 else (), earlier=done)
    run.run_all()
    assert (run.store.progress.step, run.loop.best, run.evaluated_again) == (10, whole.loop.best, [])


def test_what_a_metric_is(recorded: StepMetrics) -> None:
    evaluated = replace(recorded, eval_loss=1.5, eval_accuracy=0.25, eval_preferences={"rewards/margins": 2.0})
    wanted = {"loss": 1.5, "accuracy": 0.25, "rewards/margins": 2.0, "rewards/accuracies": None}
    for name in get_args(MetricName):
        assert BestRule(metric=name).value_of(evaluated) == wanted[name]
        assert BestRule(metric=name).value_of(replace(recorded, eval_loss=None)) is None


@pytest.fixture
def recorded() -> StepMetrics:
    return next(Run().loop.steps())


def test_an_evaluation_that_is_stopped_does_not_count() -> None:
    class Stop:
        calls = 0

        def __call__(self) -> None:
            self.calls += 1
            if self.calls == 3:  # two steps, the first batch of the evaluation
                raise Interrupted(2, "Stopped.")

    run = a_run(dict.fromkeys(range(2, 13, 2), 1.0), BestRule(patience=1), check_stop=Stop())
    with pytest.raises(Interrupted):
        run.run_all()
    assert [metrics.eval_loss for metrics in run.reported] == [None, None] and run.loop.best.step is None


def a_run(losses: dict[int, float], rule: BestRule, **changes: object) -> Run:
    settings: dict[str, Any] = {"num_steps": NUM_STEPS, "eval_steps": EVERY, "best": rule, **changes}
    return Run(num_eval_batches=1, eval_losses=losses, **settings)
