"""A run uses the costs that `ratel profile` measured, or an earlier run recorded, from its first step on."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from ratel_cli.config.load import load_config
from ratel_cli.console import RunLog
from ratel_cli.engine.replay.profiling import BlockProfiler
from ratel_cli.errors import BadInput, EnvironmentFailure
from ratel_cli.report.words.profile import model_rows, operator_lines
from ratel_cli.run.ask.profile_model import record_model
from ratel_cli.run.files.output import claim_output
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import Config, measured_by_each_run, ratel, works
from tests.planning.shapes import machine
from tests.tiers import sample


@pytest.fixture(autouse=True)
def _each_run_measures() -> Iterator[None]:
    with measured_by_each_run():
        yield


def test_costs_are_measured_once_and_cached(make_config: MakeConfig, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(make_config()).config
    costs = record_model(config, machine(), RunLog(), refresh=False)
    assert "measuring the model" in capsys.readouterr().err
    assert costs.profile.source == "recorded"
    assert 0 < costs.activation_available_bytes < config.limits.host_memory
    again = record_model(config, machine(), RunLog(), refresh=False)
    assert again.profile == costs.profile
    assert "the model's costs come from" in capsys.readouterr().err
    record_model(config, machine(), RunLog(), refresh=True)
    assert "measuring the model" in capsys.readouterr().err


def test_the_table_names_each_operator(make_config: MakeConfig) -> None:
    costs = record_model(load_config(make_config()).config, machine(), RunLog(), refresh=False)
    lines = operator_lines(costs.profile)
    assert lines[0] == "operators worth offloading in 2 of 2 layers, for one layer and micro-batch:"
    assert len(lines) == 2 + len(costs.profile.profiles[0].candidates)
    assert any(line.startswith("mlp.up_proj mm ") for line in lines)
    rows = dict(model_rows(costs.profile, available_bytes=costs.activation_available_bytes))
    assert rows.keys() == {"micro-batch", "layers", "other blocks", "activations", "available"}


def test_a_directory_that_cannot_be_written_is_reported(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    config = load_config(make_config(output_dir=str(tmp_path / "out" / "below"))).config
    with pytest.raises(EnvironmentFailure, match=r"^output_dir: .* cannot be written"):
        record_model(config, machine(), RunLog(), refresh=False)


def test_a_file_that_cannot_be_written_is_reported(make_config: MakeConfig) -> None:
    config = load_config(make_config()).config
    claim_output(config)
    (config.output_dir / "run" / "model.json").mkdir(parents=True)
    with pytest.raises(EnvironmentFailure, match=r"model.json: cannot be written"):
        record_model(config, machine(), RunLog(), refresh=False)


def no_trial() -> contextlib.AbstractContextManager[object]:
    """A context in which no layer may be tried."""
    return mock.patch.object(BlockProfiler, "record", side_effect=AssertionError("tried again"))


@pytest.mark.full
def test_a_cached_profile_is_used_and_changes_no_bit(make_config: MakeConfig, plain_run: Config) -> None:
    """A second run in the same directory measures nothing again. Longer rows need a new profile."""
    config = make_config()
    config.succeed()
    with no_trial():
        config.succeed("--resume", "no")
    assert config.export_hash == plain_run.export_hash
    plan = json.loads((config.output / "run" / "plan.json").read_text())
    assert plan["activations"]["source"] == "recorded"
    with no_trial(), pytest.raises(AssertionError, match="tried again"):
        config.succeed("--resume", "no", "--overwrite-store", "sequence_len=48")


@pytest.mark.full
def test_the_printed_command_measures_again(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine and the model, of this config."""
    config = make_config("a run")
    works("profile", config)
    hints = [line for line in ratel("profile", config).stderr.splitlines() if "measures again" in line]
    assert [line.partition(" ")[0] for line in hints] == ["machine", "the"]
    (command,) = {line.split("`")[1] for line in hints}
    (planned,) = [line for line in ratel("plan", config).stderr.splitlines() if "measures again" in line]
    assert planned.split("`")[1] == command
    words = shlex.split(command)
    assert words == ["ratel", "profile", str(config), "--refresh"]
    again = ratel(*words[1:]).stderr
    assert "measures again" not in again and "measuring the model, block by block" in again


@pytest.mark.parametrize("content", sample(["", "{", "[]", '{"profile": 3}', '{"profile": {"made_for": 1}}'], every=3))
def test_a_file_that_cannot_be_read_is_no_profile(make_config: MakeConfig, content: str) -> None:
    config = make_config(max_steps=2)
    path = config.output / "run" / "model.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    config.succeed("--overwrite")
    assert json.loads(path.read_text())["profile"]["source"] == "recorded"


@pytest.mark.full
def test_a_profile_that_is_wrong_is_noticed_while_the_run_goes_on_and_changes_no_bit(make_config: MakeConfig) -> None:
    """The costs of a device that is ten thousand times slower: each operator is worth being offloaded, at first."""
    config, right = make_config(max_steps=9), make_config("right", max_steps=9)
    right.succeed()
    config.succeed("max_steps=1")
    path = config.output / "run" / "model.json"
    content = json.loads(path.read_text())
    profile = content["profile"]
    for layer in [
        profile,
        *profile["profiles"],
        *(each for kind in profile["profiles"] for each in kind["candidates"]),
    ]:
        for key, value in layer.items():
            if key.endswith("seconds") and value is not None:
                layer[key] = 1e4 * value
    path.write_text(json.dumps(content))
    stderr = config.succeed("--resume", "no")
    assert "; new estimate: " in stderr or "; new plan from " in stderr
    plans = [line["predicted_seconds"] for line in config.metrics]
    assert plans[0] > 100 * plans[-1]
    assert config.export_hash == right.export_hash


def test_profiling_leaves_a_directory_alone_that_ratel_did_not_make(make_config: MakeConfig) -> None:
    config = make_config()
    notes = config.output / "notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")
    with pytest.raises(BadInput, match="Ratel did not make it"):
        record_model(load_config(config).config, machine(), RunLog(), refresh=False)
    assert [path.name for path in notes.parent.iterdir()] == ["notes.txt"]
