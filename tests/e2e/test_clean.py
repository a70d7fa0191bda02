"""`ratel clean` deletes exactly what a run has left."""

from __future__ import annotations

import re
import shutil
import sys
from io import StringIO
from pathlib import Path

import pytest

from ratel_cli.console import RunLog
from ratel_cli.io.queue import open_queue
from ratel_cli.store.store import Store
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import Ended, assert_rejected, finetune, output_of, ratel, store_of, succeed, tree


@pytest.fixture
def finished(make_config: MakeConfig, tmp_path: Path) -> Path:
    """The config of a run with two drives and a snapshot, among files of the user's."""
    drives = [str(tmp_path / "a"), str(tmp_path / "b")]
    storage = {"engine": "threads", "paths": drives, "snapshot": {"path": str(tmp_path / "s"), "every": 1}}
    config = make_config(max_steps=1, storage=storage)
    succeed(config)
    places = [
        *tmp_path.glob("[ab]/*.store"),
        tmp_path / "a",
        tmp_path / "s",
        output_of(config),
        output_of(config) / "run",
    ]
    places.append(next((output_of(config) / "run" / "tokens").iterdir()))
    for place in places:
        (place / "notes.txt").write_text("mine")
    (output_of(config) / "run" / "link").symlink_to(place / "notes.txt")
    return config


def left(directory: Path) -> set[str]:
    return {path.name for path in directory.rglob("*") if not path.is_dir()}


@pytest.mark.full
@pytest.mark.parametrize("by", ["config", "directory"])
def test_it_deletes_exactly_the_files_of_the_run(finished: Path, tmp_path: Path, by: str) -> None:
    run = finished if by == "config" else output_of(finished)
    export = {path.name for path in output_of(finished).iterdir() if path.is_file()}
    assert ratel("report", run).code == 0
    ended = ratel("clean", run, "--yes")
    assert ended.code == 0, ended.stderr
    assert {Path(line.split(maxsplit=2)[2]).name for line in ended.stdout.splitlines()} == {
        "ratel.store", "ratel.run", "tokens.bin", "lengths.npy", "rejects.jsonl", "meta.json", "hardware.json",
        "model.json", "plan.json", "run.json", "metrics.jsonl", "report.html", "config.yaml",
    }  # fmt: skip
    assert left(tmp_path) == {*export, "notes.txt", "link", "run.yaml"}
    assert len(list(tmp_path.rglob("notes.txt"))) == 7
    assert "there is nothing to delete" in ratel("clean", finished, "--yes").stderr


@pytest.mark.full
def test_with_its_output(finished: Path, tmp_path: Path) -> None:
    (output_of(finished) / "README.md").write_text("mine")
    for path in tmp_path.rglob("notes.txt"):
        path.unlink()
    (output_of(finished) / "run" / "link").unlink()
    ended = ratel("clean", finished, "--yes", "--output")
    assert f"kept: {output_of(finished) / 'README.md'} was changed since Ratel wrote it" in ended.stderr
    assert left(tmp_path) == {"README.md", "run.yaml"}
    assert not list(tmp_path.rglob("*.store")) and not (output_of(finished) / "run").exists()


@pytest.mark.full
def test_nothing_is_deleted_without_an_answer(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tree(tmp_path)
    assert_rejected(ratel("clean", finished), 2, "nothing was deleted", "there is no terminal to ask on")
    monkeypatch.setattr(RunLog, "is_terminal", True)
    for answer in ("", "\n", "n\n", "maybe\n"):
        monkeypatch.setattr(sys, "stdin", _Terminal(answer))
        stderr = _clean(finished).stderr
        assert stderr.endswith("nothing was deleted\n")
        assert re.search(r"delete \d+ files, [\d.]+ \w+\? The run cannot be resumed then\. \[y/N\]", stderr)
        assert tree(tmp_path) == before
    monkeypatch.setattr(sys, "stdin", _Terminal("y\n"))
    assert "deleted" in _clean(finished).stderr
    assert tree(tmp_path) != before


class _Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def _clean(config: Path) -> Ended:
    ended = ratel("clean", config)
    assert ended.code == 0, ended.stderr
    return ended


@pytest.mark.full
@pytest.mark.usefixtures("impatient")
def test_a_store_in_use_stays(make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(max_steps=1)
    succeed(config)
    before = tree(output_of(config))
    with (
        open_queue("threads", notice=pytest.fail) as queue,
        Store.open([store_of(config).parent], queue=queue, identity=None),
    ):
        assert_rejected(ratel("clean", config, "--yes"), 3, "is in use by process")
    assert tree(output_of(config)) == before and store_of(config).exists()
    assert finetune(config).code == 0  # the fixture wants a wait of ten seconds


@pytest.mark.full
def test_a_copy_of_an_output_directory_does_not_own_the_store(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(max_steps=1)
    succeed(config)
    copy = Path(shutil.copytree(output_of(config), tmp_path / "copy"))
    before = tree(config.parent)
    ended = ratel("clean", copy, "--yes")
    assert "belongs to another run" in ended.stderr
    assert tree(config.parent) == before and not (copy / "run").exists()
    assert_rejected(ratel("clean", tmp_path, "--yes"), 2, "not the output directory of a run")


def test_a_file_of_the_users_in_the_stores_place(make_config: MakeConfig) -> None:
    config = make_config(max_steps=1)
    store_of(config).parent.mkdir()
    store_of(config).write_text("my store")
    assert "there is nothing to delete" in ratel("clean", config, "--yes").stderr
    assert finetune(config, "--resume", "no").code == 2
    assert store_of(config).read_text() == "my store"
