"""The hash of a run's settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratel_cli.config.load import load_config
from ratel_cli.config.schema import RunConfig
from ratel_cli.run.settings import (
    DECIDES_THE_BITS,
    DECIDES_THE_LENGTH,
    earlier_hash,
    recorded_hash,
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


def identity_with(config_hash: str) -> StoreIdentity:
    return StoreIdentity(model_hash="", config_hash=config_hash, data_hash="", seed=0, software="")


@pytest.mark.parametrize(
    ("text", "digest"),
    [
        ("", "b4828b91644d41f394a64d44c8f7aebee7ebc9bec03bace96577562ee22d1ca5"),
        (
            "lr_scheduler: linear\nwarmup_steps: 5\nmax_steps: 9\ndtype: float32\n",
            "38fd402040f2756cdf20d03c5704233e6134b8fa1908642ef9dd0ff776a1addc",
        ),
    ],
)
def test_the_settings_of_a_store_that_is_older_than_a_key_stay_the_same(
    text: str, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digests are those of the version before `lr_scheduler_kwargs`, when all chunks of the head had 64 MiB and a
    run had one length."""
    config = trained_config(text).chunked_by(64 << 20)
    assert earlier_hash(config) == digest
    with_options = trained_config("lr_scheduler_kwargs: {num_cycles: 1.5}\nlr_scheduler: cosine\n").chunked_by(64 << 20)
    assert earlier_hash(with_options) != digest
    assert recorded_hash(config) == settings_hash(config) != digest, "there is no store"
    monkeypatch.setattr("ratel_cli.run.settings.stored_identity", lambda paths: identity_with(digest))
    assert recorded_hash(config) == digest
    longer = trained_config(
        text + "max_steps: 11\n" if "max_steps" not in text else text.replace("9", "11")
    ).chunked_by(64 << 20)
    assert recorded_hash(longer) == settings_hash(longer) == settings_hash(config)


def test_the_length_of_a_run_is_no_part_of_its_identity_and_all_else_is() -> None:
    config = trained_config("")
    for key in DECIDES_THE_LENGTH:
        assert settings_hash(config.model_copy(update={key: 7})) == settings_hash(config)
    other: dict[str, object] = {"learning_rate": 0.5, "weight_decay": 0.5, "warmup_ratio": 0.5, "sequence_len": 7}
    for key, value in other.items():
        assert key in DECIDES_THE_BITS
        assert settings_hash(config.model_copy(update={key: value})) != settings_hash(config)
