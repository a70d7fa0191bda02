"""`ratel clean --store` frees a run's store and nothing else, and every command says afterwards where the store is."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from ratel_cli.model.files.marker import Marker
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import Config, Ended, as_json, assert_rejected, ratel, tree, works, write_config

KEPT = {"config.yaml", "hardware.json", "metrics.jsonl", "model.json", "plan.json", "run.json", "notes.txt"}
DELETED = "was deleted by `ratel clean --store` (20"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, base: Path, rows: Path) -> tuple[Path, Path]:
    """A directory with a run of one step on two drives, with files of the user's wherever it has files; and a copy."""
    directory = tmp_path_factory.mktemp("workplace") / "work"
    storage = {"engine": "threads", "paths": [str(directory / "a"), str(directory / "b")]}
    config = write_config(directory, base=base, rows=rows, max_steps=1, storage=storage)
    config.succeed()
    run = config.output / "run"
    for place in [*directory.glob("[ab]/*.store"), config.output, run, run / "tokens", *run.glob("tokens/*")]:
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
    return works("clean", run, "--store", "--yes")


@pytest.mark.full
@pytest.mark.parametrize("by", ["config", "directory"])
def test_the_store_goes_and_the_rest_stays(work: Path, by: str) -> None:
    config = Config(work / "run.yaml")
    run = config if by == "config" else config.output
    before, steps, model = sizes(work), config.metrics, config.export_hash
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
    assert {path.name for path in (config.output / "run").iterdir() if path.is_file()} == KEPT
    assert (config.metrics, config.export_hash) == (steps, model)
    assert "has no export" not in ended.stderr
    assert "there is nothing to delete" in clean_store(run).stderr

    [row] = as_json("status", run)["runs"]
    assert (row["state"], row["step"], row["store_deleted"], row["store_bytes"]) == ("finished", 1, True, 0)
    assert "finished, store deleted" in ratel("status", run).stdout
    assert "Its store was deleted." in ratel("report", run, "--terminal").stdout

    works("clean", run, "--yes")
    assert [path.name for path in (config.output / "run").iterdir() if path.is_file()] == ["notes.txt"]


@pytest.mark.full
def test_what_commands_say_of_a_finished_run(work: Path, rows: Path) -> None:
    config = Config(work / "run.yaml")
    run = config.output
    clean_store(run)
    anew = f"`ratel finetune {run} --resume no` trains from the beginning"
    exported = ratel("export", run, "-o", work / "other")
    assert_rejected(exported, 2, f"the store in {work / 'a'}", DELETED)
    assert f"hint: the exported model in {run} can be used without it; {anew}" in exported.stderr
    assert not (work / "other").exists()
    for arguments in (("generate", run, "Which", "--max-new-tokens", "1"), ("eval", run, rows), ("verify", run)):
        ended = works(*arguments)
        assert DELETED in ended.stderr and anew in ended.stderr
    for command in ("finetune", "check"):
        ended = ratel(command, config)
        assert_rejected(ended, 2, f"{run} holds step 1 of the run out, but its store is gone: the store in", DELETED)
        assert "--resume no starts over here" in ended.stderr
    assert_rejected(config.finetune("--resume", "1"), 2, "there is no saved step 1: the store in", DELETED)
    branch = config.finetune(f"output_dir={work / 'new'}", "--from", str(run))
    assert_rejected(branch, 2, f"--from {run}: the store in", DELETED)


@pytest.mark.nightly
def test_a_run_that_starts_over_has_a_store_again(work: Path) -> None:
    """A store that is lost later is not said to be deleted."""
    config = Config(work / "run.yaml")
    model = config.export_hash
    clean_store(config)
    config.succeed("--resume", "no")
    assert config.export_hash == model
    for store in work.glob("[ab]/*.store"):
        shutil.rmtree(store)
    assert "store deleted" not in ratel("status", config).stdout
    assert_rejected(ratel("verify", config), 2, "there is no store in")
    assert_rejected(ratel("clean", config, "--store", "--yes"), 2, "nothing was deleted: there is no store in")


@pytest.mark.parametrize("option", ["--store", "--yes"])
def test_a_run_without_an_export(work: Path, option: str) -> None:
    """Its weights are nowhere else. The steps that are shown are those that the store had."""
    config = Config(work / "run.yaml")
    (config.output / "model.safetensors").unlink()
    log = config.output / "run" / "metrics.jsonl"
    line = log.read_text()
    log.write_text(line + line.replace('"step": 1', '"step": 2'))  # computed and never committed
    only_there = (
        f"{config.output} has no export of step 1: deleting the store deletes its weights; export them first: "
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
    [row] = as_json("status", config)["runs"]
    assert (row["step"], row["store_deleted"]) == (1, True)


@pytest.mark.nightly
def test_with_a_snapshot(make_config: MakeConfig, tmp_path: Path) -> None:
    """The snapshot stays, and the store comes back from it."""
    copy = tmp_path / "s"
    config = make_config(max_steps=1, storage={"engine": "threads", "snapshot": {"path": str(copy), "every": 1}})
    config.succeed()
    snapshot = tree(copy)
    ended = clean_store(config)
    assert f"kept: the snapshot in {copy}; `ratel restore {config}` makes the store again from it" in ended.stderr
    assert tree(copy) == snapshot
    assert_rejected(config.finetune(), 2, f"there is a snapshot in {copy}, but the store in", DELETED)
    assert f"`ratel restore {config}` makes it again from its snapshot" in ratel("verify", config).stderr
    works("restore", config)
    config.succeed("max_steps=2")
    shutil.rmtree(config.store.parent)
    assert_rejected(ratel("verify", config), 2, "there is no store in")
    works("restore", config)
    clean_store(config)
    works("clean", config, "--yes")
    assert not (copy / "ratel.store").exists()


def test_the_model_is_not_part_of_it(work: Path) -> None:
    before = tree(work)
    ended = ratel("clean", work / "run.yaml", "--store", "--output", "--yes")
    assert_rejected(ended, 2, "arguments '--store' and '--output'")
    assert tree(work) == before


def test_the_store_of_another_run_stays(work: Path) -> None:
    run = Config(work / "run.yaml").output
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
    config = Config(work / "run.yaml")
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
            ended = config.finetune()
            assert_rejected(ended, 2, DELETED)
            assert f"files of it are left: `ratel clean {config} --store` deletes them" in ended.stderr
        clean_store(config)
        assert set(sizes(work)) == expected
        assert "finished, store deleted" in ratel("status", config).stdout
        num_deleted += 1
    assert num_deleted == 11
