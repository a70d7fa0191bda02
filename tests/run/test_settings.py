"""The hash of a run's settings, and the space that a snapshot needs and has: on an empty device, next to the store, and
in `ratel plan`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ratel_cli.cli.app import main
from ratel_cli.config.load import load_config
from ratel_cli.config.schema import RunConfig
from ratel_cli.run.hardware_file import to_text
from ratel_cli.run.settings import (
    DECIDES_THE_BITS,
    DECIDES_THE_LENGTH,
    SnapshotSpace,
    earlier_hash,
    num_slots,
    recorded_hash,
    settings_hash,
    snapshot_space,
)
from ratel_cli.store.manifest import StoreIdentity
from ratel_cli.units import GIB
from tests.hardware.profiles import WITHOUT_GPU
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


def space_of(*, nvme_bytes: int = 0, path: str = "there") -> SnapshotSpace:
    space = snapshot_space(config_of(f"  snapshot: {{path: {path}, every: 3}}\n"), SPEC, nvme_bytes=nvme_bytes)
    assert space is not None
    return space


def free_bytes() -> int:
    free = os.statvfs(".")
    return free.f_bavail * free.f_frsize


def test_without_a_snapshot_no_space_is_needed() -> None:
    assert snapshot_space(config_of(), SPEC, nvme_bytes=0) is None
    assert num_slots(config_of()) == 2


def test_a_snapshot_needs_two_generations_and_a_slot_in_the_store() -> None:
    space = space_of()
    assert space.path == Path("there")
    assert 2 * 12 * ELEMENTS < space.need_bytes < 2 * 12 * ELEMENTS + 20_000
    assert num_slots(config_of("  snapshot: {path: there, every: 3}\n")) == 3


def test_the_stores_space_on_the_same_device_is_subtracted(here: Path) -> None:
    available, left = space_of().available_bytes, space_of(nvme_bytes=GIB).available_bytes
    assert available == pytest.approx(free_bytes(), abs=100 << 20)
    assert available - left == pytest.approx(GIB, abs=100 << 20)
    assert space_of(nvme_bytes=1 << 60).available_bytes == 0
    (here / "store").mkdir()
    with (here / "store" / "ratel.store").open("wb") as file:
        file.truncate(GIB)  # the store has its bytes already
    assert space_of(nvme_bytes=GIB).available_bytes == pytest.approx(available, abs=100 << 20)


def test_the_space_of_an_earlier_snapshot_is_available(here: Path) -> None:
    (here / "there").mkdir()
    with (here / "there" / "ratel.store").open("wb") as file:
        file.truncate(4 * GIB)
    assert space_of().available_bytes == pytest.approx(free_bytes() + 4 * GIB, abs=100 << 20)


def test_another_device_has_its_own_space() -> None:
    if not Path("/dev/shm").is_dir() or os.stat("/dev/shm").st_dev == os.stat(".").st_dev:
        pytest.skip("there is one file system only")
    assert space_of(nvme_bytes=1 << 60, path="/dev/shm/none").available_bytes > 0


def test_the_plan_has_a_row_for_the_snapshot(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On this machine. The space on another machine is not known."""
    config_of("  snapshot: {path: there, every: 3}\n")
    (here / "outputs" / "run" / "run").mkdir(parents=True)
    (here / "outputs" / "run" / "run" / "hardware.json").write_text(to_text(WITHOUT_GPU))
    (here / "machine.json").write_text(to_text(WITHOUT_GPU))
    assert main(["plan", "run.yaml"]) == 0
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("snapshot ")]
    assert "needs " in row and " available" in row
    assert main(["plan", "run.yaml", "--json"]) == 0
    tiers = json.loads(capsys.readouterr().out)["memory"]["tiers"]
    assert [tier["name"] for tier in tiers] == ["RAM", "NVMe", "snapshot"]
    assert main(["plan", "run.yaml", "--hardware", "machine.json"]) == 0
    assert "snapshot" not in capsys.readouterr().out


def test_a_plan_whose_snapshot_does_not_fit(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_of("  snapshot: {path: /proc/self, every: 3}\n")  # a file system without a free byte
    (here / "outputs" / "run" / "run").mkdir(parents=True)
    (here / "outputs" / "run" / "run" / "hardware.json").write_text(to_text(WITHOUT_GPU))
    assert main(["plan", "run.yaml"]) == 3
    captured = capsys.readouterr()
    assert "the run does not fit: snapshot is short by " in captured.err
    assert "hint: set storage.snapshot.path to a device with more space" in captured.err


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
