"""Where a run's store could be on this machine. For `ratel init`.

Invariant: only file systems on drives are proposed, with space for the store, in which this user may make directories.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ratel_cli.hardware.host import free_bytes

_MOUNTS = Path("/proc/mounts")
_ON_DRIVES = ("ext4", "xfs", "btrfs", "f2fs", "zfs", "ext3", "ext2", "bcachefs")
_IN_MEMORY = ("tmpfs", "ramfs")
_SPARE = 1.1
"""Space for a store, as a multiple of its need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCandidate:
    """A directory on a file system of its own."""

    directory: Path
    free_bytes: int


def is_in_memory(directory: Path, mounts: Path = _MOUNTS) -> bool:
    """Whether a directory's files are in memory and not on a drive."""
    real = os.path.realpath(directory)
    around = [(point, kind) for point, kind in _mounted(mounts) if Path(real).is_relative_to(point)]
    return bool(around) and max(around, key=lambda mount: len(mount[0]))[1] in _IN_MEMORY


def has_space(directory: Path, need_bytes: int) -> bool:
    """Whether a store of this size fits there, with some space to spare."""
    return free_bytes([directory]) >= need_bytes * _SPARE


def other_places(directory: Path, need_bytes: int, mounts: Path = _MOUNTS) -> list[StoreCandidate]:
    """Mount points on other drives than the directory's that have the space, the one with the most space first."""
    seen = {directory.stat().st_dev}
    found = []
    for point, kind in _mounted(mounts):
        place = Path(point)
        if kind not in _ON_DRIVES or not os.access(place, os.W_OK | os.X_OK) or not place.is_dir():
            continue
        device = place.stat().st_dev
        if device not in seen and has_space(place, need_bytes):
            seen.add(device)
            found.append(StoreCandidate(directory=place, free_bytes=free_bytes([place])))
    return sorted(found, key=lambda each: -each.free_bytes)


def _mounted(mounts: Path) -> list[tuple[str, str]]:
    """Mount points and the kinds of their file systems; empty if the system does not say."""
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return []
    words = [line.split() for line in lines]
    return [(_unescaped(each[1]), each[2]) for each in words if len(each) > 2]


def _unescaped(path: str) -> str:
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\134", "\\")):
        path = path.replace(code, char)
    return path
