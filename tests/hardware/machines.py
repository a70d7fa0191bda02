"""Machines made of files: a root with /proc and /sys as a healthy kernel has them, which a test then breaks."""

from __future__ import annotations

import os
from pathlib import Path

from ratel_cli.hardware.system_files import SystemFiles

BUS = "sys/bus/pci/devices"
GPU = "0000:01:00.0"


class Machine:
    """A machine below `root`. It begins with 64 GiB of RAM, no swap, huge pages on request, and no GPU."""

    def __init__(self, root: Path) -> None:
        self.files = SystemFiles(root=root)
        self.write("proc/meminfo", "MemTotal:       67108864 kB\nMemFree: 1 kB\nMemAvailable:   50331648 kB\n")
        self.write("proc/self/cgroup", "0::/\n")
        self.write("proc/self/status", "Name:\tpython\nSeccomp:\t0\n")
        self.write("proc/swaps", "Filename\tType\tSize\tUsed\tPriority\n")
        self.write("proc/cpuinfo", "model name\t: Fast CPU\nflags\t\t: fpu sse avx2 fma avx512f\n")
        self.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
        self.write("proc/self/mountinfo", "")

    def write(self, path: str, text: str) -> Machine:
        """Write a file."""
        file = self.files.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return self

    def remove(self, path: str) -> Machine:
        """Remove a file."""
        (self.files.root / path).unlink()
        return self

    def drive(
        self, name: str, number: str, *, rotational: int = 0, model: str = "", partitions: tuple[str, ...] = ()
    ) -> Machine:
        """A drive, and its partitions as `NAME=MAJOR:MINOR`."""
        device = f"sys/devices/pci0/{name}"
        self.write(f"{device}/queue/rotational", f"{rotational}\n")
        if model:
            self.write(f"{device}/device/model", f"{model}   \n")
        self._device(name, number, device)
        for part in partitions:
            part_name, _, part_number = part.partition("=")
            self.write(f"{device}/{part_name}/partition", "1\n")
            self._device(part_name, part_number, f"{device}/{part_name}")
        return self

    def layered(self, name: str, number: str, *below: str) -> Machine:
        """A device on top of others: device mapper, or md."""
        device = f"sys/devices/virtual/block/{name}"
        self.write(f"{device}/queue/rotational", "1\n")
        for each in below:
            self._link(f"{device}/slaves/{each}", f"sys/class/block/{each}")
        self._device(name, number, device)
        return self

    def mount(self, number: str, place: Path | str, file_system: str, source: str, *, options: str = "rw") -> Machine:
        """A mount; later ones hide earlier ones."""
        escaped = str(place).replace(" ", "\\040")
        line = f"36 35 {number} / {escaped} {options},noatime shared:1 - {file_system} {source} rw\n"
        file = self.files.root / "proc/self/mountinfo"
        file.write_text(file.read_text() + line)
        return self

    def gpu(
        self, *, width: str = "16", speed: str = "16.0 GT/s PCIe", slot_width: int = 16, slot: str = "16.0"
    ) -> Machine:
        """An NVIDIA GPU that can do PCIe 4.0 x16, in a slot, with its driver."""
        bridge = "sys/devices/pci0000:00/0000:00:01.0"
        for name, value in (
            ("vendor", "0x10de"),
            ("class", "0x030200"),
            ("current_link_width", width),
            ("current_link_speed", speed),
            ("max_link_width", "16"),
            ("max_link_speed", "16.0 GT/s PCIe"),
        ):
            self.write(f"{bridge}/{GPU}/{name}", f"{value}\n")
        self.write(f"{bridge}/max_link_width", f"{slot_width}\n").write(
            f"{bridge}/max_link_speed", f"{slot} GT/s PCIe\n"
        )
        self._link(f"{BUS}/{GPU}", f"{bridge}/{GPU}")
        self.write(
            "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Rel\n"
        )
        return self.write(f"proc/driver/nvidia/gpus/{GPU}/information", "Model: \t\t NVIDIA RTX\n")

    def _device(self, name: str, number: str, device: str) -> None:
        self._link(f"sys/class/block/{name}", device)
        self._link(f"sys/dev/block/{number}", device)

    def _link(self, path: str, target: str) -> None:
        link = self.files.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        os.symlink(os.path.relpath(self.files.root / target, link.parent), link)
