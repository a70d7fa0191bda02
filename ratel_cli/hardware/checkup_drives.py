"""What `ratel doctor` finds about the directories of a store: may they be written, how fast is what lies below them.

Invariant: a check depends only on its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Final

from ratel_cli.hardware.checkup import Diagnosis
from ratel_cli.hardware.mounts import Mount
from ratel_cli.io.probe import Probe
from ratel_cli.units import GIB, format_bytes

_LEAST_FREE_BYTES: Final = GIB
_OTHER_DIRECTORY: Final = "set storage.paths to directories on local NVMe drives"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A directory of a store, and what is known about it."""

    path: Path
    """The directory as the user wrote it."""
    mount: Mount | None
    free_bytes: int
    """Free bytes of its file system. Several directories may share it."""
    probe: Probe


def check_place(place: Place) -> Diagnosis:
    """What one directory is good for."""
    what, mount, probe = str(place.path), place.mount, place.probe
    facts = [f"{format_bytes(place.free_bytes)} free"]
    if mount is not None:
        drives = " + ".join(map(str, mount.drives))
        facts.insert(0, f"{mount.file_system} on {drives}" if drives else mount.file_system)
    if mount is not None and mount.is_read_only:
        return Diagnosis(
            what=what,
            verdict="broken",
            reason=", ".join(["mounted read-only", *facts]),
            remedy=f"sudo mount -o remount,rw {mount.place}; or {_OTHER_DIRECTORY}",
        )
    if probe.failure is not None:
        remedy = "give yourself the right to write there, or set storage.paths to other directories"
        return Diagnosis(what=what, verdict="broken", reason=probe.failure.removeprefix(f"{what}: "), remedy=remedy)
    if place.free_bytes < _LEAST_FREE_BYTES:
        return Diagnosis(
            what=what,
            verdict="broken",
            reason=", ".join(["too little space", *facts]),
            remedy=f"free some space, or {_OTHER_DIRECTORY}",
        )
    slow = _why_slow(mount, is_direct=probe.is_direct)
    if slow is not None:
        return Diagnosis(what=what, verdict="slow", reason=", ".join([slow, *facts]), remedy=_OTHER_DIRECTORY)
    return Diagnosis(what=what, verdict="ok", reason=", ".join([*facts, "direct I/O"]))


def check_sharing(places: Sequence[Place]) -> Iterator[Diagnosis]:
    """A diagnosis for each directory on a drive that an earlier one is on: it adds no speed."""
    for first, second in combinations(places, 2):
        shared = _drive_names(first) & _drive_names(second)
        if shared:
            yield Diagnosis(
                what=str(second.path),
                verdict="slow",
                reason=f"on the same drive as {first.path} ({', '.join(sorted(shared))}): it adds no speed",
                remedy="set storage.paths to one directory for each drive",
            )


def check_space(places: Sequence[Place], *, need_bytes: int, available_bytes: int) -> Diagnosis:
    """Whether a config's store fits in its directories together."""
    reason = f"the store needs {format_bytes(need_bytes)}, {format_bytes(available_bytes)} available"
    if need_bytes <= available_bytes:
        return Diagnosis(what="space", verdict="ok", reason=reason)
    names = ", ".join(str(place.path) for place in places)
    return Diagnosis(
        what="space",
        verdict="broken",
        reason=f"{reason} (short by {format_bytes(need_bytes - available_bytes)})",
        remedy=f"free some space in {names}, add a directory to storage.paths, or halve the need with "
        "storage.durability: none",
    )


def _why_slow(mount: Mount | None, *, is_direct: bool) -> str | None:
    if mount is not None and mount.is_memory:
        return "in RAM (tmpfs): it takes the memory that the store is meant to save, and is lost at a restart"
    if mount is not None and mount.is_network:
        return "on a network"
    if mount is not None and any(drive.rotates for drive in mount.drives):
        return "a hard disk"
    return None if is_direct else "no direct I/O: transfers go through the page cache"


def _drive_names(place: Place) -> set[str]:
    return set() if place.mount is None else {drive.name for drive in place.mount.drives}
