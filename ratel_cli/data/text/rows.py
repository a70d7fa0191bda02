"""Finds the files of a dataset and reads them row by row: a file, a directory, a pattern, or a dataset on the hub.

Invariants: rows come in a fixed order (sources as configured, files sorted by path, rows as written), so a row number
means the same in every run. The network is used only if the path is no local file and does not look like one.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, Protocol, cast

from ratel_cli.data.files.csv_rows import read_csv
from ratel_cli.data.files.folders import files_of_split, is_saved, saved_files
from ratel_cli.data.files.lines import (
    Progress,
    Reject,
    Row,
    read_json,
    read_json_lines,
    read_text_file,
    read_text_lines,
)
from ratel_cli.data.files.splits import Part, parse_split
from ratel_cli.data.text.drafts import TrainOnEos
from ratel_cli.errors import BadInput, EnvironmentFailure, excerpt, printable
from ratel_cli.input_files import SUFFIXES, CountedFile, uncompressed_name
from ratel_cli.progress import OpenBar, no_bar, no_progress

DatasetType = Literal["auto", "completion", "chat_template", "alpaca", "tokens", "mlm", "classification", "seq2seq"]
TextUnit = Literal["line", "file"]
Media = Literal["reject", "ignore"]
Compares = Literal["pairs", "verdicts"]
RowStream = Generator[Row | Reject, None, None]


class Reader(Protocol):
    """Reads the rows of one file, which the second argument names in messages."""

    def __call__(self, path: Path, label: str, /, *, progress: Progress) -> Iterator[Row | Reject]: ...


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_ROWS_PER_BATCH = 64  # rows that exist as Python objects at a time
_QUICK_BYTES = 64 << 20  # are hashed in a tenth of a second
_HIDDEN = re.compile(r"(^|/)(\.|__[^/]*/)")
_NOT_DATA = {"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSource:
    """One item of `datasets:` in the config; its keys are described there.

    `max_samples` counts the rows that are not rejected, before long texts are split.
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
    text_unit: TextUnit = "line"
    weight: float = 1.0
    field_system: str | None = None
    system_prompt: str | None = None
    drop_system_message: bool = False
    field_history: str | None = None
    field_tools: str = "tools"
    message_property_mappings: Mapping[str, str] | None = None
    roles: Mapping[str, tuple[str, ...]] | None = None
    roles_to_train: tuple[str, ...] | None = None
    train_on_eos: TrainOnEos | None = None
    message_field_training: str | None = None
    field_prompt: str = "prompt"
    field_completion: str = "completion"
    media: Media = "reject"
    field_label: str = "label"
    labels: tuple[str, ...] | None = None
    field_chosen: str = "chosen"
    field_rejected: str = "rejected"
    compares: Compares | None = None
    """What of the rows is compared: pairs of answers, or answers with a verdict; None: answers are imitated."""
    closes_answers: bool = False
    """Answers of messages that are compared end with an EOS token, whatever the chat template writes."""

    def described(self) -> dict[str, object]:
        """What decides the tokens of its samples, for a hash: keys that came later count only if they are set."""
        values = asdict(self)
        return {key: value for key, value in values.items() if key in _FIRST_KEYS or value != DEFAULTS[key]}


_FIRST_KEYS = frozenset(
    {
        "path", "type", "split", "name", "field", "field_messages", "field_instruction", "field_input", "field_output",
        "max_samples",
    }
)  # fmt: skip
DEFAULTS: Final = {each.name: each.default for each in fields(DatasetSource)}
"""By key of a source: what it has if the config does not set it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStamp:
    """One data file and its state when it was hashed."""

    path: Path
    sha256: str
    """SHA-256 of the file's content, as hexadecimal digits. In a stream: of its size and time of last change."""
    identity: tuple[int, int, int, int]
    """Device, inode, size and time of the last change. Any write to the file changes it."""


class RowSource:
    """The rows of one `DatasetSource`, and the files that hold them."""

    def __init__(
        self,
        source: DatasetSource,
        files: tuple[FileStamp, ...],
        read: Callable[[Progress], RowStream],
        *,
        part: Part | None = None,
    ) -> None:
        self.source = source
        self.files = files
        self._read = read
        self.part = part
        """The rows of the files that are read; None: all of them."""
        self.num_bytes = sum(stamp.identity[2] for stamp in files) * (2 if part is not None and part.needs_count else 1)
        """How much `read` reports as its progress if it reads all rows; 0 if that is not known."""

    def read(self, progress: Progress = no_progress) -> RowStream:
        """All rows; each call starts again. `progress` is called with bytes of the files as they are read.

        Raises BadInput or EnvironmentFailure if a file cannot be read.
        """
        return self._read(progress) if self.part is None else _read_part(self._read, self.part, progress)

    def check_unchanged(self) -> None:
        """Raise BadInput if a file was written to since it was hashed."""
        for stamp in self.files:
            if _identity(stamp.path) != stamp.identity:
                raise BadInput(
                    f"{printable(str(stamp.path))}: the file was changed while it was being read",
                    hint="wait until no program writes to it, then start again",
                )


def open_source(
    source: DatasetSource, *, notice: Callable[[str], None], is_stream: bool = False, open_bar: OpenBar = no_bar
) -> RowSource:
    """Find and hash the files of a source. `notice` gets remarks for the user.

    Of a stream no content is read ahead: neither hashed, nor downloaded from the hub.

    Raises BadInput if there is nothing to read, EnvironmentFailure if a file cannot be read.
    """
    paths = _local_files(source.path)
    part = None
    if paths is not None:
        is_folder = os.path.isdir(root := Path(source.path).expanduser())
        split, part = _split(source, is_stream=is_stream, notice=(lambda text: None) if is_folder else notice)
        if is_folder and is_saved(root):
            paths = saved_files(root, split=split)
        elif is_folder:
            paths = files_of_split(root, paths, split=split, name=source.name, notice=notice)
    if source.text_unit == "file" and not any(_suffix(path) == ".txt" for path in paths or ()):
        notice(f"{printable(source.path)}: text_unit: file is ignored, because there is no text file (.txt)")
    if paths is None:
        return _open_hub(source, is_stream=is_stream, open_bar=open_bar)
    if source.text_unit == "line" and any(_suffix(path) == ".txt" for path in paths):
        notice(f"{printable(source.path)}: each line of a text file is one sample; text_unit: file takes whole files")
    stamps = _stamps(paths, is_stream=is_stream, open_bar=open_bar)

    def read(progress: Progress) -> RowStream:
        for path in paths:
            try:
                yield from _reader(path, source.text_unit)(path, printable(str(path)), progress=progress)
            except OSError as error:
                raise EnvironmentFailure(f"{printable(str(path))}: cannot be read: {error.strerror}") from error

    return RowSource(source, stamps, read, part=part)


def is_hub_id(path: str) -> bool:
    """Whether the path of a source can only be a dataset on the hub."""
    return _HUB_ID.fullmatch(path) is not None and _suffix(Path(path)) not in _READERS and not os.path.exists(path)


def _local_files(path_text: str) -> list[Path] | None:
    """The data files that a path stands for, sorted; None if the path can only be a dataset on the hub."""
    if (address := re.search("|".join(_NO_PATHS), path_text)) is not None:
        raise BadInput(f"{printable(path_text)}: {_NO_PATHS[address[0]]}")
    path = Path(path_text).expanduser()
    label = printable(path_text)
    # Methods of Path would raise for names that are too long.
    if os.path.isdir(path):
        found = sorted(item for item in path.rglob("*") if _suffix(item) in _READERS and _is_visible_data(item, path))
        if not found and not is_saved(path):
            raise BadInput(f"{label}: there are no data files in this directory", hint=_KNOWN_FILES)
        return found
    if os.path.exists(path):
        if not os.path.isfile(path):
            raise BadInput(f"{label}: not a regular file")
        return [_known(path)]
    if glob.has_magic(path_text):
        found = sorted(Path(item) for item in glob.glob(str(path), recursive=True) if os.path.isfile(item))
        if not found:
            raise BadInput(f"{label}: no file matches this pattern")
        return [_known(item) for item in found]
    if not is_hub_id(path_text):
        raise BadInput(f"{label}: no such file or directory")
    return None


def _split(source: DatasetSource, *, is_stream: bool, notice: Callable[[str], None]) -> tuple[str, Part | None]:
    """The split that is read, and the part of its rows. `notice` gets what single files have not. Raises BadInput."""
    label = printable(source.path)
    try:
        name, part = parse_split(source.split)
    except ValueError as error:
        raise BadInput(f"{label}: split {source.split!r} cannot be read: {error}") from error
    if part is not None and part.needs_count and is_stream:
        message = f"{label}: split {source.split!r} needs the number of rows, which `streaming` does not know"
        raise BadInput(message, "write numbers of rows, as in train[:1000], or `max_samples`")
    if name != "train":
        rest = "" if part is None else f"; its part [{part.written}] is taken of all rows"
        notice(f"{label}: split {name!r} is ignored, because files have no splits{rest}")
    if source.name is not None:
        notice(f"{label}: name {source.name!r} is ignored, because files have no configurations")
    return name, part


def _read_part(read: Callable[[Progress], RowStream], part: Part, progress: Progress) -> RowStream:
    """The rows of one part. Percent, and bounds from the end, need all rows to be counted before."""
    first, end = part.of(sum(1 for _ in read(progress))) if part.needs_count else (part.first or 0, part.end)
    yield from islice(read(progress), first, end if end is None else max(first, end))


def _is_visible_data(item: Path, root: Path) -> bool:
    hidden = _HIDDEN.search(item.relative_to(root).as_posix())
    return not hidden and item.is_file() and uncompressed_name(item).name not in _NOT_DATA


def _suffix(path: Path) -> str:
    """The ending that says what is in a file. A parquet file is compressed inside, and read from its end; one of Arrow
    is mapped."""
    inner = uncompressed_name(path).suffix.lower()
    return path.suffix.lower() if inner in (".parquet", ".arrow") else inner


def _known(path: Path) -> Path:
    if _suffix(path) not in _READERS:
        raise BadInput(f"{printable(str(path))}: this type of file cannot be read", hint=_KNOWN_FILES)
    return path


def _stamps(paths: Sequence[Path], *, is_stream: bool, open_bar: OpenBar) -> tuple[FileStamp, ...]:
    total = 0 if is_stream else sum(_identity(path)[2] for path in paths)
    with (open_bar if total > _QUICK_BYTES else no_bar)("hashing the data", total) as advance:
        return tuple(_stamp(path, advance, is_stream=is_stream) for path in paths)


def _stamp(path: Path, progress: Progress, *, is_stream: bool) -> FileStamp:
    try:
        identity = _identity(path)
        with BufferedReader(CountedFile(path, progress)) as file:
            if is_stream:
                digest = hashlib.sha256(str(identity[2:]).encode()).hexdigest()
            else:
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


def _reader(path: Path, text_unit: TextUnit) -> Reader:
    suffix = _suffix(path)
    return read_text_file if suffix == ".txt" and text_unit == "file" else _READERS[suffix]


def _parquet_batches(path: Path) -> Iterator[tuple[Any, int]]:
    """The rows of a parquet file, and how many of its bytes they end at."""
    import pyarrow.parquet  # type: ignore[import-untyped]

    line, num_bytes = 0, path.stat().st_size
    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH):
            line += len(batch)
            yield batch, num_bytes * line // file.metadata.num_rows


def _arrow_batches(path: Path) -> Iterator[tuple[Any, int]]:
    """The rows of a stream of Arrow, and how many of its bytes they end at. Each is checked: a damaged one has values
    outside the file."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
        for batch in stream:
            batch.validate(full=True)
            for first in range(0, len(batch), _ROWS_PER_BATCH):
                yield batch.slice(first, _ROWS_PER_BATCH), file.tell()


def _read_table(
    batches_of: Callable[[Path], Iterator[tuple[Any, int]]], kind: str, path: Path, label: str, *, progress: Progress
) -> Iterator[Row | Reject]:
    import pyarrow

    line = position = 0
    try:
        for batch, end in batches_of(path):
            progress(end - position)
            position = end
            for record in cast(list[dict[str, object]], batch.to_pylist()):
                line += 1
                yield Row(file=label, line=line, record=_without_padding(record))
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # a fault of the drive; Arrow's own errors about a file have no errno
        raise BadInput(f"{label}: not a usable {kind} file: {excerpt(str(error))}") from error


def _open_hub(source: DatasetSource, *, is_stream: bool, open_bar: OpenBar) -> RowSource:
    """A dataset on the hub, which `datasets` downloads and maps, or streams. A dataset's own code is never run."""
    import datasets  # type: ignore[import-untyped]

    label = f"hub:{source.path}[{printable(source.split)}]"
    try:
        dataset = datasets.load_dataset(
            source.path, source.name, split=source.split, keep_in_memory=False, streaming=is_stream
        )
    except Exception as error:  # load_dataset raises a dozen types: network, hub, builder, Arrow
        raise BadInput(
            f"{printable(source.path)}: no such local file, and it cannot be loaded from the hub: "
            f"{type(error).__name__}: {excerpt(str(error))}",
            hint="check path, name and split; for a local file, write its path with its ending",
        ) from error
    files = () if is_stream else dataset.cache_files
    stamps = _stamps([Path(entry["filename"]) for entry in files], is_stream=False, open_bar=open_bar)
    assert is_stream or stamps or not len(dataset), "a dataset without files would be cached under no content hash"

    num_bytes = sum(stamp.identity[2] for stamp in stamps)
    num_rows = len(dataset) if stamps else 1

    def read(progress: Progress) -> RowStream:
        for index, record in enumerate(cast(Iterable[dict[str, object]], dataset)):
            progress(num_bytes * (index + 1) // num_rows - num_bytes * index // num_rows)
            yield Row(file=label, line=index + 1, record=_without_padding(record))

    return RowSource(source, stamps, read)


def _without_padding(record: dict[str, object]) -> dict[str, object]:
    """A row of Arrow without the keys that it pads: a struct has null for each key that only other rows have.

    A null that was written looks like one of these. Items of lists are never padded.
    """
    return {column: _unpadded(value) for column, value in record.items()}


def _unpadded(value: object) -> object:
    if isinstance(value, dict):
        return {key: _unpadded(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list | None):
        return [_unpadded(item) for item in value]
    return value


_READERS: dict[str, Reader] = {
    ".jsonl": read_json_lines,
    ".json": read_json,
    ".parquet": partial(_read_table, _parquet_batches, "parquet"),
    ".arrow": partial(_read_table, _arrow_batches, "Arrow"),
    ".txt": read_text_lines,
    ".csv": partial(read_csv, delimiter=","),
    ".tsv": partial(read_csv, delimiter="\t"),
}
_KNOWN_FILES = (
    f"data files end in {', '.join(_READERS)}, all but parquet and arrow also with {' or '.join(SUFFIXES)} behind it"
)
_NO_PATHS = {
    "\0": "a path cannot contain a NUL byte",
    "://": "an address is no path; download the file, or write the id of a dataset on the hub, as in owner/name",
}
