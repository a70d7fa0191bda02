"""Reading an exported directory back: values that are not finite, files that are not the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ratel_cli.errors import IntegrityFailure
from ratel_cli.model.export.reload import check_values, holds_export, load_export, read_parameter
from ratel_cli.model.files.directory import INDEX_NAME, WEIGHTS_NAME
from ratel_cli.model.files.shards import ShardReader, ShardWriter
from tests.model.tiny import FAMILIES, Tensors, rewrite, save_tiny, specs_of
from tests.tiers import sample


def write(path: Path, tensors: Tensors) -> Path:
    with ShardWriter(path, specs_of(tensors)) as writer:
        for tensor in tensors.values():
            writer.write(tensor.contiguous())
        writer.finish()
    return path


def check(path: Path) -> int:
    """Check the file. Returns the bytes that were read."""
    parts: list[int] = []
    with ShardReader(path) as reader:
        check_values(reader, progress=parts.append)
    return sum(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    tensors = {"a": torch.ones(3, dtype=dtype), "b": torch.ones(4, 5).to(dtype), "empty": torch.ones(0, dtype=dtype)}
    assert check(write(tmp_path / "fine.safetensors", tensors)) == 23 * dtype.itemsize
    tensors["b"] = torch.tensor([[1.0, value]]).to(dtype)
    with pytest.raises(IntegrityFailure, match=r"^bad\.safetensors: tensor b has values that are NaN or infinite$"):
        check(write(tmp_path / "bad.safetensors", tensors))


def test_large_values_are_finite_in_their_own_dtype(tmp_path: Path) -> None:
    check(write(tmp_path / "wide.safetensors", {"a": torch.tensor([1e300], dtype=torch.float64)}))
    check(write(tmp_path / "whole.safetensors", {"a": torch.tensor([-1]), "b": torch.tensor([True])}))


def test_tensors_larger_than_a_part(tmp_path: Path) -> None:
    large = torch.zeros((32 << 20) // 4 + 7)
    assert check(write(tmp_path / "large.safetensors", {"a": large})) == large.nbytes
    large[-1] = float("nan")
    with pytest.raises(IntegrityFailure, match="tensor a"):
        check(write(tmp_path / "large.safetensors", {"a": large}))


@pytest.mark.parametrize("name", [WEIGHTS_NAME, INDEX_NAME])
def test_what_counts_as_an_export(tmp_path: Path, name: str) -> None:
    assert not holds_export(tmp_path)
    assert not holds_export(tmp_path / "none")
    (tmp_path / name).touch()
    assert holds_export(tmp_path)


@pytest.mark.parametrize("family", sample(FAMILIES, every=4))
def test_every_parameter_is_as_it_was_saved(tmp_path: Path, family: str) -> None:
    model = save_tiny(family, tmp_path)
    loaded = load_export(tmp_path, dtype=torch.float32, attention=None)
    assert not loaded.training
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        assert torch.equal(read_parameter(loaded, name, 0, flat.numel()), flat)
        assert torch.equal(read_parameter(loaded, name, 3, 5), flat[3:8])


def test_the_dtype_is_that_of_the_config(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({name: t.bfloat16() for name, t in tensors.items()}))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    assert load_export(tmp_path, dtype=None, attention="eager").dtype == torch.bfloat16


def drop(tensors: Tensors) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def add(tensors: Tensors) -> None:
    tensors["model.layers.9.odd.weight"] = torch.ones(3)


def reshape(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = torch.ones(7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"),
        (add, r"tensor model\.layers\.9\.odd\.weight does not belong to the model"),
        (reshape, "transformers cannot load the model"),
    ],
)
def test_weights_that_are_not_the_models(tmp_path: Path, change: Callable[[Tensors], None], message: str) -> None:
    save_tiny("llama", tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(IntegrityFailure, match=message) as raised:
        load_export(tmp_path, dtype=torch.float32, attention=None)
    assert "\n" not in raised.value.message


def test_a_directory_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS_NAME).write_bytes(b"x")
    with pytest.raises(IntegrityFailure, match="transformers cannot load the model"):
        load_export(tmp_path, dtype=None, attention=None)


def test_a_parameter_that_the_model_lacks(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    loaded = load_export(tmp_path, dtype=torch.float32, attention=None)
    for name in ("model.odd.weight", "odd", "model.layers.0.mlp"):
        with pytest.raises(IntegrityFailure, match="is not a parameter of the loaded model"):
            read_parameter(loaded, name, 0, 1)
