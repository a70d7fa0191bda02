"""The lock: one holder at a time, within a process and across processes, and a message that names the holder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ratel_cli.errors import BadInput, EnvironmentFailure
from ratel_cli.store.lock import DATA_FILE_NAME, OWNER_FILE_NAME, StoreLock, find_use

HOLD = """
import sys
from pathlib import Path
from ratel_cli.store.lock import StoreLock
with StoreLock([Path(path) for path in sys.argv[1:]], create=True, wait_seconds=0):
    print("held", flush=True)
    sys.stdin.read(1)
"""


@pytest.fixture
def directories(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "b", tmp_path / "a"]
    for directory in made:
        directory.mkdir()
        (directory / DATA_FILE_NAME).write_bytes(b"data")
    return made


def hold_in_another_process(directories: list[Path]) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, *map(str, directories)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def test_files_are_in_the_order_of_the_directories(directories: list[Path]) -> None:
    with StoreLock(directories, create=False, wait_seconds=0) as lock:
        assert [path.parent for path in lock.paths] == directories
        for fd, path in zip(lock.fds, lock.paths, strict=True):
            assert os.fstat(fd).st_ino == path.stat().st_ino


@pytest.mark.parametrize("shared", [0, 1])
def test_a_second_holder_gets_the_name_of_the_first(directories: list[Path], shared: int) -> None:
    with hold_in_another_process(directories) as child:
        owner = json.loads((directories[0] / OWNER_FILE_NAME).read_text())
        assert owner["pid"] == child.pid
        with pytest.raises(EnvironmentFailure) as raised:
            StoreLock([directories[shared]], create=False, wait_seconds=0.05)
        assert f"process {child.pid}" in raised.value.message
        assert owner["started"] in raised.value.message
        child.communicate("x")
    StoreLock(directories, create=False, wait_seconds=0).close()


def test_readers_share_it(directories: list[Path]) -> None:
    """With each other, and with none who may change the store."""
    with (
        StoreLock(directories, create=False, wait_seconds=0, shared=True),
        StoreLock(directories[::-1], create=False, wait_seconds=0, shared=True),
    ):
        assert find_use(directories[0]).is_locked
        with pytest.raises(EnvironmentFailure, match="in use"):
            StoreLock(directories, create=False, wait_seconds=0)
    with (
        StoreLock(directories, create=False, wait_seconds=0),
        pytest.raises(EnvironmentFailure, match="in use"),
    ):
        StoreLock(directories, create=False, wait_seconds=0, shared=True)


def test_it_waits_until_the_holder_ends(directories: list[Path]) -> None:
    first = StoreLock(directories, create=False, wait_seconds=0)
    timer = threading.Timer(0.2, first.close)
    began = time.monotonic()
    timer.start()
    StoreLock(list(reversed(directories)), create=False, wait_seconds=120).close()
    assert 0.15 < time.monotonic() - began < 60
    timer.join()


def test_a_killed_process_holds_no_lock(directories: list[Path]) -> None:
    with hold_in_another_process(directories) as child:
        child.kill()
    with StoreLock(directories, create=False, wait_seconds=10):
        owner = json.loads((directories[1] / OWNER_FILE_NAME).read_text())
        assert owner["pid"] == os.getpid()


def test_an_unreadable_owner_file_is_ignored(directories: list[Path]) -> None:
    with StoreLock(directories, create=False, wait_seconds=0):
        (directories[0] / OWNER_FILE_NAME).write_text("[]")
        with pytest.raises(EnvironmentFailure, match="in use by another process"):
            StoreLock(directories[:1], create=False, wait_seconds=0)


def test_closing_removes_the_owner_file_and_may_be_repeated(directories: list[Path]) -> None:
    lock = StoreLock(directories, create=True, wait_seconds=0)
    lock.close()
    lock.close()
    assert [path.name for path in directories[0].iterdir()] == [DATA_FILE_NAME]


def test_empty_files_that_it_made_are_removed(tmp_path: Path) -> None:
    with StoreLock([tmp_path], create=True, wait_seconds=0) as lock:
        assert lock.paths[0].exists()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_removed_while_waiting_is_made_again(tmp_path: Path) -> None:
    first = StoreLock([tmp_path], create=True, wait_seconds=0)
    timer = threading.Timer(0.1, first.close)  # removes the empty file that the second one waits for
    timer.start()
    with StoreLock([tmp_path], create=True, wait_seconds=10) as second:
        assert os.fstat(second.fds[0]).st_ino == second.paths[0].stat().st_ino
    timer.join()


def test_a_missing_file_is_an_error_and_leaves_nothing_locked(directories: list[Path]) -> None:
    (directories[1] / DATA_FILE_NAME).unlink()
    with pytest.raises(BadInput, match=f"there is no store in {directories[1]}"):
        StoreLock(directories, create=False, wait_seconds=0)
    StoreLock(directories[:1], create=False, wait_seconds=0).close()


def test_only_regular_files_are_locked(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / DATA_FILE_NAME)
    with pytest.raises(EnvironmentFailure, match="not a regular file"):
        StoreLock([tmp_path], create=False, wait_seconds=0)


def test_a_directory_in_place_of_the_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / DATA_FILE_NAME).mkdir()
    with pytest.raises(EnvironmentFailure, match="Is a directory"):
        StoreLock([tmp_path], create=True, wait_seconds=0)
