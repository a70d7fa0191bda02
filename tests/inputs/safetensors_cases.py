"""Malformed weights: the base model's `model.safetensors`, damaged or replaced.

What may be wrong with a file alone is that of `tests/model/test_shards.py`.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.inputs.cases import MalformedInput, RunFiles, no_line
from tests.model.test_shards import DAMAGED, packed

Header = dict[str, Any]

NORM = "model.norm.weight"
"""A vector of 32 elements, 128 bytes in fp32."""
_GIT_LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"


def cases() -> Iterator[MalformedInput]:
    for fault, (content, message) in DAMAGED.items():
        yield _content(f"damaged: {fault}", content, f".*{message}")
    yield from _whole_files()
    yield from _tensors()
    yield from _places()


def read_parts(path: Path) -> tuple[Header, bytes]:
    """The header and the data of a healthy file."""
    content = path.read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + header_bytes]), content[8 + header_bytes :]


def _weights(inputs: RunFiles) -> Path:
    return inputs.base / "model.safetensors"


def _content(name: str, content: bytes | Callable[[bytes], bytes], message: str) -> MalformedInput:
    """Another content of the file. A callable gets the healthy content."""

    def damage(inputs: RunFiles) -> None:
        path = _weights(inputs)
        path.write_bytes(content(path.read_bytes()) if callable(content) else content)

    return MalformedInput(name=f"file {name}", damage=no_line(damage), message=f"model.safetensors: {message}")


def _header(name: str, change: Callable[[Header], object], message: str) -> MalformedInput:
    """A changed header, followed by the healthy data."""

    def damage(inputs: RunFiles) -> None:
        path = _weights(inputs)
        header, data = read_parts(path)
        change(header)
        path.write_bytes(packed(header, data))

    return MalformedInput(name=f"tensor {name}", damage=no_line(damage), message=message)


def _whole_files() -> Iterator[MalformedInput]:
    """What users have in the place of weights."""
    yield _content("cut in its length", lambda whole: whole[:5], "not a safetensors file: it has only 5 bytes")
    yield _content("cut in its header", lambda whole: whole[:100], "truncated: the header")
    yield _content("cut in half", lambda whole: whole[: len(whole) // 2], ".* are outside the")
    yield _content("less its last byte", lambda whole: whole[:-1], ".* are outside the")
    yield _content("twice over", lambda whole: whole + whole, r"\d+ bytes after the last tensor")
    yield _content("moved by a byte", lambda whole: b"\0" + whole, "")
    yield _content("compressed", gzip.compress, "")
    yield _content("that is a zip archive", b"PK\x03\x04" + bytes(200), "")
    yield _content("that is GGUF", b"GGUF\x03\0\0\0" + bytes(200), "")
    yield _content("that git-lfs stands in for", _GIT_LFS, "not a safetensors file")
    yield _content("that is a web page", b"<!doctype html><html><body>404</body></html>", "not a safetensors file")


def _tensors() -> Iterator[MalformedInput]:
    """Files that are sound, and do not fit the model."""
    for dtype in ("I32", "U32"):
        message = "has dtype .* weights must be floating point"
        yield _header(f"of dtype {dtype}", lambda header, dtype=dtype: header[NORM].update(dtype=dtype), message)
    missing = "has a gap before it|bytes after the last tensor"
    yield _header("that is left out", lambda header: header.pop(NORM), missing)
    for name in ("model.norm.wait", "norm", "", "a\0b", "\x1b[2J", "model.layers.2.mlp.up_proj.weight", "\ud800"):
        message = r"tensor \S* does not belong to LlamaForCausalLM"
        yield _header(f"renamed to {name!r}", lambda header, new=name: header.update({new: header.pop(NORM)}), message)
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    yield _header("that nobody wants", lambda header: header.update(extra=empty), "tensor extra does not belong to")
    projection, other_shape = "model.layers.0.mlp.up_proj.weight", "has shape .*, but the model needs"
    yield _header("with a dimension more", lambda header: header[NORM].update(shape=[1, 32]), other_shape)
    yield _header("transposed", lambda header: header[projection]["shape"].reverse(), other_shape)


def _places() -> Iterator[MalformedInput]:
    def place(name: str, message: str, put: Callable[[Path, Path], object]) -> MalformedInput:
        """`put` gets the path of the weights, where no file is left, and a directory outside the model's."""

        def damage(inputs: RunFiles) -> None:
            path = _weights(inputs)
            path.rename(inputs.directory / "weights")
            put(path, inputs.directory)

        return MalformedInput(name=f"file that is {name}", damage=no_line(damage), message=message)

    none = "no weights: there is no model.safetensors and no model.safetensors.index.json"
    yield place("not there", none, lambda path, outside: None)
    yield place("a directory", "model.safetensors is not a regular file", lambda path, outside: path.mkdir())
    yield place("a FIFO", "model.safetensors is not a regular file", lambda path, outside: os.mkfifo(path))
    for name, target, message in (
        ("a link out of the model", "../weights", "is a link to a file outside the model's directory"),
        ("a link to a device", "/dev/zero", "is a link to a file outside the model's directory"),
        ("a dangling link", "gone", "is missing"),
        ("a link to itself", "model.safetensors", "cannot be opened"),
    ):
        yield place(name, f"model.safetensors {message}", lambda path, outside, to=target: path.symlink_to(to))
    for name, reason in (("pytorch_model.bin", "; other formats are never loaded"), ("model.gguf", " but GGUF")):
        yield place(
            f"another's, {name}",
            f"{name} is not a safetensors file{reason}",
            lambda path, outside, name=name: (path.parent / name).write_bytes(b"\x80\x04K\x01."),
        )
