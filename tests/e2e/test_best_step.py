"""Early stopping, and the best step as the result of a run: whole runs, killed and not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import Config, as_json, assert_rejected, file_hash, ratel, works, write_config

CHANGES: Mapping[str, object] = {
    "max_steps": 18,
    "gradient_accumulation_steps": 1,
    "learning_rate": 0.1,  # so that the loss on other samples soon rises
    "val_set_size": 8,
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "early_stopping_patience": 2,
}


def evaluations(config: Config) -> dict[int, float]:
    lines = (config.output / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert len({each["step"] for each in steps}) == len(steps), "each step has one line"
    return {each["step"]: each["eval_loss"] for each in steps if each.get("eval_loss") is not None}


def status(config: Config) -> dict[str, object]:
    [row] = as_json("status", config.output)["runs"]
    assert isinstance(row, dict)
    return row


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, base: Path, rows: Path) -> tuple[Config, str]:
    config = write_config(tmp_path_factory.mktemp("ended"), base=base, rows=rows, **CHANGES)
    return config, config.succeed()


@pytest.mark.full
def test_the_best_step_is_exported_and_the_run_ends_early(
    ended: tuple[Config, str], make_config: MakeConfig, tmp_path: Path
) -> None:
    config, err = ended
    losses = evaluations(config)
    best, last = min(losses, key=lambda step: losses[step]), max(losses)
    assert (last, len([step for step in losses if step > best])) == (best + 4, 2) and last < 18, losses
    assert (
        f"ended early after step {last}: 2 evaluations without a better eval loss; the best is that of step {best}"
        in err
    )
    assert f"after step {best}; the best so far" in err and f"after step {last}; step {best} is the best" in err
    assert f"exported the model of step {best}, the best, to " in err
    row = status(config)
    assert (row["state"], row["step"], row["best_step"], row["ended_early"]) == ("finished", last, best, True)
    shown = ratel("status", config.output).stdout
    assert "finished early" in shown and f"{last}/18, epoch 3/3, best {best}" in shown
    works("report", config.output)
    page = (config.output / "run" / "report.html").read_text()
    assert f"It ended early, since its evaluations did not get better. The best step is {best}." in page
    shorter = make_config(
        **{
            **CHANGES,
            "max_steps": best,
            "eval_steps": None,
            "load_best_model_at_end": False,
            "early_stopping_patience": None,
        }
    )
    shorter.succeed()
    assert config.export_hash == shorter.export_hash
    for arguments, is_best in (((), True), (("--step", str(last)), False)):
        directory = tmp_path / f"export-{len(arguments)}"
        works("export", config.output, "-o", directory, *arguments)
        assert (file_hash(directory / "model.safetensors") == shorter.export_hash) is is_best
    works("verify", config.output)
    assert ratel("export", config.output, "-o", tmp_path / "x", "--step", str(best - 2)).code == 2, "it is not saved"


@pytest.mark.full
def test_a_run_that_ended_early_stays_so_and_goes_on_with_more_patience(make_config: MakeConfig) -> None:
    config = make_config(**CHANGES)
    first = config.succeed()
    losses = evaluations(config)
    again = config.succeed()
    line = next(line for line in first.splitlines() if line.startswith("ended early"))
    assert line in again and evaluations(config) == losses
    assert status(config)["state"] == "finished"
    config.succeed("early_stopping_patience=null")
    assert max(evaluations(config)) == 18 and status(config)["ended_early"] is False


@pytest.mark.full
@pytest.mark.parametrize(
    "point", ["commit.published:5", "commit.published:11", "manifest.published:6", "commit.synced:7"]
)
def test_a_run_that_is_killed_ends_with_the_same_best_step(
    ended: tuple[Config, str], make_config: MakeConfig, point: str
) -> None:
    """Among others between the commit of a step and its evaluation."""
    config = make_config(**CHANGES)
    config.run_until_killed(kill_at=point)
    err = config.succeed()
    whole, whole_err = ended
    assert evaluations(config) == evaluations(whole)
    config.assert_same_result(whole)
    line = next(line for line in whole_err.splitlines() if line.startswith("ended early"))
    assert line in err


@pytest.mark.full
def test_ranks_end_together(make_config: MakeConfig) -> None:
    """Also if one of them has lost what it knew of the evaluations."""
    config = make_config(**{**CHANGES, "learning_rate": 0.3, "early_stopping_patience": 1})
    first = config.succeed_ranks(2)
    line = next(line for line in first.splitlines() if line.startswith("ended early"))
    (config.output / "run" / "ranks" / "1" / "run" / "metrics.jsonl").unlink()
    assert line in config.succeed_ranks(2)


def test_a_run_whose_best_step_is_lost_ends_with_the_best_that_is_saved(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """A snapshot has no saved steps. `finetune` and `export` give the same step, and say which. The greatest loss is
    the best here, so that it is an early one."""
    storage = {"engine": "threads", "snapshot": {"path": str(tmp_path / "snapshot"), "every": 4}}
    config = make_config(
        **{**CHANGES, "max_steps": 10, "early_stopping_patience": None, "storage": storage, "greater_is_better": True}
    )
    config.succeed()
    losses = evaluations(config)
    best = max(losses, key=lambda step: losses[step])
    shutil.rmtree(config.store.parent)
    works("restore", config)
    [row] = as_json("status", config.output)["runs"]
    restored = row["step"]
    assert best < restored <= 10, losses
    err = config.succeed()
    assert evaluations(config) == losses
    left = [step for step in losses if step >= restored]
    saved = max(left, key=lambda step: losses[step])
    found = f"step {restored} is the best that is" if restored in losses else "no evaluated step is"
    assert f"warning: step {best} has the best evaluation, but is not saved any more; {found}" in err
    assert f"exported the model of step {saved}, the best that is saved, to " in err
    assert json.loads((config.output / "run" / "run.json").read_text())["exported_step"] == saved
    assert status(config)["state"] == "finished"
    works("export", config.output, "-o", tmp_path / "export")
    assert file_hash(tmp_path / "export" / "model.safetensors") == config.export_hash


@pytest.mark.full
def test_without_a_rule_the_last_step_is_exported(make_config: MakeConfig) -> None:
    config = make_config(**{**CHANGES, "load_best_model_at_end": False, "max_steps": 6})
    config.succeed()
    row = status(config)
    assert (row["state"], row["best_step"] in (2, 4, 6)) == ("finished", True)


@pytest.mark.full
def test_a_store_without_space_for_the_best_step(make_config: MakeConfig) -> None:
    config = make_config(**{**CHANGES, "load_best_model_at_end": False, "max_steps": 2})
    config.succeed()
    ended = config.finetune("load_best_model_at_end=true")
    assert ended.code == 2 and "the store has space for 0 saved generations" in ended.stderr
    assert "remove save_steps, load_best_model_at_end or storage.snapshot" in ended.stderr


@pytest.mark.full
def test_a_changed_bit_in_the_metrics_chooses_no_other_step(make_config: MakeConfig, tmp_path: Path) -> None:
    """The line of the best step is damaged: an export names the line, and a run that resumes keeps what follows it."""
    config = make_config(**{**CHANGES, "max_steps": 6, "early_stopping_patience": None, "learning_rate": 1e-4})
    config.succeed()
    path = config.output / "run" / "metrics.jsonl"
    losses = evaluations(config)
    best = min(losses, key=lambda step: losses[step])
    lines = path.read_bytes().splitlines(keepends=True)
    place = lines[best - 1].index(b'"eval_loss": ') + len(b'"eval_loss": ')
    changed = bytearray(lines[best - 1])
    changed[place] ^= 1
    damaged = b"".join([*lines[: best - 1], bytes(changed), *lines[best:]])
    path.write_bytes(damaged)
    ended = ratel("export", config, "-o", tmp_path / "export")
    assert_rejected(ended, 4, f"{path}: 1 damaged line: the best step is not known")
    assert "--step STEP" in ended.stderr and not (tmp_path / "export").exists()
    works("export", config, "-o", tmp_path / "export", "--step", str(best))
    assert file_hash(tmp_path / "export" / "model.safetensors") == config.export_hash
    assert_rejected(config.finetune("max_steps=7"), 4, f"{path}: 1 damaged line: the best step is not known")
    without = ("max_steps=7", "load_best_model_at_end=false")
    assert f"{path}:{best}: 1 damaged line" in config.succeed(*without)
    assert path.read_bytes().startswith(damaged) and len(path.read_bytes().splitlines()) == 7


def test_an_evaluation_that_a_kill_took_is_made_up_for(make_config: MakeConfig) -> None:
    """Also where no evaluation decides anything."""
    changes = {**CHANGES, "max_steps": 4, "load_best_model_at_end": False, "early_stopping_patience": None}
    undisturbed, config = make_config("undisturbed", **changes), make_config(**changes)
    undisturbed.succeed()
    config.run_until_killed(kill_at="commit.published:3")  # the first is that of the import
    assert list(evaluations(config)) == []
    config.succeed()
    assert evaluations(config) == evaluations(undisturbed) != {}
