"""Files on the store's directories, one for each drive: checked, reserved, made durable.

Invariant: space is checked on every directory before anything is created, and reserved before anything is written, so a
full disk is found at the start and never later.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ratel_cli.errors import BadInput, EnvironmentFailure, NotEnoughSpace
from ratel_cli.units import format_bytes

SPACE_HINT = "free some space, or set storage.paths to directories with more space"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceNeed:
    """Space that one file will take: its size when it is reserved, and what it holds on the drive already."""

    directory: Path
    num_bytes: int
    held_bytes: int = 0


def check_directories(paths: Sequence[Path]) -> tuple[Path, ...]:
    """The paths made absolute. Raises BadInput for an empty list, or for two names of one directory."""
    if not paths:
        raise BadInput("storage.paths is empty", "name at least one directory")
    resolved = tuple(Path(os.path.realpath(path)) for path in paths)
    for index, path in enumerate(resolved):
        if path in resolved[:index]:
            raise BadInput(f"storage.paths names {path} twice", "name each directory once: one for each drive")
    return resolved


def check_space(needs: Sequence[SpaceNeed]) -> None:
    """Raise NotEnoughSpace if a drive lacks it. Directories may not exist yet, or may share a drive."""
    for directory in dict.fromkeys(need.directory for need in needs):
        existing = nearest_existing(directory)
        drive = existing.stat().st_dev
        here = [need for need in needs if device_of(need.directory) == drive]
        need_bytes = sum(need.num_bytes for need in here)
        free = os.statvfs(existing)
        available_bytes = free.f_bavail * free.f_frsize + sum(min(need.held_bytes, need.num_bytes) for need in here)
        if need_bytes > available_bytes:
            raise NotEnoughSpace(
                f"not enough space: needs {format_bytes(need_bytes)} on {directory}, "
                f"{format_bytes(available_bytes)} available "
                f"(short by {format_bytes(need_bytes - available_bytes)})",
                SPACE_HINT,
            )


def make_directory(directory: Path) -> None:
    """Create the directory and its parents if they are missing; they are durable then. Raises EnvironmentFailure."""
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for each in missing:
            sync_path(each.parent)
    except OSError as exc:
        raise EnvironmentFailure(
            f"{directory}: cannot be created: {exc.strerror}", "set storage.paths to directories you may write to"
        ) from exc


def open_unlinked(directory: Path) -> int:
    """A new file without a name, open for reading and writing. Raises EnvironmentFailure."""
    try:
        fd, name = tempfile.mkstemp(prefix="ratel.scratch.", dir=directory)
        os.unlink(name)
    except OSError as exc:
        raise EnvironmentFailure(
            f"{directory}: a file cannot be created in it: {exc.strerror}",
            "set storage.paths to directories you may write to",
        ) from exc
    return fd


def reserve(fd: int, path: Path, num_bytes: int) -> None:
    """Make the file system allocate `num_bytes` for the file, without changing what it holds.

    Raises EnvironmentFailure if it cannot, NotEnoughSpace where that is the reason.
    """
    if num_bytes == 0:
        return
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = os.statvfs(path.parent)
            available_bytes = free.f_bavail * free.f_frsize
            raise NotEnoughSpace(
                f"space cannot be reserved: needs {format_bytes(num_bytes)} on {path.parent}, "
                f"{format_bytes(available_bytes)} available ({exc.strerror})",
                SPACE_HINT,
            ) from exc
        raise EnvironmentFailure(f"{path}: space cannot be reserved: {exc.strerror}", SPACE_HINT) from exc


def use_direct_io(fds: Sequence[int], paths: Sequence[Path], notice: Callable[[str], None]) -> None:
    """Bypass the page cache where the file system can. One notice names the directories where it cannot."""
    buffered: list[str] = []
    for fd, path in zip(fds, paths, strict=True):
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        except OSError:
            buffered.append(str(path.parent))
    if buffered:
        where = ", ".join(dict.fromkeys(buffered))
        notice(f"direct I/O is not available on {where}; transfers use the page cache, with the same results")


def sync_path(path: Path) -> None:
    """Make a file durable, or the names in a directory. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole and durably: 1. as `NAME.new`, which a process that is killed leaves;
    2. that file gets the name.

    Links in these two places are replaced, not followed. Raises OSError, and leaves what was there then.
    """
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    try:
        with open(new, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def device_of(path: Path) -> int:
    """The number of the file system that has the path, or will have it."""
    return nearest_existing(path).stat().st_dev


def nearest_existing(path: Path) -> Path:
    """The path itself or its closest existing parent, which is on the same drive unless something is mounted later."""
    while not os.path.exists(path):  # Path.exists raises for names that are too long
        path = path.parent
    return path
