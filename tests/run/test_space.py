"""The space that snapshot and export need and have: on an empty device, next to the store, and in `ratel plan`."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from ratel_cli.cli.app import main
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.load import load_config
from ratel_cli.errors import NotEnoughSpace
from ratel_cli.model.files.marker import STAGING_NAME, Marker, space_for_export, write_marker
from ratel_cli.run.files.hardware_file import to_text
from ratel_cli.run.inputs.settings import num_slots
from ratel_cli.run.train.space import Space, check_store_space, spaces_of
from ratel_cli.schedule.rules import FROZEN
from ratel_cli.units import GIB, MIB
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


def space_of(*, nvme_bytes: int = 0, path: str = "there") -> Space:
    config = config_of(f"  snapshot: {{path: {path}, every: 3}}\n")
    [snapshot, _] = spaces_of(config, SPEC, nvme_bytes=nvme_bytes)
    return snapshot


def free_bytes() -> int:
    free = os.statvfs(".")
    return free.f_bavail * free.f_frsize


def test_without_a_snapshot_no_space_is_needed() -> None:
    assert [space.name for space in spaces_of(config_of(), SPEC, nvme_bytes=0)] == ["export"]
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
    assert [tier["name"] for tier in tiers] == ["RAM", "NVMe", "snapshot", "export"]
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


def export_of(config: RunConfig, *, shares: tuple[int, ...] | None = None) -> Space:
    return spaces_of(config, SPEC, nvme_bytes=0, shares=shares, export_bytes=GIB)[-1]


def other_device() -> Path:
    if not Path("/dev/shm").is_dir() or os.stat("/dev/shm").st_dev == os.stat(".").st_dev:
        pytest.skip("there is one file system only")
    return Path("/dev/shm/none")


STORE_BYTES = 24 * ELEMENTS
"""Of two slots of 12 bytes per parameter; headers and alignment come to it."""
NEAR = MIB
"""Other programs write to this file system, too."""


def test_the_export_shares_its_file_system_with_the_store_and_the_snapshot() -> None:
    other = other_device()
    alone = export_of(config_of().model_copy(update={"output_dir": other}))
    assert (alone.need_bytes, alone.is_shared) == (GIB, False)
    shm = os.statvfs("/dev/shm")
    assert alone.available_bytes == pytest.approx(shm.f_bavail * shm.f_frsize, abs=NEAR)
    shared = export_of(config_of())
    assert shared.is_shared and " available beside the store" in shared.words
    assert shared.available_bytes == pytest.approx(free_bytes() - STORE_BYTES, abs=NEAR)
    with_snapshot = export_of(config_of("  snapshot: {path: there, every: 3}\n"))
    # The store has one more slot for the snapshot, which has two.
    assert with_snapshot.available_bytes == pytest.approx(free_bytes() - STORE_BYTES * 5 / 2, abs=NEAR)


def test_of_a_store_on_several_drives_only_what_is_on_the_exports_counts() -> None:
    other = other_device()
    config = config_of()
    storage = config.storage.model_copy(update={"paths": (Path("store"), other)})
    config = config.model_copy(update={"storage": storage})
    share = free_bytes() - export_of(config, shares=(1, 3)).available_bytes
    assert share == pytest.approx(STORE_BYTES / 4, abs=NEAR)


def test_the_space_of_a_store_that_is_there_is_not_taken_twice(here: Path) -> None:
    (here / "store").mkdir()
    with (here / "store" / "ratel.store").open("wb") as file:
        file.truncate(2 * STORE_BYTES)
    space = export_of(config_of())
    assert not space.is_shared
    assert space.available_bytes == pytest.approx(free_bytes(), abs=NEAR)


def test_what_an_interrupted_export_left_is_available(here: Path) -> None:
    """It is removed before the next one; not while its files are being moved to their places, nor if it is not ours."""
    staging = here / "out" / STAGING_NAME / "deep"
    staging.mkdir(parents=True)
    with (staging / "model.safetensors").open("wb") as file:
        file.truncate(GIB)
    for marker, left_bytes in (
        (None, 0),
        (Marker(run="a", is_run=True), GIB),
        (Marker(run="a", is_run=True, is_publishing=True), 0),
    ):
        if marker is not None:
            write_marker(here / "out", marker)
        assert space_for_export(here / "out") == pytest.approx(free_bytes() + left_bytes, abs=NEAR)


def test_an_export_that_does_not_fit(here: Path) -> None:
    config = config_of().model_copy(update={"output_dir": Path("/proc/self/out")})  # without a free byte
    with pytest.raises(
        NotEnoughSpace, match=r"for the export: it needs 1\.00 GiB in /proc/self/out, 0 B ava"
    ) as raised:
        export_of(config).check()
    assert raised.value.hint == "free some space there, or set output_dir to another device"


def test_a_plan_whose_export_does_not_fit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Other micro-batches would not help, and are not advised."""
    config_of("output_dir: /proc/self/out\n")
    monkeypatch.setattr("ratel_cli.run.ask.plan_inputs.cached_machine_profile", lambda *_, **__: WITHOUT_GPU)
    assert main(["plan", "run.yaml"]) == 3
    captured = capsys.readouterr()
    assert "the run does not fit: export is short by " in captured.err
    assert captured.err.splitlines()[-1] == "hint: set output_dir to a device with more space"
    assert "what would fit" not in captured.out


def test_an_adapter_is_exported_alone() -> None:
    """Its export does not have the base's bytes, and its base may stay where it is."""
    frozen = replace(SPEC, blocks=(*(replace(block, rule=FROZEN) for block in SPEC.blocks[:-1]), SPEC.blocks[-1]))
    adapter = config_of().model_copy(update={"adapter": "lora"})
    [export] = spaces_of(adapter, frozen, nvme_bytes=0)
    last = SPEC.blocks[-1]
    assert export.need_bytes == last.num_stored * last.dtype_bytes
    [whole] = spaces_of(config_of(), frozen, nvme_bytes=0)
    assert whole.need_bytes == sum(block.num_stored * block.dtype_bytes for block in SPEC.blocks)


def test_where_the_base_takes_the_space_it_may_stay_in_its_files() -> None:
    last = replace(SPEC.blocks[-1], parameters=(), num_elements=2048)
    frozen = replace(SPEC, blocks=(*(replace(block, rule=FROZEN) for block in SPEC.blocks[:-1]), last))
    placed = frozen.in_files({block.index: block.compute_bytes for block in frozen.blocks[:-1]})
    hardware = replace(WITHOUT_GPU, nvme=replace(WITHOUT_GPU.nvme, free_bytes=0, shares=(1,)))
    packed = replace(frozen, blocks=(*(replace(each, dtype="uint8") for each in frozen.blocks[:-1]), last))
    halved = "storage.durability: none"
    for spec, hint in ((frozen, "base_storage: in_place"), (placed, halved), (SPEC, halved), (packed, halved)):
        with pytest.raises(NotEnoughSpace) as raised:
            check_store_space(config_of(), spec, 1 << 60, hardware)
        assert hint in str(raised.value.hint)
