"""A run with trackers and with an upload: what they get, also after a kill; and that they change nothing."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from ratel_cli.commands import install_extras
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import Config, assert_rejected, works
from tests.run.fake_trackers import CALLS, TROUBLE, logged, read_calls, write_packages
from tests.tiers import sample

EVALUATED: dict[str, object] = {"val_set_size": 4, "eval_steps": 2}


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the calls of the fake packages, which are installed."""
    packages = str(write_packages(tmp_path / "packages"))
    monkeypatch.setenv("PYTHONPATH", packages)
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv(CALLS, str(tmp_path / "calls"))
    return tmp_path / "calls"


@pytest.mark.full
def test_trackers_get_the_rows_of_the_metrics_and_change_nothing(
    calls: Path, make_config: MakeConfig, plain_run: Config
) -> None:
    config = make_config(report_to=["wandb"], project="p", **EVALUATED)
    stderr = config.succeed()
    assert "note: report_to: wandb: https://wandb.example/" in stderr
    sent = {call[1]: call[2] for call in read_calls(calls) if call[0] == "log"}
    assert list(sent) == [1, 2, 3, 4]
    for row in config.metrics:
        values = sent[int(row["step"])]
        assert isinstance(values, dict)
        assert values["train/loss"] == row["loss"] and values["train/grad_norm"] == row["grad_norm"]
        assert values.get("eval/loss") == row.get("eval_loss")
    assert sum("eval/loss" in values for values in sent.values() if isinstance(values, dict)) == 2
    tracked, plain = make_config("tracked", report_to="mlflow"), make_config("plain")
    tracked.succeed()
    plain.succeed()
    tracked.assert_same_result(plain)
    assert not list((plain.output / "run").glob("*.log")), "without report_to nothing is started"


@pytest.mark.full
def test_a_run_that_resumes_or_goes_back(calls: Path, make_config: MakeConfig) -> None:
    config = make_config(report_to="trackio", save_steps=2, save_total_limit=3)
    config.succeed()
    config.succeed("max_steps=6")
    assert logged(calls) == [1, 2, 3, 4, 5, 6]
    assert len({call[1]["name"] for call in read_calls(calls) if call[0] == "init"}) == 1  # type: ignore[call-overload, index]
    calls.unlink()
    config.succeed("max_steps=6", "--resume", "4")
    assert logged(calls) == [1, 2, 3, 4, 5, 6], "a new run of the tracker, with all steps"


@pytest.mark.parametrize("tracker", sample(["mlflow", "wandb"], every=2))
def test_no_step_is_sent_twice_after_a_kill(calls: Path, make_config: MakeConfig, tracker: str) -> None:
    config = make_config(report_to=tracker)
    environment = {name: os.environ[name] for name in ("PYTHONPATH", CALLS)}
    config.run_until_killed(kill_at="commit.written:3", environment=environment)
    deadline = time.monotonic() + 60
    while ["finish"] not in read_calls(calls):  # the tracker's process ends by itself
        assert time.monotonic() < deadline
        time.sleep(0.05)
    config.succeed()
    assert logged(calls) == [1, 2, 3, 4]


@pytest.mark.full
@pytest.mark.parametrize("trouble", ["raise:init", "raise:log 2", "die:log 3"])
def test_a_tracker_that_fails_does_not_stop_the_run(
    calls: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    monkeypatch.setenv(TROUBLE, trouble)
    config = make_config(report_to=["wandb", "tensorboard"])
    stderr = config.succeed()
    assert stderr.count("warning: report_to: wandb failed: ") == 1
    assert "exported the model" in stderr and len(config.metrics) == 4


def test_a_tracker_that_is_not_installed(make_config: MakeConfig) -> None:
    config = make_config(report_to=["trackio"])
    for arguments in ([], ["--dry-run"]):
        ended = config.finetune(*arguments)
        assert_rejected(ended, 2, "report_to: trackio cannot be used: not installed here")
        assert f"{install_extras('trackio')}, or set report_to: none\n" in ended.stderr
        assert not config.output.exists(), "it is said before anything is written"


def test_a_dry_run_starts_no_tracker(calls: Path, make_config: MakeConfig) -> None:
    make_config(report_to=["wandb", "mlflow", "trackio", "tensorboard"]).succeed("--dry-run")
    assert read_calls(calls) == []


@pytest.mark.full
@pytest.mark.parametrize("others", [[], ["events.out.tfevents.1.host.2.0", "notes.txt"]])
def test_clean_deletes_what_trackers_have_left(calls: Path, make_config: MakeConfig, others: list[str]) -> None:
    config = make_config(report_to=["wandb", "tensorboard"])
    config.succeed()
    events = config.output / "run" / "tensorboard"
    assert len(list(events.iterdir())) == 1
    for name in others:
        (events / name).write_text("the user's")
    works("clean", config, "--yes", "--output")
    left = sorted(path.name for path in config.output.rglob("*") if path.is_file())
    assert left == others
    assert config.output.exists() == bool(others)


@pytest.mark.full
def test_an_upload_that_fails_is_a_warning_with_the_command(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    config = make_config(hub_model_id="me/model", max_steps=1)
    assert "uploading" not in config.succeed("--dry-run")
    stderr = config.succeed()
    assert "warning: the model was not uploaded to me/model: " in stderr
    assert (
        "to upload it by hand: hf auth login && "
        f"hf upload me/model {config.output} . '--exclude=run/*' --exclude=ratel.files\n"
    ) in stderr
    assert json.loads((config.output / "config.json").read_text()) and os.environ.get("HF_TOKEN") is None
