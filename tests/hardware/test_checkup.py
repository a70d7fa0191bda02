"""Every check of `ratel doctor` on machines that are healthy, slow and broken in every way."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratel_cli.hardware.checkup import (
    Diagnosis,
    Verdict,
    check_bf16,
    check_huge_pages,
    check_io_uring,
    check_memory,
    check_waiting,
)
from ratel_cli.units import GIB
from tests.hardware.machines import Machine

DENIED = "io_uring is not available here: Operation not permitted"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "root")


def check(diagnosis: Diagnosis, verdict: Verdict, reason: str, remedy: str | None) -> None:
    """The diagnosis has this verdict, one line of reason with these words, and such a remedy."""
    assert diagnosis.verdict == verdict, diagnosis
    assert reason in diagnosis.reason and "\n" not in diagnosis.reason, diagnosis
    if remedy is None:
        assert diagnosis.remedy is None, diagnosis
    else:
        assert diagnosis.remedy is not None and remedy in diagnosis.remedy, diagnosis


def test_a_healthy_machine(machine: Machine) -> None:
    check(check_io_uring(machine.files, None, is_required=True), "ok", "available", None)
    check(check_huge_pages(machine.files), "ok", "given on madvise", None)
    check(check_memory(machine.files, wanted_bytes=48 * GIB), "ok", "48.0 GiB available of 64.0 GiB", None)


@pytest.mark.parametrize(
    ("disabled", "seccomp", "failure", "remedy"),
    [
        ("2", "0", DENIED, "sudo sysctl kernel.io_uring_disabled=0"),
        ("1", "2", DENIED, "sudo sysctl kernel.io_uring_disabled=0"),
        ("0", "2", DENIED, "--security-opt seccomp=unconfined"),
        ("0", "0", DENIED, "set storage.engine to threads"),
        (None, "0", "io_uring is not available here: Function not implemented", "set storage.engine to threads"),
    ],
)
@pytest.mark.parametrize(("is_required", "verdict"), [(False, "slow"), (True, "broken")])
def test_io_uring(
    machine: Machine, disabled: str | None, seccomp: str, failure: str, remedy: str, is_required: bool, verdict: Verdict
) -> None:
    if disabled is not None:
        machine.write("proc/sys/kernel/io_uring_disabled", f"{disabled}\n")
    machine.write("proc/self/status", f"Name:\tpython\nSeccomp:\t{seccomp}\nSeccomp_filters:\t1\n")
    check(check_io_uring(machine.files, failure, is_required=is_required), verdict, failure, remedy)


@pytest.mark.parametrize(
    ("text", "verdict", "reason", "remedy"),
    [
        ("[always] madvise never\n", "ok", "given on always", None),
        ("always madvise [never]\n", "slow", "turned off", "echo madvise | sudo tee /sys/kernel/mm/"),
        ("odd\n", "ok", "given on request", None),
        (None, "slow", "this kernel has none", "CONFIG_TRANSPARENT_HUGEPAGE"),
    ],
)
def test_huge_pages(machine: Machine, text: str | None, verdict: Verdict, reason: str, remedy: str | None) -> None:
    if text is None:
        machine.remove("sys/kernel/mm/transparent_hugepage/enabled")
    else:
        machine.write("sys/kernel/mm/transparent_hugepage/enabled", text)
    check(check_huge_pages(machine.files), verdict, reason, remedy)


def test_memory_that_is_not_there(machine: Machine) -> None:
    words = ("limits.host_memory is", "lower limits.host")
    check(check_memory(machine.files, wanted_bytes=48 * GIB + 1), "slow", *words)
    check(check_memory(machine.files, wanted_bytes=64 * GIB), "slow", *words)
    check(check_memory(machine.files, wanted_bytes=64 * GIB + 1), "broken", *words)
    machine.write("proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 1048576 kB\n")
    check(check_memory(machine.files, wanted_bytes=None), "broken", "1.00 GiB available", "close other programs")


def test_a_control_group_that_limits(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/job\n")
    for name, value in (("memory.max", 8 * GIB), ("memory.current", 5 * GIB), ("memory.stat", "inactive_file 0")):
        machine.write(f"sys/fs/cgroup/job/{name}", f"{value}\n")
    words = "3.00 GiB available within the control group's limit of 8.00 GiB (the machine has 64.0 GiB)"
    check(check_memory(machine.files, wanted_bytes=None), "ok", words, None)
    check(check_memory(machine.files, wanted_bytes=4 * GIB), "slow", words, "raise the container's")
    check(check_memory(machine.files, wanted_bytes=8 * GIB + 1), "broken", words, "raise the container's")
    machine.write("sys/fs/cgroup/job/memory.current", f"{8 * GIB}\n")
    check(check_memory(machine.files, wanted_bytes=None), "broken", "0 B available", "raise the container's")


def test_a_limit_above_the_machines_memory_is_none(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "4:memory:/a\n")
    group = "sys/fs/cgroup/memory/a"
    machine.write(f"{group}/memory.limit_in_bytes", "9223372036854771712\n")
    machine.write(f"{group}/memory.usage_in_bytes", "1\n").write(f"{group}/memory.stat", "total_inactive_file 0\n")
    check(check_memory(machine.files, wanted_bytes=None), "ok", "48.0 GiB available of 64.0 GiB", None)


@pytest.mark.parametrize(
    ("environment", "verdict", "reason"),
    [
        ({"GOMP_SPINCOUNT": "2000"}, "ok", "idle threads sleep soon (GOMP_SPINCOUNT=2000)"),
        ({"GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "active"}, "ok", "GOMP_SPINCOUNT=0"),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, "ok", "idle threads sleep soon (OMP_WAIT_POLICY=PASSIVE)"),
        ({"GOMP_SPINCOUNT": "300000", "OMP_WAIT_POLICY": "passive"}, "slow", "idle threads spin (GOMP_SPINCOUNT=30"),
        ({"GOMP_SPINCOUNT": "infinite"}, "slow", "idle threads spin (GOMP_SPINCOUNT=infinite)"),
        ({"OMP_WAIT_POLICY": "active"}, "slow", "a step takes several times as long"),
    ],
)
def test_threads_that_wait(environment: dict[str, str], verdict: Verdict, reason: str) -> None:
    remedy = f"unset {next(iter(environment))}" if verdict == "slow" else None
    check(check_waiting(environment), verdict, reason, remedy)


@pytest.mark.parametrize(
    ("line", "is_slow"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16", False),
        ("flags\t\t: fpu avx2 avx512f amx_bf16 amx_tile", False),
        ("Features\t: fp asimd bf16", False),
        ("Features\t: fp asimd", True),
        ("flags\t\t: fpu avx2 avx512f avx512_bf16x", True),
        ("model name\t: a processor that does not say", False),
    ],
)
def test_products_in_bf16(machine: Machine, line: str, is_slow: bool) -> None:
    found = check_bf16(machine.write("proc/cpuinfo", f"{line}\n").files)
    remedy = "set dtype: float32" if is_slow else None
    check(found, "slow" if is_slow else "ok", "no bf16 instructions" if is_slow else "multiplies in bf16", remedy)
