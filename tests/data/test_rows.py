"""Finding the files of a source, and reading parquet and hub datasets."""

from __future__ import annotations

import json
import os
from pathlib import Path

import datasets  # type: ignore[import-untyped]
import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
import pytest

from ratel_cli.data.files.lines import Reject, Row
from ratel_cli.data.text.rows import DatasetSource, is_hub_id, open_source
from ratel_cli.errors import BadInput, EnvironmentFailure


def _texts(path: object, notices: list[str]) -> list[object]:
    source = open_source(DatasetSource(path=str(path)), notice=notices.append)
    return [item.record["text"] for item in source.read() if isinstance(item, Row)]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory with data files of all kinds, and with other files."""
    root = tmp_path / "data"
    (root / "sub").mkdir(parents=True)
    (root / ".hidden").mkdir()
    (root / "b.jsonl").write_text('{"text": "b"}\n')
    (root / "a.json").write_text('[{"text": "a"}]')
    (root / "sub" / "c.txt").write_text("c\n")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["d", "e"]}), root / "sub" / "d.parquet")
    (root / ".hidden" / "x.jsonl").write_text('{"text": "x"}\n')
    (root / "dataset_info.json").write_text("{}")
    (root / "README.md").write_text("no data")
    return root


def test_a_directory_is_read_in_the_order_of_its_paths(tree: Path, notices: list[str]) -> None:
    (tree / "b.jsonl").rename(tree / "sub" / "b.jsonl")
    (tree / "sub" / "d.parquet").unlink()
    assert _texts(tree, notices) == ["a", "b"]
    assert notices == [f"{tree}: split 'train' has 2 of 3 files; these are not read: sub/c.txt"]


def test_lines_of_text_files_are_samples(tree: Path, notices: list[str]) -> None:
    assert _texts(tree / "sub" / "c.txt", notices) == ["c"]
    path = tree / "sub" / "c.txt"
    assert notices == [f"{path}: each line of a text file is one sample; text_unit: file takes whole files"]


def test_globs_and_single_files(tree: Path, notices: list[str]) -> None:
    assert _texts(tree / "[ab].json*", notices) == ["a", "b"]
    assert _texts(tree / "**" / "*.parquet", notices) == ["d", "e"]
    assert _texts(tree / "b.jsonl", notices) == ["b"]


def test_parquet_rows_are_numbered(tree: Path, notices: list[str]) -> None:
    source = open_source(DatasetSource(path=str(tree / "sub" / "d.parquet")), notice=notices.append)
    assert [(item.file, item.line) for item in source.read()] == [(str(tree / "sub" / "d.parquet"), n) for n in (1, 2)]


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"\0" * 100 + b"PAR1"])
def test_a_broken_parquet_file(tmp_path: Path, notices: list[str], content: bytes) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=r"x\.parquet: not a usable parquet file"):
        _texts(path, notices)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.jsonl", "no such file"),
        ("./missing", "no such file"),
        ("data/README.md", "this type of file cannot be read"),
        ("data/.hidden/../*.zip", "no file matches this pattern"),
        ("empty", "there are no data files in this directory"),
        ("pipe.jsonl", "not a regular file"),
        ("nul\0.jsonl", r"nul\\x00\.jsonl: a path cannot contain a NUL"),
    ],
)
def test_paths_that_give_nothing(tree: Path, notices: list[str], name: str, message: str) -> None:
    (tree.parent / "empty").mkdir()
    os.mkfifo(tree.parent / "pipe.jsonl")
    with pytest.raises(BadInput, match=message):
        open_source(DatasetSource(path=f"{tree.parent}/{name}"), notice=notices.append)


@pytest.mark.parametrize(
    "path", ["s3://bucket/a.jsonl", "https://host/a.jsonl?raw=*", "hf://datasets/o/n", "file:///a.jsonl"]
)
def test_addresses(path: str) -> None:
    with pytest.raises(BadInput, match="an address is no path; download the file, or write the id of a dataset"):
        open_source(DatasetSource(path=path), notice=print)


def test_a_relative_name_of_a_data_file_never_goes_to_the_hub(
    tmp_path: Path, notices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.jsonl", "data/train.parquet", "../x", "a/b/c"):
        with pytest.raises(BadInput, match="no such file"):
            open_source(DatasetSource(path=name), notice=notices.append)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file(tree: Path, notices: list[str]) -> None:
    (tree / "b.jsonl").chmod(0)
    with pytest.raises(EnvironmentFailure, match="cannot be read: Permission denied"):
        open_source(DatasetSource(path=str(tree / "b.jsonl")), notice=notices.append)


def test_a_file_that_is_removed_before_it_is_read(tree: Path, notices: list[str]) -> None:
    source = open_source(DatasetSource(path=str(tree / "b.jsonl")), notice=notices.append)
    (tree / "b.jsonl").unlink()
    with pytest.raises(EnvironmentFailure, match="cannot be read"):
        list(source.read())
    with pytest.raises(BadInput, match="changed while it was being read"):
        source.check_unchanged()


@pytest.mark.parametrize(
    ("split", "kept"),
    [
        ("train", range(10)),
        ("train[:20%]", range(2)),
        ("train[:25%]", range(2)),  # rounded as Python rounds, like `datasets`
        ("train[26%:]", range(3, 10)),
        ("train[-20%:]", range(8, 10)),
        ("train[3:5]", range(3, 5)),
        ("train[-3:-1]", range(7, 9)),
        ("train[5:3]", range(0)),
        ("train[:]", range(10)),
        ("train[7:1_000]", range(7, 10)),
        ("train[:0%]", range(0)),
        ("train[100%:]", range(0)),
    ],
)
def test_a_part_of_local_files(tmp_path: Path, split: str, kept: range, notices: list[str]) -> None:
    """Over all files of a source; a row that cannot be read counts, as it does where rows are counted."""
    lines = [json.dumps({"text": str(number)}) for number in range(10)]
    lines[8] = "no JSON"
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:4]) + "\n")
    (tmp_path / "b.jsonl").write_text("\n".join(lines[4:]) + "\n")
    source = open_source(DatasetSource(path=str(tmp_path), split=split), notice=notices.append)
    for _ in range(2):
        found = [8 if isinstance(row, Reject) else int(str(row.record["text"])) for row in source.read()]
        assert found == list(kept)
    assert notices == []


@pytest.mark.parametrize(
    ("split", "is_stream", "error"),
    [
        ("train[:20%", False, "it must be a name, or a name and a part like train"),
        ("train[20%]", False, "it must be a name, or a name and a part like train"),
        ("train[:10%]+train[-10%:]", False, "it must be a name, or a name and a part like train"),
        ("train[10%:20]", False, "one bound is in percent and the other is not"),
        ("train[:120%]", False, "a bound is more than 100 %"),
        ("train[:20%]", True, "needs the number of rows, which `streaming` does not know"),
        ("train[-5:]", True, "needs the number of rows, which `streaming` does not know"),
    ],
)
def test_parts_that_cannot_be_read(tree: Path, split: str, is_stream: bool, error: str) -> None:
    with pytest.raises(BadInput) as caught:
        open_source(DatasetSource(path=str(tree), split=split), notice=print, is_stream=is_stream)
    assert error in caught.value.message


def test_a_stream_has_a_part_by_numbers(tree: Path) -> None:
    source = open_source(DatasetSource(path=str(tree / "b.jsonl"), split="train[:1]"), notice=print, is_stream=True)
    assert len(list(source.read())) == 1


def test_a_split_of_local_files_is_ignored_with_a_notice(tree: Path, notices: list[str]) -> None:
    open_source(DatasetSource(path=str(tree / "b.jsonl"), split="test"), notice=notices.append)
    assert notices == [f"{tree / 'b.jsonl'}: split 'test' is ignored, because files have no splits"]
    notices.clear()
    open_source(DatasetSource(path=str(tree / "b.jsonl"), split="test[:50%]"), notice=notices.append)
    assert notices[0].endswith("because files have no splits; its part [:50%] is taken of all rows")


def test_what_is_for_hub_datasets_and_for_text_files_is_ignored_with_a_notice(tree: Path, notices: list[str]) -> None:
    path = str(tree / "b.jsonl")
    open_source(DatasetSource(path=path, name="en", text_unit="file"), notice=notices.append)
    assert notices == [
        f"{path}: name 'en' is ignored, because files have no configurations",
        f"{path}: text_unit: file is ignored, because there is no text file (.txt)",
    ]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_hub_dataset_is_streamed_from_its_files(
    tmp_path: Path, notices: list[str], monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    saved = tmp_path / "saved"
    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(saved)
    asked: list[object] = []

    def fake(path: str, name: str | None, *, split: str, keep_in_memory: bool, streaming: bool) -> object:
        asked.append((path, name, split, keep_in_memory, streaming))
        found = datasets.load_from_disk(str(saved))
        return found.to_iterable_dataset() if streaming else found

    monkeypatch.setattr(datasets, "load_dataset", fake)
    wanted = DatasetSource(path="owner/name", split="test", name="main")
    source = open_source(wanted, notice=notices.append, is_stream=is_stream)
    assert asked == [("owner/name", "main", "test", False, is_stream)]
    assert [(item.file, item.line) for item in source.read()] == [
        ("hub:owner/name[test]", 1),
        ("hub:owner/name[test]", 2),
    ]
    assert [stamp.path.suffix for stamp in source.files] == ([] if is_stream else [".arrow"])


def test_a_hub_that_has_no_such_dataset(notices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(*_: object, **__: object) -> None:
        raise ConnectionError("offline\nmode")

    monkeypatch.setattr(datasets, "load_dataset", fake)
    with pytest.raises(
        BadInput,
        match=r"owner/name: no such local file, and it cannot be loaded from the hub: ConnectionError: offline\\nmode",
    ):
        open_source(DatasetSource(path="owner/name"), notice=notices.append)


@pytest.mark.parametrize(
    ("path", "is_on_hub"),
    [
        ("org/name", True), ("name", True), ("org/name.v1-2_x", True), ("here/data", False), ("data.jsonl", False),
        ("org/data.csv", False), ("./name", False), ("/org/name", False), ("~/name", False), ("org/*", False),
        ("a/b/c", False), ("", False), ("a\0b", False),
    ],
)  # fmt: skip
def test_what_can_only_be_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, is_on_hub: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "data").mkdir(parents=True)
    assert is_hub_id(path) == is_on_hub
