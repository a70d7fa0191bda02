"""Where samples come from: files, directories, globs or a dataset on the hub, read row by row.

For `data/ingest.py`. Invariant: rows are streamed in a fixed order (sources as configured, files sorted by
path, rows as written), so a row number means the same thing in every run. The network is touched only when the
path is neither a local file nor looks like one.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from ratel_cli.data.lines import Reject, Row, read_json, read_json_lines, read_text_lines
from ratel_cli.errors import BadInput, EnvironmentFailure, printable

DatasetType = Literal["auto", "completion", "chat_template", "alpaca", "tokens"]
RowStream = Generator[Row | Reject, None, None]
Reader = Callable[[Path, str], Iterator[Row | Reject]]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_ROWS_PER_BATCH = 64  # rows that pyarrow turns into Python objects at a time
_NOT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSource:
    """One item of ``datasets:``, with the columns of each type under their usual names.

    `max_samples` keeps the first rows that are good, counted before long texts are split.
    """

    path: str
    type: DatasetType = "auto"
    split: str = "train"
    name: str | None = None
    field: str = "text"
    field_messages: str = "messages"
    field_instruction: str = "instruction"
    field_input: str = "input"
    field_output: str = "output"
    max_samples: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStamp:
    """One file that feeds the run: its content, and what changes when somebody writes to it meanwhile."""

    path: Path
    sha256: str
    identity: tuple[int, int, int, int]


class RowSource:
    """The rows of one `DatasetSource`, and the files behind them."""

    def __init__(self, source: DatasetSource, files: tuple[FileStamp, ...], read: Callable[[], RowStream]) -> None:
        self.source = source
        self.files = files
        self.read = read

    def check_unchanged(self) -> None:
        """Raises BadInput when a file is no longer the one that was hashed."""
        for stamp in self.files:
            if _identity(stamp.path) != stamp.identity:
                raise BadInput(
                    f"{printable(str(stamp.path))}: the file was changed while it was being read",
                    hint="let the writer finish, then start again",
                )


def open_source(source: DatasetSource, *, notice: Callable[[str], None]) -> RowSource:
    """Finds and hashes the files of a source. Raises BadInput when there is nothing to read."""
    paths = _local_files(source.path)
    if paths is None:
        return _open_hub(source)
    if source.split != "train":
        notice(f"{printable(source.path)}: split {source.split!r} has no meaning for local files and is ignored")
    if any(path.suffix.lower() == ".txt" for path in paths):
        notice(f"{printable(source.path)}: each line of a text file is one sample")
    stamps = tuple(_stamp(path) for path in paths)

    def read() -> RowStream:
        for path in paths:
            try:
                yield from _READERS[path.suffix.lower()](path, printable(str(path)))
            except OSError as error:
                raise EnvironmentFailure(f"{printable(str(path))}: cannot be read: {error.strerror}") from error

    return RowSource(source, stamps, read)


def _local_files(path_text: str) -> list[Path] | None:
    """The data files that a path means, sorted; None when only the hub can have it."""
    if "\0" in path_text:
        raise BadInput(f"{printable(path_text)}: a path cannot hold a NUL byte")
    path = Path(path_text).expanduser()
    label = printable(path_text)
    # Not by methods of Path: they raise for names that are too long.
    if os.path.isdir(path):
        found = sorted(
            item for item in path.rglob("*") if item.suffix.lower() in _READERS and _is_visible_data(item, path)
        )
        if not found:
            raise BadInput(f"{label}: no data files in this directory", hint=_KNOWN_FILES)
        return found
    if os.path.exists(path):
        if not os.path.isfile(path):
            raise BadInput(f"{label}: not a regular file")
        return [_known(path)]
    if glob.has_magic(path_text):
        found = sorted(Path(item) for item in glob.glob(str(path), recursive=True) if os.path.isfile(item))
        if not found:
            raise BadInput(f"{label}: no file matches")
        return [_known(item) for item in found]
    if path.suffix.lower() in _READERS or not _HUB_ID.fullmatch(path_text):
        raise BadInput(f"{label}: no such file or directory")
    return None


def _is_visible_data(item: Path, root: Path) -> bool:
    hidden = any(part.startswith(".") for part in item.relative_to(root).parts)
    return not hidden and item.is_file() and item.name not in _NOT_DATA


def _known(path: Path) -> Path:
    if path.suffix.lower() not in _READERS:
        raise BadInput(f"{printable(str(path))}: do not know how to read {path.suffix!r} files", hint=_KNOWN_FILES)
    return path


def _stamp(path: Path) -> FileStamp:
    try:
        identity = _identity(path)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise EnvironmentFailure(f"{printable(str(path))}: cannot be read: {error.strerror}") from error
    return FileStamp(path=path, sha256=digest, identity=identity)


def _identity(path: Path) -> tuple[int, int, int, int]:
    try:
        status = path.stat()
    except FileNotFoundError:
        return (0, 0, 0, 0)
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _read_parquet(path: Path, label: str) -> Iterator[Row | Reject]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    line = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH):
                for record in cast(list[dict[str, object]], batch.to_pylist()):
                    line += 1
                    yield Row(file=label, line=line, record=record)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's fault; Arrow's own complaints about a file have no errno
        raise BadInput(f"{label}: not a usable parquet file: {printable(str(error))[:200]}") from error


def _open_hub(source: DatasetSource) -> RowSource:
    """A dataset on the hub, downloaded and memory-mapped by `datasets`. Never runs a dataset's own code."""
    import datasets  # type: ignore[import-untyped]

    label = f"hub:{source.path}[{printable(source.split)}]"
    try:
        dataset = datasets.load_dataset(source.path, source.name, split=source.split, keep_in_memory=False)
    except Exception as error:  # load_dataset raises some dozen types: network, hub, builder, Arrow
        raise BadInput(
            f"{printable(source.path)}: no such local file, and the hub gives no dataset: "
            f"{type(error).__name__}: {printable(str(error))[:200]}"
        ) from error
    stamps = tuple(_stamp(Path(entry["filename"])) for entry in dataset.cache_files)
    assert stamps or not len(dataset), "a dataset without files would be cached under no content hash"

    def read() -> RowStream:
        for index, record in enumerate(cast(Iterable[dict[str, object]], dataset)):
            yield Row(file=label, line=index + 1, record=record)

    return RowSource(source, stamps, read)


_READERS: dict[str, Reader] = {
    ".jsonl": read_json_lines,
    ".json": read_json,
    ".parquet": _read_parquet,
    ".txt": read_text_lines,
}
_KNOWN_FILES = "known are " + ", ".join(_READERS)
