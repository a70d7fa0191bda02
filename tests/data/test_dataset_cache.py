"""The token cache and the fingerprint of the data: when they are used again, and when they are made anew."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from ratel_cli.data.text.rows import DatasetSource
from ratel_cli.errors import BadInput, EnvironmentFailure
from tests.data.conftest import GOOD_ROW, Load, MakeTokenizer, WriteRows, read_rejects, same_batches, write_text_rows


class Counting(PreTrainedTokenizerFast):
    """A tokenizer that counts its texts."""

    num_texts = 0

    def __call__(self, text: list[str], **more: object) -> object:
        type(self).num_texts += len(text)
        return super().__call__(text, **more)


MakeCounting = Callable[[str], Counting]
EOS_TOKEN = "<|endoftext|>"


@pytest.fixture
def counting(make_tokenizer: MakeTokenizer) -> MakeCounting:
    """Makes counting tokenizers. The count starts at 0."""
    Counting.num_texts = 0

    def make(eos_token: str) -> Counting:
        backend = make_tokenizer().backend_tokenizer
        return Counting(tokenizer_object=backend, eos_token=eos_token)  # type: ignore[no-untyped-call]

    return make


def test_the_cache_is_used_again_with_the_same_notices(
    load: Load, tmp_path: Path, counting: MakeCounting, notices: list[str]
) -> None:
    path = write_text_rows(tmp_path / "x.jsonl", 300, ["{}"])
    first = load(path, tokenizer=counting(EOS_TOKEN))
    first_notices, counted = list(notices), Counting.num_texts
    (tmp_path / "run" / "rejects.jsonl").unlink()
    second = load(path, tokenizer=counting(EOS_TOKEN), seed=1, packing=True, shuffle=True, micro_batch_size=2)
    assert Counting.num_texts == counted
    assert notices == first_notices * 2
    assert second.rejected == first.rejected == 1
    assert len(read_rejects(tmp_path)) == 1
    assert second.fingerprint != first.fingerprint
    assert load(path, tokenizer=counting(EOS_TOKEN)).fingerprint == first.fingerprint


def test_another_cache_is_made_when_anything_changes(
    load: Load, tmp_path: Path, write_rows: WriteRows, counting: MakeCounting
) -> None:
    path = write_rows(GOOD_ROW, GOOD_ROW)
    load(path, tokenizer=counting(EOS_TOKEN))
    changes: list[Callable[[], object]] = [
        lambda: load(path, tokenizer=counting(EOS_TOKEN), sequence_len=32),
        lambda: load(path, tokenizer=counting(EOS_TOKEN), train_on_inputs=True),
        lambda: load(path, tokenizer=counting("<|im_end|>")),
        lambda: load(DatasetSource(path=str(path), max_samples=1), tokenizer=counting(EOS_TOKEN)),
        lambda: load(DatasetSource(path=str(path), split="train[:1]"), tokenizer=counting(EOS_TOKEN)),
        lambda: load(path, path, tokenizer=counting(EOS_TOKEN)),
        lambda: load(write_rows(GOOD_ROW, {"text": "other"}), tokenizer=counting(EOS_TOKEN)),
    ]
    for number, change in enumerate(changes, start=2):
        change()
        assert len(list((tmp_path / "cache").iterdir())) == number


def test_the_fingerprint_depends_on_data_and_order_but_not_on_paths(load: Load, write_rows: WriteRows) -> None:
    path, twin = write_rows(GOOD_ROW, GOOD_ROW), write_rows(GOOD_ROW, GOOD_ROW, name="twin.jsonl")
    first = load(path).fingerprint
    assert len(first) == 64
    assert load(twin).fingerprint == first
    others = [
        load(path, seed=1),
        load(path, packing=True),
        load(path, shuffle=True),
        load(path, micro_batch_size=2),
        load(path, gradient_accumulation_steps=2),
        load(path, val_set_size=1),
        load(path, sequence_len=32),
        load(write_rows(GOOD_ROW, {"text": "the quick brown dog"})),
    ]
    assert len({first, *(data.fingerprint for data in others)}) == 9


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def _pickle_lengths(directory: Path) -> None:
    np.save(directory / "lengths.npy", np.array([object()]), allow_pickle=True)


def _old_version(directory: Path) -> None:
    meta = json.loads((directory / "meta.json").read_text())
    (directory / "meta.json").write_text(json.dumps({**meta, "format_version": 0}))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "token flipped": lambda directory: _flip(directory / "tokens.bin"),
    "length flipped": lambda directory: _flip(directory / "lengths.npy"),
    "cut off": lambda directory: os.truncate(directory / "tokens.bin", 8),
    "no meta": lambda directory: (directory / "meta.json").unlink(),
    "meta torn": lambda directory: os.truncate(directory / "meta.json", 9),
    "no rejects": lambda directory: (directory / "rejects.jsonl").unlink(),
    "a pickle": _pickle_lengths,
    "old version": _old_version,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_built_again(
    load: Load, tmp_path: Path, write_rows: WriteRows, notices: list[str], damage: str
) -> None:
    path = write_rows(GOOD_ROW, {"text": "and another"})
    before = load(path)
    steps = [before.step(index) for index in range(2)]
    (directory,) = (tmp_path / "cache").iterdir()
    DAMAGE[damage](directory)
    after = load(path)
    assert sum("the token cache is damaged or of another version; rebuilding it" in text for text in notices) == 1
    assert all(same_batches(steps[index], after.step(index)) for index in range(2))
    assert after.fingerprint == before.fingerprint
    assert [item.name for item in (tmp_path / "cache").iterdir()] == [directory.name]


@pytest.mark.parametrize("damage", ["old version", "no meta", "a cache that was deleted"])
def test_the_user_s_files_in_a_cache_stay(
    load: Load, tmp_path: Path, write_rows: WriteRows, notices: list[str], damage: str
) -> None:
    """The cache is built again among them."""
    path = write_rows(GOOD_ROW)
    before = load(path)
    (directory,) = (tmp_path / "cache").iterdir()
    (directory / "deep").mkdir()
    for name in ("notes.txt", "deep/notes.txt"):
        (directory / name).write_text(f"my {name}")
    own = ("tokens.bin", "lengths.npy", "rejects.jsonl", "meta.json")
    if damage in DAMAGE:
        DAMAGE[damage](directory)
    else:
        for name in own:
            (directory / name).unlink()
    notices.clear()
    for is_built in (True, False):
        after = load(path)
        assert same_batches(before.step(0), after.step(0)) and after.fingerprint == before.fingerprint
        assert any("rebuilding it" in text for text in notices) == (is_built and damage in DAMAGE)
        assert sorted(each.name for each in directory.iterdir()) == sorted((*own, "deep", "notes.txt"))
        assert [(directory / name).read_text() for name in ("notes.txt", "deep/notes.txt")] == [
            "my notes.txt", "my deep/notes.txt",
        ]  # fmt: skip
        assert list((tmp_path / "cache").iterdir()) == [directory]
        notices.clear()


def test_a_cache_that_vanishes_during_the_run(load: Load, tmp_path: Path, write_rows: WriteRows) -> None:
    data = load(write_rows(GOOD_ROW))
    (tokens,) = (tmp_path / "cache").glob("*/tokens.bin")
    os.truncate(tokens, 4)
    with pytest.raises(EnvironmentFailure, match="sample 0 is truncated"):
        data.step(0)
    tokens.unlink()
    with pytest.raises(EnvironmentFailure, match="No such file"):
        data.step(0)


def test_partial_caches_of_killed_runs_are_removed_and_of_running_ones_stay(
    load: Load, tmp_path: Path, write_rows: WriteRows
) -> None:
    path = write_rows(GOOD_ROW)
    load(path)
    (whole,) = (tmp_path / "cache").iterdir()
    (whole / "meta.json").unlink()
    dead, living = (whole.with_name(f"{whole.name}.partial-{pid}") for pid in (2**22 + 1, os.getppid()))
    for partial in (dead, living):
        partial.mkdir()
    load(path)
    assert not dead.exists()
    assert living.exists()


def test_a_file_changed_while_it_is_read(load: Load, tmp_path: Path, write_rows: WriteRows) -> None:
    path = write_rows(GOOD_ROW)

    def meddle(_: str) -> None:
        with path.open("a") as file:
            file.write(json.dumps(GOOD_ROW) + "\n")

    with pytest.raises(BadInput, match="was changed while it was being read"):
        load(path, notice=meddle)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_file_changed_since_the_run_began_has_another_fingerprint(load: Load, write_rows: WriteRows) -> None:
    before = load(write_rows(GOOD_ROW)).fingerprint
    assert load(write_rows(GOOD_ROW, GOOD_ROW)).fingerprint != before
    assert load(write_rows(GOOD_ROW)).fingerprint == before


def test_no_space_for_the_cache(
    load: Load, tmp_path: Path, write_rows: WriteRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EnvironmentFailure, match=r"cannot be written \(no space left\)"):
        load(write_rows(GOOD_ROW))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_directory_that_cannot_be_made(load: Load, tmp_path: Path, write_rows: WriteRows) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(EnvironmentFailure, match="cannot be written"):
        load(write_rows(GOOD_ROW))
