"""What `ratel env` tells about a machine and its software, for reports of bugs.

Invariants: nothing names a person or a place: no user, no host, no path, no environment variable, no serial number.
Nothing heavy is imported when this is, and torch never, so it works where torch does not.
"""

from __future__ import annotations

import ast
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from os.path import realpath
from pathlib import Path
from typing import Final

from ratel_cli.errors import first_line
from ratel_cli.hardware.checkup import instruction_flags, memory_total_bytes
from ratel_cli.hardware.host import (
    available_bytes,
    free_bytes,
    gpu_names,
    group_limit_bytes,
    num_cores,
    processor_name,
)
from ratel_cli.hardware.mounts import mount_of
from ratel_cli.hardware.system_files import SystemFiles
from ratel_cli.io.files import nearest_existing

_INSTRUCTION_SETS: Final = (
    "avx2", "fma", "avx512f", "avx512bw", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16",
)  # fmt: skip
"""Instruction sets that matter to AdamW and to matrix products on the CPU, by the kernel's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFacts:
    """A directory of a store, without its name."""

    file_system: str
    drives: tuple[str, ...]
    """Their names and models; empty if there is none, or none is visible."""
    rotates: bool
    is_read_only: bool
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A machine and its software."""

    packages: dict[str, str]
    """The version of each package that is installed."""
    python: str
    torch_build: str
    """What torch was built for: `CUDA 13.0`, `ROCm 6.2` or `CPU`; empty without torch."""
    system: str
    kernel: str
    libc: str
    processor: str
    num_cores: int
    instruction_sets: tuple[str, ...]
    kernels_use: str
    """The instruction set that AdamW's kernels use; why they cannot be loaded, if they cannot."""
    memory_bytes: int
    available_bytes: int
    group_limit_bytes: int | None
    """The control group's limit on memory; None without one."""
    gpus: tuple[str, ...]
    gpu_driver: str
    """The first line of the driver's own version; empty without it."""
    storage: tuple[StorageFacts, ...]


def describe_environment(paths: Sequence[Path], packages: Mapping[str, str], files: SystemFiles) -> Environment:
    """This machine; `paths` are directories of stores, which may not exist yet."""
    limit, total = group_limit_bytes(files.proc, files.control_groups), memory_total_bytes(files)
    release = re.search(r'^PRETTY_NAME="?([^"\n]*)', files.text("etc/os-release") or "", flags=re.MULTILINE)
    driver = (files.text("proc/driver/nvidia/version") or "").splitlines()
    return Environment(
        packages=dict(packages),
        python=f"{platform.python_version()} ({platform.python_implementation()})",
        torch_build=_torch_build(),
        system=release[1] if release else platform.system(),
        kernel=f"{platform.release()} {platform.machine()}",
        libc=" ".join(platform.libc_ver()).strip(),
        processor=processor_name(files.proc),
        num_cores=num_cores(),
        instruction_sets=tuple(name for name in _INSTRUCTION_SETS if name in instruction_flags(files)),
        kernels_use=_kernels_use(),
        memory_bytes=total,
        available_bytes=available_bytes(files.proc, files.control_groups),
        group_limit_bytes=limit if limit is not None and limit < total else None,
        gpus=gpu_names(files.proc),
        gpu_driver=driver[0] if driver else "",
        storage=tuple(_storage(path, files) for path in paths),
    )


def _storage(path: Path, files: SystemFiles) -> StorageFacts:
    directory = nearest_existing(path)
    mount = mount_of(Path(realpath(directory)), files)
    return StorageFacts(
        file_system="unknown" if mount is None else mount.file_system,
        drives=() if mount is None else tuple(map(str, mount.drives)),
        rotates=mount is not None and any(drive.rotates for drive in mount.drives),
        is_read_only=mount is not None and mount.is_read_only,
        free_bytes=free_bytes([directory]),
    )


def _torch_build() -> str:
    """What torch was built for, from the file in which torch has its versions, without importing torch."""
    try:
        spec = find_spec("torch")
        text = "" if spec is None or spec.origin is None else Path(spec.origin).with_name("version.py").read_text()
    except (OSError, ValueError, ImportError):
        return ""
    for name, shown in (("cuda", "CUDA"), ("hip", "ROCm")):
        found = re.search(rf"^{name}\b[^=\n]*=(.*)$", text, flags=re.MULTILINE)
        try:
            value = ast.literal_eval(found[1].strip()) if found else None
        except (ValueError, SyntaxError):
            value = None
        if value:
            return f"{shown} {value}"
    return "CPU" if text else ""


def _kernels_use() -> str:
    try:
        from ratel_cli import _native

        return _native.active_isa()
    except (ImportError, ValueError) as error:
        return f"not loadable: {first_line(error)}"
