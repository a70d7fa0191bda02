"""Files of the user's in `run/` of an output directory are lost to no command that does not insist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, Trainer

from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import assert_rejected, ratel, tree, works


def plant(output: Path, *names: str) -> dict[str, bytes | None]:
    """Files of the user's in `run/`, and everything that is there then."""
    for name in names:
        (output / "run" / name).write_text(f"my {name}")
    return tree(output)


@pytest.mark.full
def test_files_of_the_users_with_names_of_a_run(make_config: MakeConfig) -> None:
    config = make_config(max_steps=1)
    config.succeed()
    output = config.output
    before = plant(output, "trace.json")
    assert_rejected(config.finetune("trace=true", "max_steps=2"), 2, "trace.json would be replaced", "did not write it")
    assert tree(output) == before
    assert_rejected(ratel("check", config, "trace=true"), 2, "trace.json would be replaced")
    config.succeed("max_steps=2")  # such a run has no trace
    before = plant(output, "rejects.jsonl", "origin.json", "report.html")
    assert_rejected(config.finetune("max_steps=3"), 2, "rejects.jsonl would be replaced")
    assert_rejected(ratel("report", config), 2, "report.html: the file exists, and it is not a report")
    assert tree(output) == before
    works("clean", config, "--yes")
    after = tree(output)
    mine = {f"run/{name}" for name in ("trace.json", "rejects.jsonl", "origin.json", "report.html")}
    assert {name for name, content in after.items() if name.startswith("run/") and content is not None} == mine
    assert all(after[name] == before[name] for name in mine)


@pytest.mark.full
def test_with_overwrite_only_what_a_run_writes_is_replaced(make_config: MakeConfig) -> None:
    """Here there are no rejects and no origin, so the files of the user's stay."""
    config = make_config(max_steps=1)
    config.succeed()
    output = config.output
    plant(output, "trace.json", "rejects.jsonl", "origin.json")
    config.succeed("trace=true", "max_steps=2", "--overwrite")
    assert (output / "run" / "rejects.jsonl").read_text() == "my rejects.jsonl"
    assert (output / "run" / "origin.json").read_text() == "my origin.json"
    assert isinstance(json.loads((output / "run" / "trace.json").read_text()), list)
    assert len(config.metrics) == 2
    (output / "run" / "rejects.jsonl").unlink()
    config.succeed("trace=true", "max_steps=3")


@pytest.mark.full
@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)])
@pytest.mark.parametrize("name", ["trace.json", "metrics.jsonl", "config.yaml"])
def test_no_link_is_written_through(
    make_config: MakeConfig, tmp_path: Path, name: str, overwrite: tuple[str, ...]
) -> None:
    config, mine = make_config(max_steps=1), tmp_path / "mine"
    config.succeed()
    path = config.output / "run" / name
    mine.write_bytes(path.read_bytes() if path.exists() else b"mine")
    path.unlink(missing_ok=True)
    path.symlink_to(mine)
    before = mine.read_bytes()
    assert_rejected(config.finetune("trace=true", "max_steps=2", *overwrite), 2, f"{name} is a link")
    works("clean", config.output, "--yes")
    assert path.is_symlink() and mine.read_bytes() == before


@pytest.mark.full
def test_a_folder_that_is_a_link_is_neither_filled_nor_cleaned(make_config: MakeConfig, tmp_path: Path) -> None:
    config, mine = make_config(max_steps=1), tmp_path / "mine"
    config.succeed()
    tokens = config.output / "run" / "tokens"
    tokens.rename(mine)
    tokens.symlink_to(mine)
    before = tree(mine)
    assert_rejected(config.finetune("max_steps=2"), 2, "tokens is a link")
    works("clean", config, "--yes")
    assert tree(mine) == before and tokens.is_symlink()


@pytest.mark.full
def test_a_folder_of_the_users_among_the_tokens(make_config: MakeConfig) -> None:
    config = make_config(max_steps=1)
    config.succeed()
    mine = config.output / "run" / "tokens" / "mine"
    mine.mkdir()
    for name in ("meta.json", "rejects.jsonl"):
        (mine / name).write_text("mine")
    works("clean", config, "--yes")
    assert [path.name for path in mine.parent.iterdir()] == ["mine"] and len(tree(mine)) == 2


@pytest.mark.full
def test_a_refused_command_does_not_claim_the_users_folder(make_config: MakeConfig) -> None:
    config = make_config(max_steps=1)
    output = config.output
    (output / "run").mkdir(parents=True)
    (output / "notes.txt").write_text("mine")
    before = plant(output, "metrics.jsonl", "config.yaml")
    assert_rejected(config.finetune("--overwrite"), 2, "holds the records of a run", "its store is gone")
    assert tree(output) == before
    assert_rejected(config.finetune("--resume", "no"), 2, "has files in it, and Ratel did not make it")
    assert tree(output) == before
    config.succeed("--overwrite", "--resume", "no")
    assert len(config.metrics) == 1 and (output / "notes.txt").read_text() == "mine"


@pytest.mark.full
def test_a_refused_command_does_not_claim_files_in_run(make_config: MakeConfig) -> None:
    """In the run's own directory it must insist each time, too."""
    config = make_config(max_steps=2)
    config.succeed()
    before = plant(config.output, "trace.json")
    assert_rejected(config.finetune("trace=true", "max_steps=1", "--overwrite"), 2, "max_steps")
    assert_rejected(config.finetune("trace=true", "max_steps=3"), 2, "trace.json would be replaced")
    assert tree(config.output) == before


def test_what_was_never_written_is_not_claimed(make_config: MakeConfig) -> None:
    """A run without rejects gives their names back, and so does `clean` with all names."""
    config = make_config(max_steps=1)
    config.succeed()
    listed = json.loads((config.output / "ratel.files").read_text())["run_files"]
    written = ["config.yaml", "hardware.json", "metrics.jsonl", "model.json", "plan.json", "run.json"]
    assert listed == written
    works("clean", config, "--yes")
    assert json.loads((config.output / "ratel.files").read_text())["run_files"] == []


@pytest.mark.full
def test_rejects_are_the_runs(make_config: MakeConfig, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n' * 199 + '{"prompt": 3}\n')
    config = make_config(max_steps=1, rows=rows)
    assert "rejects.jsonl" in config.succeed()
    config.succeed("max_steps=2")
    rejects = config.output / "run" / "rejects.jsonl"
    assert rejects.is_file()
    works("clean", config, "--yes")
    assert not rejects.exists()


@pytest.mark.full
def test_the_names_that_decay_are_listed_and_stay(make_config: MakeConfig, base: Path) -> None:
    """Another version may have had another rule; without decay no rule matters."""
    config = make_config(max_steps=1)
    config.succeed()
    path = config.output / "run" / "model.json"
    recorded = json.loads(path.read_text())
    model = AutoModelForCausalLM.from_pretrained(base)
    names = [name for name, _ in model.named_parameters()]
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    assert recorded["decayed"] == [name for name in names if name in decayed]
    assert recorded["undecayed"] == [name for name in names if name not in decayed]

    parameter = recorded["blocks"][1]["parameters"][0]
    parameter["decay"] = not parameter["decay"]
    path.write_text(json.dumps(recorded))
    before = tree(config.output)
    ended = config.finetune("max_steps=2")
    assert_rejected(ended, 2, "weight decay applied to other parameters when this run began", parameter["name"])
    assert "hint: finish the run with the version of Ratel that began it" in ended.stderr
    assert tree(config.output) == before
    path.unlink()
    config.succeed("max_steps=2")
