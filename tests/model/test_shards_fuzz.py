"""Random headers and indices: all tensors can be read, or a BadInput names the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ratel_cli.errors import BadInput
from ratel_cli.model.files.directory import INDEX_NAME, find_weight_files
from ratel_cli.model.files.shards import DTYPES, ShardReader
from tests.json_values import TEXTS, json_values
from tests.model.test_shards import packed
from tests.tiers import examples

QUICK = examples(200)
VALUES = json_values(TEXTS, st.sampled_from([1 << 62, 1 << 70]))
COUNTS = st.integers(0, 40) | st.sampled_from([-1, 1 << 31, 1 << 62, 1 << 63, 1 << 70])
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F4"]) | VALUES,
        "shape": st.lists(COUNTS, max_size=4) | VALUES,
        "data_offsets": st.lists(COUNTS, min_size=2, max_size=2) | VALUES,
    }
)
HEADERS = st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), ENTRIES | VALUES, max_size=4)

NAMES = st.text(st.sampled_from("a./~\0\n\x1b\ud800\udcff") | st.characters(), max_size=8)
"""With halves of surrogate pairs: JSON can hold them, file names cannot."""
INDICES = st.fixed_dictionaries({"weight_map": st.dictionaries(NAMES, NAMES | VALUES, max_size=3)})


def attempt(path: Path, content: bytes) -> None:
    """Open the file and read everything. A BadInput must name the file, on one line."""
    path.write_bytes(content)
    try:
        reader = ShardReader(path)
    except BadInput as error:
        assert str(path) in error.message and error.message.isprintable()
        return
    with reader:
        num_bytes = sum(
            reader.read_whole(name).numel() * entry.dtype.itemsize for name, entry in reader.tensors.items()
        )
    assert len(content) == 8 + int.from_bytes(content[:8], "little") + num_bytes


@QUICK
@given(content=st.binary(max_size=100))
def test_any_bytes(tmp_path: Path, content: bytes) -> None:
    attempt(tmp_path / "a.safetensors", content)
    attempt(tmp_path / "a.safetensors", packed(b"{" + content, 0))


@QUICK
@given(header=HEADERS, num_bytes=st.integers(0, 40))
def test_any_header(tmp_path: Path, header: dict[str, object], num_bytes: int) -> None:
    attempt(tmp_path / "a.safetensors", packed(header, num_bytes))


@QUICK
@given(shape=st.lists(COUNTS, max_size=5), zero_at=st.integers(0, 5), dtype=st.sampled_from(sorted(DTYPES)))
def test_any_empty_tensor(tmp_path: Path, shape: list[int], zero_at: int, dtype: str) -> None:
    """An empty tensor has no bytes that could bound its shape."""
    shape.insert(zero_at, 0)
    header = {"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}}
    attempt(tmp_path / "a.safetensors", packed(header, 0))


@QUICK
@given(
    shapes=st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=5),
    dtype=st.sampled_from([name for name in DTYPES if name != "BOOL"]),
    cut=st.integers(-1, 1),
)
def test_any_tiling(tmp_path: Path, shapes: list[list[int]], dtype: str, cut: int) -> None:
    """A correct file is read. With one byte more or less it is rejected."""
    header, position = {}, 0
    for index, shape in enumerate(shapes):
        end = position + torch.Size(shape).numel() * DTYPES[dtype].itemsize
        header[f"t{index}"] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    path = tmp_path / "a.safetensors"
    attempt(path, packed(header, max(0, position + cut)))
    try:
        ShardReader(path).close()
    except BadInput:
        assert cut != 0
    else:
        assert cut == 0 or (cut == -1 and position == 0)


@QUICK
@given(index=VALUES | INDICES)
def test_any_index(tmp_path: Path, index: object) -> None:
    path = tmp_path / INDEX_NAME
    path.write_text(json.dumps(index))
    try:
        files = find_weight_files(tmp_path)
    except BadInput as error:
        assert str(tmp_path) in error.message and error.message.isprintable()
    else:
        assert files.paths == () == files.listed


@QUICK
@given(name=NAMES)
def test_any_name_of_a_shard(tmp_path: Path, name: str) -> None:
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"x": f"{name}.safetensors"}}))
    with pytest.raises(BadInput) as caught:
        find_weight_files(tmp_path)
    assert str(tmp_path) in caught.value.message and caught.value.message.isprintable()


@QUICK
@given(content=st.binary(max_size=60))
def test_any_bytes_as_an_index(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / INDEX_NAME
    path.write_bytes(content)
    try:
        find_weight_files(tmp_path)
    except BadInput as error:
        assert str(tmp_path) in error.message and error.message.isprintable()
