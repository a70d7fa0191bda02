"""Any hardware file gives a machine, or a BadInput that names a place."""

from __future__ import annotations

from pathlib import Path

import yaml
from hypothesis import given
from hypothesis import strategies as st

from ratel_cli.config.hardware_file import DriveSection, GpuSection, HardwareFile, HostSection, LinkSection, NvmeSection
from ratel_cli.errors import BadInput
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.run.files.hardware_file import load_hardware, to_text
from tests.json_values import json_values
from tests.tiers import examples

QUICK = examples(100)
SECTIONS = (HardwareFile, GpuSection, LinkSection, NvmeSection, DriveSection, HostSection)
KEYS = sorted({key for section in SECTIONS for key in section.model_fields} | {"<<", "gpus"})
VALUES = json_values(
    st.sampled_from(KEYS),
    st.sampled_from(["24GiB", "3.5GB/s", "3.5 GB / s", "1e400GB/s", "GB/s", "/s", "1/s", 10**400]),
)
HEALTHY: dict[str, dict[str, object]] = {
    "gpu": {"name": "a", "memory_bytes": 1 << 30, "flops_per_second": 1e12},
    "nvme": {"num_devices": 1, "read_bytes_per_second": 1e9, "write_bytes_per_second": 1e9, "free_bytes": 1 << 40},
    "host": {"memory_bytes": 1 << 34, "available_bytes": 1 << 33, "adam_parameters_per_second": 1e9},
}


def attempt(path: Path, content: bytes) -> HardwareProfile | None:
    """Load the file. None if it is rejected; then every error must name its place."""
    path.write_bytes(content)
    try:
        return load_hardware(path)
    except BadInput as exc:
        for error in (exc, *exc.others):
            assert error.message.startswith(f"{path}:"), error.message
            assert len(error.message) < len(str(path)) + 600
        return None


@QUICK
@given(content=st.binary(max_size=100))
def test_any_bytes(tmp_path: Path, content: bytes) -> None:
    attempt(tmp_path / "hardware.yaml", content)


@QUICK
@given(content=VALUES)
def test_any_values(tmp_path: Path, content: object) -> None:
    attempt(tmp_path / "hardware.yaml", yaml.safe_dump(content, allow_unicode=True).encode())


@QUICK
@given(section=st.sampled_from(sorted(HEALTHY)), key=st.sampled_from(KEYS), value=VALUES)
def test_any_value_in_a_machine(tmp_path: Path, section: str, key: str, value: object) -> None:
    """A machine that is accepted, written and read again is equal."""
    content = {**HEALTHY, section: {**HEALTHY[section], key: value}}
    profile = attempt(tmp_path / "hardware.yaml", yaml.safe_dump(content, allow_unicode=True).encode())
    if profile is not None:
        assert attempt(tmp_path / "again.json", to_text(profile).encode()) == profile
