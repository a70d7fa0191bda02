"""Malformed indices of weights: the base model in two shards, with an index that is damaged, wrong or unsafe."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.inputs.cases import MalformedInput, RunFiles, no_line
from tests.inputs.safetensors_cases import NORM

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def cases() -> Iterator[MalformedInput]:
    yield from _names()
    yield from _files()
    yield from _contents()
    yield from _wrong_maps()


def shard(base: Path) -> dict[str, str]:
    """Split the weights into two files. Returns the correct weight map."""
    whole = base / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    names = sorted(tensors)
    halves = {FIRST: names[: len(names) // 2], SECOND: names[len(names) // 2 :]}
    for file_name, half in halves.items():
        save_file({name: tensors[name] for name in half}, base / file_name, metadata={"format": "pt"})
    return {name: file_name for file_name, half in halves.items() for name in half}


def _write(base: Path, index: object) -> None:
    (base / INDEX).write_text(json.dumps(index))


def _mapped(name: str, change: Callable[[dict[str, object], Path], object], message: str) -> MalformedInput:
    """A changed weight map. `change` also gets the model's directory."""

    def damage(inputs: RunFiles) -> None:
        weight_map: dict[str, object] = dict(shard(inputs.base))
        change(weight_map, inputs.base)
        _write(inputs.base, {"metadata": {"total_size": 1}, "weight_map": weight_map})

    return MalformedInput(name=f"index {name}", damage=no_line(damage), message=message)


def _content(name: str, content: bytes, message: str) -> MalformedInput:
    """Another content of the index."""

    def damage(inputs: RunFiles) -> None:
        shard(inputs.base)
        (inputs.base / INDEX).write_bytes(content)

    return MalformedInput(name=f"index {name}", damage=no_line(damage), message=f"{INDEX}: {message}")


def _names() -> Iterator[MalformedInput]:
    """File names that must not be opened."""
    long_name = "a" * 5_000 + ".safetensors"
    for name, message in {
        "../weights.safetensors": "is outside the model's directory",
        "a/../../weights.safetensors": "is outside the model's directory",
        "/dev/zero.safetensors": "is outside the model's directory",
        "/etc/passwd": "in weight_map is not a .safetensors file",
        "~/weights.safetensors": "is missing",
        "a\0b.safetensors": "is outside the model's directory",
        "": "in weight_map is not a .safetensors file",
        ".": "in weight_map is not a .safetensors file",
        "..": "in weight_map is not a .safetensors file",
        "pytorch_model.bin": "in weight_map is not a .safetensors file",
        "modeling.py": "in weight_map is not a .safetensors file",
        "gone.safetensors": "is missing",
        "sub/gone.safetensors": "is missing",
        "config.json/a.safetensors": "cannot be opened|is missing",
        "\x1b[2J.safetensors": r"file \\x1b\[2J.safetensors is missing",
        "\ud800.safetensors": r"file \\ud800.safetensors",
        "\n.safetensors": r"file \\n.safetensors is missing",
        long_name: "cannot be opened",
        "https://example.org/model.safetensors": "is missing",
        "model-00001-of-00002.safetensors/": "in weight_map is not a .safetensors file",
    }.items():
        shown = repr(name if len(name) < 50 else name[:20])
        yield _mapped(f"naming {shown}", lambda weights, base, name=name: weights.update({NORM: name}), message)
    for value in (None, 7, True, [FIRST], {"file": FIRST}):
        message = "weight_map must map tensor names to file names"
        yield _mapped(f"naming {value!r}", lambda weights, base, value=value: weights.update({NORM: value}), message)


def _files() -> Iterator[MalformedInput]:
    """Shards that are not regular safetensors files."""

    def replaced(name: str, put: Callable[[Path], object], message: str) -> MalformedInput:
        def change(weights: dict[str, object], base: Path) -> None:
            path = base / SECOND
            path.rename(base.parent / "second.safetensors")
            put(path)

        return _mapped(f"with a shard that is {name}", change, message)

    yield replaced("not there", lambda path: None, f"{SECOND} is missing")
    yield replaced("a directory", lambda path: path.mkdir(), f"{SECOND} is not a regular file")
    yield replaced("a FIFO", os.mkfifo, f"{SECOND} is not a regular file")
    yield replaced("empty", lambda path: path.touch(), f"{SECOND}: not a safetensors file: it has only 0 bytes")
    yield replaced("a page of zeros", lambda path: path.write_bytes(bytes(4096)), f"{SECOND}: not a safetensors")
    yield replaced("a dangling link", lambda path: path.symlink_to("gone"), f"{SECOND} is missing")
    yield replaced("a link to itself", lambda path: path.symlink_to(path.name), f"{SECOND} cannot be opened")
    for target in ("../second.safetensors", "/dev/zero", "/proc/self/mem"):
        message = f"{SECOND} is a link to a file outside the model's directory"
        yield replaced(f"a link to {target}", lambda path, target=target: path.symlink_to(target), message)


def _contents() -> Iterator[MalformedInput]:
    for name, content in {
        "that is empty": b"",
        "that is cut": b'{"weight_map": {"a": ',
        "that is not UTF-8": b'{"weight_map": {"\xff": "a"}}',
        "behind a byte order mark": b'\xef\xbb\xbf{"weight_map": {}}',
        "nested deeply": b"[" * 50_000,
        "with a tensor twice": b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
        "with a number of 10000 digits": b'{"weight_map": ' + b"1" * 10_000 + b"}",
        "that is YAML": b"weight_map:\n  a: b\n",
    }.items():
        yield _content(name, content, "not valid JSON")
    for content in ("null", "[]", "7", "{}", '{"weight_map": null}', '{"weight_map": []}', '{"weight_map": "a"}'):
        message = "weight_map must map tensor names to file names"
        yield _content(f"that is {content}", content.encode(), message)

    def link(inputs: RunFiles) -> None:
        _write(inputs.directory, {"weight_map": shard(inputs.base)})
        (inputs.directory / INDEX).rename(inputs.directory / "index.json")
        (inputs.base / INDEX).symlink_to("../index.json")

    def fifo(inputs: RunFiles) -> None:
        shard(inputs.base)
        os.mkfifo(inputs.base / INDEX)

    leaves = f"{INDEX} is a link to a file outside the model's directory"
    yield MalformedInput(name="index that is a link out of the model", damage=no_line(link), message=leaves)
    yield MalformedInput(name="index that is a FIFO", damage=no_line(fifo), message=f"{INDEX} is not a regular file")


def _wrong_maps() -> Iterator[MalformedInput]:
    def also_in_first(weights: dict[str, object], base: Path) -> None:
        tensors = load_file(base / FIRST) | {NORM: load_file(base / SECOND)[NORM]}
        save_file(tensors, base / FIRST, metadata={"format": "pt"})

    def drop(weights: dict[str, object], base: Path) -> None:
        tensors = load_file(base / SECOND)
        del tensors[NORM]
        save_file(tensors, base / SECOND, metadata={"format": "pt"})

    def forget_second(weights: dict[str, object], base: Path) -> None:
        for name in [name for name, file_name in weights.items() if file_name == SECOND]:
            del weights[name]

    def swap(weights: dict[str, object], base: Path) -> None:
        weights.update({name: FIRST if file_name == SECOND else SECOND for name, file_name in weights.items()})

    here = "is missing; the index says that it is in this file"
    yield _mapped("of a tensor that is in the other file", lambda weights, base: weights.update({NORM: FIRST}), here)
    yield _mapped("of a tensor that is nowhere", lambda weights, base: weights.update(ghost=FIRST), f"ghost {here}")
    yield _mapped("of a tensor that its file lacks", drop, f"{NORM} {here}")
    yield _mapped("with its files swapped", swap, here)
    yield _mapped("of a tensor in two files", also_in_first, f"tensor {NORM} is in {FIRST} too")
    yield _mapped("that forgets a file", forget_second, "tensor .* is missing")
    yield _mapped("of nothing", lambda weights, base: weights.clear(), "tensor .* is missing")
