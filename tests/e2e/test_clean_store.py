"""`ratel clean --store` frees a run's store and nothing else, and every command says afterwards where the store is."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from ratel_cli.io.queue import open_queue
from ratel_cli.model.files.marker import Marker
from ratel_cli.store.store import Store
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import (
    Ended,
    assert_rejected,
    export_hash,
    finetune,
    metrics,
    output_of,
    ratel,
    store_of,
    succeed,
    tree,
    write_config,
)

KEPT = {"config.yaml", "hardware.json", "metrics.jsonl", "model.json", "plan.json", "run.json", "notes.txt"}
DELETED = "was deleted by `ratel clean --store` (20"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, base: Path, rows: Path) -> tuple[Path, Path]:
    """A directory with a run of one step on two drives, with files of the user's wherever it has files; and a copy."""
    directory = tmp_path_factory.mktemp("workplace") / "work"
    storage = {"engine": "threads", "paths": [str(directory / "a"), str(directory / "b")]}
    config = write_config(directory, base=base, rows=rows, max_steps=1, storage=storage)
    succeed(config)
    run = output_of(config) / "run"
    for place in [*directory.glob("[ab]/*.store"), output_of(config), run, run / "tokens", *run.glob("tokens/*")]:
        (place / "notes.txt").write_text("mine")
    return directory, Path(shutil.copytree(directory, directory.with_name("copy")))


@pytest.fixture
def work(workplace: tuple[Path, Path]) -> Path:
    """The directory as the run has left it."""
    directory, copy = workplace
    again(directory, copy)
    return directory


def again(directory: Path, copy: Path) -> None:
    shutil.rmtree(directory)
    shutil.copytree(copy, directory)


def sizes(directory: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in directory.rglob("*") if path.is_file()}


def clean_store(run: Path) -> Ended:
    ended = ratel("clean", run, "--store", "--yes")
    assert ended.code == 0, ended.stderr
    return ended


@pytest.mark.full
@pytest.mark.parametrize("by", ["config", "directory"])
def test_the_store_goes_and_the_rest_stays(work: Path, by: str) -> None:
    config = work / "run.yaml"
    run = config if by == "config" else output_of(config)
    before, steps, model = sizes(work), metrics(config), export_hash(config)
    ended = clean_store(run)
    gone = before.keys() - sizes(work).keys()
    assert sorted(path.name for path in gone) == [
        "lengths.npy", "meta.json", "ratel.run", "ratel.run", "ratel.store", "ratel.store", "rejects.jsonl",
        "tokens.bin",
    ]  # fmt: skip
    assert {Path(line.split(maxsplit=2)[2]) for line in ended.stdout.splitlines()} == gone
    freed = re.search(r"deleted 8 files, ([\d.]+) KiB; metrics, plan and config stay in", ended.stderr)
    assert freed is not None, ended.stderr
    assert float(freed[1]) == pytest.approx(sum(before[path] for path in gone) / 1024, abs=0.5)
    assert {path.name for path in (output_of(config) / "run").iterdir() if path.is_file()} == KEPT
    assert (metrics(config), export_hash(config)) == (steps, model)
    assert "has no export" not in ended.stderr
    assert "there is nothing to delete" in clean_store(run).stderr

    [row] = json.loads(ratel("status", run, "--json").stdout)["runs"]
    assert (row["state"], row["step"], row["store_deleted"], row["store_bytes"]) == ("finished", 1, True, 0)
    assert "finished, store deleted" in ratel("status", run).stdout
    assert "Its store was deleted." in ratel("report", run, "--terminal").stdout

    assert ratel("clean", run, "--yes").code == 0
    assert [path.name for path in (output_of(config) / "run").iterdir() if path.is_file()] == ["notes.txt"]


@pytest.mark.full
def test_what_commands_say_of_a_finished_run(work: Path, rows: Path) -> None:
    config = work / "run.yaml"
    run = output_of(config)
    clean_store(run)
    anew = f"`ratel finetune {run} --resume no` trains from the beginning"
    exported = ratel("export", run, "-o", work / "other")
    assert_rejected(exported, 2, f"the store in {work / 'a'}", DELETED)
    assert f"hint: the exported model in {run} can be used without it; {anew}" in exported.stderr
    assert not (work / "other").exists()
    for arguments in (("generate", run, "Which", "--max-new-tokens", "1"), ("eval", run, rows), ("verify", run)):
        ended = ratel(*arguments)
        assert ended.code == 0 and DELETED in ended.stderr and anew in ended.stderr, ended.stderr
    for command in ("finetune", "check"):
        ended = ratel(command, config)
        assert_rejected(ended, 2, f"{run} holds step 1 of the run out, but its store is gone: the store in", DELETED)
        assert "--resume no starts over here" in ended.stderr
    assert_rejected(finetune(config, "--resume", "1"), 2, "there is no saved step 1: the store in", DELETED)
    branch = finetune(config, f"output_dir={work / 'new'}", "--from", str(run))
    assert_rejected(branch, 2, f"--from {run}: the store in", DELETED)


@pytest.mark.nightly
def test_a_run_that_starts_over_has_a_store_again(work: Path) -> None:
    """A store that is lost later is not said to be deleted."""
    config = work / "run.yaml"
    model = export_hash(config)
    clean_store(config)
    succeed(config, "--resume", "no")
    assert export_hash(config) == model
    for store in work.glob("[ab]/*.store"):
        shutil.rmtree(store)
    assert "store deleted" not in ratel("status", config).stdout
    assert_rejected(ratel("verify", config), 2, "there is no store in")
    assert_rejected(ratel("clean", config, "--store", "--yes"), 2, "nothing was deleted: there is no store in")


@pytest.mark.parametrize("option", ["--store", "--yes"])
def test_a_run_without_an_export(work: Path, option: str) -> None:
    """Its weights are nowhere else. The steps that are shown are those that the store had."""
    config = work / "run.yaml"
    (output_of(config) / "model.safetensors").unlink()
    log = output_of(config) / "run" / "metrics.jsonl"
    line = log.read_text()
    log.write_text(line + line.replace('"step": 1', '"step": 2'))  # computed and never committed
    only_there = (
        f"{output_of(config)} has no export of step 1: deleting the store deletes its weights; export them first: "
        f"`ratel export {config} -o DIR`"
    )
    if option == "--yes":
        assert only_there in ratel("clean", config, "--yes").stderr
        return
    before = tree(work)
    refused = ratel("clean", config, "--store")
    assert_rejected(refused, 2, "nothing was deleted", "there is no terminal to ask on")
    assert only_there in refused.stderr and tree(work) == before
    assert only_there in clean_store(config).stderr
    [row] = json.loads(ratel("status", config, "--json").stdout)["runs"]
    assert (row["step"], row["store_deleted"]) == (1, True)


@pytest.mark.nightly
def test_with_a_snapshot(make_config: MakeConfig, tmp_path: Path) -> None:
    """The snapshot stays, and the store comes back from it."""
    copy = tmp_path / "s"
    config = make_config(max_steps=1, storage={"engine": "threads", "snapshot": {"path": str(copy), "every": 1}})
    succeed(config)
    snapshot = tree(copy)
    ended = clean_store(config)
    assert f"kept: the snapshot in {copy}; `ratel restore {config}` makes the store again from it" in ended.stderr
    assert tree(copy) == snapshot
    assert_rejected(finetune(config), 2, f"there is a snapshot in {copy}, but the store in", DELETED)
    assert f"`ratel restore {config}` makes it again from its snapshot" in ratel("verify", config).stderr
    assert ratel("restore", config).code == 0
    succeed(config, "max_steps=2")
    shutil.rmtree(store_of(config).parent)
    assert_rejected(ratel("verify", config), 2, "there is no store in")
    assert ratel("restore", config).code == 0
    clean_store(config)
    assert ratel("clean", config, "--yes").code == 0
    assert not (copy / "ratel.store").exists()


def test_the_model_is_not_part_of_it(work: Path) -> None:
    before = tree(work)
    ended = ratel("clean", work / "run.yaml", "--store", "--output", "--yes")
    assert_rejected(ended, 2, "arguments '--store' and '--output'")
    assert tree(work) == before


def test_a_store_in_use_stays(work: Path) -> None:
    before = tree(work)
    stores = [next(work.glob(f"{drive}/*.store")) for drive in "ab"]
    with (
        open_queue("threads", notice=pytest.fail) as queue,
        Store.open(stores, queue=queue, identity=None),
    ):
        assert_rejected(ratel("clean", work / "run.yaml", "--store", "--yes"), 3, "is in use by process")
    assert tree(work) == before


def test_the_store_of_another_run_stays(work: Path) -> None:
    run = output_of(work / "run.yaml")
    copy = Path(shutil.copytree(run, work / "copy"))
    stores = {path: size for path, size in sizes(work).items() if path.suffix == ".store"}
    assert "belongs to another run" in clean_store(copy).stderr
    assert stores.items() <= sizes(work).items()
    assert "store deleted" not in ratel("status", work).stdout


def test_what_cannot_be_recorded_is_not_done(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_directory: Path, _marker: Marker) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("ratel_cli.run.files.output.write_marker", fail)
    before = tree(work)
    ended = ratel("clean", work / "run.yaml", "--store", "--yes")
    assert_rejected(ended, 3, f"nothing was deleted: {work / 'out'} cannot be written", "Read-only file system")
    assert tree(work) == before


@pytest.mark.full
def test_a_command_that_is_killed_can_be_finished(
    workplace: tuple[Path, Path], work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any number of deleted files. Nothing is tidied up after a kill, so every later deletion fails here."""
    config = work / "run.yaml"
    clean_store(config)
    expected = set(sizes(work))
    unlink = Path.unlink
    is_whole = True
    num_deleted = 0
    while is_whole:
        again(*workplace)
        left = num_deleted

        def fail(path: Path, missing_ok: bool = False) -> None:
            nonlocal left
            if not path.name.startswith("ratel.files"):
                if not left:
                    raise OSError(5, "Input/output error")
                left -= 1
            unlink(path, missing_ok=missing_ok)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", fail)
            is_whole = ratel("clean", config, "--store", "--yes").code == 3
        rest = list(work.glob("[ab]/*/ratel.store"))
        assert ("store deleted" in ratel("status", config).stdout) == (len(rest) < 2)
        if len(rest) == 1:
            ended = finetune(config)
            assert_rejected(ended, 2, DELETED)
            assert f"files of it are left: `ratel clean {config} --store` deletes them" in ended.stderr
        clean_store(config)
        assert set(sizes(work)) == expected
        assert "finished, store deleted" in ratel("status", config).stdout
        num_deleted += 1
    assert num_deleted == 11
