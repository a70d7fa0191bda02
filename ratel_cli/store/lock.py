"""The lock on a store, held on the data files themselves: of one who changes it, or of any number who read it.

The lock belongs to the open file, and so does a write that io_uring still has in flight after its process was killed
(seen for up to 169 ms). As long as a dead run can still write, its lock is held, and a new run waits. A small file next
to each data file says who holds the lock; it serves the message only.

Invariant: of two `StoreLock`s that exist at once on a data file, in one process or in two, both are shared.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, Literal

from ratel_cli.closing import Closing
from ratel_cli.errors import BadInput, EnvironmentFailure, RatelError
from ratel_cli.json_fields import JsonFields

DATA_FILE_NAME = "ratel.store"
OWNER_FILE_NAME = "ratel.owner"
DEFAULT_WAIT_SECONDS = 10.0
_POLL_SECONDS = 0.02
_MAY_NOT_WRITE: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


class StoreLock(Closing):
    """Open data files, locked. `close` unlocks them, and removes those that this lock made and nobody filled."""

    def __init__(
        self,
        directories: Sequence[Path],
        *,
        create: bool,
        wait_seconds: float,
        read_only: bool = False,
        shared: bool = False,
    ) -> None:
        """Open and lock the data file of each directory. `create` makes missing files.

        `read_only`: a file that this process may not write to is opened for reading. `shared`: others may have such a
        lock at the same time.

        Waits up to `wait_seconds` for another holder, then raises EnvironmentFailure. Raises BadInput if a file is
        missing and `create` is False.
        """
        self._operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        self._fds: dict[Path, int] = {}
        self._made: list[Path] = []
        deadline = time.monotonic() + wait_seconds
        try:
            # All runs lock in the same order, so that two of them cannot each hold what the other waits for.
            for path in sorted(directory / DATA_FILE_NAME for directory in directories):
                self._fds[path] = self._open_locked(path, create=create, deadline=deadline, read_only=read_only)
        except BaseException:
            self.close()
            raise
        self.paths = tuple(directory / DATA_FILE_NAME for directory in directories)
        """The data files, in the order of the directories."""
        self.fds = tuple(self._fds[path] for path in self.paths)
        """Their descriptors, in the same order."""
        for directory in directories:
            _write_owner(directory)

    def find_deleted(self) -> Path | None:
        """A data file that was deleted since it was opened; None if there is none."""
        return next((path for path, fd in self._fds.items() if not os.fstat(fd).st_nlink), None)

    def close(self) -> None:
        """Unlock the files and close them. Idempotent."""
        fds, self._fds = self._fds, {}
        for path, fd in fds.items():
            if _owner_pid(path.parent) in (None, os.getpid()):
                with suppress(OSError):
                    (path.parent / OWNER_FILE_NAME).unlink()
            if path in self._made and os.fstat(fd).st_size == 0:
                with suppress(OSError):
                    path.unlink()
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child may have the descriptor for longer
            os.close(fd)

    def _open_locked(self, path: Path, *, create: bool, deadline: float, read_only: bool) -> int:
        while True:
            existed = path.exists()
            fd = _open(path, create=create, read_only=read_only)
            try:
                if _try_lock(fd, path, self._operation) and _is_still(fd, path):
                    if not existed:
                        self._made.append(path)
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            if time.monotonic() >= deadline:
                raise EnvironmentFailure(
                    f"the store in {path.parent} is in use{_describe_owner(path.parent)}",
                    "wait until that process ends, or stop it",
                )
            time.sleep(_POLL_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUse:
    """Whether a process uses a store."""

    is_locked: bool
    pid: int | None
    """The process that the file next to the store names; None if there is none. Without a lock it was killed."""


def find_use(directory: Path) -> StoreUse:
    """Whether a process uses the store in a directory. The store is neither changed nor, for longer, locked.

    A run that begins in the same instant waits for a fiftieth of a second.
    """
    try:
        fd = os.open(directory / DATA_FILE_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return StoreUse(is_locked=False, pid=None)
    try:
        # Readers refuse only the second one. So does NFS, since the file is opened for reading: then none is known.
        for operation in (fcntl.LOCK_SH, fcntl.LOCK_EX):
            fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return StoreUse(is_locked=True, pid=_owner_pid(directory))
    except OSError:
        return StoreUse(is_locked=False, pid=None)  # a file system without locks
    finally:
        os.close(fd)
    return StoreUse(is_locked=False, pid=_owner_pid(directory))


def _owner_pid(directory: Path) -> int | None:
    try:
        return JsonFields(json.loads((directory / OWNER_FILE_NAME).read_bytes())).integer("pid")
    except (OSError, ValueError, RecursionError):
        return None


def _open(path: Path, *, create: bool, read_only: bool) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o666)
    except OSError as exc:
        if not read_only or exc.errno not in _MAY_NOT_WRITE:
            raise _unusable(path, exc, "writing") from exc
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as failure:
            raise _unusable(path, failure, "reading") from failure
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise EnvironmentFailure(
            f"{path} is not a regular file", "remove it, or set storage.paths to another directory"
        )
    return fd


def _unusable(path: Path, error: OSError, purpose: Literal["reading", "writing"]) -> RatelError:
    if isinstance(error, FileNotFoundError):
        return BadInput(f"there is no store in {path.parent}", "check storage.paths")
    message = f"{path}: cannot be opened for {purpose}: {error.strerror}"
    if purpose == "reading":
        return EnvironmentFailure(message, "give yourself the right to read it")
    return EnvironmentFailure(message, "set storage.paths to directories you may write to")


def _try_lock(fd: int, path: Path, operation: int) -> bool:
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as exc:
        raise EnvironmentFailure(f"{path}: cannot be locked: {exc.strerror}", "use a local file system") from exc
    return True


def _is_still(fd: int, path: Path) -> bool:
    """True if the path still names the file that was opened. Its last holder may have removed it."""
    opened = os.fstat(fd)
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    return (opened.st_dev, opened.st_ino) == (named.st_dev, named.st_ino)


def _write_owner(directory: Path) -> None:
    started = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    # A full drive must not stop a run that needs no more space.
    with suppress(OSError):
        (directory / OWNER_FILE_NAME).write_text(json.dumps({"pid": os.getpid(), "started": started}))


def _describe_owner(directory: Path) -> str:
    try:
        owner = json.loads((directory / OWNER_FILE_NAME).read_text())
        return f" by process {int(owner['pid'])}, started {str(owner['started'])!r}"
    except (OSError, ValueError, KeyError, TypeError):
        return " by another process"
