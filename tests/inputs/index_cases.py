"""Malformed indices of weights: the base model in two shards, with an index that is damaged, wrong or unsafe.

What may be wrong with an index alone, and where it may point, is that of `tests/model/test_directory.py`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from safetensors.torch import load_file, save_file

from ratel_cli.model.files.directory import INDEX_NAME
from tests.inputs.cases import MalformedInput, RunFiles, no_line
from tests.inputs.safetensors_cases import NORM
from tests.model.test_directory import ELSEWHERE, NO_INDEX, edit_index, put_odd_files

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def shard(base: Path) -> None:
    """Split the weights into two files, with their index."""
    tensors = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: FIRST if at < len(names) // 2 else SECOND for at, name in enumerate(names)}
    for file_name in (FIRST, SECOND):
        of_file = {name: tensors[name] for name in names if weight_map[name] == file_name}
        save_file(of_file, base / file_name, metadata={"format": "pt"})
    (base / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def cases() -> Iterator[MalformedInput]:
    for number, (name, message) in enumerate(ELSEWHERE.items()):
        yield _sharded(f"naming a file, {number}", partial(_elsewhere, name=name), re.escape(message))
    for number, content in enumerate(NO_INDEX):
        put = partial(_put, lambda path, content=content: path.write_text(content))
        yield _sharded(f"that is none, {number}", put, f"{INDEX_NAME}: ")
    link = partial(_put, lambda path: path.symlink_to(f"../{INDEX_NAME}"))
    yield _sharded("that is a link out of the model", link, f"{INDEX_NAME} is a link to a file outside the model's")
    yield _sharded("that is a FIFO", partial(_put, os.mkfifo), f"{INDEX_NAME} is not a regular file")
    yield from _wrong_maps()


def _sharded(name: str, change: Callable[[Path], object], message: str) -> MalformedInput:
    """`change` gets the directory of the model."""

    def damage(inputs: RunFiles) -> None:
        shard(inputs.base)
        change(inputs.base)

    return MalformedInput(name=f"index {name}", damage=no_line(damage), message=message)


def _put(put: Callable[[Path], object], base: Path) -> None:
    """Something else in the place of the index, which goes out of the model."""
    (base / INDEX_NAME).rename(base.parent / INDEX_NAME)
    put(base / INDEX_NAME)


def _elsewhere(base: Path, name: str) -> None:
    (base.parent / "model.safetensors").touch()
    put_odd_files(base)
    edit_index(base, lambda weight_map: weight_map.update({NORM: name}))


def _wrong_maps() -> Iterator[MalformedInput]:
    def also_in_first(base: Path) -> None:
        save_file(load_file(base / FIRST) | {NORM: load_file(base / SECOND)[NORM]}, base / FIRST)

    def forget_second(base: Path) -> None:
        edit_index(base, lambda weight_map: [weight_map.pop(name) for name in load_file(base / SECOND)])

    def add_ghost(base: Path) -> None:
        edit_index(base, lambda weight_map: weight_map.update(ghost=FIRST))

    yield _sharded("of a tensor that is nowhere", add_ghost, "ghost is missing; the index says that it is in this file")
    yield _sharded("of a tensor in two files", also_in_first, f"tensor {NORM} is in {FIRST} too")
    yield _sharded("that forgets a file", forget_second, "tensor .* is missing")
    yield _sharded(
        "with a shard that is empty", lambda base: (base / SECOND).write_bytes(b""), f"{SECOND}: not a safet"
    )
