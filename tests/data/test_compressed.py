"""Compressed data files: the rows, the line numbers and the rejects of the same file without compression."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
import pytest

from ratel_cli.data.files.lines import MAX_ROW_BYTES
from ratel_cli.data.text.prompts import read_prompts
from ratel_cli.data.text.rows import DatasetSource, open_source
from ratel_cli.errors import BadInput
from ratel_cli.progress import Advance
from tests.data.conftest import GOOD_ROW, Load, read_rejects, write_text_rows
from tests.test_input_files import MIB, compressed

FILES = {
    "a.jsonl": b'\xef\xbb\xbf{"text": "one"}\n\nbad\n{"text": "two"}',
    "a.json": b'[\n{"text": "one"},\n\n7, {"text": "two"}]',
    "a.txt": b"one\r\n\ntwo\n\xff\n",
    "a.csv": b'text,n\n"one\nmore",1\nx\ntwo,2\n',
    "a.tsv": b"text\tn\none\t1\nx\ntwo\t2\n",
}


def _items(path: Path) -> list[tuple[object, ...]]:
    rows = open_source(DatasetSource(path=str(path)), notice=lambda text: None).read()
    return [(item.line, getattr(item, "record", None), getattr(item, "reason", None)) for item in rows]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("name", FILES)
def test_rows_and_line_numbers_are_those_without_compression(tmp_path: Path, name: str, suffix: str) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / name).write_bytes(FILES[name])
    path = tmp_path / (name + suffix)
    path.write_bytes(compressed(FILES[name], suffix))
    items = _items(tmp_path / "plain" / name)
    assert len(items) == 3 and _items(path) == items


def test_a_directory_has_compressed_files_and_their_labels_name_them(tmp_path: Path) -> None:
    for name in ("b.jsonl.gz", "a.json.zst", "dataset_info.json.gz", "x.tar.gz", "model.bin.zst"):
        (tmp_path / name).write_bytes(compressed(b'{"text": "x"}', name[name.rindex(".") :]))
    rows = open_source(DatasetSource(path=str(tmp_path)), notice=lambda text: None).read()
    assert [Path(row.file).name for row in rows] == ["a.json.zst", "b.jsonl.gz"]


@pytest.mark.parametrize("name", ["a.parquet.gz", "a.tar.gz", "a.gz", "a.md.zst"])
def test_other_compressed_files_cannot_be_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(BadInput, match="this type of file cannot be read") as raised:
        open_source(DatasetSource(path=str(tmp_path / name)), notice=lambda text: None)
    assert "all but parquet and arrow also with .gz or .zst behind it" in (raised.value.hint or "")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_damaged_file_is_one_error_with_its_key(load: Load, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.jsonl{suffix}"
    raw = compressed("".join(json.dumps({"text": f"row {n} " * 9}) + "\n" for n in range(2000)).encode(), suffix)
    path.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(BadInput, match="the compressed file is damaged or cut off") as raised:
        load(path)
    assert raised.value.key == ("datasets", 0, "path") and not raised.value.others


def test_a_file_that_expands_to_one_endless_line_is_one_reject(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    rows = f"{json.dumps(GOOD_ROW)}\n" * 300
    path.write_bytes(compressed(rows.encode() + b" " * (4 * MAX_ROW_BYTES), ".gz"))
    load(path)
    ((_, line, reason),) = read_rejects(tmp_path)
    assert (line, reason) == (301, f"the line is longer than {MAX_ROW_BYTES} bytes")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_prompts_come_from_compressed_files_of_any_size(tmp_path: Path, suffix: str) -> None:
    for name, content in (("p.jsonl", b'{"prompt": "one"}\r\n\n{"prompt": "two"}'), ("p.txt", b"one\r\n\ntwo\n")):
        path = tmp_path / f"{name}{suffix}"
        path.write_bytes(compressed(content, suffix))
        assert read_prompts(path) == ["one", "two"]
    path.write_bytes(compressed(b"x" * (64 * MIB + 1), suffix))
    with pytest.raises(BadInput, match=r"p\.txt\..*: larger than 64\.0 MiB"):
        read_prompts(path)
    path.write_bytes(compressed(b"one", suffix)[:-3])
    with pytest.raises(BadInput, match="the compressed file is damaged or cut off"):
        read_prompts(path)


class Bars:
    """Records the bars of a load: what, total, items, and what was reported."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, float, str]] = []
        self.done: list[tuple[float, int]] = []

    @contextmanager
    def __call__(self, what: str, total: float, *, items: str = "") -> Iterator[Advance]:
        self.shown.append((what, total, items))
        self.done.append((0.0, 0))

        def advance(amount: float, items: int = 0) -> None:
            assert amount >= 0
            done, rows = self.done[-1]
            self.done[-1] = (done + amount, rows + items)

        yield advance


@pytest.mark.parametrize("split", ["train", "train[:50%]"])
@pytest.mark.parametrize("max_samples", [None, 20, 10**6])
@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.parquet"])
def test_progress_ends_at_the_whole(load: Load, tmp_path: Path, name: str, split: str, max_samples: int | None) -> None:
    path = write_text_rows(tmp_path / "x.jsonl", 600, ["{}"])
    if name.endswith(".gz"):
        path = tmp_path / name
        path.write_bytes(compressed((tmp_path / "x.jsonl").read_bytes(), ".gz"))
    elif name.endswith(".parquet"):
        path = tmp_path / name
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"text": "the fox"}] * 601), path)
    bars = Bars()
    data = load(DatasetSource(path=str(path), split=split, max_samples=max_samples), open_bar=bars)
    total = path.stat().st_size * (1 if split == "train" else 2)
    assert bars.shown == [("reading the data", total, "rows")]
    ((done, rows),) = bars.done
    assert done == pytest.approx(total)
    assert max_samples == 20 or rows == data.cache.summary.num_rows
    load(DatasetSource(path=str(path), split=split, max_samples=max_samples), open_bar=bars)
    assert len(bars.shown) == 1


def test_progress_of_a_stream_and_of_test_data(load: Load, tmp_path: Path) -> None:
    path, bars = write_text_rows(tmp_path / "x.jsonl", 600, []), Bars()
    load(path, open_bar=bars, stream_steps=30, window_samples=40)
    assert bars.shown == [("reading the data", 1, "rows")] and bars.done == [(1.0, 256)]
    bars = Bars()
    test_path = write_text_rows(tmp_path / "test.jsonl", 3, [])
    load(path, test_sources=(DatasetSource(path=str(test_path)),), open_bar=bars)
    assert [what for what, _, _ in bars.shown] == ["reading the data", "reading the test data"]
