"""Where a directory is: its file system, and the drives below it, as the kernel names them.

A drive is found through partitions, device mapper (LVM, LUKS) and md (RAID), so two directories of one drive are known
to be that, whatever lies between.

Invariant: nothing is guessed. A file system without a drive of its own (tmpfs, NFS, a container's layers) has none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from ratel_cli.hardware.system_files import SystemFiles

NETWORK_FILE_SYSTEMS: Final = (
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse.gcsfuse", "fuse.glusterfs", "fuse.juicefs", "fuse.rclone", "fuse.s3fs",
    "fuse.sshfs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "smbfs", "wekafs",
)  # fmt: skip
MEMORY_FILE_SYSTEMS: Final = ("tmpfs", "ramfs", "devtmpfs")
_VIRTUAL_NAMES: Final = ("vd", "xvd")
_VIRTUAL_MODELS: Final = ("QEMU", "VBOX", "Virtual", "Msft Virtual", "VMware")
"""Drives of virtual machines. They say that they rotate, whatever is below them."""
_MAX_DEPTH: Final = 8
"""Layers between a file system and its drives. More are a fault of the kernel's files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """A drive, as the kernel knows it."""

    name: str
    """Name of the drive, such as `nvme0n1`."""
    model: str
    """Empty if it has none, as in a virtual machine."""
    rotates: bool | None
    """None: unknown, as in a virtual machine."""

    def __str__(self) -> str:
        return f"{self.name} ({self.model})" if self.model else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A mounted file system."""

    place: str
    """Where it is mounted."""
    file_system: str
    """Its type, such as `ext4`."""
    is_read_only: bool
    drives: tuple[Drive, ...]

    @property
    def is_network(self) -> bool:
        """Whether another machine has the bytes."""
        return self.file_system in NETWORK_FILE_SYSTEMS

    @property
    def is_memory(self) -> bool:
        """Whether the bytes are in main memory."""
        return self.file_system in MEMORY_FILE_SYSTEMS


def mount_of(path: Path, files: SystemFiles) -> Mount | None:
    """The mount that an absolute path without links is on; None if the kernel does not tell."""
    found: tuple[int, list[str], list[str]] | None = None
    for line in (files.text("proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) < 6 or len(rest) < 2:
            continue
        place = PurePosixPath(_unescaped(fields[4]))
        # Of several mounts at one place, the last one hides the others.
        if path.is_relative_to(place) and (found is None or len(place.parts) >= found[0]):
            found = len(place.parts), fields, rest
    if found is None:
        return None
    _, fields, (file_system, source, *_) = found
    return Mount(
        place=_unescaped(fields[4]),
        file_system=file_system,
        is_read_only="ro" in fields[5].split(","),
        drives=tuple(sorted(set(_drives(fields[2], _unescaped(source), files)), key=lambda drive: drive.name)),
    )


def _drives(number: str, source: str, files: SystemFiles) -> Iterator[Drive]:
    """The drives below a file system, by its device number; by its source where that number is its own (btrfs)."""
    device = files.real(f"sys/dev/block/{number}")
    if device is None and source.startswith("/dev/"):
        device = files.real(f"sys/class/block/{PurePosixPath(source).name}")
    if device is not None:
        yield from _below(device, files, depth=0)


def _below(device: Path, files: SystemFiles, *, depth: int) -> Iterator[Drive]:
    if (device / "partition").exists():
        device = device.parent
    parts = files.names(device / "slaves")
    if parts and depth < _MAX_DEPTH:
        for part in parts:
            place = files.real(device / "slaves" / part)
            if place is not None:
                yield from _below(place, files, depth=depth + 1)
        return
    rotates = files.number(device / "queue" / "rotational")
    model = " ".join((files.text(device / "device" / "model") or "").split())
    is_virtual = device.name.startswith(_VIRTUAL_NAMES) or model.startswith(_VIRTUAL_MODELS)
    yield Drive(name=device.name, model=model, rotates=None if rotates is None or is_virtual else bool(rotates))


def _unescaped(text: str) -> str:
    """A path as it is, from the form in which mountinfo has spaces and the like (`\\040`)."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
