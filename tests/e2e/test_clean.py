"""`ratel clean` deletes exactly what a run has left."""

from __future__ import annotations

import re
import sys
from io import StringIO
from pathlib import Path

import pytest

from ratel_cli.console import RunLog
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import Config, assert_rejected, ratel, tree, works


@pytest.fixture
def finished(make_config: MakeConfig, tmp_path: Path) -> Config:
    """The config of a run with two drives and a snapshot, among files of the user's."""
    drives = [str(tmp_path / "a"), str(tmp_path / "b")]
    storage = {"engine": "threads", "paths": drives, "snapshot": {"path": str(tmp_path / "s"), "every": 1}}
    config = make_config(max_steps=1, storage=storage)
    config.succeed()
    places = [
        *tmp_path.glob("[ab]/*.store"),
        tmp_path / "a",
        tmp_path / "s",
        config.output,
        config.output / "run",
    ]
    places.append(next((config.output / "run" / "tokens").iterdir()))
    for place in places:
        (place / "notes.txt").write_text("mine")
    (config.output / "run" / "link").symlink_to(place / "notes.txt")
    return config


def left(directory: Path) -> set[str]:
    return {path.name for path in directory.rglob("*") if not path.is_dir()}


@pytest.mark.full
@pytest.mark.parametrize("by", ["config", "directory"])
def test_it_deletes_exactly_the_files_of_the_run(finished: Config, tmp_path: Path, by: str) -> None:
    run = finished if by == "config" else finished.output
    export = {path.name for path in finished.output.iterdir() if path.is_file()}
    works("report", run)
    ended = works("clean", run, "--yes")
    assert {Path(line.split(maxsplit=2)[2]).name for line in ended.stdout.splitlines()} == {
        "ratel.store", "ratel.run", "tokens.bin", "lengths.npy", "rejects.jsonl", "meta.json", "hardware.json",
        "model.json", "plan.json", "run.json", "metrics.jsonl", "report.html", "config.yaml",
    }  # fmt: skip
    assert left(tmp_path) == {*export, "notes.txt", "link", "run.yaml"}
    assert len(list(tmp_path.rglob("notes.txt"))) == 7
    assert "there is nothing to delete" in ratel("clean", finished, "--yes").stderr


@pytest.mark.full
def test_with_its_output(finished: Config, tmp_path: Path) -> None:
    (finished.output / "README.md").write_text("mine")
    for path in tmp_path.rglob("notes.txt"):
        path.unlink()
    (finished.output / "run" / "link").unlink()
    ended = ratel("clean", finished, "--yes", "--output")
    assert f"kept: {finished.output / 'README.md'} was changed since Ratel wrote it" in ended.stderr
    assert left(tmp_path) == {"README.md", "run.yaml"}
    assert not list(tmp_path.rglob("*.store")) and not (finished.output / "run").exists()


@pytest.mark.full
def test_nothing_is_deleted_without_an_answer(
    finished: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(tmp_path)
    assert_rejected(ratel("clean", finished), 2, "nothing was deleted", "there is no terminal to ask on")
    monkeypatch.setattr(RunLog, "is_terminal", True)
    for answer in ("", "\n", "n\n", "maybe\n"):
        monkeypatch.setattr(sys, "stdin", _Terminal(answer))
        stderr = works("clean", finished).stderr
        assert stderr.endswith("nothing was deleted\n")
        assert re.search(r"delete \d+ files, [\d.]+ \w+\? The run cannot be resumed then\. \[y/N\]", stderr)
        assert tree(tmp_path) == before
    monkeypatch.setattr(sys, "stdin", _Terminal("y\n"))
    assert "deleted" in works("clean", finished).stderr
    assert tree(tmp_path) != before


class _Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_of_the_users_in_the_stores_place(make_config: MakeConfig) -> None:
    config = make_config(max_steps=1)
    config.store.parent.mkdir()
    config.store.write_text("my store")
    assert "there is nothing to delete" in ratel("clean", config, "--yes").stderr
    assert config.finetune("--resume", "no").code == 2
    assert config.store.read_text() == "my store"
