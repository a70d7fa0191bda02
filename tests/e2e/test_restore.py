"""Snapshots on another device, and `ratel restore`: a lost store comes back, and the run ends as it would have."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from ratel_cli.io.queue import open_queue
from ratel_cli.store.store import Store
from tests.e2e.conftest import MakeConfig, SignalAt
from tests.e2e.runs import (
    Ended,
    curve,
    export_hash,
    file_hash,
    finetune,
    output_of,
    ratel,
    save_base,
    start,
    store_of,
    succeed,
    told_by,
    wait,
    write_config,
)
from tests.tiers import sample

NUM_STEPS = 24
CHANGES: dict[str, object] = {
    "max_steps": NUM_STEPS,
    "gradient_accumulation_steps": 1,
    "lr_scheduler": "cosine",
    "save_steps": 8,
    "dtype": "bfloat16",
}


def snapshot_of(config: Path) -> Path:
    return config.parent / "snapshot"


def with_snapshot(directory: Path, base: Path, rows: Path, *, every: int = 2, **changes: object) -> Path:
    storage = {"engine": "threads", "snapshot": {"path": str(directory / "snapshot"), "every": every}}
    return write_config(directory, base=base, rows=rows, **{**CHANGES, "storage": storage, **changes})


def committed_step(directory: Path) -> int:
    with (
        open_queue("threads", notice=pytest.fail) as queue,
        Store.open([directory], queue=queue, identity=None) as store,
    ):
        return store.progress.step


def refused(ended: Ended, code: int, *parts: str) -> None:
    assert ended.code == code, ended.told
    assert "Traceback" not in ended.told
    assert [part for part in parts if part not in ended.errors[0]] == [], ended.errors[0]


def wait_for_snapshot(config: Path, process: ForkServerProcess) -> None:
    deadline = time.monotonic() + 300
    while not Store.exists([snapshot_of(config)]):
        assert process.is_alive() and time.monotonic() < deadline, told_by(config)
        time.sleep(0.005)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, base: Path, rows: Path) -> Path:
    """Without a snapshot."""
    config = write_config(tmp_path_factory.mktemp("undisturbed"), base=base, rows=rows, **CHANGES)
    succeed(config)
    return config


@pytest.fixture(scope="module")
def ended_run(tmp_path_factory: pytest.TempPathFactory, base: Path, rows: Path) -> Path:
    """With one, of its last step. Tests only look at it."""
    config = with_snapshot(tmp_path_factory.mktemp("ended"), base, rows, max_steps=4)
    succeed(config)
    return config


@pytest.fixture
def copied(ended_run: Path, tmp_path: Path) -> Path:
    """A copy of that, to be changed."""
    shutil.copytree(ended_run.parent, tmp_path / "copied")
    config = tmp_path / "copied" / "run.yaml"
    config.write_text(config.read_text().replace(str(ended_run.parent), str(config.parent)))
    return config


def check_as_if_nothing_had_happened(config: Path, undisturbed: Path) -> None:
    assert export_hash(config) == export_hash(undisturbed)
    assert curve(config) == curve(undisturbed)


def test_a_snapshot_changes_no_bit_and_holds_the_last_step_that_was_due(
    tmp_path: Path, base: Path, rows: Path, undisturbed: Path
) -> None:
    config = with_snapshot(tmp_path / "run", base, rows, every=5)
    told = succeed(config)
    assert [line for line in told.splitlines() if line.startswith("snapshot ") and "every 5 steps" in line]
    assert "warning: " not in told
    check_as_if_nothing_had_happened(config, undisturbed)
    assert committed_step(snapshot_of(config)) in range(5, NUM_STEPS, 5)
    with (
        open_queue("threads", notice=pytest.fail) as queue,
        Store.open([store_of(config).parent], queue=queue, identity=None) as store,
    ):
        assert store.pinned_steps == (24,)


def test_a_store_that_is_lost_with_its_run(tmp_path: Path, base: Path, rows: Path, undisturbed: Path) -> None:
    """Killed, its drive lost, brought back, gone on with: the same bytes, the same losses."""
    config = with_snapshot(tmp_path / "run", base, rows)
    process = start(config)
    wait_for_snapshot(config, process)
    process.kill()
    wait(process)
    shutil.rmtree(store_of(config).parent)
    refused(finetune(config), 2, f"there is a snapshot in {snapshot_of(config)}, but no store in")
    ended = ratel("restore", config)
    assert ended.code == 0, ended.told
    step = committed_step(snapshot_of(config))
    assert step % 2 == 0 < step
    assert f"restored step {step} from {snapshot_of(config)} to {store_of(config).parent}" in ended.told
    assert f"resuming at step {step}" in succeed(config)
    check_as_if_nothing_had_happened(config, undisturbed)
    assert committed_step(snapshot_of(config)) == NUM_STEPS


@pytest.mark.parametrize(
    "changes", sample([{"dtype": "float32"}, {"durability": "none"}], every=2), ids=["float32", "in place"]
)
def test_to_other_directories_and_kinds_of_stores(
    tmp_path: Path, base: Path, rows: Path, changes: dict[str, object]
) -> None:
    dtype = {key: value for key, value in changes.items() if key == "dtype"}
    config = with_snapshot(tmp_path / "run", base, rows, max_steps=6, save_steps=None, **dtype)
    succeed(config)
    before = export_hash(config), curve(config)
    shutil.rmtree(store_of(config).parent)
    arguments = [f"storage.paths=[{tmp_path}/a, {tmp_path}/b]"]
    if "durability" in changes:
        arguments += ["storage.durability=none", "storage.snapshot=null"]
    ended = ratel("restore", config, *arguments, "--from", snapshot_of(config))
    assert ended.code == 0, ended.told
    assert "all 6 steps are done" in succeed(config, *arguments)
    assert (export_hash(config), curve(config)) == before
    assert ratel("restore", output_of(config), "--from", tmp_path / "none").code == 2


def test_a_store_that_is_as_new_is_kept_unless_that_is_wanted(copied: Path) -> None:
    before = file_hash(store_of(copied))
    refused(ratel("restore", copied), 2, "is at step 4, and the snapshot at step 4")
    assert file_hash(store_of(copied)) == before
    ended = ratel("restore", copied, "--overwrite")
    assert ended.code == 0, ended.told
    assert ratel("verify", copied).code == 0


def test_a_store_that_is_older_is_replaced(copied: Path, base: Path, rows: Path, tmp_path: Path) -> None:
    older = with_snapshot(tmp_path / "older", base, rows, max_steps=4)
    process = start(older, kill_at="commit.written:3")
    assert wait(process) == -9
    step = committed_step(store_of(older).parent)
    assert step < 4
    ended = ratel("restore", older, "--from", snapshot_of(copied))
    assert ended.code == 0, ended.told
    assert committed_step(store_of(older).parent) == 4
    assert "all 4 steps are done" in succeed(older, "storage.snapshot=null")
    assert export_hash(older) == export_hash(copied)


def test_a_store_of_another_run_or_that_is_damaged_is_kept(copied: Path, make_config: MakeConfig) -> None:
    other = make_config("other", **{**CHANGES, "max_steps": 1, "seed": 7})
    succeed(other)
    shutil.copy(store_of(other), store_of(copied))
    before = file_hash(store_of(copied))
    refused(ratel("restore", copied), 2, "belongs to another run than the snapshot")
    assert file_hash(store_of(copied)) == before
    store_of(copied).write_bytes(store_of(copied).read_bytes()[: 1 << 16])
    refused(ratel("restore", copied), 2, "cannot be opened", "truncated")
    assert ratel("restore", copied, "--overwrite").code == 0
    assert committed_step(store_of(copied).parent) == 4


def test_a_damaged_snapshot_replaces_nothing(copied: Path) -> None:
    data = snapshot_of(copied) / "ratel.store"
    content = bytearray(data.read_bytes())
    content[3 * 4096 :] = bytes(byte ^ 1 for byte in content[3 * 4096 :])
    data.write_bytes(content)
    before = file_hash(store_of(copied))
    refused(ratel("restore", copied, "--overwrite"), 4, "damaged")
    assert file_hash(store_of(copied)) == before
    store_of(copied).unlink()
    refused(ratel("restore", copied), 4, "damaged")
    assert not Store.exists([store_of(copied).parent])


def test_what_cannot_be_restored_from(copied: Path, undisturbed: Path, tied_base: Path, tmp_path: Path) -> None:
    refused(ratel("restore", undisturbed), 2, "`storage.snapshot` is not set")
    refused(ratel("restore", copied, "--from", tmp_path / "none"), 2, "there is no snapshot in")
    refused(ratel("restore", copied, f"base_model={tied_base}", "--overwrite"), 2, "was made for another model than")
    refused(ratel("restore", copied, "--from", store_of(copied).parent), 2, "are in the same directory")
    refused(ratel("restore", tmp_path / "none.yaml"), 2, "no such file")
    refused(ratel("restore", copied, "storage.snapshot.evry=3"), 2, "unknown key `evry` in `storage.snapshot`")
    assert committed_step(store_of(copied).parent) == 4


def test_a_snapshot_in_use_or_on_a_disk_that_may_not_be_written(copied: Path, small_disk: Path, tmp_path: Path) -> None:
    shutil.copytree(snapshot_of(copied), small_disk / "s")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    ended = ratel("restore", copied, "--overwrite", "--from", small_disk / "s")
    refused(ended, 3, "the snapshot cannot be used", "cannot be opened for writing")
    assert committed_step(store_of(copied).parent) == 4


def test_a_disk_without_room_for_it(copied: Path, small_disk: Path) -> None:
    shutil.rmtree(store_of(copied).parent)
    refused(ratel("restore", copied, f"storage.paths=[{small_disk}/s]"), 3, "need", "have", str(small_disk))
    assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("call", sample([1, 8], every=2, offset=1))
def test_a_signal_and_once_more(copied: Path, signal_at: SignalAt, call: int, number: int, code: int) -> None:
    shutil.rmtree(store_of(copied).parent)
    signal_at(call, number)
    ended = ratel("restore", copied)
    assert (ended.code, ended.told.splitlines()[-1]) == (code, "Stopped. Run the same command again.")
    assert not Store.exists([store_of(copied).parent])
    signal_at(10**9, number)
    assert ratel("restore", copied).code == 0
    assert "all 4 steps are done" in succeed(copied)


def test_starting_over_replaces_the_snapshot(copied: Path) -> None:
    shutil.rmtree(store_of(copied).parent)
    succeed(copied, "--resume", "no", "max_steps=2")
    assert committed_step(snapshot_of(copied)) == 2


def test_a_snapshot_of_another_run_is_not_written_over(copied: Path, make_config: MakeConfig) -> None:
    storage = {"engine": "threads", "snapshot": {"path": str(snapshot_of(copied)), "every": 1}}
    other = make_config("other", **{**CHANGES, "max_steps": 1, "seed": 7, "storage": storage})
    before = file_hash(snapshot_of(copied) / "ratel.store")
    refused(finetune(other), 2, "there is a snapshot in", "but no store in")
    succeed(other, "storage.snapshot.path=" + str(other.parent / "own"))
    refused(finetune(other), 2, "storage.snapshot.path: the settings changed since the store in", "config_hash was")
    assert file_hash(snapshot_of(copied) / "ratel.store") == before


def test_where_a_snapshot_cannot_go(make_config: MakeConfig, tmp_path: Path, small_disk: Path) -> None:
    wide = save_base(tmp_path / "wide", hidden_size=64)
    same = make_config("same", base=wide, storage={"snapshot": {"path": "x", "every": 1}, "engine": "threads"})
    refused(
        finetune(same, f"storage.snapshot.path={store_of(same).parent}"), 2, "its loss would take store and snapshot"
    )
    ended = finetune(same, f"storage.snapshot.path={small_disk}/s")
    refused(ended, 3, "not enough space for the snapshot: it needs", f"in {small_disk}/s, ")
    assert not store_of(same).parent.exists()
    assert list(small_disk.iterdir()) == []


def test_a_device_that_may_not_be_written(make_config: MakeConfig, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    storage = {"engine": "threads", "snapshot": {"path": str(small_disk / "s"), "every": 1}}
    config = make_config(storage=storage)
    ended = finetune(config)
    refused(ended, 3, f"storage.snapshot.path: {small_disk}/s: cannot be created")
    assert "hint: set storage.snapshot.path to" in ended.told
    assert not store_of(config).parent.exists()


def test_verify_looks_at_the_snapshot_too(copied: Path) -> None:
    ended = ratel("verify", copied)
    assert ended.code == 0, ended.out
    assert "step 4, snapshot" in ended.out
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
    assert (ended.code, "there is none in" in ended.out) == (0, True)


def test_a_store_without_a_slot_for_it(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(max_steps=2)
    succeed(config)
    arguments = [f"storage.snapshot.path={tmp_path}/snapshot", "storage.snapshot.every=1"]
    refused(
        finetune(config, *arguments),
        2,
        "the store has space for 0 saved generations, the config asks for 1, one of them for the snapshot",
    )
    assert not (tmp_path / "snapshot").exists()
