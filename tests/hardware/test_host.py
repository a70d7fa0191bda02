"""What is read from /proc and from control groups: on directories made for the tests, and on this machine."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ratel_cli.hardware import host
from ratel_cli.units import GIB, MIB

NO_LIMIT_V1 = 9223372036854771712


def make_proc(directory: Path, *, cpuinfo: str = "", memberships: str = "0::/\n") -> Path:
    proc = directory / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "cpuinfo").write_text(cpuinfo)
    (proc / "meminfo").write_text(
        "MemTotal:       20971520 kB\nMemAvailable:   10485760 kB\nHugePages_Total:       0\n"
    )
    (proc / "self" / "cgroup").write_text(memberships)
    return proc


def make_group(directory: Path, *, limit: int | str, usage: int, cache: int = 0, unified: bool = True) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    names = (
        ("memory.max", "memory.current", "inactive_file")
        if unified
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    (directory / names[0]).write_text(f"{limit}\n")
    (directory / names[1]).write_text(f"{usage}\n")
    (directory / "memory.stat").write_text(f"anon 12345\n{names[2]} {cache}\n")


def printed(source: str, *arguments: str) -> list[str]:
    """The words that a process of its own prints, whose memory nothing else takes or frees."""
    command = [sys.executable, "-c", source, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("processor\t: 0\nmodel name\t: Fast CPU @ 3.00GHz\n\nmodel name\t: Other\n", "Fast CPU @ 3.00GHz"),
        ("processor\t: 0\nmodel name\t: a: b\n", "a: b"),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", f"{platform.machine()} CPU"),
        ("model name\t:\n", f"{platform.machine()} CPU"),
        ("", f"{platform.machine()} CPU"),
    ],
)
def test_processor_name(tmp_path: Path, cpuinfo: str, name: str) -> None:
    assert host.processor_name(make_proc(tmp_path, cpuinfo=cpuinfo)) == name


def test_gpu_names(tmp_path: Path) -> None:
    proc = make_proc(tmp_path)
    assert host.gpu_names(proc) == ()
    for number, model in enumerate(("NVIDIA H200", "NVIDIA GeForce RTX 4090")):
        gpu = proc / "driver" / "nvidia" / "gpus" / f"0000:0{number}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 24\nGPU UUID: \t GPU-1\n")
    assert host.gpu_names(proc) == ("NVIDIA H200", "NVIDIA GeForce RTX 4090")


def test_cores_are_those_that_this_process_may_use() -> None:
    source = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
    source += "from ratel_cli.hardware.host import num_cores; print(num_cores())"
    assert printed(source) == ["1"]
    assert host.num_cores() >= 1


def test_a_drive_that_directories_share_counts_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    here, free = host.free_bytes([tmp_path, tmp_path / "a", tmp_path]), shutil.disk_usage(tmp_path).free
    assert abs(here - free) < 0.2 * free
    memory = Path("/dev/shm")
    if memory.is_dir() and memory.stat().st_dev != tmp_path.stat().st_dev:
        assert host.free_bytes([tmp_path, memory]) > host.free_bytes([memory])


def test_available_without_control_groups(tmp_path: Path) -> None:
    assert host.available_bytes(make_proc(tmp_path), tmp_path / "none") == 10 * GIB


@pytest.mark.parametrize(("usage", "cache", "left"), [(1, 0, 4), (3, 2, 4), (5, 0, 0), (7, 0, 0)])
def test_a_group_leaves_its_limit_minus_its_usage(tmp_path: Path, usage: int, cache: int, left: int) -> None:
    proc = make_proc(tmp_path, memberships="0::/a/b\n")
    make_group(tmp_path / "groups" / "a" / "b", limit=5 * GIB, usage=usage * GIB, cache=cache * GIB)
    assert host.available_bytes(proc, tmp_path / "groups") == left * GIB


def test_the_tightest_of_all_parent_groups_counts(tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    proc = make_proc(tmp_path, memberships="0::/a/b\n")
    make_group(groups / "a" / "b", limit=8 * GIB, usage=GIB)
    make_group(groups / "a", limit=4 * GIB, usage=2 * GIB)
    make_group(groups, limit="max", usage=2 * GIB)
    assert host.available_bytes(proc, groups) == 2 * GIB


def test_a_container_sees_its_group_as_the_root(tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    make_group(groups, limit=3 * GIB, usage=GIB)
    assert host.available_bytes(make_proc(tmp_path), groups) == 2 * GIB


def test_version_1_of_control_groups(tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    proc = make_proc(tmp_path, memberships="5:cpu:/x\n4:memory:/a\n0::/\n")
    make_group(groups / "memory" / "a", limit=6 * GIB, usage=3 * GIB, cache=GIB, unified=False)
    make_group(groups / "memory", limit=NO_LIMIT_V1, usage=3 * GIB, unified=False)
    assert host.available_bytes(proc, groups) == 4 * GIB


def test_the_values_of_this_machine_are_plausible() -> None:
    assert host.processor_name()
    assert 0 < host.available_bytes() <= host.memory_bytes()
    assert 0 < host.default_limit_bytes() < host.memory_bytes()
    assert MIB < host.resident_bytes() <= host.peak_resident_bytes() < host.memory_bytes()


def test_resident_memory_follows_touched_memory() -> None:
    script = """
import mmap
from ratel_cli.hardware.host import peak_resident_bytes, resident_bytes
MIB = 1 << 20
before = resident_bytes()
with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
    memory.write(bytes(64 * MIB))
    print(resident_bytes() - before >= 60 * MIB)
print(resident_bytes() - before <= 16 * MIB)  # the bytes object that was the source of the copy is freed too
print(peak_resident_bytes() - before >= 60 * MIB)
"""
    assert printed(script) == ["True", "True", "True"]


def test_freed_memory_returns_to_the_system() -> None:
    """glibc keeps freed blocks of up to 31 MiB once it has freed one. In a process of its own: it cannot be undone."""
    source = """
import ctypes, sys
from ratel_cli.hardware.host import resident_bytes, return_large_buffers
if sys.argv[1] == "yes":
    return_large_buffers()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.free(libc.malloc(31 << 20))
blocks = [libc.malloc(16 << 20) for _ in range(4)]
guard = libc.malloc(1 << 10)
for block in blocks:
    ctypes.memset(block, 1, 16 << 20)
before = resident_bytes()
for block in blocks[:-1]:
    libc.free(block)
print((before - resident_bytes()) >> 20)
"""
    assert int(*printed(source, "yes")) >= 47
    if platform.libc_ver()[0] == "glibc":
        assert int(*printed(source, "no")) < 16, "glibc keeps nothing by itself: return_large_buffers has no purpose"


def test_what_lies_free_in_the_heap_is_not_kept() -> None:
    """In a process of its own. Small objects lie between the gaps that buffers have left."""
    source = """
import ctypes
from ratel_cli.hardware.host import kept_bytes, resident_bytes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
before = kept_bytes()
buffers = [(libc.malloc(100 << 10), libc.malloc(1 << 10))[0] for _ in range(640)]
for buffer in buffers:
    ctypes.memset(buffer, 1, 100 << 10)
    libc.free(buffer)
print((resident_bytes() - before) >> 20, (kept_bytes() - before) >> 20)
"""
    resident_mebibytes, kept_mebibytes = map(int, printed(source))
    assert kept_mebibytes < 16
    if platform.libc_ver()[0] == "glibc":
        assert resident_mebibytes >= 48, "glibc returns gaps by itself: kept_bytes has no purpose"
