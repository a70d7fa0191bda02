"""The space that a snapshot needs and has: on an empty device, next to the store, and in `ratel plan`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ratel_cli.cli.app import main
from ratel_cli.config.load import load_config
from ratel_cli.config.schema import RunConfig
from ratel_cli.run.hardware_file import to_text
from ratel_cli.run.settings import SnapshotSpace, num_slots, snapshot_space
from ratel_cli.units import GIB
from tests.hardware.profiles import WITHOUT_GPU
from tests.planning.shapes import gpt

SPEC = gpt()
ELEMENTS = sum(block.num_elements for block in SPEC.blocks)
SHAPE = "model_shape: {num_layers: 2, num_heads: 2, hidden_size: 64, vocab_size: 512}\nlimits: {host_memory: 4GiB}\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(text: str = "") -> RunConfig:
    Path("run.yaml").write_text(SHAPE + "storage:\n  paths: [store]\n" + text)
    return load_config(Path("run.yaml")).config


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
