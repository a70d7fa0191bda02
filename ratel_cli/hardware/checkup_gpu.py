"""What `ratel doctor` finds about GPUs: driver, torch, CUDA's settings, the link to them, pinned memory, clocks.

Invariant: a check depends only on its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ratel_cli.hardware.checkup import Diagnosis
from ratel_cli.hardware.spec import Link
from ratel_cli.hardware.system_files import SystemFiles
from ratel_cli.units import format_rate

_PCI: Final = "sys/bus/pci/devices"
_DRIVER_GPUS: Final = "proc/driver/nvidia/gpus"
_NVIDIA: Final = "0x10de"
_DISPLAY_CLASSES: Final = ("0x0300", "0x0302")
"""The beginnings of a GPU's PCI class: VGA and 3D controllers."""
_LANE_BYTES_PER_SECOND: Final = {2.5: 0.25e9, 5.0: 0.5e9, 8.0: 0.985e9, 16.0: 1.969e9, 32.0: 3.938e9, 64.0: 7.56e9}
"""What a lane carries one way, by its GT/s: PCIe 1 to 6."""
_LEAST_SHARE: Final = 0.6
"""Least share of what the lanes carry that is no finding. Pinned memory reaches 0.8 and more of it; less has a
cause."""
_NUM_STREAMS: Final = 4
"""Computing, two lanes of uploads, downloads (engine/device/gpu.py). With fewer connections some share one."""
_FIRST_LEAKY: Final = (6, 11)
_LAST_LEAKY: Final = (6, 13)
"""Releases of Linux that lose memory that was pinned for a long time, until pinning fails (NVIDIA/NV-Kernels 108)."""
_SLOWED: Final = {
    0x8: "hardware slowdown", 0x20: "too hot (software)", 0x40: "too hot (hardware)", 0x80: "power brake",
}  # fmt: skip
"""Bits of nvidia-smi's reasons for a lower clock that do not belong to normal work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSight:
    """What torch and the driver's own tool see."""

    build: str | None
    """The version of CUDA or ROCm that torch was built with; None: without either."""
    failure: str | None
    """Why torch can use no GPU; None if it can, or if there is nothing to say."""
    name: str | None
    """The GPU that torch uses; None: none."""
    link: Link | None = None
    """Its link, as measured."""
    pinning_failure: str | None = None
    """Why host memory cannot be pinned; None if it can."""
    clock_reasons: int | None = None
    """The driver's reasons for its present clock, as bits; None: unknown."""


def check_gpu(
    files: SystemFiles, sight: GpuSight, *, environment: Mapping[str, str], kernel: str
) -> Iterator[Diagnosis]:
    """The diagnoses about the GPU that a run would use; one that says so if there is none.

    `environment`: the variables of this process. `kernel`: its release, such as `6.8.0-45-generic`.
    """
    if sight.name is None:
        yield _without_gpu(files, sight)
        return
    version = _driver_version(files)
    driver = f", driver {version}" if version else ""
    yield Diagnosis(what="GPU", verdict="ok", reason=f"{sight.name}{driver}, torch built for {sight.build}")
    yield _settings(environment)
    for address in files.names(_DRIVER_GPUS):
        device = files.real(f"{_PCI}/{address.lower()}")
        if device is not None:
            yield _lanes(files, device, sight.link)
    yield _pinned_memory(sight.pinning_failure, kernel)
    yield _clock(sight.clock_reasons)


def _settings(environment: Mapping[str, str]) -> Diagnosis:
    """CUDA's environment variables that keep copies from running next to kernels."""
    found = {}
    connections = environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if connections.isdecimal() and int(connections) < _NUM_STREAMS:
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = "copies and kernels share a queue and wait for each other"
    if environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        found["CUDA_LAUNCH_BLOCKING"] = "the host waits for every kernel"
    if not found:
        return Diagnosis(what="CUDA settings", verdict="ok", reason="none that slow a run")
    reason = "; ".join(f"{name}={environment[name]}: {what}" for name, what in found.items())
    return Diagnosis(what="CUDA settings", verdict="slow", reason=reason, remedy=f"unset {' '.join(found)}")


def _pinned_memory(failure: str | None, kernel: str) -> Diagnosis:
    numbers = tuple(map(int, re.findall(r"\d+", kernel)[:2]))
    is_leaky = _FIRST_LEAKY <= numbers <= _LAST_LEAKY
    if failure is None and not is_leaky:
        return Diagnosis(what="pinned memory", verdict="ok", reason="copies to and from the GPU overlap with work")
    reasons = [] if failure is None else [f"{failure}: copies do not overlap with work"]
    remedy = "look at the kernel's log for NVRM (sudo dmesg); in a container, raise its limit on memory"
    if is_leaky:
        reasons.append(f"Linux {kernel} loses pinned memory, and may refuse to pin more")
        remedy = "boot a kernel before 6.11, or 6.14 and newer"
    return Diagnosis(what="pinned memory", verdict="slow", reason="; ".join(reasons), remedy=remedy)


def _without_gpu(files: SystemFiles, sight: GpuSight) -> Diagnosis:
    has_driver = files.text("proc/driver/nvidia/version") is not None
    has_gpu = any(
        files.text(f"{_PCI}/{address}/vendor") == _NVIDIA
        and (files.text(f"{_PCI}/{address}/class") or "").startswith(_DISPLAY_CLASSES)
        for address in files.names(_PCI)
    )
    if not has_driver and not has_gpu:
        return Diagnosis(what="GPU", verdict="ok", reason="none; the CPU computes")
    if not has_driver:
        return Diagnosis(
            what="GPU",
            verdict="broken",
            reason="there is an NVIDIA GPU, but its driver is not loaded",
            remedy="install NVIDIA's driver, or load it: sudo modprobe nvidia",
        )
    if sight.build is None:
        return Diagnosis(
            what="GPU",
            verdict="broken",
            reason="there is an NVIDIA GPU, but torch was built for the CPU alone",
            remedy="install torch's build for CUDA: see https://pytorch.org/get-started/locally",
        )
    return Diagnosis(
        what="GPU",
        verdict="broken",
        reason=f"torch cannot use the GPU: {sight.failure or 'it finds none'} (driver {_driver_version(files)}, torch "
        f"built for {sight.build})",
        remedy="look at nvidia-smi and at CUDA_VISIBLE_DEVICES; in a container, start it with --gpus all",
    )


def _lanes(files: SystemFiles, device: Path, link: Link | None) -> Diagnosis:
    what = f"PCIe {device.name}"
    width, speed = files.number(device / "current_link_width"), _speed(files, device / "current_link_speed")
    if not width or speed is None:
        return Diagnosis(what=what, verdict="ok", reason="the link is not visible here (a virtual machine)")
    possible_width = _possible(width, *(files.number(each / "max_link_width") for each in (device, device.parent)))
    possible_speed = _possible(speed, *(_speed(files, each / "max_link_speed") for each in (device, device.parent)))
    now, could = f"x{width:g} at {speed:g} GT/s", f"x{possible_width:g} at {possible_speed:g} GT/s"
    if width < possible_width or speed < possible_speed:
        remedy = "seat the card anew or use another slot; look at the BIOS's settings of the slot"
        return Diagnosis(what=what, verdict="slow", reason=f"{now} of {could}", remedy=remedy)
    carried = width * _LANE_BYTES_PER_SECOND.get(speed, 0.0)
    if link is None:
        return Diagnosis(what=what, verdict="ok", reason=now)
    least = min(link.to_gpu_bytes_per_second, link.from_gpu_bytes_per_second)
    up, down = format_rate(link.to_gpu_bytes_per_second), format_rate(link.from_gpu_bytes_per_second)
    measured = f"{up} up, {down} down"
    if least < _LEAST_SHARE * carried:
        return Diagnosis(
            what=what,
            verdict="slow",
            reason=f"{now}, which carries {format_rate(carried)}, but measured {measured}",
            remedy="close other programs that use the GPU; with two sockets, run on the GPU's: numactl --cpunodebind",
        )
    return Diagnosis(what=what, verdict="ok", reason=f"{now}, {measured}")


def _possible(now: float, *most: float | None) -> float:
    """The best of both ends: the least of what they can. What they report may be less than what there is."""
    return max(now, min((each for each in most if each), default=now))


def _speed(files: SystemFiles, path: Path) -> float | None:
    """GT/s of a lane, from a file such as `16.0 GT/s PCIe`."""
    found = re.match(r"([\d.]+) GT/s", files.text(path) or "")
    return float(found[1]) if found else None


def _clock(reasons: int | None) -> Diagnosis:
    if reasons is None:
        return Diagnosis(what="GPU clock", verdict="ok", reason="the driver does not say why it has its clock")
    slowed = [words for bit, words in _SLOWED.items() if reasons & bit]
    if slowed:
        return Diagnosis(
            what="GPU clock",
            verdict="slow",
            reason=f"lowered: {', '.join(slowed)}",
            remedy="look at cooling and power: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
        )
    return Diagnosis(what="GPU clock", verdict="ok", reason="not lowered")


def _driver_version(files: SystemFiles) -> str:
    """The version of NVIDIA's driver; empty without it."""
    found = re.search(r"(?:Module|x86_64|aarch64)\s+(\d+\.[\d.]+)", files.text("proc/driver/nvidia/version") or "")
    return found[1] if found else ""
