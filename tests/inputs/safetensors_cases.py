"""Malformed weights: the base model's `model.safetensors`, damaged or replaced."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.inputs.cases import MalformedInput, RunFiles, no_line

Header = dict[str, Any]

NORM = "model.norm.weight"
"""A vector of 32 elements, 128 bytes in fp32."""
_GIT_LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"


def cases() -> Iterator[MalformedInput]:
    yield from _whole_files()
    yield from _headers()
    yield from _entries()
    yield from _tensors()
    yield from _places()


def read_parts(path: Path) -> tuple[Header, bytes]:
    """The header and the data of a healthy file."""
    content = path.read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + header_bytes]), content[8 + header_bytes :]


def packed(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def _weights(inputs: RunFiles) -> Path:
    return inputs.base / "model.safetensors"


def _content(name: str, content: bytes | Callable[[bytes], bytes], message: str) -> MalformedInput:
    """Another content of the file. A callable gets the healthy content."""

    def damage(inputs: RunFiles) -> None:
        path = _weights(inputs)
        path.write_bytes(content(path.read_bytes()) if callable(content) else content)

    return MalformedInput(name=f"file {name}", damage=no_line(damage), message=f"model.safetensors: {message}")


def _raw_header(name: str, header: bytes, message: str, *, keep_data: bool = False) -> MalformedInput:
    """Another header, followed by no data or by the healthy data."""

    def damage(inputs: RunFiles) -> None:
        path = _weights(inputs)
        path.write_bytes(packed(header, read_parts(path)[1] if keep_data else b""))

    return MalformedInput(name=f"header {name}", damage=no_line(damage), message=f"model.safetensors: {message}")


def _header(name: str, change: Callable[[Header], object], message: str, *, more_data: bytes = b"") -> MalformedInput:
    """A changed header, followed by the healthy data and `more_data`."""

    def damage(inputs: RunFiles) -> None:
        path = _weights(inputs)
        header, data = read_parts(path)
        change(header)
        path.write_bytes(packed(json.dumps(header).encode(), data + more_data))

    return MalformedInput(name=f"tensor {name}", damage=no_line(damage), message=message)


def _whole_files() -> Iterator[MalformedInput]:
    for num_bytes in (0, 1, 7):
        yield _content(
            f"of {num_bytes} bytes", bytes(num_bytes), f"not a safetensors file: it has only {num_bytes} bytes"
        )
    for length in (100_000_001, 1 << 31, 1 << 62, 1 << 63, (1 << 64) - 1):
        message = f"not a safetensors file: its header would have {length} bytes"
        yield _content(f"with a header of {length} bytes", length.to_bytes(8, "little") + b"{}", message)
    yield _content("with a header beyond its end", (1000).to_bytes(8, "little") + b"{}", "truncated: the header")
    yield _content("without a header", bytes(8), "not a safetensors file: the header does not begin")
    yield _content("of zeros", bytes(5000), "not a safetensors file: the header does not begin")
    yield _content("cut in its length", lambda whole: whole[:5], "not a safetensors file: it has only 5 bytes")
    yield _content("cut in its header", lambda whole: whole[:100], "truncated: the header")
    yield _content("cut in half", lambda whole: whole[: len(whole) // 2], ".* are outside the")
    yield _content("less its last byte", lambda whole: whole[:-1], ".* are outside the")
    for num_bytes in (1, 4096):
        message = f"{num_bytes} bytes after the last tensor"
        yield _content(f"with {num_bytes} bytes more", lambda whole, more=num_bytes: whole + bytes(more), message)
    yield _content("twice over", lambda whole: whole + whole, r"\d+ bytes after the last tensor")
    yield _content("moved by a byte", lambda whole: b"\0" + whole, "")
    yield _content("compressed", gzip.compress, "")
    yield _content("that is a pickle", b"\x80\x04\x95" + bytes(200), "")
    yield _content("that is a zip archive", b"PK\x03\x04" + bytes(200), "")
    yield _content("that is GGUF", b"GGUF\x03\0\0\0" + bytes(200), "")
    yield _content("that git-lfs stands in for", _GIT_LFS, "not a safetensors file")
    yield _content("that is a web page", b"<!doctype html><html><body>404</body></html>", "not a safetensors file")
    yield _content("of text", b"model weights go here\n", "not a safetensors file")


def _headers() -> Iterator[MalformedInput]:
    for name, header in {
        "cut": b'{"x": ',
        "in single quotes": b"{'x': 1}",
        "with a comma too many": b'{"x": 1,}',
        "with a comment": b'{"x": 1 /* one */}',
        "not UTF-8": b'{"\xff": 1}',
        "nested deeply": b'{"x":' + b"[" * 50_000,
        "with a number of 10000 digits": b'{"x":' + b"1" * 10_000 + b"}",
        "followed by another": b"{}{}",
        "with a raw control character": b'{"a\x1b[2J": 1}',
    }.items():
        yield _raw_header(name, header, "the header is not valid JSON")
    for name, header in {
        "that is a list": b"[]",
        "that is null": b"null",
        "behind a byte order mark": b"\xef\xbb\xbf{}",
        "behind a space": b" {}",
        "in UTF-16": "{}".encode("utf-16"),
    }.items():
        yield _raw_header(name, header, "not a safetensors file: the header does not begin")
    yield _raw_header("with a name twice", b'{"a\\u001b": 1, "a\\u001b": 1}', r".*a\\x1b appears twice")
    yield _raw_header("that is empty", b"{}", r"\d+ bytes after the last tensor", keep_data=True)
    for value in ('{"a": 1}', '{"a": null}', '{"a": {}}', "[]", "null", '"text"'):
        message = "__metadata__ in the header must map text to text"
        yield _raw_header(f"with metadata {value}", b'{"__metadata__": ' + value.encode() + b"}", message)
    for value in ("null", "7", '"F32"', "[]", "{}", '{"dtype": "F32"}', '{"dtype": "F32", "shape": [1]}'):
        yield _raw_header(
            f"with an entry {value}",
            b'{"x": ' + value.encode() + b"}",
            "tensor x: its entry in the header must have exactly",
        )
    yield _raw_header(
        "with a name of a million characters",
        b'{"' + b"a" * 1_000_000 + b'": 1}',
        r"tensor a{200}\.\.\.: its entry in the header must have exactly",
    )


def _entries() -> Iterator[MalformedInput]:
    def entry(name: str, message: str, **fields: object) -> MalformedInput:
        where = f"model.safetensors: tensor {NORM}:? "
        return _header(name, lambda header: header[NORM].update(fields), where + message)

    for dtype in ("F4", "f32", "float32", "", None, 5, ["F32"], {"F32": 1}):
        yield entry(f"of dtype {dtype!r}", "dtype .* is not supported", dtype=dtype)
    for shape in ([-32], [32.0], [True], ["32"], "32", None, {"0": 32}, [[32]], 32):
        yield entry(f"of shape {shape!r}", "shape and data_offsets must be lists of whole numbers", shape=shape)
    for shape in ([33], [31], [0], [], [32, 32], [1 << 62] * 1000, [0, 1 << 62, 1 << 62], [1] * 1_000):
        name = f"of shape {str(shape)[:40]}"
        if shape == [1] * 1_000:
            yield entry(name, "its shape and dtype do not match", shape=[*shape, 32])
        else:
            yield entry(name, "its shape and dtype do not match", shape=shape)
    for dtype in ("F64", "BF16", "F16", "I8"):
        yield entry(f"of dtype {dtype} and other size", "its shape and dtype do not match", dtype=dtype)
    for dtype in ("I32", "U32"):
        yield entry(f"of dtype {dtype}", "has dtype .* weights must be floating point", dtype=dtype)
    for offsets in ([0], [0, 1, 2], [], None, "0", [0.0, 128.0], [-128, 0], [True, 128], {"0": 128}):
        message = "shape and data_offsets must be lists of whole numbers"
        yield entry(f"at {offsets!r}", message, data_offsets=offsets)
    for offsets in ([128, 0], [0, 1 << 40], [1 << 70, 1 << 71], [0, 10**400]):
        yield entry(f"at {str(offsets)[:40]}", "bytes .* are outside the .* bytes of data", data_offsets=offsets)
    yield entry("with a field more", "its entry in the header must have exactly", strides=[1])


def _tensors() -> Iterator[MalformedInput]:
    def shift(header: Header, num_bytes: int) -> None:
        """Move every tensor but the first by `num_bytes`."""
        for fields in sorted(header.values(), key=_begin)[1:]:
            fields["data_offsets"] = [offset + num_bytes for offset in fields["data_offsets"]]

    def double(header: Header) -> None:
        first, second = sorted((fields for fields in header.values() if "shape" in fields), key=_begin)[:2]
        second.update(first)

    def without_metadata(change: Callable[[Header], object]) -> Callable[[Header], object]:
        def changed(header: Header) -> None:
            header.pop("__metadata__", None)
            change(header)

        return changed

    gap = without_metadata(lambda header: shift(header, 4))
    yield _header("after a gap", gap, "has a gap before it", more_data=bytes(4))
    yield _header("over another", without_metadata(lambda header: shift(header, -4)), "overlaps|are outside")
    yield _header("in another's place", without_metadata(double), "overlaps the tensor before it")
    yield _header(
        "that is left out", lambda header: header.pop(NORM), "has a gap before it|bytes after the last tensor"
    )
    for name in ("model.norm.wait", "norm", "", "a\0b", "\x1b[2J", "model.layers.2.mlp.up_proj.weight", "\ud800"):
        message = r"tensor \S* does not belong to LlamaForCausalLM"
        yield _header(f"renamed to {name!r}", lambda header, new=name: header.update({new: header.pop(NORM)}), message)
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    yield _header("that nobody wants", lambda header: header.update(extra=empty), "tensor extra does not belong to")
    turned = {"shape": [1, 32]}
    yield _header(
        "with a dimension more", lambda header: header[NORM].update(turned), "has shape .*, but the model needs"
    )
    projection = "model.layers.0.mlp.up_proj.weight"
    yield _header(
        "transposed",
        lambda header: header[projection].update(shape=header[projection]["shape"][::-1]),
        "has shape .*, but the model needs",
    )


def _begin(fields: Header) -> tuple[int, int]:
    return fields["data_offsets"][0], fields["data_offsets"][1]


def _places() -> Iterator[MalformedInput]:
    def place(name: str, message: str, put: Callable[[Path, Path], object]) -> MalformedInput:
        """`put` gets the path of the weights, where no file is left, and a directory outside the model's."""

        def damage(inputs: RunFiles) -> None:
            path = _weights(inputs)
            path.rename(inputs.directory / "weights")
            put(path, inputs.directory)

        return MalformedInput(name=f"file that is {name}", damage=no_line(damage), message=message)

    yield place(
        "not there",
        "no weights: there is no model.safetensors and no model.safetensors.index.json",
        lambda path, outside: None,
    )
    yield place("a directory", "model.safetensors is not a regular file", lambda path, outside: path.mkdir())
    yield place("a FIFO", "model.safetensors is not a regular file", lambda path, outside: os.mkfifo(path))
    yield place(
        "a link out of the model",
        "model.safetensors is a link to a file outside the model's directory",
        lambda path, outside: path.symlink_to(outside / "weights"),
    )
    yield place(
        "a link to a device",
        "model.safetensors is a link to a file outside the model's directory",
        lambda path, outside: path.symlink_to("/dev/zero"),
    )
    yield place("a dangling link", "model.safetensors is missing", lambda path, outside: path.symlink_to("gone"))
    yield place(
        "a link to itself", "model.safetensors cannot be opened", lambda path, outside: path.symlink_to(path.name)
    )
    for name, reason in (
        ("pytorch_model.bin", "; other formats are never loaded"),
        ("model.gguf", " but GGUF"),
        ("weights.pt", "; other formats are never loaded"),
        ("tf_model.h5", "; other formats are never loaded"),
    ):
        yield place(
            f"another's, {name}",
            f"{name} is not a safetensors file{reason}",
            lambda path, outside, name=name: (path.parent / name).write_bytes(b"\x80\x04K\x01."),
        )
