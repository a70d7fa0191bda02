"""Files with latents: parquet of every form has the bits of safetensors; what cannot be used is rejected by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import numpy as np
import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from ratel_cli.data.batches import latent_formats
from ratel_cli.data.batches.latent_files import LatentFiles, latent_paths, open_latents
from ratel_cli.errors import BadInput, EnvironmentFailure

SHAPE, NUM_CLASSES = (2, 4, 3), 3
ELEMENTS = 24

Numbers = NDArray[Any]
Write = Callable[[Path, Numbers, Numbers], None]


def _numbers(size: int, dtype: str = "float32") -> tuple[Numbers, Numbers]:
    draw = np.random.default_rng(size)
    return draw.standard_normal((size, *SHAPE)).astype(dtype), draw.integers(NUM_CLASSES, size=size)


def _list_type(dtype: str, *sizes: int) -> Any:  # noqa: ANN401 (pyarrow has no types)
    """Lists of lists of these sizes, the outermost first; -1: of any size."""
    found = pyarrow.from_numpy_dtype(np.dtype(dtype))
    for size in reversed(sizes):
        found = pyarrow.list_(found, size)
    return found


def _table(latents: Numbers, labels: Numbers, kind: Any) -> Any:  # noqa: ANN401 (pyarrow has no types)
    is_flat = not pyarrow.types.is_nested(kind.value_type)
    rows = list(latents.reshape(-1, ELEMENTS)) if is_flat else latents.tolist()
    return pyarrow.table({"other": [7] * len(rows), "latents": pyarrow.array(rows, kind), "labels": labels})


def _in_lists(*sizes: int, label_dtype: str = "int64", **options: object) -> Write:
    def write(path: Path, latents: Numbers, labels: Numbers) -> None:
        table = _table(latents, labels.astype(label_dtype), _list_type(str(latents.dtype), *sizes))
        pyarrow.parquet.write_table(table, path, **options)

    return write


_write_nested = _in_lists(-1, -1, -1)
_write_fixed = _in_lists(*SHAPE, row_group_size=4)
_write_flat = _in_lists(-1, label_dtype="int8", row_group_size=3, use_dictionary=False, compression="none")


def _write_large_lists(path: Path, latents: Numbers, labels: Numbers) -> None:
    kind = pyarrow.from_numpy_dtype(latents.dtype)
    for _ in SHAPE:
        kind = pyarrow.large_list(kind)
    pyarrow.parquet.write_table(_table(latents, labels, kind), path, row_group_size=5)


def _write_tensors(path: Path, latents: Numbers, labels: Numbers) -> None:
    kind = pyarrow.fixed_shape_tensor(pyarrow.from_numpy_dtype(latents.dtype), SHAPE)
    storage = pyarrow.array(list(latents.reshape(-1, ELEMENTS)), kind.storage_type)
    column = pyarrow.ExtensionArray.from_storage(kind, storage)
    pyarrow.parquet.write_table(pyarrow.table({"latents": column, "labels": labels}), path)


def _write_by_datasets(path: Path, latents: Numbers, labels: Numbers) -> None:
    features = datasets.Features(
        latents=datasets.Array3D(SHAPE, str(latents.dtype)), labels=datasets.ClassLabel(num_classes=NUM_CLASSES)
    )
    rows = datasets.Dataset.from_dict({"latents": list(latents), "labels": labels.tolist()}, features=features)
    rows.to_parquet(path, batch_size=4)


WRITERS = {
    "nested": _write_nested,
    "fixed": _write_fixed,
    "flat": _write_flat,
    "fixed, flat": _in_lists(ELEMENTS, label_dtype="uint16", row_group_size=1),
    "large lists": _write_large_lists,
    "tensors": _write_tensors,
    "by datasets": _write_by_datasets,
}


def _write_safetensors(path: Path, latents: Numbers, labels: Numbers) -> None:
    save_file({"latents": torch.from_numpy(latents), "labels": torch.from_numpy(labels)}, path)


def _opened(path: Path) -> LatentFiles:
    return open_latents(latent_paths(str(path)), latent_shape=SHAPE, num_classes=NUM_CLASSES)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(("size", "dtype"), [(1, "float16"), (2, "float64"), (11, "float32"), (16, "float16")])
def test_parquet_has_the_bits_of_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str, size: int, dtype: str
) -> None:
    """In any order of rows, whatever their form, and also if a row group is decoded in parts of three rows."""
    latents, labels = _numbers(size, dtype)
    WRITERS[writer](tmp_path / "a.parquet", latents, labels)
    _write_safetensors(tmp_path / "a.safetensors", latents, labels)
    found, wanted = _opened(tmp_path / "a.parquet"), _opened(tmp_path / "a.safetensors")
    assert torch.equal(found.labels, wanted.labels) and found.labels.dtype == torch.int64
    orders = (np.arange(size), np.arange(size)[::-1], np.random.default_rng(1).permutation(size)[: size // 2 + 1])
    for decoded in (latent_formats._DECODED_BYTES, 3 * 8 * ELEMENTS):
        monkeypatch.setattr(latent_formats, "_DECODED_BYTES", decoded)
        for order in orders:
            assert torch.equal(found.read(order), wanted.read(order))
            assert torch.equal(found.read(order), torch.from_numpy(latents[order]).float())


def test_files_of_both_formats_are_one_set(tmp_path: Path) -> None:
    """In the order of their names; some files have no rows."""
    latents, labels = _numbers(13)
    for name, write, first, stop in (
        ("a.parquet", _write_flat, 0, 4), ("b.parquet", _write_nested, 4, 4), ("d.parquet", _write_fixed, 9, 13),
        ("b.safetensors", _write_safetensors, 4, 9), ("c.safetensors", _write_safetensors, 9, 9),
    ):  # fmt: skip
        write(tmp_path / name, latents[first:stop], labels[first:stop])
    files = _opened(tmp_path)
    assert files.starts.tolist() == [0, 4, 4, 9, 9, 13]
    assert files.labels.tolist() == labels.tolist()
    order = np.random.default_rng(0).permutation(13)
    assert torch.equal(files.read(order), torch.from_numpy(latents[order]))


def test_only_the_row_groups_of_a_step_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of each no more than the parts up to its last row."""
    latents, labels = _numbers(40)
    pyarrow.parquet.write_table(_table(latents, labels, _list_type("float32", ELEMENTS)), tmp_path / "a.parquet",
                                row_group_size=10)  # fmt: skip
    files = _opened(tmp_path / "a.parquet")
    monkeypatch.setattr(latent_formats, "_DECODED_BYTES", 2 * 8 * ELEMENTS)
    decoded: list[tuple[int, int]] = []
    parts = latent_formats.ParquetLatents._parts

    def counted(self: latent_formats.ParquetLatents, file: object, group: int) -> Any:  # noqa: ANN401
        for first, part in parts(self, file, group):
            decoded.append((group, first))
            yield first, part

    monkeypatch.setattr(latent_formats.ParquetLatents, "_parts", counted)
    assert torch.equal(files.read(np.array([33, 11, 12])), torch.from_numpy(latents[[33, 11, 12]]))
    assert decoded == [(1, 0), (1, 2), (3, 0), (3, 2)]


def test_every_byte_counts(tmp_path: Path) -> None:
    latents, labels = _numbers(5)
    prints = set()
    for changed in (latents, latents + 1, latents[:4]):
        _write_flat(tmp_path / "a.parquet", changed, labels[: len(changed)])
        prints.add(_opened(tmp_path / "a.parquet").fingerprint)
    table = _table(latents, labels, _list_type("float32", -1))
    pyarrow.parquet.write_table(table.replace_schema_metadata({"by": "someone else"}), tmp_path / "a.parquet")
    assert len({*prints, _opened(tmp_path / "a.parquet").fingerprint}) == 4


_ROWS = [[[[float(k)] * 3] * 4] * 2 for k in range(3)]
_FLAT = [[float(k)] * ELEMENTS for k in range(3)]


@pytest.mark.parametrize(
    ("columns", "part"),
    [
        ({"labels": [0, 1, 2]}, "no column latents"),
        ({"latents": _ROWS}, "no column labels"),
        ({"latents": [*_ROWS[:2], [[[0.0] * 3] * 4]], "labels": [0, 1, 2]}, "row 3: latents has 1 in a list, but the"),
        ({"latents": [_ROWS[0], [[[0.0] * 2] * 4] * 2], "labels": [0, 1]}, "row 2: latents has 2 in a list, but the"),
        ({"latents": [*_FLAT[:2], [0.0] * 23], "labels": [0, 1, 2]}, "row 3: latents has 23 in a list, but the"),
        ({"latents": [[_FLAT[0]]], "labels": [0]}, "no lists of latents"),
        ({"latents": [1.0, 2.0], "labels": [0, 1]}, "latents is double, no lists of latents"),
        ({"latents": [["a"] * ELEMENTS], "labels": [0]}, "no lists of latents"),
        ({"latents": [[1] * ELEMENTS], "labels": [0]}, "no lists of latents"),
        ({"latents": [_FLAT[0], None], "labels": [0, 1]}, "row 2: latents has a null"),
        ({"latents": [_FLAT[0], [None, *_FLAT[0][1:]]], "labels": [0, 1]}, "row 2: latents has a null"),
        ({"latents": [[_ROWS[0][0], None]], "labels": [0]}, "row 1: latents has a null"),
        ({"latents": _FLAT, "labels": [0, None, 2]}, "row 2: labels is null"),
        ({"latents": _FLAT, "labels": [0.0, 1.0, 2.0]}, "labels is double, not integers"),
        ({"latents": _FLAT, "labels": [True, False, True]}, "labels is bool, not integers"),
        ({"latents": _FLAT, "labels": ["0", "1", "2"]}, "labels is string, not integers"),
        ({"latents": _FLAT, "labels": [[0], [1], [2]]}, "not integers"),
        ({"latents": _FLAT, "labels": [0, 3, 1]}, "label 3, but the model's classes are 0 to 2"),
        ({"latents": _FLAT, "labels": [0, -1, 1]}, "label -1, but the model's classes are 0 to 2"),
    ],
)
def test_a_table_that_cannot_be_used_is_rejected(tmp_path: Path, columns: dict[str, list[object]], part: str) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    with pytest.raises(BadInput) as raised:
        _opened(tmp_path / "a.parquet")
    assert f"{tmp_path / 'a.parquet'}: " in raised.value.message and part in raised.value.message
    assert raised.value.hint


def test_tensors_of_another_shape_are_rejected(tmp_path: Path) -> None:
    """Also those with as many numbers."""
    for shape, order in (((2, 3, 4), None), (SHAPE, [0, 2, 1]), ((2, 4, 4), None)):
        kind = pyarrow.fixed_shape_tensor(pyarrow.float32(), shape, permutation=order)
        storage = pyarrow.array([[0.0] * int(np.prod(shape))], kind.storage_type)
        column = pyarrow.ExtensionArray.from_storage(kind, storage)
        pyarrow.parquet.write_table(pyarrow.table({"latents": column, "labels": [0]}), tmp_path / "a.parquet")
        with pytest.raises(BadInput, match=r"but the model's are \[2, 4, 3\]"):
            _opened(tmp_path / "a.parquet")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"x" * 100 + b"PAR1", b"{}"])
def test_a_file_that_is_no_parquet_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(BadInput, match=r"a\.parquet: not a usable parquet file") as raised:
        _opened(tmp_path / "a.parquet")
    assert raised.value.hint


def test_a_damaged_page_is_rejected(tmp_path: Path) -> None:
    """Where the file has checksums."""
    table = _table(*_numbers(40), _list_type("float32", -1))
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", write_page_checksum=True, compression="none")
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(BadInput, match=r"a\.parquet: not a usable parquet file"):
        _opened(tmp_path / "a.parquet")


def test_a_set_without_latents_is_rejected(tmp_path: Path) -> None:
    for write in WRITERS.values():
        write(tmp_path / "a.parquet", *_numbers(0))
        with pytest.raises(BadInput, match="the datasets have no latents"):
            _opened(tmp_path)
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(BadInput, match="no safetensors or parquet file in this directory"):
        latent_paths(str(tmp_path))


def test_a_file_that_has_changed_or_is_gone_fails_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    _write_flat(path, *_numbers(5))
    files = _opened(path)
    for content in (b"PAR1", None):
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(EnvironmentFailure, match=r"a\.parquet: cannot be read"):
            files.read(np.arange(2))
