"""Snapshots on another device, and `ratel restore`: after a lost store the run still ends with the same result."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from functools import cache
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from ratel_cli.io.queue import open_queue
from ratel_cli.store.run_record import RECORD_FILE_NAME
from ratel_cli.store.store import Store
from tests.e2e.conftest import MakeConfig, SignalAt
from tests.e2e.runs import Config, assert_rejected, file_hash, ratel, wait, works, write_config
from tests.e2e.trained import TRAINED, WHOLE_OR_ADAPTER, OfEach, run_of_each
from tests.tiers import rotating, sample, thinned

NUM_STEPS = 24
CHANGES: dict[str, object] = {
    "max_steps": NUM_STEPS,
    "gradient_accumulation_steps": 1,
    "lr_scheduler": "cosine",
    "save_steps": 8,
    "dtype": "bfloat16",
}


def snapshot_of(config: Config) -> Path:
    return config.parent / "snapshot"


def with_snapshot(directory: Path, base: Path, rows: Path, *, every: int = 2, **changes: object) -> Config:
    storage = {"engine": "threads", "snapshot": {"path": str(directory / "snapshot"), "every": every}}
    return write_config(directory, base=base, rows=rows, **{**CHANGES, "storage": storage, **changes})


def committed_step(directory: Path) -> int:
    with (
        open_queue("threads", notice=pytest.fail) as queue,
        Store.open([directory], queue=queue, identity=None) as store,
    ):
        return store.progress.step


def wait_for_snapshot(config: Config, process: ForkServerProcess) -> None:
    deadline = time.monotonic() + 300
    while not Store.exists([snapshot_of(config)]):
        assert process.is_alive() and time.monotonic() < deadline, config.stderr
        time.sleep(0.005)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, base: Path, rows: Path) -> OfEach:
    """Of runs without a snapshot."""
    return run_of_each(tmp_path_factory, base=base, rows=rows, **CHANGES)


@pytest.fixture(scope="module")
def ended_run(tmp_path_factory: pytest.TempPathFactory, base: Path, rows: Path) -> OfEach:
    """Of runs with a snapshot of their last step."""

    @cache
    def ended(what: str) -> Config:
        config = with_snapshot(tmp_path_factory.mktemp("ended"), base, rows, max_steps=4, **TRAINED[what])
        config.succeed()
        return config

    return ended


@pytest.fixture
def copied(ended_run: OfEach, tmp_path: Path, request: pytest.FixtureRequest) -> Config:
    """A run like `ended_run`, which a test may change: a copy that knows nothing of the place it comes from. It trains
    all weights unless the test asks for another one."""
    ended = ended_run(getattr(request, "param", "all weights"))
    shutil.copytree(ended.parent, tmp_path / "copied")
    config = Config(tmp_path / "copied" / "run.yaml")
    for file in (config, config.parent / "out/run/config.yaml", *config.parent.rglob(RECORD_FILE_NAME)):
        file.write_text(file.read_text().replace(str(ended.parent), str(config.parent)))
    return config


@pytest.mark.full
@pytest.mark.parametrize("what", sample(TRAINED, every=4))
def test_a_snapshot_changes_no_bit_and_has_the_last_step_that_was_due(
    tmp_path: Path, base: Path, rows: Path, undisturbed: OfEach, what: str
) -> None:
    config = with_snapshot(tmp_path / "run", base, rows, every=5, **TRAINED[what])
    stderr = config.succeed()
    assert [line for line in stderr.splitlines() if line.startswith("snapshot ") and "every 5 steps" in line]
    assert "warning: " not in stderr
    config.assert_same_result(undisturbed(what))
    assert committed_step(snapshot_of(config)) in range(5, NUM_STEPS, 5)
    with (
        open_queue("threads", notice=pytest.fail) as queue,
        Store.open([config.store.parent], queue=queue, identity=None) as store,
    ):
        assert store.pinned_steps == (24,)


@pytest.mark.full
@pytest.mark.parametrize("what", sample(WHOLE_OR_ADAPTER, every=2))
def test_a_killed_run_whose_store_is_lost(
    tmp_path: Path, base: Path, rows: Path, undisturbed: OfEach, what: str
) -> None:
    """Killed, its drive lost, restored, resumed: the same bytes and losses."""
    config = with_snapshot(tmp_path / "run", base, rows, **TRAINED[what])
    process = config.start()
    wait_for_snapshot(config, process)
    process.kill()
    wait(process)
    shutil.rmtree(config.store.parent)
    assert_rejected(config.finetune(), 2, f"there is a snapshot in {snapshot_of(config)}, but there is no store in")
    ended = works("restore", config)
    step = committed_step(snapshot_of(config))
    assert step % 2 == 0 < step
    assert f"restored step {step} from {snapshot_of(config)} to {config.store.parent}" in ended.stderr
    assert f"resuming from step {step}" in config.succeed()
    config.assert_same_result(undisturbed(what))
    assert committed_step(snapshot_of(config)) == NUM_STEPS


@pytest.mark.parametrize(
    ("kind", "what"),
    rotating(["float32", "in place"], ["all weights", "qlora", "lora"], every=2, full_rotation=True),
)
def test_restoring_to_other_directories_and_kinds_of_stores(
    tmp_path: Path, base: Path, rows: Path, kind: str, what: str
) -> None:
    changes = {**TRAINED[what], **({"dtype": "float32"} if kind == "float32" else {})}
    config = with_snapshot(tmp_path / "run", base, rows, max_steps=6, save_steps=None, **changes)
    config.succeed()
    before = config.export_hash, config.curve
    shutil.rmtree(config.store.parent)
    arguments = [f"storage.paths=[{tmp_path}/a, {tmp_path}/b]"]
    if kind == "in place":
        arguments += ["storage.durability=none", "storage.snapshot=null"]
    works("restore", config, *arguments, "--from", snapshot_of(config))
    assert "all 6 steps are done" in config.succeed(*arguments)
    assert (config.export_hash, config.curve) == before
    assert ratel("restore", config.output, "--from", tmp_path / "none").code == 2


@pytest.mark.full
@pytest.mark.parametrize("copied", sample(WHOLE_OR_ADAPTER, every=2), indirect=True)
def test_a_store_that_is_not_older_is_replaced_only_by_overwrite(copied: Config) -> None:
    before = file_hash(copied.store)
    assert_rejected(ratel("restore", copied), 2, "is at step 4, and the snapshot at step 4")
    assert file_hash(copied.store) == before
    works("restore", copied, "--overwrite")
    works("verify", copied)


@pytest.mark.full
def test_an_older_store_is_replaced(copied: Config, base: Path, rows: Path, tmp_path: Path) -> None:
    older = with_snapshot(tmp_path / "older", base, rows, max_steps=4)
    process = older.start(kill_at="commit.written:3")
    assert wait(process) == -9
    step = committed_step(older.store.parent)
    assert step < 4
    works("restore", older, "--from", snapshot_of(copied))
    assert committed_step(older.store.parent) == 4
    assert "all 4 steps are done" in older.succeed("storage.snapshot=null")
    assert older.export_hash == copied.export_hash


@pytest.mark.full
def test_a_store_of_another_run_or_a_damaged_one_is_not_replaced(copied: Config, make_config: MakeConfig) -> None:
    other = make_config("other", **{**CHANGES, "max_steps": 1, "seed": 7})
    other.succeed()
    shutil.copy(other.store, copied.store)
    before = file_hash(copied.store)
    assert_rejected(ratel("restore", copied), 2, "and the snapshot belong to different runs")
    assert file_hash(copied.store) == before
    copied.store.write_bytes(copied.store.read_bytes()[: 1 << 16])
    assert_rejected(ratel("restore", copied), 2, "cannot be opened", "truncated")
    works("restore", copied, "--overwrite")
    assert committed_step(copied.store.parent) == 4


@pytest.mark.parametrize("copied", thinned(WHOLE_OR_ADAPTER, every=3), indirect=True)
def test_a_damaged_snapshot_replaces_nothing(copied: Config) -> None:
    data = snapshot_of(copied) / "ratel.store"
    content = bytearray(data.read_bytes())
    content[3 * 4096 :] = bytes(byte ^ 1 for byte in content[3 * 4096 :])
    data.write_bytes(content)
    before = file_hash(copied.store)
    assert_rejected(ratel("restore", copied, "--overwrite"), 4, "damaged")
    assert file_hash(copied.store) == before
    copied.store.unlink()
    ended = ratel("restore", copied)
    assert_rejected(ended, 4, f"the snapshot in {snapshot_of(copied)} is damaged")
    assert "hint: name another snapshot with --from DIR, or start over with --resume no" in ended.stderr
    assert not Store.exists([copied.store.parent])


def test_wrong_arguments_are_rejected(copied: Config, undisturbed: OfEach, tied_base: Path, tmp_path: Path) -> None:
    assert_rejected(ratel("restore", undisturbed("all weights")), 2, "`storage.snapshot` is not set")
    assert_rejected(ratel("restore", copied, "--from", tmp_path / "none"), 2, "there is no snapshot in")
    assert_rejected(
        ratel("restore", copied, f"base_model={tied_base}", "--overwrite"), 2, "was made for another model, not for"
    )
    assert_rejected(ratel("restore", copied, "--from", copied.store.parent), 2, "are in the same directory")
    assert_rejected(ratel("restore", tmp_path / "none.yaml"), 2, "no such file")
    assert_rejected(ratel("restore", copied, "storage.snapshot.evry=3"), 2, "unknown key `evry` in `storage.snapshot`")
    assert committed_step(copied.store.parent) == 4


def test_a_snapshot_on_a_read_only_disk(copied: Config, small_disk: Path) -> None:
    shutil.copytree(snapshot_of(copied), small_disk / "s")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    shutil.rmtree(copied.store.parent)
    works("restore", copied, "--from", small_disk / "s")
    assert committed_step(copied.store.parent) == 4


@pytest.mark.full
@pytest.mark.usefixtures("impatient")
def test_a_snapshot_in_use(copied: Config) -> None:
    place = snapshot_of(copied)
    with open_queue("threads", notice=pytest.fail) as queue, Store.open([place], queue=queue, identity=None):
        ended = ratel("restore", copied, "--overwrite")
    assert_rejected(ended, 3, f"the snapshot cannot be used: the store in {place} is in use by process")
    assert "hint: make sure that no other process uses it, and that you may read it\n" in ended.stderr
    assert committed_step(copied.store.parent) == 4


def test_a_disk_that_is_too_small_for_the_store(copied: Config, small_disk: Path) -> None:
    shutil.rmtree(copied.store.parent)
    assert_rejected(
        ratel("restore", copied, f"storage.paths=[{small_disk}/s]"), 3, "needs", "available", str(small_disk)
    )
    assert list(small_disk.iterdir()) == []


@pytest.mark.full
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize(
    ("copied", "call"), rotating(WHOLE_OR_ADAPTER, [8, 1], every=2, full_rotation=True), indirect=["copied"]
)
def test_restoring_again_after_a_signal(copied: Config, signal_at: SignalAt, call: int, number: int, code: int) -> None:
    shutil.rmtree(copied.store.parent)
    signal_at(call, number)
    ended = ratel("restore", copied)
    assert (ended.code, ended.stderr.splitlines()[-1]) == (code, "Stopped. Run the same command again.")
    assert not Store.exists([copied.store.parent])
    signal_at(10**9, number)
    works("restore", copied)
    assert "all 4 steps are done" in copied.succeed()


@pytest.mark.full
@pytest.mark.parametrize("copied", sample(WHOLE_OR_ADAPTER, every=3, offset=2), indirect=True)
def test_starting_over_replaces_the_snapshot(copied: Config) -> None:
    shutil.rmtree(copied.store.parent)
    shutil.rmtree(copied.output)
    ended = copied.finetune("--resume", "no", "learning_rate=0.5")
    assert_rejected(ended, 2, f"{snapshot_of(copied)} holds the store of the run", "which has other settings or data")
    copied.succeed("--resume", "no", "max_steps=2")
    assert committed_step(snapshot_of(copied)) == 2


@pytest.mark.full
@pytest.mark.parametrize("seed", sample([42, 7], every=2), ids=["same settings", "other settings"])
def test_a_snapshot_of_another_run_is_not_overwritten(copied: Config, make_config: MakeConfig, seed: int) -> None:
    """With the same settings too, before it has a store and after, and when it starts over."""
    storage = {"engine": "threads", "snapshot": {"path": str(snapshot_of(copied)), "every": 1}}
    other = make_config("other", **{**CHANGES, "max_steps": 4, "seed": seed, "storage": storage})
    before = file_hash(snapshot_of(copied) / "ratel.store")
    own = f"storage.snapshot.path={other.parent / 'own'}"
    theirs = f"storage.snapshot.path: {snapshot_of(copied)} holds the snapshot of the run out (step 4, made "
    for arguments in ([], ["--dry-run"], ["--resume", "no"]):
        ended = other.finetune(*arguments)
        assert_rejected(ended, 2, theirs)
        assert "hint: set storage.snapshot.path to a directory that only this run uses; or " in ended.stderr
    other.succeed(own)
    for arguments in ([], ["--resume", "no"]):
        assert_rejected(other.finetune(*arguments), 2, theirs)
    assert file_hash(snapshot_of(copied) / "ratel.store") == before
    other.succeed("--resume", "no", "--overwrite-store")
    assert_rejected(copied.finetune("max_steps=5"), 2, "holds the snapshot of the run out")


@pytest.mark.full
def test_a_snapshot_never_replaces_the_store_of_another_run(make_config: MakeConfig, tmp_path: Path) -> None:
    """Nor the file on any of its drives, not even if the user insists."""
    drives = [str(tmp_path / "a"), str(tmp_path / "b")]
    theirs = make_config("theirs", max_steps=1, storage={"engine": "threads", "paths": drives})
    theirs.succeed()
    files = sorted(tmp_path.glob("[ab]/*.store/ratel.store"))
    before = [file_hash(file) for file in files]
    assert len(files) == 2
    for file in files:
        storage = {"engine": "threads", "snapshot": {"path": str(file.parent), "every": 1}}
        other = make_config("other", max_steps=1, storage=storage)
        for arguments in ([], ["--resume", "no"], ["--resume", "no", "--overwrite-store"]):
            ended = other.finetune(*arguments)
            assert_rejected(ended, 2, f"storage.snapshot.path: {file.parent} holds the store of the run out (")
            assert "hint: set storage.snapshot.path to a directory that only this run uses" in ended.stderr
    assert [file_hash(file) for file in files] == before


@pytest.mark.full
def test_a_snapshot_without_a_record_belongs_to_the_run_with_its_settings(
    copied: Config, make_config: MakeConfig
) -> None:
    (snapshot_of(copied) / RECORD_FILE_NAME).unlink()
    storage = {"engine": "threads", "snapshot": {"path": str(snapshot_of(copied)), "every": 1}}
    other = make_config("other", **{**CHANGES, "max_steps": 1, "seed": 7, "storage": storage})
    before = file_hash(snapshot_of(copied) / "ratel.store")
    assert_rejected(other.finetune(), 2, "there is a snapshot in", "but there is no store in")
    other.succeed("storage.snapshot.path=" + str(other.parent / "own"))
    assert_rejected(
        other.finetune(), 2, "storage.snapshot.path: the settings changed since the store in", "config_hash was"
    )
    assert file_hash(snapshot_of(copied) / "ratel.store") == before
    assert "all 4 steps are done" in copied.succeed()


@pytest.mark.full
def test_a_run_that_has_moved_keeps_its_snapshot(copied: Config, tmp_path: Path) -> None:
    (tmp_path / "copied").rename(tmp_path / "moved")
    config = Config(tmp_path / "moved" / "run.yaml")
    config.write_text(config.read_text().replace(str(tmp_path / "copied"), str(tmp_path / "moved")))
    assert "all 4 steps are done" in config.succeed()


def test_a_snapshot_on_a_read_only_device(make_config: MakeConfig, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    storage = {"engine": "threads", "snapshot": {"path": str(small_disk / "s"), "every": 1}}
    config = make_config(storage=storage)
    ended = config.finetune()
    assert_rejected(ended, 3, f"storage.snapshot.path: {small_disk}/s cannot be written: Read-only file system")
    assert "hint: set storage.snapshot.path to" in ended.stderr
    assert not config.store.parent.exists()


@pytest.mark.full
@pytest.mark.parametrize("copied", sample(WHOLE_OR_ADAPTER, every=2), indirect=True)
def test_verify_checks_the_snapshot_too(copied: Config) -> None:
    assert "step 4, snapshot" in works("verify", copied).stdout
    data = snapshot_of(copied) / "ratel.store"
    content = data.read_bytes()
    data.write_bytes(content[: 3 * 4096] + bytes(byte ^ 1 for byte in content[3 * 4096 :]))
    ended = ratel("verify", copied)
    assert (ended.code, ended.errors[0].startswith("error: step 4, snapshot: ")) == (4, True)
    data.write_bytes(content[: 4 * 4096])
    ended = ratel("verify", copied)
    assert (ended.code, ended.errors[0].startswith("error: snapshot: ")) == (4, True)
    assert "truncated" in ended.errors[0]
    shutil.rmtree(snapshot_of(copied))
    ended = ratel("verify", copied)
    assert (ended.code, "there is none in" in ended.stdout) == (0, True)


@pytest.mark.full
def test_a_store_without_a_slot_for_the_snapshot(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(max_steps=2)
    config.succeed()
    arguments = [f"storage.snapshot.path={tmp_path}/snapshot", "storage.snapshot.every=1"]
    assert_rejected(
        config.finetune(*arguments),
        2,
        "the store has space for 0 saved generations, but the config asks for 1, one of them for the snapshot",
    )
    assert not (tmp_path / "snapshot").exists()
