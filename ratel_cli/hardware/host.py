"""Facts from the operating system: names of processor and GPUs, memory, disk space, and what this process uses.

Linux only. Invariant: nothing is cached, each call reports the current state; and nothing heavy is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ratel_cli.hardware.spec import margin_bytes

_PROC = Path("/proc")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_SYSTEM_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 4 << 20


def processor_name(proc: Path = _PROC) -> str:
    """The processor's model name; its architecture if the kernel has no name (most ARM processors)."""
    for line in (proc / "cpuinfo").read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return f"{platform.machine()} CPU"


def gpu_names(proc: Path = _PROC) -> tuple[str, ...]:
    """The model names of all NVIDIA GPUs, from their driver. Empty without the driver."""
    names = []
    for file in sorted((proc / "driver" / "nvidia" / "gpus").glob("*/information")):
        for line in file.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "Model":
                names.append(value.strip())
    return tuple(names)


def boot_id(proc: Path = _PROC) -> str:
    """A name that this machine shares with no other, until it is started again."""
    return (proc / "sys" / "kernel" / "random" / "boot_id").read_text().strip()


def num_cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def memory_bytes() -> int:
    """The installed main memory."""
    return os.sysconf("SC_PHYS_PAGES") * _SYSTEM_PAGE_BYTES


def available_bytes(proc: Path = _PROC, control_groups: Path = _CONTROL_GROUPS) -> int:
    """Memory that can be used without swapping, within the limits of this process's control groups."""
    available = _counters(proc / "meminfo")["MemAvailable:"] * 1024
    left_in_groups = [group.limit_bytes - group.used_bytes for group in _groups(proc, control_groups)]
    return max(0, min([available, *left_in_groups]))


def group_limit_bytes(proc: Path = _PROC, control_groups: Path = _CONTROL_GROUPS) -> int | None:
    """The tightest limit on memory of this process's control groups; None without one."""
    return min((group.limit_bytes for group in _groups(proc, control_groups)), default=None)


def free_bytes(paths: Sequence[Path]) -> int:
    """Free space for files in all these directories together. A drive that several of them share counts once."""
    drives = {path.stat().st_dev: os.statvfs(path) for path in paths}
    return sum(drive.f_bavail * drive.f_frsize for drive in drives.values())


def default_limit_bytes() -> int:
    """Memory that a run may use if the user sets no limit: what is available or its own already, less a margin."""
    return max(0, available_bytes() + resident_bytes() - margin_bytes(memory_bytes()))


def resident_bytes() -> int:
    """Main memory that this process uses now."""
    return int((_PROC / "self" / "statm").read_text().split()[1]) * _SYSTEM_PAGE_BYTES


def kept_bytes() -> int:
    """Main memory that this process uses now, once free memory has been returned. A plan begins with it."""
    return_free_memory()
    return resident_bytes()


def return_free_memory() -> None:
    """Let malloc return to the system what lies free in its heap now, between what is in use.

    How much that is depends on what happened to be freed first: one command, run again and again, had 446 to 480 MiB;
    without what lay free, 430 to 431 MiB (2-core EPYC, 2026-11).
    """
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def peak_resident_bytes() -> int:
    """The most main memory that this process has used at any time."""
    return _counters(_PROC / "self" / "status")["VmHWM:"] * 1024


def return_large_buffers() -> None:
    """From now on, let malloc return freed buffers of 4 MiB and more to the system.

    By default glibc raises this bound by itself, up to 32 MiB, and keeps what torch frees, as fragments that nothing
    fits into: with 85M parameters the peak was 902 MiB instead of 636 MiB. Mapping memory again costs page faults: 0.6
    % of the CPU time of a layer of that size (2-core Xeon with AMX, 2026-11). A bound of 1 MiB saved 3 % more memory
    and cost 3 %.
    """
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """A control group with a limit on memory."""

    limit_bytes: int
    used_bytes: int
    """Without page cache, which counts as left."""


def _groups(proc: Path, control_groups: Path) -> Iterator[_Group]:
    """The control groups of this process that limit its memory, parents included."""
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        for place in (path, *(str(parent) for parent in Path(path).parents)):
            group = _group(control_groups, place.strip("/"), unified=not controllers)
            if group is not None:
                yield group


def _group(control_groups: Path, name: str, *, unified: bool) -> _Group | None:
    """A group by its name; None if it has no limit.

    `unified`: version 2 of control groups, otherwise version 1.
    """
    directory = control_groups / name if unified else control_groups / "memory" / name
    limit_name, usage_name, cache_name = (
        ("memory.max", "memory.current", "inactive_file")
        if unified
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    try:
        limit = int((directory / limit_name).read_text())
        usage = int((directory / usage_name).read_text())
        cache = _counters(directory / "memory.stat").get(cache_name, 0)
    except (OSError, ValueError):  # the group is not visible from here, or its limit is "max"
        return None
    return _Group(limit_bytes=limit, used_bytes=usage - cache)


def _counters(path: Path) -> dict[str, int]:
    """The values of a file whose lines are a name and a number, with or without a unit."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
