"""Learning rates have the bits of transformers, loss scales those of GradScaler."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import get_scheduler

from ratel_cli.config.keys.scheduler import SchedulerConfig
from ratel_cli.training.schedule import LearningRateSchedule, LossScale, ScheduleOptions, SchedulerName

PLAIN: tuple[SchedulerName, ...] = ("constant", "linear", "cosine", "cosine_with_restarts", "inverse_sqrt")
"""The schedules that need no options."""
Options = dict[str, float | int | str]
WITH_OPTIONS: list[tuple[SchedulerName, Options]] = [
    ("cosine", {"num_cycles": 1.25}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("cosine_with_min_lr", {"min_lr": 1e-6}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
    ("cosine_with_min_lr", {"min_lr_rate": 1.0, "num_cycles": 0.7}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}),
    ("cosine_warmup_with_min_lr", {"min_lr": 3e-6, "warmup_lr_rate": 0.2}),
    ("polynomial", {}),
    ("polynomial", {"power": 2.5, "lr_end": 1e-6}),
    ("polynomial", {"power": 2, "lr_end": 0.0}),
    ("inverse_sqrt", {"timescale": 500}),
    ("warmup_stable_decay", {"num_decay_steps": 0}),
    ("warmup_stable_decay", {"num_decay_steps": 5}),
    ("warmup_stable_decay", {"num_decay_steps": 60, "decay_type": "linear", "min_lr_ratio": 0.1}),
    ("warmup_stable_decay", {"num_decay_steps": 3, "decay_type": "1-sqrt", "warmup_type": "1-sqrt"}),
    ("warmup_stable_decay", {"num_decay_steps": 3, "num_stable_steps": 2, "warmup_type": "cosine"}),
    ("warmup_stable_decay", {"num_decay_steps": 9, "num_cycles": 1.5, "warmup_type": "linear"}),
]
LENGTHS = [(0, 1), (0, 2), (1, 1), (1, 2), (3, 97), (7, 7), (9, 7), (0, 100), (333, 1000)]
"""Steps of the warm-up and of the run."""


def reference(
    scheduler: SchedulerName, peak: float, num_warmup_steps: int, num_steps: int, options: Options
) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    schedule = get_scheduler(
        "constant_with_warmup" if scheduler == "constant" else scheduler,
        optimizer,
        num_warmup_steps=num_warmup_steps,
        num_training_steps=num_steps,
        scheduler_specific_kwargs=options or None,
    )
    rates = [float(optimizer.param_groups[0]["lr"])]
    for _ in range(num_steps - 1):
        optimizer.step()
        schedule.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates


@pytest.mark.parametrize(("scheduler", "options"), [("cosine", {}), *WITH_OPTIONS[3:12]])
def test_groups_have_the_shares_of_the_run(scheduler: SchedulerName, options: Options) -> None:
    """Also where a schedule looks at the run's own peak."""
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    rates = (2e-4, 3.2e-3, 1e-6 / 7)
    groups = [{"params": [each], "lr": rate} for each, rate in zip(parameters, rates, strict=True)]
    optimizer = torch.optim.SGD(groups, lr=rates[0])
    theirs = get_scheduler(
        scheduler, optimizer, num_warmup_steps=3, num_training_steps=20, scheduler_specific_kwargs=options or None
    )
    own = SchedulerConfig(**options).model_dump() if options else {}  # type: ignore[arg-type]
    schedule = LearningRateSchedule(
        scheduler=scheduler,
        peak=rates[0],
        group_peaks=rates[1:],
        num_warmup_steps=3,
        num_steps=20,
        options=ScheduleOptions(**own),
    )
    for step in range(20):
        assert [schedule.at(step), *schedule.groups_at(step)] == [group["lr"] for group in optimizer.param_groups]
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("scheduler", PLAIN)
@pytest.mark.parametrize("peak", [2e-5, 3e-4 / 7, 0.0])
@pytest.mark.parametrize(("num_warmup_steps", "num_steps"), LENGTHS)
def test_the_rates_are_those_of_transformers(
    scheduler: SchedulerName, peak: float, num_warmup_steps: int, num_steps: int
) -> None:
    schedule = LearningRateSchedule(
        scheduler=scheduler, peak=peak, num_warmup_steps=num_warmup_steps, num_steps=num_steps
    )
    expected = reference(scheduler, peak, num_warmup_steps, num_steps, {})
    assert [schedule.at(step) for step in range(num_steps)] == expected


@pytest.mark.filterwarnings("ignore:Both num_training_steps and num_stable_steps")
@pytest.mark.parametrize(("scheduler", "options"), WITH_OPTIONS)
@pytest.mark.parametrize(("num_warmup_steps", "num_steps"), LENGTHS)
def test_the_rates_with_options_are_those_of_transformers(
    scheduler: SchedulerName, options: Options, num_warmup_steps: int, num_steps: int
) -> None:
    peak = 3e-4 / 7
    # The config's own types: what a section of the config hands over must fit the schedule.
    config = SchedulerConfig.model_validate(options)
    schedule = LearningRateSchedule(
        scheduler=scheduler,
        peak=peak,
        num_warmup_steps=num_warmup_steps,
        num_steps=num_steps,
        options=ScheduleOptions(**config.model_dump()),
    )
    expected = reference(scheduler, peak, num_warmup_steps, num_steps, options)
    assert [schedule.at(step) for step in range(num_steps)] == expected


def test_the_first_and_the_last_rate() -> None:
    def rates(scheduler: SchedulerName) -> tuple[float, float, float]:
        schedule = LearningRateSchedule(scheduler=scheduler, peak=1e-3, num_warmup_steps=10, num_steps=110)
        return schedule.at(0), schedule.at(10), schedule.at(110)

    assert rates("constant") == (0.0, 1e-3, 1e-3)
    assert rates("linear") == (0.0, 1e-3, 0.0)
    assert rates("cosine") == (0.0, 1e-3, 0.0)


def grad_scaler(scale: float, overflows: list[bool]) -> list[float]:
    """The scales after each step, by the kernel that GradScaler uses."""
    now = torch.tensor([scale])
    growth = torch.zeros(1, dtype=torch.int32)
    scales = []
    for overflow in overflows:
        torch._amp_update_scale_(now, growth, torch.tensor([float(overflow)]), 2.0, 0.5, 2000)
        scales.append(now.item())
    return scales


@pytest.mark.parametrize("seed", range(4))
def test_the_scale_follows_grad_scaler(seed: int) -> None:
    choice = random.Random(seed)
    overflows = [choice.random() < 0.001 for _ in range(6000)]
    scale, scales = LossScale(scale=2.0**16, good_steps=0), []
    for overflow in overflows:
        scale = scale.after(applied=not overflow)
        scales.append(scale.scale)
    assert scales == grad_scaler(2.0**16, overflows)


def test_it_doubles_after_2000_applied_steps_in_a_row() -> None:
    scale = LossScale(scale=4.0, good_steps=1998)
    assert scale.after(applied=True) == LossScale(scale=4.0, good_steps=1999)
    assert scale.after(applied=True).after(applied=True) == LossScale(scale=8.0, good_steps=0)
    assert scale.after(applied=True).after(applied=False) == LossScale(scale=2.0, good_steps=0)


def test_the_scale_stays_within_bounds() -> None:
    greatest = LossScale(scale=2.0**24, good_steps=1999)
    assert greatest.after(applied=True) == LossScale(scale=2.0**24, good_steps=0)
    scale = LossScale(scale=2.0**16, good_steps=5)
    for _ in range(16):
        assert not scale.exhausted
        scale = scale.after(applied=False)
    assert scale == LossScale(scale=1.0, good_steps=0)
    assert scale.exhausted
    assert scale.after(applied=False) == scale
