"""Whatever a command calls it, a run is named by its config file or by its output directory: every command takes both.

The commands are those of the program itself, so a new one cannot be forgotten.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.commands import commands_that_take_a_run
from tests.e2e.runs import assert_rejected, export_hash, output_of, ratel, store_of, succeed, write_rows
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
def ended_run(tmp_path_factory: pytest.TempPathFactory, base: Path, rows: Path) -> Path:
    """The config of a run with a snapshot. Tests must not change it."""
    config = with_snapshot(tmp_path_factory.mktemp("ended"), base, rows, max_steps=2, save_steps=None, every=1)
    succeed(config)
    return config


@pytest.fixture
def run(ended_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The config of a run of the test's own, in the current directory; with a cache of its own."""
    here = tmp_path / "here"
    shutil.copytree(ended_run.parent, here)
    for file in (here / "run.yaml", *here.rglob("config.yaml"), *here.rglob("ratel.run")):
        file.write_text(file.read_text().replace(str(ended_run.parent), str(here)))
    write_rows(here / "rows.jsonl")
    monkeypatch.chdir(here)
    return here / "run.yaml"


def test_commands_are_found() -> None:
    assert {"clean", "data", "export", "finetune", "plan", "profile", "restore", "verify"} <= set(COMMANDS)


@pytest.mark.full
@pytest.mark.parametrize(
    ("command", "by"), rotating([name for name in COMMANDS if name != "profile"], ["file", "directory"])
)
def test_both_name_the_run(run: Path, command: str, by: str) -> None:
    """`profile` measures for half a minute; the next test knows that it reads its argument in the same way. What
    `doctor` finds depends on the machine. There is nothing to merge in this run."""
    ended = ratel(command, run if by == "file" else output_of(run), *FURTHER.get(command, []))
    codes = {"doctor": (0, 3), "merge": (2,)}
    assert ended.code in codes.get(command, (0,)), ended.stderr
    assert "this run trains no adapter" in ended.stderr or command != "merge"
    assert str(store_of(run).parent) in ended.stdout or command != "doctor"


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
def test_a_run_that_was_moved_goes_on_from_its_directory(run: Path) -> None:
    """Its store stays where it is."""
    moved = run.parent / "elsewhere"
    output_of(run).rename(moved)
    before = store_of(run).stat().st_ino
    ended = ratel("finetune", moved, "max_steps=3")
    assert ended.code == 0, ended.stderr
    assert "resuming from step 2" in ended.stderr
    assert store_of(run).stat().st_ino == before
    assert not output_of(run).exists()


@pytest.mark.full
def test_the_directory_and_the_file_train_the_same(run: Path, ended_run: Path, tmp_path: Path) -> None:
    """A run that is raised from its directory ends like one that is raised from its file."""
    copy = tmp_path / "copy"
    shutil.copytree(run.parent, copy)
    for file in (copy / "run.yaml", *copy.rglob("config.yaml"), *copy.rglob("ratel.run")):
        file.write_text(file.read_text().replace(str(run.parent), str(copy)))
    for named in (run, output_of(copy / "run.yaml")):
        ended = ratel("finetune", named, "max_steps=4")
        assert ended.code == 0, ended.stderr
    assert export_hash(run) == export_hash(copy / "run.yaml") != export_hash(ended_run)
    assert snapshot_of(run).exists()


def test_an_output_directory_names_no_other_run(run: Path) -> None:
    ended = ratel("finetune", output_of(run), f"output_dir={run.parent / 'new'}")
    assert_rejected(ended, 2, f"output_dir: it cannot be changed for the run in {output_of(run)}")
    assert not (run.parent / "new").exists()
