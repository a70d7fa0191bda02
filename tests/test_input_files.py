"""Compressed files: the content that gzip and zstd gave, in bounded memory; damage as one error; progress in bytes."""

from __future__ import annotations

import gzip
import random
import tracemalloc
from functools import partial
from pathlib import Path

import pyarrow  # type: ignore[import-untyped]
import pytest

from ratel_cli.errors import BadInput
from ratel_cli.input_files import open_to_read, uncompressed_name

MIB = 1 << 20


def compressed(content: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        return gzip.compress(content)
    target = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(target, "zstd") as stream:
        stream.write(content)
    return bytes(target.getvalue().to_pybytes())


def _written(tmp_path: Path, raw: bytes, name: str) -> Path:
    path = tmp_path / name
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".GZ", ".ZST"])
@pytest.mark.parametrize("size", [0, 1, MIB // 8 - 1, MIB // 8, MIB // 8 + 1, 3 * MIB])
def test_the_content_and_its_progress(tmp_path: Path, suffix: str, size: int) -> None:
    content = random.Random(size).randbytes(size)
    raw = compressed(content, suffix.lower()) if suffix else content
    parts: list[int] = []
    with open_to_read(_written(tmp_path, raw, f"x.bin{suffix}"), progress=parts.append) as file:
        assert file.peek(3)[:3] == content[:3]
        assert b"".join(iter(partial(file.read, 1 << 16), b"")) == content
    assert sum(parts) == len(raw) and max(parts) <= MIB // 8


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_archives_one_after_another_are_one_file(tmp_path: Path, suffix: str) -> None:
    raw = compressed(b"one\n", suffix) + compressed(b"", suffix) + compressed(b"two\n", suffix)
    with open_to_read(_written(tmp_path, raw, f"x{suffix}")) as file:
        assert file.readlines() == [b"one\n", b"two\n"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut off", "cut off early", "not compressed", "text behind it"])
def test_damage_is_one_error_behind_what_is_whole(tmp_path: Path, suffix: str, damage: str) -> None:
    content = random.Random(0).randbytes(3 * MIB)
    whole = compressed(content, suffix)
    raw = {
        "cut off": whole[:-3],
        "cut off early": whole[:5],
        "not compressed": b'{"text": "plain"}\n' * 9,
        "text behind it": whole + b"and more",
    }[damage]
    found: list[bytes] = []
    with open_to_read(_written(tmp_path, raw, f"x\x1b{suffix}")) as file:
        for _ in range(2):  # it stays damaged
            with pytest.raises(BadInput, match="the compressed file is damaged or cut off") as raised:
                found.extend(iter(partial(file.read, 1 << 16), b""))
    assert content.startswith(b"".join(found))
    assert raised.value.message.startswith(f"{tmp_path}/x\\x1b{suffix}: ")
    assert ("zstd -t" if suffix == ".zst" else "gzip -t") in (raised.value.hint or "")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_memory_does_not_grow_with_what_a_file_expands_to(tmp_path: Path, suffix: str) -> None:
    size = 64 * MIB
    path = _written(tmp_path, compressed(bytes(size), suffix), f"x{suffix}")
    assert path.stat().st_size < MIB
    tracemalloc.start()
    try:
        arrow_before = pyarrow.total_allocated_bytes()
        with open_to_read(path) as file:
            num_bytes = 0
            while part := file.read(MIB):
                num_bytes += len(part)
                assert pyarrow.total_allocated_bytes() - arrow_before < 16 * MIB
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert num_bytes == size
    assert peak < 16 * MIB


def test_a_missing_file_and_a_directory(tmp_path: Path) -> None:
    for name in ("x.gz", "x.zst", "x"):
        with pytest.raises(FileNotFoundError):
            open_to_read(tmp_path / name)
    (tmp_path / "d.gz").mkdir()
    with pytest.raises(IsADirectoryError):
        open_to_read(tmp_path / "d.gz")


def test_names_without_compression() -> None:
    assert [str(uncompressed_name(Path(name))) for name in ("a/b.json.gz", "b.zst", "b.gz.d", "b")] == [
        "a/b.json", "b", "b.gz.d", "b",
    ]  # fmt: skip
