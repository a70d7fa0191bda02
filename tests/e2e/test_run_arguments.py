"""Whatever a command calls it, a run is named by its config file or by its output directory: every command takes both.

The commands are those of the program itself, so a new one cannot be forgotten.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.commands import commands_that_take_a_run
from tests.e2e.runs import Config, assert_rejected, ratel, works, write_rows
from tests.e2e.test_restore import snapshot_of, with_snapshot
from tests.tiers import rotating

FURTHER: dict[str, list[str]] = {
    "clean": ["--yes"],
    "data": ["-n", "1"],
    "eval": ["rows.jsonl"],
    "export": ["-o", "exported"],
    "generate": ["Which number is 3?", "--max-new-tokens", "1"],
    "merge": ["-o", "merged"],
    "restore": ["--overwrite"],
}
"""What a command needs besides, or is to be told."""
TAKES_OTHERS_TOO = ("doctor", "env", "eval", "generate", "status", "verify")
"""Commands that take a directory that is no run."""
COMMANDS = commands_that_take_a_run()


@pytest.fixture(scope="module")
def ended_run(tmp_path_factory: pytest.TempPathFactory, base: Path, rows: Path) -> Config:
    """The config of a run with a snapshot. Tests must not change it."""
    config = with_snapshot(tmp_path_factory.mktemp("ended"), base, rows, max_steps=2, save_steps=None, every=1)
    config.succeed()
    return config


@pytest.fixture
def run(ended_run: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The config of a run of the test's own, in the current directory; with a cache of its own."""
    here = tmp_path / "here"
    shutil.copytree(ended_run.parent, here)
    for file in (here / "run.yaml", *here.rglob("config.yaml"), *here.rglob("ratel.run")):
        file.write_text(file.read_text().replace(str(ended_run.parent), str(here)))
    write_rows(here / "rows.jsonl")
    monkeypatch.chdir(here)
    return Config(here / "run.yaml")


def test_commands_are_found() -> None:
    assert {"clean", "data", "export", "finetune", "plan", "profile", "restore", "verify"} <= set(COMMANDS)


@pytest.mark.full
@pytest.mark.parametrize(
    ("command", "by"), rotating([name for name in COMMANDS if name != "profile"], ["file", "directory"])
)
def test_both_name_the_run(run: Config, command: str, by: str) -> None:
    """`profile` measures for half a minute; the next test knows that it reads its argument in the same way. What
    `doctor` finds depends on the machine. There is nothing to merge in this run."""
    ended = ratel(command, run if by == "file" else run.output, *FURTHER.get(command, []))
    codes = {"doctor": (0, 3), "merge": (2,)}
    assert ended.code in codes.get(command, (0,)), ended.stderr
    assert "this run trains no adapter" in ended.stderr or command != "merge"
    assert str(run.store.parent) in ended.stdout or command != "doctor"


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_run(run: Path, command: str) -> None:
    further = FURTHER.get(command, [])
    (run.parent / "other").mkdir()
    if command not in TAKES_OTHERS_TOO:
        ended = ratel(command, run.parent / "other", *further)
        assert_rejected(ended, 2, "other: not the output directory of a run: it has no run/config.yaml")
    ended = ratel(command, run.parent / "none", *further)
    assert_rejected(ended, 2, "none: no such file or directory")
    named = "name a run, its config, a directory with a model's config.json" if command == "plan" else "lists the runs"
    assert named in ended.stderr


@pytest.mark.full
def test_a_run_that_was_moved_goes_on_from_its_directory(run: Config) -> None:
    """Its store stays where it is."""
    moved = run.parent / "elsewhere"
    run.output.rename(moved)
    before = run.store.stat().st_ino
    assert "resuming from step 2" in works("finetune", moved, "max_steps=3").stderr
    assert run.store.stat().st_ino == before
    assert not run.output.exists()


@pytest.mark.full
def test_the_directory_and_the_file_train_the_same(run: Config, ended_run: Config, tmp_path: Path) -> None:
    """A run that is raised from its directory ends like one that is raised from its file."""
    copy = tmp_path / "copy"
    shutil.copytree(run.parent, copy)
    for file in (copy / "run.yaml", *copy.rglob("config.yaml"), *copy.rglob("ratel.run")):
        file.write_text(file.read_text().replace(str(run.parent), str(copy)))
    for named in (run, Config(copy / "run.yaml").output):
        works("finetune", named, "max_steps=4")
    assert run.export_hash == Config(copy / "run.yaml").export_hash != ended_run.export_hash
    assert snapshot_of(run).exists()


def test_an_output_directory_names_no_other_run(run: Config) -> None:
    ended = ratel("finetune", run.output, f"output_dir={run.parent / 'new'}")
    assert_rejected(ended, 2, f"output_dir: it cannot be changed for the run in {run.output}")
    assert not (run.parent / "new").exists()
