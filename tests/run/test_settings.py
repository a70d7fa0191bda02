"""The hash of a run's settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.load import load_config
from ratel_cli.run.inputs.settings import (
    DECIDES_THE_BITS,
    DECIDES_THE_LENGTH,
    settings_hash,
)
from ratel_cli.store.manifest import StoreIdentity
from tests.planning.shapes import gpt

SPEC = gpt()
ELEMENTS = sum(block.num_elements for block in SPEC.blocks)
SHAPE = "model_shape: {num_layers: 2, num_heads: 2, hidden_size: 64, vocab_size: 512}\nlimits: {host_memory: 4GiB}\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(text: str = "") -> RunConfig:
    Path("run.yaml").write_text(SHAPE + "storage:\n  paths: [store]\n" + text)
    return load_config(Path("run.yaml")).config


def trained_config(text: str) -> RunConfig:
    Path("run.yaml").write_text("base_model: org/name\ndatasets: train.jsonl\n" + text)
    return load_config(Path("run.yaml")).config


def test_how_the_model_is_quantised_is_a_part_of_a_runs_identity() -> None:
    """Two forms can take the same bytes, so that no size of a block tells them apart."""
    texts = ("", "load_in_8bit: true\n", "load_in_4bit: true\n")
    texts += ("load_in_4bit: true\nbnb_4bit_use_double_quant: false\n",)
    hashes = [settings_hash(trained_config("adapter: lora\n" + text)) for text in texts]
    assert len(set(hashes)) == len(texts)
    assert hashes[0] == settings_hash(trained_config("adapter: lora\nbnb_4bit_use_double_quant: false\n"))


@pytest.mark.parametrize(
    ("optimizer", "written", "same"),
    [
        ("sgd", "{momentum: 0.0, nesterov: false}", ""),
        ("sgd", "{momentum: 0.9, nesterov: false}", "{momentum: 0.9}"),
        ("muon", "{momentum: 0.95, nesterov: true, adjust_lr_fn: match_rms_adamw}", ""),
        ("muon", "{momentum: 0.9, nesterov: true}", "{momentum: 0.9}"),
    ],
)
def test_options_of_an_optimizer_count_by_what_they_mean(optimizer: str, written: str, same: str) -> None:
    texts = [f"optimizer: {optimizer}\n" + (f"optim_args: {each}\n" if each else "") for each in (written, same)]
    texts.append(f"optimizer: {optimizer}\noptim_args: {{momentum: 0.5}}\n")
    one, other, different = (settings_hash(trained_config(text)) for text in texts)
    assert one == other != different


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("optim_args: {}", "optim_args"),
        ("lr_scheduler_kwargs: {min_lr: null}", "lr_scheduler_kwargs"),
    ],
)
def test_a_section_of_defaults_is_as_none(text: str, key: str) -> None:
    config = trained_config(text + "\n")
    assert getattr(config, key) is None and settings_hash(config) == settings_hash(trained_config(""))


def identity_with(config_hash: str) -> StoreIdentity:
    return StoreIdentity(model_hash="", config_hash=config_hash, data_hash="", seed=0, software="")


def test_the_length_of_a_run_is_no_part_of_its_identity_and_all_else_is() -> None:
    config = trained_config("")
    for key in DECIDES_THE_LENGTH:
        assert settings_hash(config.model_copy(update={key: 7})) == settings_hash(config)
    other: dict[str, object] = {"learning_rate": 0.5, "weight_decay": 0.5, "warmup_ratio": 0.5, "sequence_len": 7}
    for key, value in other.items():
        assert key in DECIDES_THE_BITS
        assert settings_hash(config.model_copy(update={key: value})) != settings_hash(config)
