"""Random changes to a checkpoint's tensors: all parameters can be read, or a BadInput says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratel_cli.errors import BadInput
from ratel_cli.model.export.checkpoint import CheckpointSource
from ratel_cli.model.files.directory import WEIGHTS_NAME
from tests.inputs.safetensors_cases import read_parts
from tests.model.test_shards import packed
from tests.model.tiny import read_all, save_tiny, skeleton_of
from tests.tiers import examples, sample

FAMILIES = ("llama", "qwen3_moe", "gpt2")
DTYPES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "I8": 1, "I64": 8}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each family, in one file."""
    found = {}
    for family in FAMILIES:
        found[family] = tmp_path_factory.mktemp(family)
        save_tiny(family, found[family]).save_pretrained(found[family])
    return found


@pytest.mark.full
@pytest.mark.parametrize("family", sample(FAMILIES, every=3, offset=1))
@examples(60)
@given(data=st.data())
def test_any_tensors(directories: dict[str, Path], tmp_path: Path, family: str, data: st.DataObject) -> None:
    """Some of the model's tensors are left out or renamed, or get another dtype or shape."""
    header, _ = read_parts(directories[family] / WEIGHTS_NAME)
    names = sorted(set(header) - {"__metadata__"})
    tensors = {name: (header[name]["dtype"], header[name]["shape"]) for name in names}
    for name in data.draw(st.lists(st.sampled_from(names), max_size=3, unique=True)):
        dtype, shape = tensors.pop(name)
        what = data.draw(st.sampled_from(["left out", "renamed", "another dtype", "another shape", "as it was"]))
        other_names = [f"model.{name}", name.replace("0", "7"), "x", name.rpartition(".")[2]]
        if what == "another dtype":
            dtype = data.draw(st.sampled_from(sorted(DTYPES)))
        if what == "another shape":
            shape = data.draw(st.permutations(shape) | st.lists(st.integers(0, 9), max_size=3))
        if what != "left out":
            tensors[data.draw(st.sampled_from(other_names)) if what == "renamed" else name] = (dtype, shape)
    write(tmp_path / WEIGHTS_NAME, tensors)
    (tmp_path / "config.json").write_bytes((directories[family] / "config.json").read_bytes())
    skeleton, spec = skeleton_of(tmp_path)
    try:
        with CheckpointSource(tmp_path, skeleton, spec) as source:
            values = read_all(source, spec)
    except BadInput as error:
        assert str(tmp_path) in error.message and error.message.isprintable()
    else:
        assert {name: tuple(value.shape) for name, value in values.items()} == {
            parameter.name: parameter.shape for block in spec.blocks for parameter in block.parameters
        }


def write(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """Write a file with these tensors, all zeros."""
    header, position = {}, 0
    for name, (dtype, shape) in tensors.items():
        num_bytes = DTYPES[dtype]
        for extent in shape:
            num_bytes *= extent
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + num_bytes]}
        position += num_bytes
    path.write_bytes(packed(header, position))
