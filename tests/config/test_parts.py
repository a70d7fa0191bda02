"""Machines by the names of their parts: what parts.yaml says, and all that may be wrong with a name."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ratel_cli.config.parts import Parts
from ratel_cli.errors import BadInput
from ratel_cli.run.files.hardware_file import described, load_hardware

TABLE = Path(__file__).parents[2] / "ratel_cli" / "config" / "parts.yaml"
READ = yaml.safe_load(TABLE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", READ["gpus"])
def test_each_gpu_makes_a_machine(name: str) -> None:
    machine = Parts(gpu=name).machine()
    assert machine.gpu.name == READ["gpus"][name]["gpu"]["name"]
    assert (machine.nvme.num_devices, machine.nvme.endurance_tb_written) == (2, 2400)
    assert machine.host.memory_bytes == 64 << 30
    assert machine.host.memory_bytes - machine.host.available_bytes == 4 << 30


@pytest.mark.parametrize("name", READ["drives"])
def test_each_drive_counts_as_often_as_there_are(name: str) -> None:
    one, three = (Parts(gpu="rtx4090", ssd=text).machine().nvme for text in (name, f"3x{name}"))
    assert one.read_bytes_per_second >= one.write_bytes_per_second > 3e9
    assert one.endurance_tb_written is not None
    assert three.model_dump() == one.model_dump() | {
        "num_devices": 3,
        "read_bytes_per_second": pytest.approx(3 * one.read_bytes_per_second),
        "write_bytes_per_second": pytest.approx(3 * one.write_bytes_per_second),
        "free_bytes": 3 * one.free_bytes,
        "endurance_tb_written": 3 * one.endurance_tb_written,
    }


@pytest.mark.parametrize("name", ["rtx4090", "RTX 4090", "rtx-4090", "4090", "NVIDIA GeForce RTX 4090"])
def test_spellings(name: str) -> None:
    assert Parts(gpu=name).machine() == Parts(gpu="rtx4090").machine()


@pytest.mark.parametrize("ram", ["64GB", "64GiB", "64 GB", "64G", "68719476736"])
def test_memory_is_sold_in_binary_gigabytes(ram: str) -> None:
    assert Parts(gpu="rtx4090", ram=ram).machine().host.memory_bytes == 64 << 30


def test_the_same_machine_in_a_hardware_file(tmp_path: Path) -> None:
    file = tmp_path / "desk.yaml"
    file.write_text(
        """
gpu:
  name: NVIDIA GeForce RTX 4090
  memory_bytes: 24GiB
  flops_per_second: 164_000_000_000_000
  memory_bytes_per_second: 1_008_000_000_000
link: {to_gpu_bytes_per_second: 22_600_000_000, from_gpu_bytes_per_second: 22_600_000_000}
nvme: {num_devices: 2, read_bytes_per_second: 14GB/s, write_bytes_per_second: 14GB/s, free_bytes: 4TB}
host:
  num_cores: 16
  memory_bytes: 128GiB
  available_bytes: 124GiB
  memory_bytes_per_second: 51.8GB/s
  adam_parameters_per_second: 450_000_000
"""
    )
    assert described(Parts(gpu="rtx4090", ram="128GB", ssd="2x7GB/s").machine()) == load_hardware(file)


@pytest.mark.parametrize(
    ("parts", "message", "hint"),
    [
        (Parts(gpu="rtx4091"), "argument '--gpu': rtx4091 is not known", "rtx4090"),
        (Parts(gpu="abacus"), "argument '--gpu': abacus is not known", "known are rtx3060, "),
        (Parts(gpu="rtx4090", ssd="2x991pro"), "argument '--ssd': 991pro is not known", "990pro"),
        (Parts(gpu="rtx4090", ssd="0x990pro"), "0x990pro is not known", "990pro"),
        (Parts(gpu="rtx4090", ssd=" "), "is not known", "a file for --hardware"),
        (Parts(gpu="rtx4090", ssd="2x7GB/h"), "argument '--ssd': must be like 2x990pro or 2x7GB/s, not 7GB/h", ""),
        (Parts(gpu="rtx4090", ssd="0GB/s"), "must be like 2x990pro", ""),
        (Parts(gpu="rtx4090", ssd=f"{10**400}/s"), "must be like 2x990pro", ""),
        (
            Parts(gpu="rtx4090", ram="much"),
            "argument '--ram': must be a size with a unit, more than 4GB, such as 64GB, not much",
            "",
        ),
        (
            Parts(gpu="rtx4090", ram="64"),
            "argument '--ram': must be a size with a unit, more than 4GB, such as 64GB, not 64",
            "",
        ),
        (Parts(gpu="rtx4090", ram=f"{10**300}GB"), "argument '--ram': must be a size", ""),
    ],
)
def test_wrong_names(parts: Parts, message: str, hint: str) -> None:
    with pytest.raises(BadInput) as caught:
        parts.machine()
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")
