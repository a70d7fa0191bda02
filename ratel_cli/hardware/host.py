"""What the operating system says: processor and GPUs by name, memory and space, what this process takes.

Used by `hardware.measure`, `run.profile_cache` and `run.finetune`. Linux only. Imports nothing heavy.
Invariant: nothing is cached; each call says how it is now.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence
from pathlib import Path

from ratel_cli.hardware.spec import margin_bytes

_PROC = Path("/proc")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_SYSTEM_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 4 << 20


def processor_name(proc: Path = _PROC) -> str:
    """The model that the kernel names; the architecture where it names none (most ARM processors)."""
    for line in (proc / "cpuinfo").read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return f"{platform.machine()} CPU"


def gpu_names(proc: Path = _PROC) -> tuple[str, ...]:
    """The models of NVIDIA GPUs that their driver names."""
    names = []
    for file in sorted((proc / "driver" / "nvidia" / "gpus").glob("*/information")):
        for line in file.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "Model":
                names.append(value.strip())
    return tuple(names)


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def memory_bytes() -> int:
    """Installed main memory."""
    return os.sysconf("SC_PHYS_PAGES") * _SYSTEM_PAGE_BYTES


def available_bytes(proc: Path = _PROC, control_groups: Path = _CONTROL_GROUPS) -> int:
    """Memory that can be had without swapping, within the limits of the control groups we are in."""
    available = _counters(proc / "meminfo")["MemAvailable:"] * 1024
    groups = [line.split(":", 2) for line in (proc / "self" / "cgroup").read_text().splitlines()]
    rooms = [
        room
        for _, controllers, path in groups
        if controllers in ("", "memory")
        for group in (path, *(str(parent) for parent in Path(path).parents))
        if (room := _room_in(control_groups, group.strip("/"), unified=not controllers)) is not None
    ]
    return max(0, min([available, *rooms]))


def free_bytes(paths: Sequence[Path]) -> int:
    """Space for files in these directories together; a drive that several of them share counts once."""
    drives = {path.stat().st_dev: os.statvfs(path) for path in paths}
    return sum(drive.f_bavail * drive.f_frsize for drive in drives.values())


def default_limit_bytes() -> int:
    """What a run may take when the user sets no limit: what is free and taken already, less a margin."""
    return max(0, available_bytes() + resident_bytes() - margin_bytes(memory_bytes()))


def resident_bytes() -> int:
    """Main memory that this process holds now."""
    return int((_PROC / "self" / "statm").read_text().split()[1]) * _SYSTEM_PAGE_BYTES


def peak_resident_bytes() -> int:
    """The most that this process ever held."""
    return _counters(_PROC / "self" / "status")["VmHWM:"] * 1024


def return_freed_memory() -> None:
    """Have malloc return buffers of 4 MiB and more to the system when they are freed, for the process's whole life.

    glibc would raise that bound by itself, up to 32 MiB, and then keep what torch frees, in pieces that fit
    nothing: at 85M parameters the peak was 902 MiB, and 636 MiB so. Mapping anew costs page faults, 0.6 % of the
    CPU time of a layer of that size (2-core Xeon with AMX, 2026-11); a bound of 1 MiB saved 3 % more memory
    and cost 3 %.
    """
    try:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    except (OSError, AttributeError):
        return  # not glibc


def _room_in(control_groups: Path, group: str, *, unified: bool) -> int | None:
    """What a control group's limit leaves, page cache not counted; None without a limit. Version 2, or 1."""
    directory = control_groups / group if unified else control_groups / "memory" / group
    limit_name, usage_name, cache_name = (
        ("memory.max", "memory.current", "inactive_file")
        if unified
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    try:
        limit = int((directory / limit_name).read_text())
        usage = int((directory / usage_name).read_text())
        cache = _counters(directory / "memory.stat").get(cache_name, 0)
    except (OSError, ValueError):  # no such group from here, or "max"
        return None
    return limit - (usage - cache)


def _counters(path: Path) -> dict[str, int]:
    """Lines that are a name and a number, with or without a unit."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
