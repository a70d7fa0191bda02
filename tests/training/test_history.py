"""The steps of a run, read back: what was written, and what anything may have happened to since."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ratel_cli.training.facts import FACTS_NAME, read_facts
from ratel_cli.training.history import finite_mean, read_history, read_recent, recent_rate, recent_seconds
from ratel_cli.training.metrics import StepMetrics
from ratel_cli.training.metrics_log import MetricsLog
from tests.report.recorded import FACTS
from tests.training.test_metrics import metrics

NONSENSE = ["", "7", "[]", "{}", "null", "nonsense", "[" * 100_000, '{"step": "x"}', "\x00\x01"]


def lines(*steps: int) -> str:
    return "".join(json.dumps(metrics(step).to_json()) + "\n" for step in steps)


@pytest.mark.parametrize(
    "step",
    [
        metrics(1),
        replace(metrics(7), eval_loss=2.5, clipped=True, num_alloc_retries=3),
        replace(metrics(9), num_alloc_retries=0, applied=False, bottleneck="optimizer"),
        replace(metrics(10), slowest_rank=3, slowest_bottleneck="nvme write"),
    ],
)
def test_what_is_written_is_read(tmp_path: Path, step: StepMetrics) -> None:
    with MetricsLog(tmp_path / "m.jsonl", committed_step=0, warn=pytest.fail) as log:
        log.write(step)
    assert read_history(tmp_path / "m.jsonl").steps == (step,) == read_recent(tmp_path / "m.jsonl").steps


def test_a_value_that_was_not_finite_is_nan(tmp_path: Path) -> None:
    (tmp_path / "m").write_text(json.dumps(replace(metrics(1), loss=math.inf, grad_norm=math.nan).to_json()) + "\n")
    [step] = read_history(tmp_path / "m").steps
    assert math.isnan(step.loss) and math.isnan(step.grad_norm) and step.eval_loss is None


@pytest.mark.parametrize("key", sorted(metrics(1).to_json()))
@pytest.mark.parametrize("value", ["text", [], {}, None])
def test_a_field_of_another_type_is_no_step(tmp_path: Path, key: str, value: object) -> None:
    content = metrics(1).to_json()
    is_null_allowed = value is None and isinstance(content[key], float) and key != "step_seconds"
    (tmp_path / "m").write_text(json.dumps({**content, key: value}) + "\n" + lines(2))
    history = read_history(tmp_path / "m")
    is_same_type = isinstance(content[key], str) and value == content[key]
    assert [each.step for each in history.steps] == ([1, 2] if is_null_allowed or is_same_type else [2])
    assert history.num_unreadable == (0 if is_null_allowed else 1)


@pytest.mark.parametrize("noise", NONSENSE)
def test_nonsense_is_counted(tmp_path: Path, noise: str) -> None:
    (tmp_path / "m").write_text(lines(1, 2) + noise + "\n" + lines(3))
    history = read_history(tmp_path / "m")
    assert [each.step for each in history.steps] == [1, 2, 3]
    assert (history.num_unreadable, history.is_cut_short) == (int(bool(noise)), False)


def test_half_a_line_is_said(tmp_path: Path) -> None:
    (tmp_path / "m").write_text(lines(1, 2)[:-20])
    history = read_history(tmp_path / "m")
    assert ([each.step for each in history.steps], history.is_cut_short, history.num_unreadable) == ([1], True, 0)


def test_there_may_be_no_file(tmp_path: Path) -> None:
    assert read_history(tmp_path / "m").steps == read_recent(tmp_path / "m").steps == ()
    assert recent_rate(()) is None and recent_seconds(()) is None


def test_a_step_that_was_run_again_counts_once(tmp_path: Path) -> None:
    again = json.dumps(replace(metrics(2), loss=9.0).to_json()) + "\n"
    (tmp_path / "m").write_text(lines(1, 2, 3) + again)
    history = read_history(tmp_path / "m")
    assert [(each.step, each.loss) for each in history.steps] == [(1, 1 + 1 / 3), (2, 9.0), (3, 3 + 1 / 3)]
    assert [each.step for each in history.up_to(2).steps] == [1, 2]


@pytest.mark.parametrize("count", [1, 60, 90, 400])
def test_the_recent_steps_are_the_last_of_all(tmp_path: Path, count: int) -> None:
    (tmp_path / "m").write_text(lines(*range(1, count + 1)))
    every, recent = read_history(tmp_path / "m").steps, read_recent(tmp_path / "m").steps
    assert len(every) == count
    assert recent == every[-len(recent) :] and len(recent) >= min(count, 20)


def test_the_warm_up_does_not_count_for_the_speed() -> None:
    first = replace(metrics(1), step_seconds=100.0)
    assert recent_seconds([first]) == 100.0 and recent_rate([first]) == 1.0
    assert recent_seconds([first, metrics(2), metrics(3)]) == 2.0
    assert recent_rate([first, metrics(2), metrics(3)]) == 50.0


def test_facts_are_read_as_they_were_written(tmp_path: Path) -> None:
    facts = replace(FACTS, end_ids=(5,))
    assert read_facts(tmp_path) is None
    (tmp_path / FACTS_NAME).write_text(json.dumps(facts.to_json()))
    assert read_facts(tmp_path) == facts
    for noise in NONSENSE:
        (tmp_path / FACTS_NAME).write_text(noise)
        assert read_facts(tmp_path) is None
    for key in asdict(facts):
        (tmp_path / FACTS_NAME).write_text(json.dumps({**facts.to_json(), key: {}}))
        assert read_facts(tmp_path) is None


@pytest.mark.parametrize(
    ("values", "mean"), [([], None), ([math.nan], None), ([1.0], 1.0), ([1.0, math.nan, 4.0, math.inf], 2.5)]
)
def test_the_mean_of_what_is_finite(values: list[float], mean: float | None) -> None:
    assert finite_mean(values) == mean
