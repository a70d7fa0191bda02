"""A base that stays in its own files: the run is the same, and the files must be, too."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import Config, as_json, assert_rejected, tree, works

LORA: dict[str, object] = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "max_steps": 2, "dtype": "bfloat16"}
IN_PLACE: dict[str, object] = {**LORA, "base_storage": "in_place"}


def base_of(config: Config) -> Path:
    return Path(yaml.safe_load(config.read_text())["base_model"])


def own_copy(config: Config, directory: Path) -> Path:
    """The config with a copy of its base that a test may change. Returns the copy."""
    shutil.copytree(base_of(config), directory)
    content = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump({**content, "base_model": str(directory)}))
    return directory


def file_with(directory: Path, tensor: str) -> Path:
    [found] = [path for path in directory.glob("*.safetensors") if tensor in load_file(path)]
    return found


def test_a_run_is_that_with_a_copied_base(make_config: MakeConfig) -> None:
    config = make_config(**IN_PLACE)
    before = tree(base_of(config))
    said = config.succeed()
    copied = make_config("copied", **LORA, base=base_of(config))
    copied.succeed()
    found, wanted = config.exported, copied.exported
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert [line["loss"] for line in config.metrics] == [line["loss"] for line in copied.metrics]
    assert tree(base_of(config)) == before
    assert f"stay in the files of {base_of(config)}" in said and "copied" not in said
    sizes = [each.store.stat().st_size for each in (config, copied)]
    weights = sum(path.stat().st_size for path in base_of(config).glob("*.safetensors"))
    assert sizes[1] - sizes[0] > 0.9 * weights - 16384


@pytest.mark.full
def test_the_plan_needs_no_space_for_it(make_config: MakeConfig) -> None:
    """Before a run, with the files or without, and after it."""
    config, copied = make_config(**IN_PLACE), make_config("copied", **LORA)
    plans = [as_json("plan", each) for each in (config, copied)]
    needs = [plan["memory"]["nvme_bytes"] for plan in plans]
    assert needs[0] < needs[1] - 20_000
    config.succeed()
    assert as_json("plan", config)["memory"]["nvme_bytes"] == needs[0]
    directory = own_copy(config, config.output.parent / "shape")
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    assert as_json("plan", config)["memory"]["nvme_bytes"] == needs[0]


@pytest.mark.full
def test_what_is_asked_of_a_run(make_config: MakeConfig, rows: Path, tmp_path: Path) -> None:
    config = make_config(**IN_PLACE)
    config.succeed()
    for command in (
        ("verify", config),
        ("merge", config, "-o", tmp_path / "merged"),
        ("export", config, "-o", tmp_path / "exported"),
        ("generate", config, "hello", "--max-new-tokens", "3"),
        ("eval", config, rows),
        ("status", config.output),
        ("report", config.output),
        ("clean", config.output, "--store", "--yes"),
    ):
        works(*command)
    assert not config.store.exists() and base_of(config).exists()


@pytest.mark.full
def test_frozen_parameters_stay_there_too(make_config: MakeConfig) -> None:
    keys: dict[str, object] = {"unfrozen_parameters": ["lm_head", "model.layers.1"], "max_steps": 2}
    config = make_config(**keys, dtype="bfloat16", base_storage="in_place")
    copied = make_config("copied", **keys, dtype="bfloat16", base=base_of(config))
    config.succeed()
    copied.succeed()
    for path in copied.output.glob("*.safetensors"):
        found, wanted = load_file(config.output / path.name), load_file(path)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted) and found.keys() == wanted.keys()
    assert len(list(copied.output.glob("*.safetensors"))) == len(list(config.output.glob("*.safetensors"))) > 1


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (_flip, 4, "has changed since the run began (block"),
        pytest.param(
            lambda path: path.write_bytes(path.read_bytes() + bytes(8)),
            2,
            "belong to no tensor",
            marks=pytest.mark.full,
        ),
        pytest.param(Path.unlink, 2, "is missing", marks=pytest.mark.nightly),
    ],
)
def test_files_that_changed_are_refused(
    make_config: MakeConfig, tmp_path: Path, change: Callable[[Path], object], code: int, message: str
) -> None:
    config = make_config(**IN_PLACE)
    directory = own_copy(config, tmp_path / "copy")
    config.succeed()
    path = file_with(directory, "model.layers.0.mlp.up_proj.weight")
    change(path)
    ended = config.finetune("max_steps=3")
    assert ended.code == code and message in ended.stderr.lower().replace("\n", " "), ended.stderr
    assert str(path) in ended.stderr or code == 2
    assert config.committed_step == 2


@pytest.mark.full
def test_a_base_that_moved_is_not_found(make_config: MakeConfig, tmp_path: Path) -> None:
    """The store's list has its old place; the config, the new one."""
    config = make_config(**IN_PLACE)
    directory = own_copy(config, tmp_path / "copy")
    config.succeed()
    directory.rename(tmp_path / "moved")
    assert config.finetune(f"base_model={tmp_path / 'moved'}", "max_steps=3").code == 2
    (tmp_path / "moved").rename(directory)
    config.succeed("max_steps=3")


def test_files_in_another_dtype_cannot_stay(make_config: MakeConfig, base: Path, tmp_path: Path) -> None:
    config = make_config(**{**LORA, "base": base})
    ended = config.finetune("base_storage=in_place")
    assert_rejected(ended, 2, "base_storage: in_place: nothing that is frozen lies in the files of", "in bfloat16")
    assert not config.store.exists()


@pytest.mark.full
def test_a_part_of_the_files_in_another_dtype_is_copied(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(**IN_PLACE)
    directory = own_copy(config, tmp_path / "copy")
    name = "model.layers.1.mlp.up_proj.weight"
    path = file_with(directory, name)
    tensors = load_file(path)
    save_file({**tensors, name: tensors[name].float()}, path, metadata={"format": "pt"})
    said = config.succeed()
    assert "1 frozen block of" in said and "are copied, as the files have them otherwise" in said
    copied = make_config("copied", **LORA, base=directory)
    copied.succeed()
    found, wanted = config.exported, copied.exported
    assert all(torch.equal(found[each], wanted[each]) for each in wanted)


@pytest.mark.full
def test_one_store_or_the_other(make_config: MakeConfig) -> None:
    config = make_config(**IN_PLACE)
    config.succeed()
    ended = config.finetune("base_storage=store", "max_steps=3")
    assert_rejected(ended, 2, "which has other settings: base_storage was in_place, is now store")
    other = make_config("other", **LORA, base=base_of(config))
    assert_rejected(other.finetune("--from", str(config.output)), 2, "base_storage was in_place, is now store")
