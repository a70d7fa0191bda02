"""Trackers: each gets every committed step once, and none of them can fail, stop or slow a run."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ratel_cli.commands import install_extras
from ratel_cli.config.keys.schema import DatasetConfig, RunConfig
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput
from ratel_cli.run.train import trackers
from ratel_cli.run.train.tracker_child import TRACKERS as ADAPTERS
from ratel_cli.run.train.tracker_child import values_of
from ratel_cli.run.train.trackers import FIGURE_NAMES, Trackers, check_trackers
from ratel_cli.training.metrics_log import MetricsLog
from tests.real_time import in_real_time
from tests.run.fake_trackers import CALLS, TROUBLE, logged, read_calls, write_packages
from tests.tiers import sample
from tests.training.test_metrics import metrics

NAMES = ["tensorboard", "wandb", "mlflow", "trackio"]
pytestmark = in_real_time  # a tracker's process that is slow to start is not there in time
SOON = 20.0
"""Far more than an idle machine takes."""


class Bench:
    """A run's directory, the fake packages, and what was printed."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.output_dir, self.calls = directory / "my-run", directory / "calls"
        self._monkeypatch = monkeypatch
        packages = str(write_packages(directory / "packages"))
        monkeypatch.setenv("PYTHONPATH", packages)
        monkeypatch.syspath_prepend(packages)
        monkeypatch.setenv(CALLS, str(self.calls))
        self._printed = io.StringIO()

    def config(self, *trackers: str, **changes: object) -> RunConfig:
        datasets = [DatasetConfig(path="a.jsonl")]
        values = {"datasets": datasets, "report_to": list(trackers), "output_dir": self.output_dir, **changes}
        return RunConfig(base_model="base", **values)  # type: ignore[arg-type]

    def write_steps(self, *steps: int, after: int = 0) -> None:
        with MetricsLog(self.output_dir / "run" / "metrics.jsonl", committed_step=after, warn=pytest.fail) as log:
            for step in steps:
                log.write(replace(metrics(step), eval_loss=0.5 if step == 2 else None))

    def open(self, *trackers: str, committed_step: int = 0, **changes: object) -> Trackers:
        config = self.config(*trackers, **changes)
        log = RunLog(self._printed)
        return Trackers(config, log, committed_step=committed_step, finish_seconds=self.finish_seconds)

    finish_seconds = SOON

    def run(self, *trackers: str, steps: range, **changes: object) -> str:
        """Report these steps, one after the other, and finish. Returns what was printed."""
        start = self._printed.tell()
        with self.open(*trackers, committed_step=steps[0] - 1, **changes) as opened:
            for step in steps:
                self.write_steps(step, after=step - 1)
                opened.report(step)
            opened.finish(steps[-1])
        return self.printed[start:]

    @property
    def printed(self) -> str:
        return self._printed.getvalue()

    def trouble(self, what: str) -> None:
        self._monkeypatch.setenv(TROUBLE, what)

    def record(self, tracker: str) -> dict[str, object]:
        found = json.loads((self.output_dir / "run" / f"{tracker}.json").read_text())
        assert isinstance(found, dict)
        return found

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SOON
        while not condition():
            assert time.monotonic() < deadline, read_calls(self.calls)
            time.sleep(0.02)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_figures_of_answers_that_are_compared_have_trls_names() -> None:
    row = replace(metrics(1), preferences={"rewards/margins": 0.5}, eval_preferences={"rewards/accuracies": 1.0})
    values = values_of(row.to_json(), FIGURE_NAMES)
    assert (values["train/rewards/margins"], values["eval/rewards/accuracies"]) == (0.5, 1.0)


def test_there_is_an_adapter_for_each_name() -> None:
    assert list(ADAPTERS) == NAMES


@pytest.mark.parametrize("tracker", NAMES)
def test_each_step_is_sent_once_in_order(bench: Bench, tracker: str) -> None:
    said = bench.run(tracker, steps=range(1, 4))
    calls = read_calls(bench.calls)
    assert [call[0] for call in calls if call[0] not in ("params", "experiment")] == [
        "init",
        "log",
        "log",
        "log",
        "finish",
    ]
    assert logged(bench.calls) == [1, 2, 3]
    values = {call[1]: call[2] for call in calls if call[0] == "log"}
    assert values[2]["train/loss"] == pytest.approx(metrics(2).loss) and values[2]["eval/loss"] == 0.5
    assert "eval/loss" not in values[1] and values[1]["train/learning_rate"] == 1e-5
    assert values[3]["step/busy_seconds/nvme_read"] == 1.0 and values[3]["step/clipped"] == 0.0
    assert bench.record(tracker)["step"] == 3
    assert said.startswith(f"note: report_to: {tracker}: ") and "warning" not in said
    assert "output of finish" in (bench.output_dir / "run" / f"{tracker}.log").read_text()


def test_all_of_them_at_once(bench: Bench) -> None:
    bench.run(*NAMES, steps=range(1, 6))
    assert sorted(map(str, logged(bench.calls))) == sorted("12345" * 4)


@pytest.mark.parametrize("tracker", NAMES)
def test_a_run_that_resumes_goes_on_in_the_same_tracker_run(bench: Bench, tracker: str) -> None:
    bench.run(tracker, steps=range(1, 3))
    before = bench.record(tracker)
    bench.run(tracker, steps=range(3, 5))
    assert logged(bench.calls) == [1, 2, 3, 4]
    assert bench.record(tracker) == {**before, "step": 4}
    second = [call[1] for call in read_calls(bench.calls) if call[0] == "init"][1]
    assert isinstance(second, dict)
    key = {"tensorboard": "purged_from", "wandb": "id", "mlflow": "run_id", "trackio": "name"}[tracker]
    assert second[key] == (3 if tracker == "tensorboard" else before["run"])


@pytest.mark.parametrize("tracker", NAMES)
def test_a_run_that_goes_back_begins_a_new_tracker_run_with_all_its_steps(bench: Bench, tracker: str) -> None:
    bench.run(tracker, steps=range(1, 5))
    before = bench.record(tracker)
    bench.calls.unlink()
    bench.run(tracker, steps=range(3, 5))
    assert logged(bench.calls) == [1, 2, 3, 4]
    first = next(call[1] for call in read_calls(bench.calls) if call[0] == "init")
    assert isinstance(first, dict)
    if tracker == "tensorboard":
        assert first["purged_from"] == 1
    elif tracker == "mlflow":
        assert "run_id" not in first
    else:
        assert bench.record(tracker)["run"] != before["run"]


def test_only_what_is_committed_is_sent(bench: Bench) -> None:
    bench.write_steps(1, 2, 3)
    with bench.open("wandb", committed_step=2) as opened:
        bench.wait_for(lambda: logged(bench.calls) == [1, 2])
        opened.finish(2)
    assert logged(bench.calls) == [1, 2]


def test_a_tracker_may_be_there_before_the_first_row(bench: Bench) -> None:
    """A new run starts its trackers first; until the file of the rows exists, there are none."""
    with bench.open("wandb") as opened:
        [child] = opened._children

        def has_looked() -> bool:
            opened.report(0)
            return child._sent == 0 or child._has_failed

        bench.wait_for(has_looked)
        assert not (bench.output_dir / "run" / "metrics.jsonl").exists()
        bench.write_steps(1, 2)
        opened.finish(2)
    assert logged(bench.calls) == [1, 2] and "failed" not in bench.printed


def test_what_was_not_sent_is_sent_by_the_next_command(bench: Bench) -> None:
    bench.trouble("raise:log 3")
    said = bench.run("wandb", steps=range(1, 6))
    log = bench.output_dir / "run" / "wandb.log"
    assert said.splitlines()[-1] == (
        "warning: report_to: wandb failed: RuntimeError: no route to the server; training goes on without it, and the "
        f"next command sends what is missing (see {log})"
    )
    assert said.count("warning") == 1 and "Traceback" in log.read_text()
    assert logged(bench.calls) == [1, 2] and bench.record("wandb")["step"] == 2
    bench.trouble("")
    bench.run("wandb", steps=range(6, 7))
    assert logged(bench.calls) == [1, 2, 3, 4, 5, 6]


def test_mlflow_is_asked_what_it_has(bench: Bench) -> None:
    bench.run("mlflow", steps=range(1, 4))
    record = bench.output_dir / "run" / "mlflow.json"
    record.write_text(json.dumps({"run": "f00d", "step": 1}))  # as if the machine had failed before it was written
    bench.run("mlflow", steps=range(4, 5))
    assert logged(bench.calls) == [1, 2, 3, 4]


@pytest.mark.parametrize("trouble", ["raise:init", "die:init", "die:log 2", "raise:finish", "die:finish"])
def test_a_tracker_that_fails_is_named_once(bench: Bench, trouble: str) -> None:
    bench.trouble(trouble)
    started = time.monotonic()
    said = bench.run("trackio", steps=range(1, 4))
    assert time.monotonic() - started < SOON, "nobody waits for a tracker that has failed"
    assert said.count("warning: report_to: trackio failed: ") == 1, said
    reason = "RuntimeError: no route to the server" if trouble.startswith("raise") else "its process ended"
    assert reason in said


@pytest.mark.full
@pytest.mark.parametrize("trouble", sample(["hang:init", "hang:log 1", "hang:finish", "linger:finish"], every=3))
def test_a_tracker_that_hangs_slows_no_step_and_is_ended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    bench.trouble(trouble)
    monkeypatch.setattr(trackers, "_EXIT_SECONDS", 0.2)
    bench.finish_seconds = SOON if trouble == "linger:finish" else 1.0
    bench.write_steps(*range(1, 2001))
    with bench.open("mlflow") as opened:
        longest = 0.0
        for step in range(1, 2001):  # more than a pipe takes, if it were asked to
            started = time.perf_counter()
            opened.report(step)
            longest = max(longest, time.perf_counter() - started)
        opened.finish(2000)
    assert longest < 1.0
    said = bench.printed
    if trouble == "linger:finish":
        assert "warning" not in said, "it has finished, and is ended"
    else:
        assert said.count("warning: report_to: mlflow did not finish in time") == 1, said


@pytest.mark.full
def test_one_that_hangs_does_not_hold_the_others_up(bench: Bench) -> None:
    bench.trouble("hang:experiment")  # only mlflow has experiments
    bench.finish_seconds = 2.0
    said = bench.run("mlflow", "wandb", steps=range(1, 4), project="p")
    assert logged(bench.calls) == [1, 2, 3]
    assert "mlflow did not finish in time" in said and "wandb did" not in said


def test_the_user_gets_to_know_what_the_run_waits_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "_SILENT_SECONDS", 0.1)
    bench.trouble("hang:finish")
    bench.finish_seconds = 1.0
    said = bench.run("wandb", steps=range(1, 2))
    assert said.count("note: waiting for wandb to finish, 1 s at most\n") == 1


def test_a_user_who_stops_the_run_waits_for_a_short_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "_STOP_SECONDS", 0.5)
    bench.trouble("hang:init")
    started = time.monotonic()
    config = bench.config("wandb")
    Trackers(config, RunLog(io.StringIO()), committed_step=0, is_stopping=lambda: True).close()
    assert time.monotonic() - started < SOON


def test_one_that_is_behind_is_named_once(bench: Bench) -> None:
    bench.trouble("hang:init")
    bench.write_steps(1, 2, 3)
    printed = io.StringIO()
    opened = Trackers(bench.config("wandb"), RunLog(printed), committed_step=0, slow_seconds=0.0, finish_seconds=0.0)
    with opened:
        for step in (1, 2, 3):
            opened.report(step)
            time.sleep(0.01)
    assert printed.getvalue().count("warning: report_to: wandb is behind; training does not wait for it") == 1


def test_it_finishes_when_the_run_is_killed(bench: Bench) -> None:
    bench.write_steps(1, 2, 3)
    program = (
        "import os, pathlib, signal, time\n"
        "from ratel_cli.config.keys.schema import RunConfig\n"
        "from ratel_cli.console import RunLog\n"
        "from ratel_cli.run.train.trackers import Trackers\n"
        f"config = RunConfig(base_model='b', datasets=[{{'path': 'a'}}], output_dir={str(bench.output_dir)!r}, "
        "report_to=['wandb'])\n"
        "Trackers(config, RunLog(), committed_step=2)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], os.getcwd()])}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, check=False, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    bench.wait_for(lambda: ["finish"] in read_calls(bench.calls))
    assert logged(bench.calls) == [1, 2]


def test_names_and_settings(bench: Bench) -> None:
    bench.run("wandb", "mlflow", steps=range(1, 2), project="p", run_name="r", adam_beta1=0.8)
    started = [call[1] for call in read_calls(bench.calls) if call[0] == "init"]
    assert [each.get("name") or each.get("run_name") for each in started if isinstance(each, dict)] == ["r", "r"]
    [wandb] = [each for each in started if isinstance(each, dict) and "config" in each]
    assert wandb["project"] == "p" and wandb["resume"] == "allow"
    assert wandb["config"]["adam_beta1"] == 0.8 and wandb["config"]["datasets.0.path"] == "a.jsonl"
    assert ["experiment", "p"] in read_calls(bench.calls)
    [parameters] = [call[1] for call in read_calls(bench.calls) if call[0] == "params"]
    assert isinstance(parameters, dict) and parameters["adam_beta1"] == "0.8"


def test_the_environment_comes_before_a_name_that_the_user_did_not_give(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.run("wandb", steps=range(1, 2))
    monkeypatch.setenv("WANDB_NAME", "theirs")
    bench.run("wandb", steps=range(2, 3))
    names = [call[1]["name"] for call in read_calls(bench.calls) if call[0] == "init"]  # type: ignore[call-overload, index]
    assert names == ["my-run", None]


def test_settings_that_are_too_long_are_left_out(bench: Bench) -> None:
    many = [DatasetConfig(path="x" * 400 + str(number)) for number in range(300)]
    bench.run("wandb", steps=range(1, 2), datasets=many)
    [started] = [call[1] for call in read_calls(bench.calls) if call[0] == "init"]
    assert isinstance(started, dict) and started["config"] == {}
    assert logged(bench.calls) == [1]


def test_without_trackers_nothing_is_started(bench: Bench) -> None:
    assert bench.run(steps=range(1, 3)) == ""
    assert {path.name for path in (bench.output_dir / "run").iterdir()} == {"metrics.jsonl"}


def test_a_process_that_cannot_be_started(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(bench.output_dir / "none"))
    said = bench.run("wandb", steps=range(1, 3))
    assert said.count("warning: report_to: wandb failed: No such file or directory; ") == 1


def test_a_tracker_that_is_not_installed_is_named_with_the_command(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_trackers(bench.config(*NAMES))
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.endswith("packages")])
    (bench.output_dir / "trackio").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(bench.output_dir))  # a directory is no package
    with pytest.raises(BadInput) as raised:
        check_trackers(bench.config("wandb", "trackio"))
    assert raised.value.message == "report_to: wandb and trackio cannot be used: not installed here"
    assert raised.value.hint == f"{install_extras('wandb', 'trackio')}, or set report_to: none"


def test_values_that_are_no_numbers_are_left_out() -> None:
    row = {
        "step": 3,
        "loss": math.nan,
        "grad_norm": None,
        "bottleneck": "link",
        "tokens": 7,
        "busy_seconds": {"a b": 1},
    }
    assert values_of(row, FIGURE_NAMES) == {"step/tokens": 7.0, "step/busy_seconds/a_b": 1.0}


@pytest.mark.full
def test_the_real_tensorboard_reads_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    bench = Bench.__new__(Bench)
    bench.output_dir, bench.calls, bench._printed = tmp_path / "my-run", tmp_path / "calls", io.StringIO()
    bench.run("tensorboard", steps=range(1, 4))
    bench.run("tensorboard", steps=range(4, 6))
    bench.run("tensorboard", steps=range(3, 5))  # goes back to step 2
    events = accumulator.EventAccumulator(str(bench.output_dir / "run" / "tensorboard"))
    events.Reload()
    found = events.Scalars("train/loss")
    assert [each.step for each in found] == [1, 2, 3, 4]
    assert [each.value for each in found] == pytest.approx([metrics(step).loss for step in (1, 2, 3, 4)])
    assert [each.step for each in events.Scalars("eval/loss")] == [2]
