"""Tokens that commands share: what is found again, what is left alone, and that nothing depends on them."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import pytest

from ratel_cli.data.batches.dataset import TrainingData
from ratel_cli.data.sources import load_tokens
from ratel_cli.data.text import shared_tokens
from ratel_cli.data.text.shared_tokens import SharedTokens
from tests.data.conftest import CHATML, GOOD_ROW, Load, MakeTokenizer, WriteRows, read_rejects, same_batches
from tests.data.test_dataset_cache import DAMAGE, EOS_TOKEN, Counting, MakeCounting, counting

__all__ = ["counting"]

Command = Callable[..., TrainingData]


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """The shared directory, which is not there yet."""
    return tmp_path / "user" / "tokens"


@pytest.fixture
def command(load: Load, tmp_path: Path, shared: Path, notices: list[str], counting: MakeCounting) -> Command:
    """Loads data as one command does: with a directory of its own, and the shared one."""
    numbers = iter(range(100))

    def run(path: Path, *, copies: bool = False, **changes: object) -> TrainingData:
        Counting.num_texts = 0
        with SharedTokens(shared, copies=copies, notice=notices.append) as opened:
            own = tmp_path / f"own-{next(numbers)}"
            return load(path, **{"tokenizer": counting(EOS_TOKEN), "cache_dir": own, "shared": opened, **changes})

    return run


def _entries(shared: Path) -> list[str]:
    return sorted(path.name for path in shared.iterdir())


def test_the_second_command_tokenises_nothing(
    command: Command, write_rows: WriteRows, tmp_path: Path, shared: Path, notices: list[str]
) -> None:
    path = write_rows(*[GOOD_ROW] * 300, {})
    first = command(path)
    told, rejects = list(notices), read_rejects(tmp_path)
    assert Counting.num_texts > 300 and len(rejects) == 1
    (tmp_path / "run" / "rejects.jsonl").unlink()
    for number, copies in ((1, False), (2, True), (3, True)):
        notices.clear()
        again = command(path, copies=copies)
        assert Counting.num_texts == 0 and notices == told and read_rejects(tmp_path) == rejects
        assert again.fingerprint == first.fingerprint and same_batches(again.step(0), first.step(0))
        assert (tmp_path / f"own-{number}").exists() == copies
    shutil.rmtree(shared)
    assert same_batches(again.step(1), first.step(1)), "a run keeps what it resumes with"
    (own,) = (tmp_path / "own-3").iterdir()
    assert command(path, copies=True, cache_dir=own.parent).fingerprint == first.fingerprint
    assert Counting.num_texts == 0 and not shared.exists()


def test_nobody_else_reads_the_entries(command: Command, write_rows: WriteRows, shared: Path) -> None:
    command(write_rows(GOOD_ROW))
    (entry,) = shared.iterdir()
    assert [path.stat().st_mode & 0o777 for path in (shared, entry, *entry.iterdir())] == [0o700] * 2 + [0o600] * 4


def test_other_data_settings_code_and_days_have_other_entries(
    command: Command,
    write_rows: WriteRows,
    shared: Path,
    make_tokenizer: MakeTokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dated = make_tokenizer(chat_template=CHATML + "{% set day = strftime_now('%d') %}")
    changes: list[Callable[[], object]] = [
        lambda: command(write_rows(GOOD_ROW)),
        lambda: command(write_rows({"text": "other"})),
        lambda: command(write_rows(GOOD_ROW), sequence_len=32),
        lambda: command(write_rows(GOOD_ROW), train_on_inputs=True),
        lambda: command(write_rows(GOOD_ROW), tokenizer=make_tokenizer(chat_template=None)),
        lambda: command(write_rows(GOOD_ROW), tokenizer=dated),
        lambda: (
            monkeypatch.setattr(load_tokens, "datetime", _Tomorrow) or command(write_rows(GOOD_ROW), tokenizer=dated)
        ),
        lambda: monkeypatch.setattr(shared_tokens, "_made_by", lambda: ("x",)) or command(write_rows(GOOD_ROW)),
    ]
    for number, change in enumerate(changes, start=1):
        for _ in range(2):
            change()
            assert len(_entries(shared)) == number


class _Tomorrow(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.now(tz) + timedelta(days=1)


def test_a_stream_is_not_shared(command: Command, write_rows: WriteRows, shared: Path) -> None:
    command(write_rows(*[GOOD_ROW] * 9), stream_steps=2, window_samples=4)
    assert not shared.exists()


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_neither_used_nor_removed(
    command: Command, write_rows: WriteRows, shared: Path, notices: list[str], damage: str
) -> None:
    path = write_rows(GOOD_ROW, {"text": "and another"})
    before = command(path)
    (entry,) = shared.iterdir()
    DAMAGE[damage](entry)
    content = {each.name: each.read_bytes() for each in entry.iterdir()}
    steps = [command(path, copies=copies).step(0) for copies in (False, True)]
    assert Counting.num_texts > 0
    assert f"{entry}: the shared tokens are damaged, and not used; delete this directory" in notices
    assert {each.name: each.read_bytes() for each in entry.iterdir()} == content
    assert command(path).fingerprint == before.fingerprint and same_batches(*steps)


def _replace_by_link(entry: Path) -> None:
    entry.rename(entry.parent.parent / "elsewhere")
    entry.symlink_to(entry.parent.parent / "elsewhere")


@pytest.mark.parametrize("what", ["link", "writable", "writable above", "locked", "file"])
def test_an_entry_that_others_can_change_or_hold_is_not_used(
    command: Command, write_rows: WriteRows, shared: Path, notices: list[str], what: str
) -> None:
    path = write_rows(GOOD_ROW)
    command(path)
    (entry,) = shared.iterdir()
    notices.clear()
    fd = os.open(entry, os.O_RDONLY)
    try:
        match what:
            case "link":
                _replace_by_link(entry)
            case "file":
                shutil.rmtree(entry)
                entry.write_text("mine")
            case "locked":
                fcntl.flock(fd, fcntl.LOCK_EX)
            case _:
                (entry if what == "writable" else shared).chmod(0o777)
        command(path)
        assert Counting.num_texts > 0 and not any("damaged" in text for text in notices)
        assert _entries(shared) == [entry.name]
    finally:
        os.close(fd)


def _fill(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("what", ["a file above", "full", "no space free", "too large", "another was faster"])
def test_without_space_or_permission_commands_tokenise_quietly(
    command: Command,
    write_rows: WriteRows,
    shared: Path,
    notices: list[str],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    path = write_rows(GOOD_ROW)
    match what:
        case "a file above":
            shared.parent.write_text("mine")
        case "full":
            monkeypatch.setattr(shutil, "copyfile", _fill)
        case "no space free":
            monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((4096, 4096, 9, 0, 0, 9, 9, 9, 0, 255)))
        case "too large":
            monkeypatch.setattr(shared_tokens, "_MOST_BYTES", 100)
        case _:
            command(path)
            monkeypatch.setattr(os.path, "lexists", lambda path: False)
            monkeypatch.setattr(SharedTokens, "find", lambda *arguments, **options: None)
    before = sorted(shared.rglob("*")) if shared.exists() else []
    notices.clear()
    for _ in range(2):
        assert command(path).num_samples == 1
        assert Counting.num_texts > 0
    assert len(notices) == 2, "each says of which type the rows are"
    assert (sorted(shared.rglob("*")) if shared.exists() else []) == before


def test_what_a_command_did_not_remove_whole_is_removed_by_the_next(
    command: Command, write_rows: WriteRows, shared: Path, monkeypatch: pytest.MonkeyPatch, notices: list[str]
) -> None:
    paths = [write_rows({"text": f"number {number}"}, name=f"{number}.jsonl") for number in range(3)]
    command(paths[0])
    (entry,) = shared.iterdir()
    size = sum(path.stat().st_size for path in entry.iterdir())
    monkeypatch.setattr(shared_tokens, "_MOST_BYTES", size + size // 2)
    with monkeypatch.context() as full:
        full.setattr(Path, "rmdir", _fill)
        command(paths[1])
        assert _entries(shared) == [f"{entry.name}.partial-{os.getpid()}"], "no entry any more, and none for the new"
    for path in paths[:2]:
        command(path)
        assert Counting.num_texts > 0 and len(_entries(shared)) == 1 and "." not in _entries(shared)[0]
    command(paths[1])
    assert Counting.num_texts == 0 and not any("damaged" in text for text in notices)


def test_the_entry_that_was_unused_for_longest_goes(
    command: Command, write_rows: WriteRows, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those that a command reads, nor what is not ours."""
    names, paths = [], []
    for number in range(4):
        paths.append(write_rows({"text": f"number {number}"}, name=f"{number}.jsonl"))
        command(paths[-1])
        (new,) = set(_entries(shared)) - set(names)
        names.append(new)
        os.utime(shared / new / "meta.json", (number, number))
    size = sum(path.stat().st_size for path in (shared / names[0]).iterdir())
    monkeypatch.setattr(shared_tokens, "_MOST_BYTES", 4 * size + size // 2)
    (shared / names[1] / "notes.txt").write_text("mine: it is not counted, and stays")
    (shared / "notes").mkdir()
    killed, working = (shared / f"{'0' * 32}.partial-{number}" for number in (1, 2))
    killed.mkdir(mode=0o700)
    working.mkdir(mode=0o700)
    (killed / "tokens.bin").write_bytes(b"x")
    command(paths[0])  # now it was used last
    with closing(SharedTokens(shared, copies=False, notice=print)) as reading:
        monkeypatch.setattr(SharedTokens, "_path", lambda self, key: self._directory / names[2])
        assert reading.find("any", shared) is not None
        monkeypatch.undo()
        monkeypatch.setattr(shared_tokens, "_MOST_BYTES", 3 * size + size // 2)
        fd = os.open(working, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        command(write_rows({"text": "number x"}, name="new.jsonl"))
        os.close(fd)
    left = set(_entries(shared))
    assert left >= {names[0], names[1], names[2], "notes", working.name}
    assert names[3] not in left and killed.name not in left and len(left) == 6
