"""Hardware files: a machine's profile as a file that people and tools read and write.

Invariant: `load_hardware` reads what `to_text` wrote as an equal profile. The field names of `config.hardware_file` and
`hardware.spec` are the same.
"""

from __future__ import annotations

import json
from pathlib import Path

from ratel_cli.config.hardware_file import HardwareFile, LinkSection, NvmeSection, read_hardware_file
from ratel_cli.hardware.spec import (
    ComputeDevice,
    DriveRates,
    HardwareProfile,
    Host,
    Link,
    Network,
    Nvme,
    Prices,
    alternating_bytes_per_second,
)


def load_hardware(path: Path) -> HardwareProfile:
    """The machine that a hardware file describes, JSON or YAML. Raises BadInput with everything that is wrong."""
    return described(read_hardware_file(path))


def described(file: HardwareFile) -> HardwareProfile:
    """The machine that the content of a hardware file describes."""
    return HardwareProfile(
        gpu=ComputeDevice(**file.gpu.model_dump()),
        link=None if file.link is None else _link(file.link),
        nvme=_nvme(file.nvme),
        host=Host(**file.host.model_dump()),
        network=None if file.network is None else Network(**file.network.model_dump()),
        prices=None if file.prices is None else Prices(**file.prices.model_dump()),
    )


def to_text(profile: HardwareProfile) -> str:
    """The content of a hardware file for this machine, as JSON."""
    return json.dumps(profile.to_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _link(link: LinkSection) -> Link:
    both = link.both_bytes_per_second or link.to_gpu_bytes_per_second + link.from_gpu_bytes_per_second
    return Link(**{**link.model_dump(), "both_bytes_per_second": both})


def _nvme(nvme: NvmeSection) -> Nvme:
    alternating = alternating_bytes_per_second(nvme.read_bytes_per_second, nvme.write_bytes_per_second)
    defaults = {
        "num_devices": nvme.num_devices or len(nvme.paths),
        "mixed_bytes_per_second": nvme.mixed_bytes_per_second or alternating,
        "shares": nvme.weights or (1,) * len(nvme.paths),
        "alone": tuple(DriveRates(**each.model_dump()) for each in nvme.alone),
    }
    return Nvme(**{**nvme.model_dump(exclude={"weights"}), **defaults})
