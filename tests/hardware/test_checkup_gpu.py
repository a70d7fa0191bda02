"""Machines with GPUs: without driver, with the wrong torch, in a narrow slot, too hot, and healthy."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ratel_cli.hardware.checkup import Diagnosis, Verdict
from ratel_cli.hardware.checkup_gpu import GpuSight, check_gpu
from ratel_cli.hardware.gpu_sight import clock_reasons, look_at_gpu
from ratel_cli.hardware.spec import Link
from tests.hardware.machines import GPU, Machine

FAST = Link(to_gpu_bytes_per_second=26e9, from_gpu_bytes_per_second=25e9, both_bytes_per_second=45e9)
SIGHT = GpuSight(build="13.0", failure=None, name="NVIDIA RTX", link=FAST, clock_reasons=0)
BLIND = GpuSight(build="13.0", failure="the driver is too old", name=None)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "root")


def check(
    machine: Machine,
    sight: GpuSight,
    *,
    environment: Mapping[str, str] = {},
    kernel: str = "6.8.0-45-generic",
) -> list[Diagnosis]:
    return list(check_gpu(machine.files, sight, environment=environment, kernel=kernel))


def diagnoses(machine: Machine, sight: GpuSight) -> dict[str, Diagnosis]:
    found = check(machine, sight)
    named = {each.what.split()[0] if each.what.startswith("PCIe") else each.what: each for each in found}
    assert len(named) == len(found)
    return named


def test_a_healthy_gpu(machine: Machine) -> None:
    found = diagnoses(machine.gpu(), SIGHT)
    assert {name: diagnosis.verdict for name, diagnosis in found.items()} == dict.fromkeys(
        ("GPU", "CUDA settings", "PCIe", "pinned memory", "GPU clock"), "ok"
    )
    assert found["GPU"].reason == "NVIDIA RTX, driver 570.86.10, torch built for 13.0"
    assert found["PCIe"].what == f"PCIe {GPU}"
    assert found["PCIe"].reason == "x16 at 16 GT/s, 26.0 GB/s up, 25.0 GB/s down"
    assert all(diagnosis.remedy is None for diagnosis in found.values())


def test_no_gpu(machine: Machine) -> None:
    """Another card on the bus is none."""
    machine.write("sys/bus/pci/devices/0000:02:00.0/vendor", "0x10de\n")
    machine.write("sys/bus/pci/devices/0000:02:00.0/class", "0x040300\n")
    machine.write("sys/bus/pci/devices/0000:03:00.0/vendor", "0x8086\n")
    machine.write("sys/bus/pci/devices/0000:03:00.0/class", "0x030000\n")
    [diagnosis] = check(machine, replace(BLIND, failure=None))
    assert (diagnosis.verdict, diagnosis.reason) == ("ok", "none; the CPU computes")


def test_gpus_that_cannot_be_used(machine: Machine) -> None:
    machine.gpu()
    [old] = check(machine, BLIND)
    assert old.verdict == "broken" and "torch cannot use the GPU: the driver is too old (driver 570" in old.reason
    [silent] = check(machine, replace(BLIND, failure=None))
    assert "it finds none" in silent.reason and silent.remedy is not None and "CUDA_VISIBLE_DEVICES" in silent.remedy
    [cpu] = check(machine, replace(BLIND, build=None, failure=None))
    assert (cpu.verdict, "built for the CPU alone" in cpu.reason) == ("broken", True)
    machine.remove("proc/driver/nvidia/version")
    [bare] = check(machine, BLIND)
    assert (bare.verdict, bare.reason) == ("broken", "there is an NVIDIA GPU, but its driver is not loaded")
    assert bare.remedy is not None and "sudo modprobe nvidia" in bare.remedy


SLOW_LINK = replace(FAST, from_gpu_bytes_per_second=11e9)


@pytest.mark.parametrize(
    ("slot", "link", "verdict", "reason"),
    [
        ({"width": "4"}, FAST, "slow", "x4 at 16 GT/s of x16 at 16 GT/s"),
        ({"speed": "2.5 GT/s PCIe"}, FAST, "slow", "x16 at 2.5 GT/s of x16 at 16 GT/s"),
        ({"width": "8", "slot_width": 8}, replace(FAST, to_gpu_bytes_per_second=13e9), "ok", "x8 at 16 GT/s, 13.0 GB"),
        ({"speed": "8.0 GT/s PCIe", "slot": "8.0"}, FAST, "ok", "x16 at 8 GT/s"),
        ({"slot_width": 4}, FAST, "ok", "x16 at 16 GT/s"),
        ({}, SLOW_LINK, "slow", "which carries 31.5 GB/s, but measured 26.0 GB/s up, 11.0 GB/s down"),
        ({}, None, "ok", "x16 at 16 GT/s"),
        ({"width": "0"}, FAST, "ok", "not visible here"),
        ({"speed": "Unknown"}, FAST, "ok", "not visible here"),
    ],
)
def test_the_slot(machine: Machine, slot: dict[str, object], link: Link | None, verdict: Verdict, reason: str) -> None:
    diagnosis = diagnoses(machine.gpu(**slot), replace(SIGHT, link=link))["PCIe"]  # type: ignore[arg-type]
    assert (diagnosis.verdict, diagnosis.remedy is None) == (verdict, verdict == "ok")
    assert reason in diagnosis.reason


FAILURE = "CUDA cannot pin 2.00 MiB of host memory now (error 2)"


@pytest.mark.parametrize(
    ("failure", "kernel", "reason", "remedy"),
    [
        (None, "6.10.14-200.fc40.x86_64", "overlap with work", None),
        (None, "6.11.0-29-generic", "Linux 6.11.0-29-generic loses pinned memory", "a kernel before 6.11, or 6.14"),
        (None, "6.13.12", "loses pinned memory", "a kernel before 6.11, or 6.14"),
        (None, "6.14.0", "overlap with work", None),
        (None, "5.15.0", "overlap with work", None),
        (None, "7.12.0", "overlap with work", None),
        (FAILURE, "6.8.0", f"{FAILURE}: copies do not overlap", "NVRM"),
        (FAILURE, "6.12.1", f"{FAILURE}: copies do not overlap with work; Linux 6.12.1", "a kernel before 6.11"),
    ],
)
def test_pinning(machine: Machine, failure: str | None, kernel: str, reason: str, remedy: str | None) -> None:
    found = check(machine.gpu(), replace(SIGHT, pinning_failure=failure), kernel=kernel)
    [pinned] = [each for each in found if each.what == "pinned memory"]
    assert (pinned.verdict, pinned.remedy is None) == ("ok" if remedy is None else "slow", remedy is None)
    assert reason in pinned.reason and (remedy or "") in (pinned.remedy or "")
    assert "ulimit" not in (pinned.remedy or ""), "the driver's pins do not count as locked"


CONNECTIONS, BLOCKING = "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"
ONE_QUEUE = "copies and kernels share a queue and wait for each other"


@pytest.mark.parametrize(
    ("environment", "reason", "remedy"),
    [
        ({}, "none that slow a run", None),
        ({CONNECTIONS: "32", BLOCKING: "0"}, "none that slow a run", None),
        ({CONNECTIONS: "", BLOCKING: ""}, "none that slow a run", None),
        ({CONNECTIONS: "4"}, "none that slow a run", None),
        ({CONNECTIONS: "1"}, f"{CONNECTIONS}=1: {ONE_QUEUE}", f"unset {CONNECTIONS}"),
        (
            {BLOCKING: "1", CONNECTIONS: "3"},
            f"{CONNECTIONS}=3: {ONE_QUEUE}; {BLOCKING}=1: the host waits for every kernel",
            f"unset {CONNECTIONS} {BLOCKING}",
        ),
    ],
)
def test_settings_of_cuda(machine: Machine, environment: dict[str, str], reason: str, remedy: str | None) -> None:
    [found] = [each for each in check(machine.gpu(), SIGHT, environment=environment) if each.what == "CUDA settings"]
    assert (found.reason, found.remedy, found.verdict) == (reason, remedy, "ok" if remedy is None else "slow")


def test_the_clock(machine: Machine) -> None:
    machine.gpu()
    for bits, verdict, reason in (
        (0x1, "ok", "not lowered"),
        (0x4, "ok", "not lowered"),
        (0x40 | 0x4, "slow", "lowered: too hot (hardware)"),
        (0x28, "slow", "lowered: hardware slowdown, too hot (software)"),
        (0x80, "slow", "power brake"),
        (None, "ok", "the driver does not say"),
    ):
        clock = diagnoses(machine, replace(SIGHT, clock_reasons=bits))["GPU clock"]
        assert (clock.verdict, reason in clock.reason) == (verdict, True), clock


def _answering(answers: dict[str, str]) -> Callable[[str], str]:
    def ask(field: str) -> str:
        if field not in answers:
            raise subprocess.CalledProcessError(2, "nvidia-smi")
        return answers[field]

    return ask


def _missing(field: str) -> str:
    raise FileNotFoundError(field)


def test_what_the_driver_says_about_clocks() -> None:
    """Under the name of today or that of older drivers; the reasons of all GPUs together."""
    assert clock_reasons(_answering({"clocks_event_reasons.active": "0x0000000000000004\n"})) == 4
    older = _answering({"clocks_throttle_reasons.active": "0x0000000000000001\n0x0000000000000040\n"})
    assert clock_reasons(older) == 0x41
    assert clock_reasons(_answering({"clocks_event_reasons.active": "[N/A]\n"})) is None
    assert clock_reasons(_missing) is None


def test_looking_at_this_machine() -> None:
    """Whatever it has: a sight, and no exception."""
    sight = look_at_gpu()
    assert (sight.name is None) == (sight.link is None and sight.clock_reasons is None)
