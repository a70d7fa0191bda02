"""Files of the user's in `run/` of an output directory are lost to no command that does not insist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, Trainer

from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import assert_rejected, finetune, metrics, output_of, ratel, succeed, tree


def plant(output: Path, *names: str) -> dict[str, bytes | None]:
    """Files of the user's in `run/`, and everything that is there then."""
    for name in names:
        (output / "run" / name).write_text(f"my {name}")
    return tree(output)


@pytest.mark.full
def test_files_of_the_users_with_names_of_a_run(make_config: MakeConfig) -> None:
    config = make_config(max_steps=1)
    succeed(config)
    output = output_of(config)
    before = plant(output, "trace.json")
    assert_rejected(
        finetune(config, "trace=true", "max_steps=2"), 2, "trace.json would be replaced", "did not write it"
    )
    assert tree(output) == before
    assert_rejected(ratel("check", config, "trace=true"), 2, "trace.json would be replaced")
    succeed(config, "max_steps=2")  # such a run has no trace
    before = plant(output, "rejects.jsonl", "origin.json", "report.html")
    assert_rejected(finetune(config, "max_steps=3"), 2, "rejects.jsonl would be replaced")
    assert_rejected(ratel("report", config), 2, "report.html: the file exists, and it is not a report")
    assert tree(output) == before
    assert ratel("clean", config, "--yes").code == 0
    after = tree(output)
    mine = {f"run/{name}" for name in ("trace.json", "rejects.jsonl", "origin.json", "report.html")}
    assert {name for name, content in after.items() if name.startswith("run/") and content is not None} == mine
    assert all(after[name] == before[name] for name in mine)


@pytest.mark.full
def test_with_overwrite_only_what_a_run_writes_is_replaced(make_config: MakeConfig) -> None:
    """Here there are no rejects and no origin, so the files of the user's stay."""
    config = make_config(max_steps=1)
    succeed(config)
    output = output_of(config)
    plant(output, "trace.json", "rejects.jsonl", "origin.json")
    succeed(config, "trace=true", "max_steps=2", "--overwrite")
    assert (output / "run" / "rejects.jsonl").read_text() == "my rejects.jsonl"
    assert (output / "run" / "origin.json").read_text() == "my origin.json"
    assert isinstance(json.loads((output / "run" / "trace.json").read_text()), list)
    assert len(metrics(config)) == 2
    (output / "run" / "rejects.jsonl").unlink()
    succeed(config, "trace=true", "max_steps=3")


@pytest.mark.full
@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)])
@pytest.mark.parametrize("name", ["trace.json", "metrics.jsonl", "config.yaml"])
def test_no_link_is_written_through(
    make_config: MakeConfig, tmp_path: Path, name: str, overwrite: tuple[str, ...]
) -> None:
    config, mine = make_config(max_steps=1), tmp_path / "mine"
    succeed(config)
    path = output_of(config) / "run" / name
    mine.write_bytes(path.read_bytes() if path.exists() else b"mine")
    path.unlink(missing_ok=True)
    path.symlink_to(mine)
    before = mine.read_bytes()
    assert_rejected(finetune(config, "trace=true", "max_steps=2", *overwrite), 2, f"{name} is a link")
    assert ratel("clean", output_of(config), "--yes").code == 0
    assert path.is_symlink() and mine.read_bytes() == before


@pytest.mark.full
def test_a_folder_that_is_a_link_is_neither_filled_nor_cleaned(make_config: MakeConfig, tmp_path: Path) -> None:
    config, mine = make_config(max_steps=1), tmp_path / "mine"
    succeed(config)
    tokens = output_of(config) / "run" / "tokens"
    tokens.rename(mine)
    tokens.symlink_to(mine)
    before = tree(mine)
    assert_rejected(finetune(config, "max_steps=2"), 2, "tokens is a link")
    assert ratel("clean", config, "--yes").code == 0
    assert tree(mine) == before and tokens.is_symlink()


@pytest.mark.full
def test_a_folder_of_the_users_among_the_tokens(make_config: MakeConfig) -> None:
    config = make_config(max_steps=1)
    succeed(config)
    mine = output_of(config) / "run" / "tokens" / "mine"
    mine.mkdir()
    for name in ("meta.json", "rejects.jsonl"):
        (mine / name).write_text("mine")
    assert ratel("clean", config, "--yes").code == 0
    assert [path.name for path in mine.parent.iterdir()] == ["mine"] and len(tree(mine)) == 2


@pytest.mark.full
def test_a_refused_command_does_not_claim_the_users_folder(make_config: MakeConfig) -> None:
    config = make_config(max_steps=1)
    output = output_of(config)
    (output / "run").mkdir(parents=True)
    (output / "notes.txt").write_text("mine")
    before = plant(output, "metrics.jsonl", "config.yaml")
    assert_rejected(finetune(config, "--overwrite"), 2, "holds the records of a run", "its store is gone")
    assert tree(output) == before
    assert_rejected(finetune(config, "--resume", "no"), 2, "has files in it, and Ratel did not make it")
    assert tree(output) == before
    succeed(config, "--overwrite", "--resume", "no")
    assert len(metrics(config)) == 1 and (output / "notes.txt").read_text() == "mine"


@pytest.mark.full
def test_a_refused_command_does_not_claim_files_in_run(make_config: MakeConfig) -> None:
    """In the run's own directory it must insist each time, too."""
    config = make_config(max_steps=2)
    succeed(config)
    before = plant(output_of(config), "trace.json")
    assert_rejected(finetune(config, "trace=true", "max_steps=1", "--overwrite"), 2, "max_steps")
    assert_rejected(finetune(config, "trace=true", "max_steps=3"), 2, "trace.json would be replaced")
    assert tree(output_of(config)) == before


def test_what_was_never_written_is_not_claimed(make_config: MakeConfig) -> None:
    """A run without rejects gives their names back, and so does `clean` with all names."""
    config = make_config(max_steps=1)
    succeed(config)
    listed = json.loads((output_of(config) / "ratel.files").read_text())["run_files"]
    written = ["config.yaml", "hardware.json", "metrics.jsonl", "model.json", "plan.json", "run.json"]
    assert listed == written
    assert ratel("clean", config, "--yes").code == 0
    assert json.loads((output_of(config) / "ratel.files").read_text())["run_files"] == []


@pytest.mark.full
def test_rejects_are_the_runs(make_config: MakeConfig, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n' * 199 + '{"prompt": 3}\n')
    config = make_config(max_steps=1, rows=rows)
    assert "rejects.jsonl" in succeed(config)
    succeed(config, "max_steps=2")
    rejects = output_of(config) / "run" / "rejects.jsonl"
    assert rejects.is_file()
    assert ratel("clean", config, "--yes").code == 0
    assert not rejects.exists()


@pytest.mark.full
def test_the_names_that_decay_are_listed_and_stay(make_config: MakeConfig, base: Path) -> None:
    """Another version may have had another rule; without decay no rule matters."""
    config = make_config(max_steps=1)
    succeed(config)
    path = output_of(config) / "run" / "model.json"
    recorded = json.loads(path.read_text())
    model = AutoModelForCausalLM.from_pretrained(base)
    names = [name for name, _ in model.named_parameters()]
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    assert recorded["decayed"] == [name for name in names if name in decayed]
    assert recorded["undecayed"] == [name for name in names if name not in decayed]

    parameter = recorded["blocks"][1]["parameters"][0]
    parameter["decay"] = not parameter["decay"]
    path.write_text(json.dumps(recorded))
    before = tree(output_of(config))
    ended = finetune(config, "max_steps=2")
    assert_rejected(ended, 2, "weight decay applied to other parameters when this run began", parameter["name"])
    assert "hint: finish the run with the version of Ratel that began it" in ended.stderr
    assert tree(output_of(config)) == before
    path.unlink()
    succeed(config, "max_steps=2")
