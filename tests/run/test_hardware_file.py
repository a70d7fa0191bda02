"""Hardware files: reading gives the profile that was written, and a hand-written file may omit keys with a default."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ratel_cli.errors import BadInput
from ratel_cli.hardware.spec import (
    ComputeDevice,
    HardwareProfile,
    Host,
    Link,
    Nvme,
    Prices,
    alternating_bytes_per_second,
)
from ratel_cli.run.files.hardware_file import load_hardware, to_text
from ratel_cli.units import GIB
from tests.hardware.profiles import WITH_GPU, WITHOUT_GPU

ROOT = Path(__file__).parents[2]
BY_HAND = """
gpu: {name: RTX 4090, memory_bytes: 24GiB, flops_per_second: 165e12}
link:
  to_gpu_bytes_per_second: 22.6GB/s
  from_gpu_bytes_per_second: 21e9
nvme:
  num_devices: 12
  read_bytes_per_second: 60 GB/s
  write_bytes_per_second: 30GB/s
  free_bytes: 46e12
  endurance_tb_written: 84_000
host:
  memory_bytes: 768GiB
  available_bytes: 0
  adam_parameters_per_second: 10e9
"""


PRICED = replace(WITH_GPU, prices=Prices(server_dollars=14_098, gpu_dollars=1_600, ssd_dollars=308))


@pytest.mark.parametrize("profile", [WITH_GPU, WITHOUT_GPU, PRICED], ids=["gpu", "cpu", "priced"])
def test_reading_gives_the_profile_that_was_written(tmp_path: Path, profile: HardwareProfile) -> None:
    path = tmp_path / "hardware.json"
    path.write_text(to_text(profile), encoding="utf-8")
    assert load_hardware(path) == profile
    path.write_text(json.dumps(profile.to_json(), separators=(",", ":")))
    assert load_hardware(path) == profile


def test_names_in_any_script(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    path.write_text(to_text(WITHOUT_GPU).replace("a CPU", 'Zuse \\"Z3\\" \U0001f600: \u00fc #1'), encoding="utf-8")
    assert load_hardware(path).gpu.name == 'Zuse "Z3" \U0001f600: \u00fc #1'


def test_a_hand_written_file(tmp_path: Path) -> None:
    path = tmp_path / "paper.yaml"
    path.write_text(BY_HAND)
    assert load_hardware(path) == HardwareProfile(
        gpu=ComputeDevice(name="RTX 4090", memory_bytes=24 * GIB, flops_per_second=165e12),
        link=Link(
            to_gpu_bytes_per_second=22.6e9,
            from_gpu_bytes_per_second=21e9,
            both_bytes_per_second=22.6e9 + 21e9,
        ),
        nvme=Nvme(
            paths=(),
            num_devices=12,
            read_bytes_per_second=60e9,
            write_bytes_per_second=30e9,
            mixed_bytes_per_second=alternating_bytes_per_second(60e9, 30e9),
            shares=(),
            free_bytes=46 * 10**12,
            endurance_tb_written=84_000.0,
        ),
        host=Host(memory_bytes=768 * GIB, available_bytes=0, adam_parameters_per_second=10e9),
    )


def test_keys_that_may_be_omitted_if_paths_are_given(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(BY_HAND.replace("num_devices: 12", "paths: [/a, /b]"))
    nvme = load_hardware(path).nvme
    assert (nvme.paths, nvme.num_devices, nvme.shares, nvme.alone) == (("/a", "/b"), 2, (1, 1), ())


def test_a_drive_that_reads_or_writes() -> None:
    """Four bytes read in 2 seconds and four written in 4: eight in 6."""
    assert alternating_bytes_per_second(2.0, 1.0) == pytest.approx(8 / 6)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "hardware").glob("*")), ids=lambda path: path.name)
def test_the_machines_in_the_repository(path: Path) -> None:
    profile = load_hardware(path)
    assert profile.link is not None
    assert profile.nvme.num_devices >= 1


def test_a_missing_file_is_reported_with_a_similar_name(tmp_path: Path) -> None:
    (tmp_path / "hardware.json").write_text("{}")
    with pytest.raises(BadInput, match=r"hardwar\.json: no such file") as caught:
        load_hardware(tmp_path / "hardwar.json")
    assert caught.value.hint == f"did you mean {tmp_path / 'hardware.json'}?"


@pytest.mark.parametrize(("num_ssds", "dollars"), [(0, 15_698), (1, 16_006), (12, 19_394)])
def test_the_price_of_the_papers_server(num_ssds: int, dollars: int) -> None:
    """Ratel, Table VII, as the machine in the repository has it."""
    prices = load_hardware(ROOT / "configs" / "hardware" / "paper-4090-12ssd.yaml").prices
    assert prices is not None and prices.dollars(num_ssds=num_ssds) == dollars


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("prices: {server_dollars: 1, gpu_dollars: 2}", "`prices.ssd_dollars` is missing"),
        ("prices: {server_dollars: 1, gpu_dollars: 2, ssd_dollars: -3}", "ssd_dollars"),
        ("prices: {server_dollar: 1, gpu_dollars: 2, ssd_dollars: 3}", "unknown key `server_dollar` in `prices`"),
    ],
)
def test_wrong_prices(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "paper.yaml"
    path.write_text(BY_HAND + line + "\n")
    with pytest.raises(BadInput) as raised:
        load_hardware(path)
    findings = [raised.value, *raised.value.others]
    assert any(message in finding.message for finding in findings), [finding.message for finding in findings]
