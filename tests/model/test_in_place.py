"""Where the files of a model have its parameters: compared with what transformers loads of the same files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.export.checkpoint import CheckpointSource
from ratel_cli.model.export.export_layout import ConvertedContent, Origins, TrainedContent
from ratel_cli.model.files.in_place import base_files_of, located_in, placed_in_files
from ratel_cli.model.files.shards import TensorSpec
from ratel_cli.model.files.skeleton import build_skeleton
from ratel_cli.model.values.freezing import freeze
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.sizes import DtypeName
from ratel_cli.store.layout import RankSlice
from tests.engine.architectures import ARCHITECTURES, tiny_config
from tests.engine.machine import attention_of, initial_weights
from tests.tiers import sample


def saved_model(directory: Path, architecture: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model as transformers loads what it saves in several files."""
    config = tiny_config(architecture)
    skeleton = build_skeleton(config, dtype="float32", attn_implementation=attention_of(config))
    state = {name: values.to(dtype) for name, values in initial_weights(config).items()}
    model = type(skeleton).from_pretrained(None, config=skeleton.config, state_dict=state, dtype=dtype)
    model.save_pretrained(directory, max_shard_size="60KB")
    loaded: PreTrainedModel = type(skeleton).from_pretrained(directory, dtype=dtype)
    return loaded


def frozen_spec(directory: Path, architecture: str, dtype: DtypeName) -> tuple[ModelSpec, CheckpointSource]:
    """The model with all but its first parameter frozen, and its files, open."""
    config = tiny_config(architecture)
    skeleton = build_skeleton(config, dtype=dtype, attn_implementation=attention_of(config))
    freeze(skeleton, unfrozen=[next(name for name, _ in skeleton.named_parameters())], frozen=())
    spec = find_blocks(skeleton, name="tiny").spec
    return spec, CheckpointSource(directory, skeleton, spec)


def arrays_of(spec: ModelSpec, model: PreTrainedModel) -> dict[int, bytes]:
    """The arrays of blocks in files, from what transformers has loaded: the oracle."""
    values = dict(model.named_parameters(remove_duplicate=False))
    arrays = {}
    for block in spec.blocks:
        if block.is_in_files:
            array = torch.zeros(block.num_elements, dtype=model.dtype)
            for each in block.parameters:
                part = values[each.name].detach().reshape(-1)[each.first : each.first + each.num_elements]
                array[each.start : each.stop] = part
            arrays[block.index] = array.view(torch.uint8).numpy().tobytes()
    return arrays


def read_by_list(spec: ModelSpec, source: CheckpointSource) -> dict[int, bytes]:
    """The same from the files alone, by the list that a store gets."""
    listed = base_files_of(spec, source)
    assert listed is not None
    contents = [Path(path).read_bytes() for path, _ in listed.files]
    assert [len(content) for content in contents] == [num_bytes for _, num_bytes in listed.files]
    arrays = {}
    for index, pieces in listed.pieces.items():
        array = bytearray(spec.blocks[index].compute_bytes)
        for piece in pieces:
            content = contents[piece.file][piece.offset : piece.offset + piece.num_bytes]
            array[piece.start : piece.start + piece.num_bytes] = content
        arrays[index] = bytes(array)
    return arrays


@pytest.mark.parametrize("architecture", sample(ARCHITECTURES, every=4))
def test_files_have_what_transformers_loads(tmp_path: Path, architecture: str) -> None:
    model = saved_model(tmp_path, architecture, torch.bfloat16)
    spec, source = frozen_spec(tmp_path, architecture, "bfloat16")
    with source:
        placed = placed_in_files(spec, source)
        assert any(block.is_in_files for block in placed.blocks)
        assert read_by_list(placed, source) == arrays_of(placed, model)
        for rank in range(3):
            own = placed.sliced(RankSlice(rank, 3))
            assert read_by_list(own, source) == arrays_of(own, model)


@pytest.mark.parametrize("architecture", sample(ARCHITECTURES, every=8))
def test_all_that_is_frozen_lies_there(tmp_path: Path, architecture: str) -> None:
    """Not only the easy ones: stacks of experts lie there in pieces."""
    saved_model(tmp_path, architecture, torch.bfloat16)
    spec, source = frozen_spec(tmp_path, architecture, "bfloat16")
    with source:
        placed = placed_in_files(spec, source)
        copied = [
            each.name
            for block in placed.blocks
            if not block.is_trained and not block.is_in_files
            for each in block.parameters
        ]
    assert copied == COPIED.get(architecture, [])


COPIED: Mapping[str, list[str]] = {}
"""By architecture, the parameters that transformers makes of a file's tensors by more than putting them together."""


def test_another_dtype_lies_elsewhere(tmp_path: Path) -> None:
    saved_model(tmp_path, "llama", torch.float32)
    spec, source = frozen_spec(tmp_path, "llama", "bfloat16")
    with source:
        assert placed_in_files(spec, source) == spec
        assert base_files_of(spec, source) is None


def test_one_tensor_of_another_dtype_keeps_its_block_out(tmp_path: Path) -> None:
    saved_model(tmp_path, "llama", torch.bfloat16)
    [path] = [each for each in tmp_path.glob("*.safetensors") if "model.layers.1.mlp.up_proj.weight" in load_file(each)]
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].float()
    save_file(tensors, path, metadata={"format": "pt"})
    spec, source = frozen_spec(tmp_path, "llama", "bfloat16")
    with source:
        placed = placed_in_files(spec, source)
    copied = [block.name for block in placed.blocks if not block.is_trained and not block.is_in_files]
    assert len(copied) == 1 and "1" in copied[0]


def test_what_files_have_transposed_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some have the experts of a mixture: the same numbers in another order."""
    name = "model.layers.1.mlp.up_proj.weight"
    contents = Origins.contents

    def transposed(origins: Origins, tensors: Mapping[str, TensorSpec]) -> dict[str, TrainedContent | ConvertedContent]:
        found = contents(origins, tensors)
        whole = found[name]
        assert isinstance(whole, TrainedContent)
        return {**found, name: replace(whole, strides=whole.strides[::-1])}

    saved_model(tmp_path, "llama", torch.bfloat16)
    spec, source = frozen_spec(tmp_path, "llama", "bfloat16")
    with source:
        assert source.located(name) is not None
    monkeypatch.setattr(Origins, "contents", transposed)
    spec, source = frozen_spec(tmp_path, "llama", "bfloat16")
    with source:
        assert source.located(name) is None
        copied = [block for block in placed_in_files(spec, source).blocks if not block.is_in_files]
    assert name in {each.name for block in copied for each in block.parameters}


def test_other_sources_have_no_files() -> None:
    class InMemory:
        def read(self, name: str, start: int, stop: int) -> torch.Tensor:
            return torch.zeros(stop - start)

    assert located_in(InMemory(), "a") is None
