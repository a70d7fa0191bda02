"""Opens files to read what is in them: of one whose name ends in .gz or .zst, what it expands to.

Invariants: memory is bounded, whatever a file expands to. Of a damaged file everything before the damage is read, and
then comes one BadInput with its name.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from io import BufferedReader, FileIO, RawIOBase
from pathlib import Path
from typing import Protocol, cast

from ratel_cli.errors import BadInput, excerpt, printable
from ratel_cli.progress import no_progress

SUFFIXES = (".gz", ".zst")
_BUFFER_BYTES = 1 << 17  # the progress of a compressed file of some MiB should not jump


def uncompressed_name(path: Path) -> Path:
    """The path as it would be without compression: `rows.jsonl` for `rows.jsonl.gz`."""
    return path.with_suffix("") if path.suffix.lower() in SUFFIXES else path


def open_to_read(path: Path, *, progress: Callable[[int], None] = no_progress) -> BufferedReader:
    """Open a file. `progress` is called with the bytes of each part of the file itself that was read. Raises OSError.

    Reading raises OSError, and BadInput if the compressed file is damaged.
    """
    file = CountedFile(path, progress)
    if path.suffix.lower() not in SUFFIXES:
        return BufferedReader(file, _BUFFER_BYTES)
    try:
        return BufferedReader(_Expanded(path, file), _BUFFER_BYTES)
    except BaseException:
        file.close()
        raise


class CountedFile(FileIO):
    """A file that reports how much of it was read."""

    def __init__(self, path: Path, progress: Callable[[int], None]) -> None:
        super().__init__(path)
        self._progress = progress

    def readinto(self, buffer: bytearray | memoryview, /) -> int | None:  # type: ignore[override]
        num_bytes = super().readinto(buffer)
        self._progress(num_bytes or 0)
        return num_bytes


class _Stream(Protocol):
    def read(self, num_bytes: int, /) -> bytes: ...


class _Expanded(RawIOBase):
    """The content of a compressed file."""

    def __init__(self, path: Path, file: CountedFile) -> None:
        self._path = path
        self._file = file
        buffered = BufferedReader(file, _BUFFER_BYTES)
        self._failure: BadInput | None = None
        self._stream = gzip.GzipFile(fileobj=buffered) if path.suffix.lower() == ".gz" else _zstd_stream(buffered)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        view = memoryview(buffer)
        filled = 0
        if self._failure is not None:
            raise self._failure
        while filled < len(view):
            try:
                part = self._stream.read(len(view) - filled)
            except (EOFError, zlib.error, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise  # a fault of the drive; errors about the content have no errno
                self._failure = self._damaged(error)
                if filled:
                    break
                raise self._failure from error
            if not part:
                break
            view[filled : filled + len(part)] = part
            filled += len(part)
        return filled

    def close(self) -> None:
        self._file.close()
        super().close()

    def _damaged(self, error: Exception) -> BadInput:
        return BadInput(
            f"{printable(str(self._path))}: the compressed file is damaged or cut off: {excerpt(str(error), 100)}",
            hint=f"make or download it again; `{'gzip' if self._path.suffix.lower() == '.gz' else 'zstd'} -t` tests it",
        )


def _zstd_stream(file: BufferedReader[CountedFile]) -> _Stream:
    # `datasets` brings pyarrow, whose wheels have zstd; Python has it from 3.14 on.
    import pyarrow  # type: ignore[import-untyped]

    return cast(_Stream, pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd"))
