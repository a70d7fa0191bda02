"""What the user is told about parts of a base model that a run leaves as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ratel_cli.model.export.checkpoint import CheckpointSource
from ratel_cli.model.files.initialise import RandomSource
from ratel_cli.run.inputs.unused_parts import unused_parts
from tests.model.test_export_layout import export, small_model
from tests.model.tiny import rewrite, save_tiny, skeleton_of


def test_layers_that_transformers_leaves_out_are_kept_and_told_once(tmp_path: Path) -> None:
    base = tmp_path / "base"
    model = small_model("qwen3_next")
    model.save_pretrained(base)
    extra = {f"mtp.{name}.weight": torch.randn(3, 5, dtype=torch.float16) for name in ("fc", "norm")}
    rewrite(base, lambda tensors: tensors.update(extra))
    skeleton, spec = skeleton_of(base)
    with CheckpointSource(base, skeleton, spec) as source:
        told = unused_parts(base, source)
    assert told == ["not trained: mtp (2 tensors, 60 B); the export contains them unchanged"]
    export(tmp_path, base, model, "bfloat16")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], values) for name, values in extra.items())


@pytest.mark.parametrize("names", [("adapter_config.json",), ("adapter_config.json", "adapter_model.safetensors")])
def test_an_adapter_beside_the_model(tmp_path: Path, names: tuple[str, ...]) -> None:
    save_tiny("llama", tmp_path)
    skeleton, spec = skeleton_of(tmp_path)
    with CheckpointSource(tmp_path, skeleton, spec) as source:
        assert unused_parts(tmp_path, source) == []
        for name in names:
            (tmp_path / name).touch()
        [told] = unused_parts(tmp_path, source)
    assert told == f"{tmp_path}: {' and '.join(names)} beside the model: the run does not use this adapter"
    assert len(unused_parts(tmp_path, RandomSource(skeleton, 1))) == 1


def test_many_parts_are_not_all_named(tmp_path: Path) -> None:
    """Layers of a model's own list too, where they come after its last one."""
    save_tiny("glm4_moe", tmp_path)
    more = {f"model.layers.{number}.eh_proj.weight": torch.ones(2) for number in range(92, 100)}
    rewrite(tmp_path, lambda tensors: tensors.update(more))
    skeleton, spec = skeleton_of(tmp_path)
    skeleton._keys_to_ignore_on_load_unexpected = {r"model\.layers\.9\d"}
    with CheckpointSource(tmp_path, skeleton, spec) as source:
        [told] = unused_parts(tmp_path, source)
    assert "model.layers.92, model.layers.93, " in told and " and 2 more parts (8 tensors, 64 B)" in told
