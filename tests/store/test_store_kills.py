"""SIGKILL at every failpoint, and at random times: the store continues from a whole step."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratel_cli.errors import BadInput, IntegrityFailure
from ratel_cli.io.queue import IoQueue, open_queue
from ratel_cli.store.barrier import FAILPOINT_VARIABLE, FAILPOINTS, failpoint
from ratel_cli.store.store import Store
from tests.store.stores import check_generation, create_store, import_all, open_store, run_step

REPOSITORY = Path(__file__).parents[2]
NO_STORE = -1


@pytest.fixture
def queue() -> Iterator[IoQueue]:
    with open_queue("threads", notice=pytest.fail, depth=2) as opened:
        yield opened


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return [tmp_path / "a", tmp_path / "b"]


def start(tmp_path: Path, work: str, paths: list[Path], kill_at: str | None = None) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)} | ({FAILPOINT_VARIABLE: kill_at} if kill_at else {})
    command = [sys.executable, str(REPOSITORY / "tests/store/store_child.py"), str(tmp_path / "acknowledged"), work]
    return subprocess.Popen([*command, *map(str, paths)], env=environment)


def run_until_killed(tmp_path: Path, work: str, paths: list[Path], kill_at: str) -> None:
    with start(tmp_path, work, paths, kill_at) as child:
        assert child.wait(300) == -signal.SIGKILL


def acknowledged_step(tmp_path: Path) -> int:
    path = tmp_path / "acknowledged"
    return int(path.read_text() or NO_STORE) if path.exists() else NO_STORE


def check_continues(paths: list[Path], queue: IoQueue, step: int) -> None:
    """The store is whole at `step`, and the next step works. Or there is no store, and one can be made."""
    assert Store.exists(paths) == (step != NO_STORE)
    with import_all(create_store(paths, queue)) if step == NO_STORE else open_store(paths, queue) as store:
        if step != NO_STORE:
            check_generation(store, step)
        run_step(store)
        check_generation(store, store.progress.step)


# The import is commit 1 and publishes manifest 1. Step t is commit t + 1 and publishes manifest t + 1.
KILLS = [
    ("create.reserved:1", NO_STORE),
    ("create.erased:1", NO_STORE),
    ("create.identified:1", NO_STORE),
    ("create.filled:1", NO_STORE),
    ("commit.written:1", NO_STORE),
    ("commit.synced:1", NO_STORE),
    ("manifest.ready:1", NO_STORE),
    ("manifest.published:1", 0),
    ("commit.published:1", 0),
    ("commit.written:3", 1),
    ("commit.synced:3", 1),
    ("manifest.ready:3", 1),
    ("manifest.published:3", 2),
    ("commit.published:3", 2),
]


def test_every_failpoint_is_tested() -> None:
    assert {kill_at.split(":")[0] for kill_at, _ in KILLS} == set(FAILPOINTS)


@pytest.mark.full
@pytest.mark.parametrize(("kill_at", "step"), KILLS)
def test_killed_at_a_failpoint(tmp_path: Path, paths: list[Path], queue: IoQueue, kill_at: str, step: int) -> None:
    run_until_killed(tmp_path, "steps", paths, kill_at)
    check_continues(paths, queue, step)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kill_at", "step"),
    [("create.reserved:1", 1), ("create.erased:1", NO_STORE), ("create.filled:1", NO_STORE), ("commit.published:1", 0)],
)
def test_killed_while_replacing_a_store(
    tmp_path: Path, paths: list[Path], queue: IoQueue, kill_at: str, step: int
) -> None:
    with import_all(create_store(paths, queue)) as store:
        run_step(store)
    run_until_killed(tmp_path, "overwrite", paths, kill_at)
    check_continues(paths, queue, step)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kill_at", "step", "pinned"),
    [
        ("manifest.ready:3", 1, ()),  # import, step 1, pin
        ("manifest.published:3", 1, (1,)),
        ("manifest.published:5", 2, ()),  # step 2, unpin, pin
        ("manifest.published:6", 2, (2,)),
    ],
)
def test_killed_while_pinning(
    tmp_path: Path, paths: list[Path], queue: IoQueue, kill_at: str, step: int, pinned: tuple[int, ...]
) -> None:
    run_until_killed(tmp_path, "pins", paths, kill_at)
    with open_store(paths, queue) as store:
        assert store.pinned_steps == pinned
    check_continues(paths, queue, step)


@pytest.mark.parametrize(
    ("kill_at", "step"), [("manifest.ready:2", 0), ("commit.synced:3", None), ("manifest.published:3", 1)]
)
def test_killed_in_place(tmp_path: Path, paths: list[Path], queue: IoQueue, kill_at: str, step: int | None) -> None:
    run_until_killed(tmp_path, "in_place", paths, kill_at)
    if step is not None:
        check_continues(paths, queue, step)
        return
    with pytest.raises(IntegrityFailure, match="step 2 was being written in place"):
        open_store(paths, queue)
    with pytest.raises(BadInput):
        create_store(paths, queue)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_time(tmp_path: Path, paths: list[Path], queue: IoQueue, seed: int) -> None:
    """The store is at the step that was acknowledged last, or at the one after it."""
    delays = random.Random(seed)
    for _ in range(2):
        before = acknowledged_step(tmp_path)
        with start(tmp_path, "endless", paths) as child:
            give_up = time.monotonic() + 300
            while acknowledged_step(tmp_path) == before and time.monotonic() < give_up:
                time.sleep(0.005)
            time.sleep(delays.uniform(0, 0.1))
            child.kill()
        last = acknowledged_step(tmp_path)
        with open_store(paths, queue, lock_wait_seconds=10) as store:
            step = store.progress.step
            assert step in (last, last + 1) or last == NO_STORE  # NO_STORE: killed while it wrote the acknowledgement
            check_generation(store, step)


def test_other_failpoints_and_counts_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FAILPOINT_VARIABLE, raising=False)
    failpoint("commit.synced")
    monkeypatch.setenv(FAILPOINT_VARIABLE, "commit.synced:3")
    failpoint("commit.written")
    failpoint("commit.synced")
    assert os.environ[FAILPOINT_VARIABLE] == "commit.synced:2"


@pytest.mark.parametrize("value", ["", "commit.synced", "commit.synced:x", ":1"])
def test_a_mistyped_failpoint_is_bad_input(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(FAILPOINT_VARIABLE, value)
    with pytest.raises(BadInput, match="expected point:n"):
        failpoint("commit.synced")
