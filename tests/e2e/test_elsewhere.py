"""Runs with relative paths, named from other directories; and runs that have moved, or were copied."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from ratel_cli.console import RunLog
from ratel_cli.io.queue import open_queue
from ratel_cli.run.files.run_directory import find_run
from ratel_cli.store.run_record import read_record
from ratel_cli.store.store import Store
from tests.e2e.runs import SETTINGS, assert_rejected, ratel, tree, works
from tests.tiers import sample

OUTPUT, STORE = Path("outputs/a"), Path("outputs/a.store")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, base: Path, rows: Path) -> tuple[Path, Path]:
    """The directory in which a run of one step was started, and a copy of it. All paths in its config are relative."""
    place = tmp_path_factory.mktemp("elsewhere") / "here" / "place"
    (place / "conf").mkdir(parents=True)
    shutil.copytree(base, place / "models" / "base")
    shutil.copy(rows, place / "rows.jsonl")
    settings = {**SETTINGS, "base_model": "models/base", "output_dir": str(OUTPUT), "max_steps": 1}
    datasets = [{"path": "rows.jsonl", "type": "completion"}]
    (place / "run.yaml").write_text(yaml.safe_dump({**settings, "datasets": datasets}))
    with contextlib.chdir(place):
        assert_ok("finetune", "run.yaml")
    return place, Path(shutil.copytree(place, place.parents[1] / "copy"))


@pytest.fixture
def started(ran: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """That directory as the run has left it, which is the current one. Nothing is beside it."""
    place, copy = ran
    shutil.rmtree(place.parent)
    shutil.copytree(copy, place)
    monkeypatch.chdir(place)
    return place


def assert_ok(*arguments: object) -> str:
    return works(*arguments).stderr


def recorded(output: Path = OUTPUT) -> str:
    return (output / "run" / "config.yaml").read_text()


@pytest.mark.full
@pytest.mark.parametrize("is_moved", sample([False, True], every=2, offset=1))
def test_every_command_finds_the_run(started: Path, monkeypatch: pytest.MonkeyPatch, is_moved: bool) -> None:
    if is_moved:
        started = started.rename(started.with_name("moved"))
    run, before = Path("..") / OUTPUT, recorded(started / OUTPUT)
    monkeypatch.chdir(started / "conf")
    assert "only the export" not in assert_ok("verify", run)
    for rows in (started / "rows.jsonl", "../rows.jsonl"):
        assert "no store" not in assert_ok("eval", run, rows)
    assert "no store" not in assert_ok("generate", run, "Which", "--max-new-tokens", "2")
    assert_ok("export", run, "-o", "exported")
    assert_ok("check", run)
    assert_ok("report", run)
    assert "resuming from step 1" in assert_ok("finetune", run, "max_steps=2")
    assert recorded(started / OUTPUT) == before.replace("max_steps: 1", "max_steps: 2")
    record = read_record(started / STORE)
    assert record is not None and record.run == str(started / OUTPUT)
    assert str(started / STORE) in assert_ok("finetune", "../outputs/a", "max_steps=3")
    monkeypatch.chdir(started)
    shown = assert_ok("finetune", "run.yaml", "max_steps=4")
    assert f"remains in {STORE}; `ratel clean {OUTPUT} --store`" in shown and "resuming from step 3" in shown
    monkeypatch.chdir(started / OUTPUT)
    assert_ok("finetune", ".", "max_steps=5")
    assert recorded(started / OUTPUT) == before.replace("max_steps: 1", "max_steps: 5")
    monkeypatch.chdir(started / "conf")
    assert_ok("clean", run, "--output", "--yes")
    assert not (started / STORE).exists() and not (started / OUTPUT).exists()


@pytest.mark.full
def test_a_step_of_it_begins_another_run(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(started / "conf")
    text = (started / "run.yaml").read_text().replace("models/base", "../models/base").replace("rows", "../rows")
    Path("b.yaml").write_text(text.replace(str(OUTPUT), "b"))
    assert_ok("finetune", "b.yaml", "max_steps=2", "--from", "../outputs/a")
    monkeypatch.chdir(started)
    assert_ok("finetune", "conf/b", "max_steps=3")
    ended = ratel("finetune", "run.yaml", "output_dir=c", "dtype=bfloat16", "max_steps=2", "--from", "conf/b")
    assert_rejected(ended, 2, "that run trains another model: dtype was float32, is now bfloat16")


@pytest.mark.full
def test_storage_paths_that_are_relative(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = ["storage.paths=[s, t]", "storage.snapshot.path=u", "storage.snapshot.every=1", "output_dir=b"]
    assert_ok("finetune", "run.yaml", *storage)
    monkeypatch.chdir(started / "conf")
    before = recorded(started / "b")
    assert_ok("verify", "../b")
    assert_ok("finetune", "../b", "max_steps=2")
    assert recorded(started / "b") == before.replace("max_steps: 1", "max_steps: 2")
    assert_ok("clean", "../b", "--output", "--yes")
    assert not [*started.glob("[stub]/**/ratel.store"), *started.glob("b")]


@pytest.mark.full
def test_paths_of_overrides_begin_here(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(started / "conf")
    assert_ok("finetune", "../outputs/a", "storage.paths=s", "--resume", "no")
    [store] = Path("s").iterdir()
    assert str(store.absolute()) in recorded(started / OUTPUT)
    monkeypatch.chdir(started)
    assert_ok("verify", OUTPUT)


@pytest.mark.full
def test_an_output_that_moved_alone(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found from where it was started. What it records then is true at its new place."""
    OUTPUT.rename("renamed")
    monkeypatch.chdir(started / "conf")
    assert_rejected(ratel("clean", "../renamed", "--yes"), 2, "there is no store in outputs/a.store")
    assert_rejected(ratel("finetune", "../renamed"), 2, "rows.jsonl: no such file", num_errors=2)
    monkeypatch.chdir(started)
    assert "resuming from step 1" in assert_ok("finetune", started / "renamed", "max_steps=2")
    assert "output_dir: renamed\n" in recorded(started / "renamed")
    monkeypatch.chdir(started / "models")
    assert "resuming from step 2" in assert_ok("finetune", "../renamed", "max_steps=3")
    assert_ok("clean", "../renamed", "--yes", "--output")
    assert not (started / STORE).exists()


@pytest.mark.full
def test_clean_keeps_the_records_of_a_store_that_it_does_not_find(
    started: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(started / "conf")
    assert_ok(
        "finetune", "../run.yaml", "base_model=../models/base", "datasets.0.path=../rows.jsonl", "output_dir=../b"
    )
    monkeypatch.chdir(started)
    Path("b.store").rename("lost")
    before = tree(started)
    assert_rejected(ratel("clean", "b", "--yes", "--output"), 2, "there is no store in ../b.store", "b/run/config.yaml")
    assert "use the directory where the run was started" in " ".join(works("verify", "b").stderr.split())
    assert "use the directory where the run was started" in " ".join(works("eval", "b", "rows.jsonl").stderr.split())
    assert tree(started) == before
    Path("b/run/plan.json").unlink()  # as the hint says
    assert_ok("clean", "b", "--yes", "--output")
    assert not Path("b").exists()


@pytest.mark.full
@pytest.mark.parametrize("missing", [["s"], ["s", "t"]])
def test_clean_misses_a_drive(started: Path, missing: list[str]) -> None:
    paths = [str(started / "s"), str(started / "t")]
    assert_ok("finetune", "run.yaml", f"storage.paths={paths}", "output_dir=b")
    for name in missing:
        Path(name).rename(f"{name}-unplugged")
    before = tree(started)
    ended = ratel("clean", "b", "--yes")
    assert_rejected(ended, 2, "nothing was deleted: there is no store in", *(str(started / name) for name in missing))
    assert "connect the drive" in ended.stderr and tree(started) == before


@pytest.mark.full
def test_clean_goes_on_where_it_was_stopped(started: Path) -> None:
    (OUTPUT / "run" / "plan.json").unlink()
    shutil.rmtree(STORE)
    assert_ok("clean", OUTPUT, "--yes")
    assert not (OUTPUT / "run").exists()


@pytest.mark.full
def test_a_copy_of_an_output_does_not_train_the_store(started: Path) -> None:
    copy = Path(shutil.copytree(OUTPUT, "outputs/copy"))
    before = tree(started)
    for arguments in ([], ["--resume", "no"], ["--resume", "1"], ["--dry-run"]):
        ended = ratel("finetune", copy, "max_steps=2", *arguments)
        assert_rejected(ended, 2, f"{STORE} holds the store of the run a (step 1", str(started / OUTPUT))
        assert tree(started) == before
    assert_rejected(ratel("check", copy), 2, "holds the store of the run a")
    assert f"`ratel finetune {started / OUTPUT}`" in ended.stderr
    hinted = ended.stderr.partition("or add `")[2].partition("`")[0].split()
    shown = assert_ok("finetune", copy, "max_steps=2", *hinted)
    assert "remains in outputs/copy.store; `ratel clean outputs/copy --store`" in shown
    assert (OUTPUT / "run" / "metrics.jsonl").read_text().count("\n") == 1
    assert_ok("finetune", started / OUTPUT, "max_steps=3")
    assert_ok("clean", "outputs/copy", "--yes")
    assert not Path("outputs/copy.store").exists() and STORE.exists()


@pytest.mark.full
def test_a_copy_may_replace_the_store_if_it_insists(started: Path) -> None:
    copy = Path(shutil.copytree(OUTPUT, "outputs/copy"))
    assert_ok("finetune", copy, "--resume", "no", "--overwrite-store")
    record = read_record(STORE)
    assert record is not None and record.run == str(started / copy)


@pytest.mark.full
@pytest.mark.parametrize("is_copied", [False, True])
def test_a_run_and_its_store_in_another_folder(started: Path, is_copied: bool) -> None:
    """By every command, from where the run was started; its model and its data have not moved."""
    moved, store = Path("moved/a"), Path("moved/a.store")
    for path, new in ((OUTPUT, moved), (STORE, store)):
        shutil.copytree(path, new)
        if not is_copied:
            shutil.rmtree(path)
    before = tree(OUTPUT.parent)
    assert "no store" not in assert_ok("verify", moved)
    assert "no store" not in assert_ok("generate", moved, "Which", "--max-new-tokens", "2")
    assert_ok("export", moved, "-o", "exported")
    assert_ok("status", moved)
    assert "resuming from step 1" in assert_ok("finetune", moved, "max_steps=2")
    record = read_record(store)
    assert record is not None and record.run == str(started / moved)
    assert "- moved/a.store" in recorded(moved)
    assert_ok("clean", moved, "--yes")
    assert not store.exists() and tree(OUTPUT.parent) == before


@pytest.mark.full
def test_a_store_of_another_run_beside_a_moved_one(started: Path) -> None:
    """It is not taken for the run's own, which is still in its place."""
    assert_ok("finetune", "run.yaml", "output_dir=moved/a", "seed=7")
    shutil.move("moved/a.store", "kept")
    shutil.copytree(OUTPUT, "new/a")
    shutil.copytree("kept", "new/a.store")
    shutil.rmtree(OUTPUT)
    assert find_run(Path("new/a"), RunLog()).storage.paths == (STORE,)


@pytest.mark.full
@pytest.mark.parametrize("is_copied", [False, True])
def test_an_output_and_its_store_elsewhere(started: Path, is_copied: bool) -> None:
    """Moved or copied together, they are a run."""
    other = started.with_name("other")
    shutil.copytree(started, other)
    if not is_copied:
        shutil.rmtree(OUTPUT)
        shutil.rmtree(STORE)
    assert "resuming from step 1" in assert_ok("finetune", other / OUTPUT, "max_steps=2")
    record = read_record(other / STORE)
    assert record is not None and record.run == str(other / OUTPUT)
    if is_copied:
        assert "resuming from step 1" in assert_ok("finetune", OUTPUT, "max_steps=2")


@pytest.mark.full
def test_another_project_with_the_same_paths(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No command about this run touches the store of that one."""
    other = Path(shutil.copytree(started, started.with_name("other")))
    monkeypatch.chdir(other)
    snapshot = ["storage.snapshot.path=snapshot", "storage.snapshot.every=1"]
    assert_ok("finetune", "run.yaml", *snapshot, "max_steps=2", "--resume", "no")
    shutil.rmtree(started / STORE)
    before, run = tree(other), Path("..") / started.name / OUTPUT
    assert_rejected(ratel("clean", run, "--yes"), 2, "nothing was deleted: there is no store in", str(started / STORE))
    assert_rejected(ratel("finetune", run, "max_steps=3"), 2, "its store is gone")
    assert_rejected(ratel("export", run, "-o", "D"), 2, f"there is no store in {started / STORE}")
    assert_ok("restore", run, "--from", "snapshot")
    assert tree(other) == before
    record = read_record(started / STORE)
    assert record is not None and record.run == str(started / OUTPUT)


@pytest.mark.full
def test_a_store_that_was_handed_over(started: Path) -> None:
    """A run was renamed and resumed. Its store, still where the first name puts it, is not the first name's."""
    OUTPUT.rename("outputs/b")
    assert_ok("finetune", "outputs/b", "max_steps=2")
    before = tree(started)
    hint = f"hint: resume that run with `ratel finetune {started / 'outputs/b'}`; or set another output_dir"
    for arguments in ([], ["--resume", "no"]):
        ended = ratel("finetune", "run.yaml", "max_steps=3", *arguments)
        assert_rejected(ended, 2, f"{STORE} holds the store of the run b (step 2")
        assert hint in ended.stderr
    assert "belongs to another run" in assert_ok("clean", "run.yaml", "--yes")
    assert tree(started) == before
    assert "resuming from step 2" in assert_ok("finetune", "outputs/b", "max_steps=3")


@pytest.mark.full
def test_restore_replaces_no_store_of_another_run(started: Path) -> None:
    storage = ["storage.snapshot.path=snapshot", "storage.snapshot.every=2"]
    assert_ok("finetune", "run.yaml", *storage, "max_steps=3", "output_dir=b")
    shutil.copytree("b", "c")
    before = tree(started)
    for arguments in ([], ["--overwrite"]):
        ended = ratel("restore", "c", *arguments)
        assert_rejected(ended, 2, "b.store holds the store of the run b (step 3")
        assert f"hint: that run is restored with `ratel restore {started / 'b'}`" in ended.stderr
    assert tree(started) == before
    assert_ok("restore", "c", "storage.paths=own")
    assert_ok("restore", "b", "--overwrite")


@pytest.mark.full
def test_a_copy_has_no_store_to_read(started: Path) -> None:
    copy = Path(shutil.copytree(OUTPUT, "outputs/copy"))
    words = f"the store in {STORE} belongs to the run in {started / OUTPUT}"
    shown = " ".join(assert_ok("eval", copy, "rows.jsonl").split())
    assert f"{words}; using the exported model in {copy}" in shown
    assert words in " ".join(assert_ok("verify", copy).split())
    assert_rejected(ratel("export", copy, "-o", "exported"), 2, words)


@pytest.mark.full
@pytest.mark.parametrize("is_renamed", [False, True])
def test_an_output_behind_a_link(started: Path, is_renamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = f"storage.paths={started / 'nvme'}"
    assert_ok("finetune", "run.yaml", paths, "output_dir=b")
    if is_renamed:  # all of it has moved, and a link is where it was
        place = started.rename(started.with_name("moved"))
        started.symlink_to(place)
        monkeypatch.chdir(place)
        assert_ok("finetune", "b", "max_steps=2")
    else:
        Path("elsewhere").mkdir()
        Path("b").rename("elsewhere/b")
        Path("b").symlink_to("elsewhere/b")
        assert "resuming from step 1" in assert_ok("finetune", "b", "max_steps=2")
        assert "resuming from step 2" in assert_ok("finetune", "elsewhere/b", "max_steps=3")
    assert_ok("clean", "b", "--yes")
    assert not [*started.glob("nvme/*")]


@pytest.mark.full
def test_a_copy_of_all_of_it(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_ok("finetune", "run.yaml", "storage.paths=[stores]", "output_dir=b")
    other = Path(shutil.copytree(started, started.with_name("other")))
    before = tree(started)
    monkeypatch.chdir(other)
    assert "resuming from step 1" in assert_ok("finetune", "b", "max_steps=2")
    monkeypatch.chdir(other / "conf")
    assert "resuming from step 2" in assert_ok("finetune", "../b", "max_steps=3")
    assert tree(started) == before


@pytest.mark.full
def test_clean_of_a_config_with_other_storage_paths(started: Path) -> None:
    settings = yaml.safe_load((started / "run.yaml").read_text())
    (started / "other.yaml").write_text(yaml.safe_dump({**settings, "storage": {"paths": ["other"]}}))
    before = tree(started)
    ended = ratel("clean", "other.yaml", "--yes")
    assert_rejected(ended, 2, f"nothing was deleted: the store of the run in {OUTPUT} is in {STORE}, not in other/")
    assert f"hint: name the run by its output directory: `ratel clean {OUTPUT}`\n" in ended.stderr
    assert tree(started) == before


@pytest.mark.full
@pytest.mark.usefixtures("impatient")
def test_a_run_in_use(started: Path) -> None:
    with open_queue("threads", notice=pytest.fail) as queue, Store.open([STORE], queue=queue, identity=None):
        for arguments in (
            ["eval", OUTPUT, "rows.jsonl"],
            ["verify", OUTPUT],
            ["export", OUTPUT, "-o", "exported"],
            ["clean", OUTPUT, "--yes"],
            ["clean", OUTPUT, "--store", "--yes"],
            ["finetune", OUTPUT],
        ):
            before = tree(OUTPUT)
            ended = ratel(*arguments)
            assert_rejected(ended, 3, "is in use by process")
            assert "hint: wait until that process ends, or stop it\n" in ended.stderr
            assert tree(OUTPUT) == before and STORE.exists() and not Path("exported").exists()
    assert_ok("finetune", OUTPUT)  # the fixture wants a wait of ten seconds


@pytest.mark.full
def test_reading_needs_no_permission_to_write(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_open = os.open

    def opened(path: str | Path, flags: int, *mode: int, dir_fd: int | None = None) -> int:
        if Path(path).name.startswith("ratel.") and flags & (os.O_RDWR | os.O_WRONLY):
            raise PermissionError(13, "Permission denied", str(path))
        return really_open(path, flags, *mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", opened)
    assert_ok("verify", OUTPUT)
    assert "no store" not in assert_ok("eval", OUTPUT, "rows.jsonl")
    assert "no store" not in assert_ok("generate", OUTPUT, "Which", "--max-new-tokens", "2")
    ended = ratel("finetune", OUTPUT, "max_steps=2")
    assert_rejected(ended, 3, "cannot be opened for writing: Permission denied")
    assert "hint: set storage.paths to directories you may write to" in ended.stderr


def test_an_adapter_names_its_base_as_the_config_does(
    tmp_path: Path, base: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As PEFT does: the directory with the model and the adapter works where it is copied to."""
    (tmp_path / "conf").mkdir()
    shutil.copytree(base, tmp_path / "models" / "base")
    settings = {**SETTINGS, "base_model": "models/base", "output_dir": "out", "max_steps": 1, "adapter": "lora"}
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump({**settings, "datasets": [{"path": str(rows), "type": "completion"}]})
    )
    monkeypatch.chdir(tmp_path)
    assert_ok("finetune", "run.yaml")
    monkeypatch.chdir(tmp_path / "conf")
    assert_ok("export", "../out", "-o", "again")
    for directory in (tmp_path / "out", Path("again")):
        written = json.loads((directory / "adapter_config.json").read_text())
        assert written["base_model_name_or_path"] == "models/base"
