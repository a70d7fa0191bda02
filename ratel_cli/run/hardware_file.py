"""Hardware files: a machine's profile, written for people and tools, and read again.

Called by the commands: `profile` writes them, and keeps one as its cache; what plans for a machine reads them.
Imports nothing heavy. Invariant: what `to_text` wrote, `load_hardware` reads as an equal profile.
"""

from __future__ import annotations

import json
from pathlib import Path

from ratel_cli.config.hardware_file import LinkSection, NvmeSection, read_hardware_file
from ratel_cli.hardware.spec import (
    ComputeDevice,
    DriveRates,
    HardwareProfile,
    Host,
    Link,
    Nvme,
    alternating_bytes_per_second,
)


def load_hardware(path: Path) -> HardwareProfile:
    """The machine that a hardware file describes, JSON or YAML. Raises BadInput with all there is to correct."""
    file = read_hardware_file(path)
    return HardwareProfile(
        gpu=ComputeDevice(
            name=file.gpu.name, memory_bytes=file.gpu.memory_bytes, flops_per_second=file.gpu.flops_per_second
        ),
        link=None if file.link is None else _link(file.link),
        nvme=_nvme(file.nvme),
        host=Host(
            memory_bytes=file.host.memory_bytes,
            available_bytes=file.host.available_bytes,
            adam_parameters_per_second=file.host.adam_parameters_per_second,
            memory_bytes_per_second=file.host.memory_bytes_per_second,
            num_cores=file.host.num_cores,
        ),
    )


def to_text(profile: HardwareProfile) -> str:
    """The hardware file of this machine."""
    return json.dumps(profile.to_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _link(link: LinkSection) -> Link:
    together = link.to_gpu_bytes_per_second + link.from_gpu_bytes_per_second
    return Link(
        to_gpu_bytes_per_second=link.to_gpu_bytes_per_second,
        from_gpu_bytes_per_second=link.from_gpu_bytes_per_second,
        both_bytes_per_second=link.both_bytes_per_second or together,
    )


def _nvme(nvme: NvmeSection) -> Nvme:
    read, write = nvme.read_bytes_per_second, nvme.write_bytes_per_second
    return Nvme(
        paths=nvme.paths,
        num_devices=nvme.num_devices or len(nvme.paths),
        read_bytes_per_second=read,
        write_bytes_per_second=write,
        mixed_bytes_per_second=nvme.mixed_bytes_per_second or alternating_bytes_per_second(read, write),
        weights=nvme.weights or (1,) * len(nvme.paths),
        free_bytes=nvme.free_bytes,
        endurance_tb_written=nvme.endurance_tb_written,
        alone=tuple(
            DriveRates(
                read_bytes_per_second=each.read_bytes_per_second,
                write_bytes_per_second=each.write_bytes_per_second,
                mixed_bytes_per_second=each.mixed_bytes_per_second,
            )
            for each in nvme.alone
        ),
    )
