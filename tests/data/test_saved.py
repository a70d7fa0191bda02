"""Directories that `save_to_disk` of `datasets` wrote: what `load_from_disk` has of them is the oracle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

import datasets  # type: ignore[import-untyped]
import pytest

from ratel_cli.data.text.rows import DatasetSource, Row, open_source
from ratel_cli.errors import BadInput
from tests.data.conftest import Load

ROWS = [{"text": f"t{number}", "n": number, "parts": [{"a": "x"}, {"b": number}]} for number in range(150)]


def _saved(root: Path, rows: list[dict[str, object]], *, num_shards: int = 1) -> Path:
    names = ("text", "n", "parts")
    columns = {name: [each[name] for each in rows] for name in names}
    datasets.Dataset.from_dict(columns).save_to_disk(root, num_shards=num_shards)
    return root


def _read(path: Path, **keys: object) -> list[dict[str, object]]:
    source = open_source(DatasetSource(path=str(path), **keys), notice=_no_notice)
    rows = list(source.read())
    assert all(isinstance(each, Row) for each in rows)
    return [each.record for each in cast(list[Row], rows)]


def _no_notice(text: str) -> None:
    raise AssertionError(text)


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("num_shards", [1, 3])
def test_the_rows_are_those_of_load_from_disk(tmp_path: Path, num_shards: int) -> None:
    """In the order of its shards, which their names need not have; other files beside them are not read."""
    root = _saved(tmp_path / "rows", ROWS, num_shards=num_shards)
    state = json.loads((root / "state.json").read_text())
    state["_data_files"].reverse()
    (root / "state.json").write_text(json.dumps(state))
    (root / "cache-0.arrow").write_bytes(b"not read")
    assert _read(root) == [_without_nulls(each) for each in datasets.load_from_disk(str(root))]


def test_a_split_of_several_is_chosen(tmp_path: Path) -> None:
    splits = {"train": ROWS[:5], "test": ROWS[5:7]}
    made = datasets.DatasetDict({
        name: datasets.Dataset.from_list([{"text": each["text"]} for each in rows]) for name, rows in splits.items()
    })  # fmt: skip
    made.save_to_disk(tmp_path)
    for name in splits:
        assert _read(tmp_path, split=name) == list(datasets.load_from_disk(str(tmp_path))[name])
    assert _read(tmp_path, split="train[1:3]") == [{"text": "t1"}, {"text": "t2"}]


def test_files_of_arrow_are_read_by_name(tmp_path: Path) -> None:
    root = _saved(tmp_path / "rows", ROWS[:2])
    assert [each["n"] for each in _read(root / "data-00000-of-00001.arrow")] == [0, 1]


def test_no_rows(tmp_path: Path) -> None:
    assert _read(_saved(tmp_path / "rows", [])) == []


def _set(name: str, value: object) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        state = json.loads((root / "state.json").read_text())
        (root / "state.json").write_text(json.dumps({**state, name: value}))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: (root / "state.json").write_text("{"), r"state\.json: cannot be read"),
        (lambda root: (root / "state.json").write_text("[" * 100_000), r"state\.json: cannot be read"),
        (_set("_data_files", None), r"state\.json: cannot be read"),
        (_set("_data_files", [{"filename": "../data.arrow"}]), "it names files elsewhere"),
        (lambda root: (root / "dataset_dict.json").write_text('{"splits": ["train"]}'), r"train/state\.json: cannot"),
        (lambda root: (root / "dataset_dict.json").write_text('{"splits": []}'), "there is no split 'train'"),
    ],
    ids=["not JSON", "deep", "no files", "elsewhere", "missing", "no splits"],
)
def test_a_damaged_description(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    root = _saved(tmp_path / "rows", ROWS[:2])
    damage(root)
    with pytest.raises(BadInput, match=message):
        _read(root)


def test_a_split_that_a_single_dataset_has_not(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no split 'test'; it has: train"):
        _read(_saved(tmp_path / "rows", ROWS[:2]), split="test")


def test_damaged_rows_cost_no_process(tmp_path: Path) -> None:
    """The end of a text lies beyond the file; without a check, memory of others would be read."""
    root = _saved(tmp_path / "rows", ROWS[:40])
    file = root / "data-00000-of-00001.arrow"
    whole = file.read_bytes()
    ends = b"".join(sum(len(f"t{each}") for each in range(number)).to_bytes(4, "little") for number in range(41))
    assert whole.count(ends) == 1
    place = whole.index(ends) + 4 * 40
    file.write_bytes(whole[:place] + b"\xff\xff\xff\x7f" + whole[place + 4 :])
    for content in (file.read_bytes(), b"", whole[:100], whole[: len(whole) // 2], whole[:-8] + b"\xff" * 8):
        file.write_bytes(content)
        with pytest.raises(BadInput, match=r"\.arrow: not a usable Arrow file"):
            _read(root)


def test_other_rows_are_other_tokens(load: Load, tmp_path: Path) -> None:
    root = _saved(tmp_path / "rows", ROWS[:20])
    caches = [load(DatasetSource(path=str(root), type="completion")).cache]
    for path in sorted(root.iterdir()):
        path.unlink()
    _saved(root, ROWS[1:21])
    caches.append(load(DatasetSource(path=str(root), type="completion")).cache)
    assert caches[0].directory != caches[1].directory
