"""Tokenised samples that all commands share, in a directory of the user's: `check`, `data` and a run tokenise once.

An entry is a token cache. Its name is a hash of the data, of all that decides its tokens, and of the code that makes
them. Invariants:

* Only entries that are whole, and belong to the user alone, are read. Other files are neither read nor removed.
* An entry appears whole, under a lock on its directory. One that a command reads stays: it holds a lock, too.
* The entries take at most `_MOST_BYTES`, and at most a quarter of the space that is free without them. The one that was
  unused for longest goes first.
* Nothing needs the directory. Where it cannot be used, commands tokenise as if it were not there.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ratel_cli.closing import Closing
from ratel_cli.data.files.file_names import CACHE_FILE_NAMES, META_NAME
from ratel_cli.data.samples.token_cache import TokenCache, copy_cache
from ratel_cli.errors import printable
from ratel_cli.json_fields import hash_of
from ratel_cli.neighbours import version_of
from ratel_cli.progress import OpenBar, no_bar

_MOST_BYTES = 8 << 30
_ENTRY = re.compile(r"[0-9a-f]{32}")
_UNFINISHED = re.compile(r"[0-9a-f]{32}\.partial-[0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    path: Path
    num_bytes: int
    used_at: float
    """When it was used last, in seconds since 1970."""


class SharedTokens(Closing):
    """The entries below a directory. Those that were found stay locked against removal until it is closed.

    `copies`: a command that finds an entry gets a copy of its own, as a run needs it to resume. `notice` gets remarks
    for the user.
    """

    def __init__(self, directory: Path, *, copies: bool, notice: Callable[[str], None]) -> None:
        self._directory = directory
        self._copies = copies
        self._notice = notice
        self._locks: list[int] = []

    def close(self) -> None:
        """Let go of the entries that were found. Idempotent."""
        while self._locks:
            os.close(self._locks.pop())

    def find(self, key: str, own: Path, *, open_bar: OpenBar = no_bar) -> TokenCache | None:
        """The entry for `key`, which names data and settings, or a copy of it in `own`; None if none can be used.

        Raises OSError if the copy cannot be made.
        """
        path = self._path(key)
        try:
            if not (_is_private(self._directory) and _is_private(path)):
                return None
            lock = _lock(path, fcntl.LOCK_SH)
        except OSError:
            return None
        self._locks.append(lock)
        found = TokenCache.whole_in(path, open_bar=open_bar)
        if found is None and os.path.lexists(path):  # it may have been removed before it was locked
            self._notice(f"{printable(str(path))}: the shared tokens are damaged, and not used; delete this directory")
        if found is None:
            return None
        with suppress(OSError):
            os.utime(path / META_NAME)
        return copy_cache(found, own) if self._copies else found

    def add(self, key: str, tokens: TokenCache) -> None:
        """Copy a token cache to the entry for `key`, if there is none and space for it."""
        path = self._path(key)
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.path.lexists(path) or not _is_private(self._directory):
                return
            num_bytes = _size(tokens.directory)
            if self._has_space(num_bytes):
                copy_cache(tokens, path, private_lock=_locked)
        except OSError:
            return  # the next command tokenises again

    def _path(self, key: str) -> Path:
        return self._directory / hash_of([key, *_made_by()])[:32]

    def _has_space(self, num_bytes: int) -> bool:
        """Whether there is space for so much, after entries that were unused for longest are removed."""
        entries = sorted(self._entries(), key=lambda entry: entry.used_at)
        held = sum(entry.num_bytes for entry in entries)
        status = os.statvfs(self._directory)
        limit = min(_MOST_BYTES, (status.f_bavail * status.f_frsize + held) // 4)
        if num_bytes > limit:
            return False
        for entry in entries:
            if held + num_bytes <= limit:
                break
            if _remove(entry.path):
                held -= entry.num_bytes
        return held + num_bytes <= limit

    def _entries(self) -> Iterator[_Entry]:
        """The entries that are whole as far as names and sizes show. Removes what killed commands left."""
        for path in self._directory.iterdir():
            if _UNFINISHED.fullmatch(path.name) and _has_only_own_files(path):
                _remove(path)
            elif _ENTRY.fullmatch(path.name) and _has_only_own_files(path):
                with suppress(OSError, ValueError, TypeError):
                    meta = path / META_NAME
                    if "tokens_sha256" in json.loads(meta.read_bytes()):
                        yield _Entry(path=path, num_bytes=_size(path), used_at=meta.stat().st_mtime)


@cache
def _made_by() -> tuple[str, ...]:
    """The code that decides how rows become tokens: ours, by its content, and that of others, by its version.

    Whoever changes a file of this folder makes all entries anew, without thinking of it.
    """
    files = sorted(Path(__file__).parent.glob("*.py"))
    return (hash_of([path.read_text(encoding="utf-8") for path in files]), *map(version_of, _LIBRARIES))


_LIBRARIES = ("ratel-cli", "transformers", "tokenizers", "jinja2", "mistral-common", "datasets", "pyarrow")


def _is_private(path: Path) -> bool:
    """Whether this is a directory, not a link to one, into which nobody else can write. Raises OSError."""
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _has_only_own_files(path: Path) -> bool:
    try:
        return _is_private(path) and all(
            each.name in CACHE_FILE_NAMES and stat.S_ISREG(each.lstat().st_mode) for each in path.iterdir()
        )
    except OSError:
        return False


def _size(path: Path) -> int:
    return sum((path / name).stat().st_size for name in CACHE_FILE_NAMES)


def _lock(path: Path, kind: int) -> int:
    """An open directory with a lock of this kind. Raises OSError, also if another command has a lock in its way."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """A context in which no other command reads or removes a directory. Raises OSError if one does."""
    fd = _lock(path, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(fd)


def _remove(path: Path) -> bool:
    """Remove an entry, or an unfinished one, that no command has locked; whether it is gone.

    It gets the name of an unfinished one first: if this command is killed, another removes the rest.
    """
    unfinished = path.with_name(f"{path.name.partition('.')[0]}.partial-{os.getpid()}")
    try:
        with _locked(path):
            path.rename(unfinished)
            for name in CACHE_FILE_NAMES:
                (unfinished / name).unlink(missing_ok=True)
            unfinished.rmdir()
    except OSError:
        return False
    return True
