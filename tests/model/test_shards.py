"""Safetensors files: compared with the reference implementation, and damaged in every way."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ratel_cli.errors import BadInput, EnvironmentFailure
from ratel_cli.model.files.shards import DTYPES, ShardReader, ShardWriter, TensorSpec, file_bytes
from tests.model.tiny import file_size_limit, specs_of

SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 4), (64, 32), (4097,)]


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """One tensor of random bytes for every dtype and shape."""
    generator = torch.Generator().manual_seed(3)
    made: dict[str, torch.Tensor] = {}
    for dtype in DTYPES.values():
        for shape in SHAPES:
            raw = torch.randint(0, 2, (torch.Size(shape).numel() * dtype.itemsize,), generator=generator)
            made[f"{dtype}.{shape}"] = raw.to(torch.uint8).view(dtype).reshape(shape)
    return made


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether dtype and bytes are equal, NaN included."""
    left, right = left.contiguous().reshape(-1), right.contiguous().reshape(-1)
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def test_reads_what_the_reference_writes(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    with ShardReader(tmp_path / "a.safetensors") as reader:
        assert set(reader.tensors) == set(tensors)
        for name, tensor in tensors.items():
            assert reader.tensors[name].shape == tuple(tensor.shape)
            assert same_bytes(reader.read_whole(name), tensor)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 1), (5, 6), (4096, 4097), (1, 4096), (4097, 4097)])
def test_reads_ranges(tmp_path: Path, start: int, stop: int) -> None:
    tensor = torch.arange(4097, dtype=torch.float32)
    save_file({"before": torch.ones(3), "x": tensor}, tmp_path / "a.safetensors")
    with ShardReader(tmp_path / "a.safetensors") as reader:
        assert torch.equal(reader.read("x", start, stop), tensor[start:stop])


def test_the_reference_reads_what_we_write(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "a.safetensors"
    entries = specs_of(tensors)
    with ShardWriter(path, entries) as writer:
        for tensor in tensors.values():
            flat = tensor.reshape(-1)
            for part in flat.tensor_split(5):
                writer.write(part)
        assert not path.exists()
        writer.finish()
    assert path.stat().st_size == file_bytes(entries)
    read = load_file(path)
    assert all(same_bytes(read[name], tensor) for name, tensor in tensors.items())
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_file_without_tensors(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "a.safetensors", []) as writer:
        writer.finish()
    with ShardReader(tmp_path / "a.safetensors") as reader:
        assert reader.tensors == {}


def test_an_unfinished_file_is_removed_and_the_old_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"old")
    with ShardWriter(path, [TensorSpec(name="x", dtype=torch.float32, shape=(4,))]) as writer:
        writer.write(torch.zeros(2))
    writer.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"] and path.read_bytes() == b"old"


def test_a_writer_accepts_exactly_the_bytes_of_its_header(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "a.safetensors", [TensorSpec(name="x", dtype=torch.float32, shape=(4,))]) as writer:
        with pytest.raises(AssertionError):
            writer.write(torch.zeros(5))
        with pytest.raises(AssertionError):
            writer.finish()


def test_no_space_left(tmp_path: Path) -> None:
    with (
        pytest.raises(EnvironmentFailure, match="no space left"),
        file_size_limit(10_000),
        ShardWriter(
            tmp_path / "a.safetensors", [TensorSpec(name="x", dtype=torch.float32, shape=(100_000,))]
        ) as writer,
    ):
        writer.write(torch.zeros(100_000))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailure, match="cannot be written"):
        ShardWriter(tmp_path / "none" / "a.safetensors", [])


def entry(begin: int = 0, end: int = 8, shape: object = (2,), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def packed(header: object, data: int | bytes) -> bytes:
    """A file with this header, and with this data or so many bytes of data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it has only 0 bytes"),
    "short": (b"\x08\0\0\0", "it has only 4 bytes"),
    "huge header": ((1 << 62).to_bytes(8, "little") + b"{}", "header would have"),
    "header beyond the end": ((1000).to_bytes(8, "little") + b"{}", "truncated"),
    "pickle": (packed(b"\x80\x04K\x01.", 0), "does not begin"),
    "no header": (packed(b"", 0), "does not begin"),
    "bad json": (packed(b'{"x": ', 0), "not valid JSON"),
    "not utf-8": (packed(b'{"\xff": 1}', 0), "not valid JSON"),
    "deep": (packed(b'{"x":' + b"[" * 100_000, 0), "not valid JSON"),
    "long number": (packed(b'{"x":' + b"1" * 10_000 + b"}", 0), "not valid JSON"),
    "doubled": (packed(b'{"x\\u001b": 1, "x\\u001b": 1}', 0), r"x\\x1b appears twice"),
    "metadata": (packed({"__metadata__": {"a": 1}}, 0), "text to text"),
    "entry": (packed({"x": [1]}, 0), "exactly dtype"),
    "more fields": (packed({"x": entry() | {"y": 1}}, 8), "exactly dtype"),
    "dtype": (packed({"x": entry(dtype="F4")}, 8), "dtype F4 is not supported"),
    "dtype no text": (packed({"x": entry(dtype=["F32"])}, 8), "is not supported"),
    "negative": (packed({"x": entry(shape=[-2])}, 8), "whole numbers"),
    "fraction": (packed({"x": entry(shape=[2.0])}, 8), "whole numbers"),
    "truth": (packed({"x": entry(shape=[True, 2])}, 8), "whole numbers"),
    "three offsets": (packed({"x": entry() | {"data_offsets": [0, 8, 8]}}, 8), "whole numbers"),
    "backwards": (packed({"x": entry(8, 0)}, 8), "are outside"),
    "beyond": (packed({"x": entry(0, 8)}, 7), "are outside"),
    "size": (packed({"x": entry(shape=[3])}, 8), "do not match"),
    "overflow": (packed({"x": entry(shape=[1 << 62] * 1000)}, 8), "do not match"),
    "empty but not": (packed({"x": entry(shape=[0, 5])}, 8), "do not match"),
    "overlap": (packed({"x": entry(0, 8), "y": entry(4, 12)}, 12), "y overlaps"),
    "same place": (packed({"x": entry(0, 8), "y": entry(0, 8)}, 8), "overlaps"),
    "gap": (packed({"x": entry(0, 8), "y": entry(12, 20)}, 20), "y has a gap"),
    "gap at the start": (packed({"x": entry(4, 12)}, 12), "x has a gap"),
    "trailing": (packed({"x": entry()}, 9), "1 bytes after the last tensor belong to no tensor"),
    "endless name": (packed({"x" * 100_000: [1]}, 0), r"tensor x{200}\.\.\.: its entry in the header must have"),
    "dimensions": (packed({"x": entry(shape=[1] * 65 + [2])}, 8), "do not match"),
    "empty and too large": (packed({"x": entry(0, 0, shape=[0, 1 << 62, 1 << 62])}, 0), "do not match"),
    "escape": (packed({"\x1b[2J": [1]}, 0), r"tensor \\x1b\[2J:"),
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_damaged_files(tmp_path: Path, fault: str) -> None:
    content, reason = DAMAGED[fault]
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=reason) as raised:
        ShardReader(path)
    assert str(path) in raised.value.message and raised.value.message.isprintable()


def test_random_damage_is_bad_input_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.arange(40.0), "y": torch.ones(3, 3)}, path)
    whole = path.read_bytes()
    rng = random.Random(5)
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(180)] = rng.randrange(256)
        path.write_bytes(damaged[: rng.choice([len(damaged), rng.randrange(len(damaged))])])
        try:
            reader = ShardReader(path)
        except BadInput:
            continue
        with reader:
            for name in reader.tensors:
                reader.read_whole(name)


def test_a_file_truncated_while_open(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.arange(4000.0)}, path)
    with ShardReader(path) as reader:
        os.truncate(path, 2000)
        with pytest.raises(BadInput, match="truncated while it was being read"):
            reader.read_whole("x")


@pytest.mark.timeout(120)
def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("fifo", "link", ".", "none"):
        with pytest.raises(BadInput):
            ShardReader(tmp_path / name)
    with pytest.raises(BadInput, match="not a regular file"):
        ShardReader(Path("/dev/null"))


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    before = len(os.listdir("/proc/self/fd"))
    path.write_bytes(packed({"x": [1]}, 0))
    with pytest.raises(BadInput):
        ShardReader(path)
    with ShardWriter(path, []) as writer:
        writer.finish()
    reader = ShardReader(path)
    reader.close()
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before
