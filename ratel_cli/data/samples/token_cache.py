"""Tokenised samples on a drive, so that RAM holds only their lengths.

A cache is a directory, and its name is the hash of everything that it was made from. It contains `tokens.bin` (for each
sample its input_ids, then its labels, int32 little endian), `lengths.npy`, `rejects.jsonl` and `meta.json`. Invariants:
a cache is written under another name and renamed, so a directory with its final name and `meta.json` is complete. It is
checked against its own hash before use. It contains only numbers and JSON, so reading it runs no code. Other files in
the directory are the user's and stay.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from ratel_cli.closing import Closing
from ratel_cli.data.files.file_names import CACHE_FILE_NAMES, LENGTHS_NAME, META_NAME, REJECTS_NAME, TOKEN_IDS_NAME
from ratel_cli.data.files.lines import Reject
from ratel_cli.data.samples.samples import Sample, TokenIds
from ratel_cli.errors import EnvironmentFailure, printable
from ratel_cli.io.files import sync_path
from ratel_cli.progress import Advance, OpenBar, no_bar
from ratel_cli.sizes import IGNORED_TARGET

FORMAT_VERSION = 1

_DISK_DTYPE = np.dtype("<i4")
_HASHED_PART_BYTES = 4 << 20
_QUICK_BYTES = 64 << 20  # are checked in a tenth of a second


@dataclass(frozen=True, slots=True)
class SourceCounts:
    """What one dataset of a cache had and gave."""

    num_rows: int
    num_rejected: int
    num_truncated: int
    num_samples: int
    num_dropped: int = 0
    """Rows whose sample was too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSummary:
    """What was counted and noted while the cache was built. The notices are repeated whenever it is used."""

    format_version: int = FORMAT_VERSION
    num_rows: int
    num_rejected: int
    notices: tuple[str, ...]
    tokens_sha256: str
    sources: tuple[SourceCounts, ...] = ()
    """Counts of each dataset, in their order."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end answers, though the model does not stop at them yet."""
    num_loss_tokens: int
    """Tokens with loss of all samples."""


class TokenCache:
    """A complete cache. It holds no file open: each read opens and closes its own."""

    def __init__(self, directory: Path, summary: CacheSummary, lengths: npt.NDArray[np.int64]) -> None:
        self.directory = directory
        self.summary = summary
        self.lengths = lengths
        self._starts = np.concatenate(([0], np.cumsum(lengths)))

    @staticmethod
    def is_in(directory: Path) -> bool:
        """Whether a directory has a cache, or a part of one. It may be damaged."""
        return any(os.path.lexists(directory / name) for name in CACHE_FILE_NAMES)

    @classmethod
    def open(cls, directory: Path, *, notice: Callable[[str], None], open_bar: OpenBar = no_bar) -> TokenCache | None:
        """The cache in a directory; None if there is none. Removes a damaged cache, with a notice. Raises OSError."""
        if not cls.is_in(directory):
            return None
        found = cls.whole_in(directory, open_bar=open_bar)
        if found is not None:
            return found
        notice(f"{printable(str(directory))}: the token cache is damaged or of another version; rebuilding it")
        if directory.is_symlink():
            directory.unlink()
        else:
            _remove_files(directory)
        return None

    @classmethod
    def whole_in(cls, directory: Path, *, open_bar: OpenBar = no_bar) -> TokenCache | None:
        """The cache in a directory; None if there is none, or if it is damaged."""
        try:
            meta = json.loads((directory / META_NAME).read_bytes())
            sources = tuple(SourceCounts(**each) for each in meta.pop("sources", ()))
            others = {name: tuple(meta.get(name, ())) for name in ("notices", "end_ids")}
            summary = CacheSummary(**{**meta, **others, "sources": sources})
            lengths = np.load(directory / LENGTHS_NAME, allow_pickle=False)
            num_bytes = 2 * _DISK_DTYPE.itemsize * int(lengths.sum())
            bar = (open_bar if num_bytes > _QUICK_BYTES else no_bar)("checking the cached tokens", num_bytes)
            with (directory / TOKEN_IDS_NAME).open("rb") as file, bar as advance:
                whole = _digest(file, lengths, advance) == summary.tokens_sha256
            if whole and summary.format_version == FORMAT_VERSION and (directory / REJECTS_NAME).is_file():
                return cls(directory, summary, lengths)
        except (OSError, ValueError, TypeError, KeyError, EOFError):
            pass  # whatever is wrong with it, it is built again
        return None

    def read(self, sample_ids: npt.NDArray[np.int64]) -> list[Sample]:
        """The samples with these numbers, `[samples]`. Raises EnvironmentFailure.

        With plain reads, because mapped pages would count as memory of the process.
        """
        path = self.directory / TOKEN_IDS_NAME
        try:
            with path.open("rb", buffering=0) as file:
                return [self._read_one(file.fileno(), int(sample_id)) for sample_id in sample_ids]
        except OSError as error:
            raise EnvironmentFailure(
                f"{printable(str(path))}: the token cache cannot be read: {error.strerror or error}",
                hint="run the same command again to rebuild the cache from the same data",
            ) from error

    def _read_one(self, fd: int, sample_id: int) -> Sample:
        length = int(self.lengths[sample_id])
        num_bytes = 2 * length * _DISK_DTYPE.itemsize
        raw = os.pread(fd, num_bytes, 2 * int(self._starts[sample_id]) * _DISK_DTYPE.itemsize)
        if len(raw) != num_bytes:
            raise OSError(f"sample {sample_id} is truncated")
        both: TokenIds = np.frombuffer(raw, dtype=_DISK_DTYPE).astype(np.int32, copy=False)
        return Sample(input_ids=both[:length], labels=both[length:])


class TokenCacheWriter(Closing):
    """Writes a cache under a temporary name. `close` without `finish` removes it. Every method may raise OSError."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._partial = directory.with_name(f"{directory.name}.partial-{os.getpid()}")
        _remove_abandoned(directory)
        self._partial.mkdir(parents=True)
        self._tokens = (self._partial / TOKEN_IDS_NAME).open("wb", buffering=1 << 20)
        self._rejects = (self._partial / REJECTS_NAME).open("w", encoding="utf-8")
        self.lengths = array("q")
        """Tokens of each sample so far."""
        self.num_rejected = 0
        """How many rejects were added."""
        self._num_loss_tokens = 0
        self._hash = hashlib.sha256()

    @property
    def num_samples(self) -> int:
        """How many samples were added."""
        return len(self.lengths)

    def add(self, sample: Sample) -> None:
        """Append one sample. Its number is the number of samples before it."""
        raw = np.concatenate((sample.input_ids, sample.labels)).astype(_DISK_DTYPE).tobytes()
        self._hash.update(raw)
        self._tokens.write(raw)
        self.lengths.append(len(sample.input_ids))
        self._num_loss_tokens += int((sample.labels[1:] != IGNORED_TARGET).sum())  # nothing predicts the first token

    def reject(self, reject: Reject) -> None:
        """Append a row that is not used."""
        self._rejects.write(json.dumps(asdict(reject)) + "\n")
        self.num_rejected += 1

    def copy_rejects(self, target: Path) -> None:
        """Write the rejects so far into a file for the user."""
        self._rejects.flush()
        copy_rejects(self._partial, target)

    def finish(
        self,
        *,
        num_rows: int,
        notices: tuple[str, ...],
        sources: tuple[SourceCounts, ...] = (),
        end_ids: tuple[int, ...] = (),
    ) -> TokenCache:
        """Make the cache durable: 1. sync all files, 2. give the directory its name, 3. sync the name."""
        lengths = np.frombuffer(self.lengths, dtype=np.int64) if self.lengths else np.zeros(0, dtype=np.int64)
        self._hash.update(_length_bytes(lengths))
        summary = CacheSummary(
            num_rows=num_rows,
            num_rejected=self.num_rejected,
            notices=notices,
            tokens_sha256=self._hash.hexdigest(),
            sources=sources,
            end_ids=end_ids,
            num_loss_tokens=self._num_loss_tokens,
        )
        with (self._partial / LENGTHS_NAME).open("wb") as file:
            np.save(file, lengths, allow_pickle=False)
        (self._partial / META_NAME).write_text(json.dumps(asdict(summary)), encoding="utf-8")
        self._tokens.close()
        self._rejects.close()
        _publish(self._partial, self._directory)
        return TokenCache(self._directory, summary, lengths)

    def close(self) -> None:
        """Close the files and remove a cache that is not finished. Idempotent."""
        self._tokens.close()
        self._rejects.close()
        shutil.rmtree(self._partial, ignore_errors=True)


def copy_cache(
    cache: TokenCache,
    directory: Path,
    *,
    private_lock: Callable[[Path], AbstractContextManager[None]] | None = None,
) -> TokenCache:
    """A copy of a cache under another name, which appears whole. Raises OSError.

    `private_lock`: nobody but the user can read the copy, it is locked in this way while it is made, and it is an error
    if there are files in its place; None: it is as other caches are, and takes the place of what is left of one.
    """
    partial = directory.with_name(f"{directory.name}.partial-{os.getpid()}")
    if private_lock is None:
        _remove_abandoned(directory)
    partial.mkdir(mode=0o777 if private_lock is None else 0o700, parents=True)
    try:
        with nullcontext() if private_lock is None else private_lock(partial):
            for name in CACHE_FILE_NAMES:
                shutil.copyfile(cache.directory / name, partial / name)
                if private_lock is not None:
                    (partial / name).chmod(0o600)
            _publish(partial, directory, replaces=private_lock is None)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return TokenCache(directory, cache.summary, cache.lengths)


def _publish(partial: Path, directory: Path, *, replaces: bool = True) -> None:
    """Make the files durable, and give their directory its name."""
    for path in partial.iterdir():
        sync_path(path)
    try:
        partial.rename(directory)
    except OSError:
        if not (replaces and directory.is_dir()):
            raise
        # Another run with the same data was faster: its files have the same bytes. Or the user's files are there.
        for name in CACHE_FILE_NAMES:
            os.replace(partial / name, directory / name)
        sync_path(directory)
    sync_path(directory.parent)


def copy_rejects(directory: Path, target: Path) -> None:
    """Write the rejects of a cache into a file for the user. Without rejects, remove that file. Raises OSError."""
    source = directory / REJECTS_NAME
    if source.stat().st_size == 0:
        target.unlink(missing_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    shutil.copyfile(source, partial)
    partial.replace(target)


def _remove_files(directory: Path) -> None:
    """Remove the files of a cache, and the directory if nothing else is in it."""
    for name in CACHE_FILE_NAMES:
        (directory / name).unlink(missing_ok=True)
    with suppress(OSError):
        directory.rmdir()


def _digest(file: BinaryIO, lengths: npt.NDArray[np.int64], advance: Advance) -> str:
    digest = hashlib.sha256()
    while content := file.read(_HASHED_PART_BYTES):
        digest.update(content)
        advance(len(content))
    digest.update(_length_bytes(lengths))
    return digest.hexdigest()


def _length_bytes(lengths: npt.NDArray[np.int64]) -> bytes:
    return lengths.astype("<i8").tobytes()


def _remove_abandoned(directory: Path) -> None:
    """Remove what killed processes left: a tokenised dataset may have many gigabytes."""
    for partial in directory.parent.glob(f"{directory.name}.partial-*"):
        pid = partial.name.rpartition("-")[2]
        if not (pid.isdecimal() and Path("/proc", pid).exists()) or int(pid) == os.getpid():
            shutil.rmtree(partial, ignore_errors=True)
