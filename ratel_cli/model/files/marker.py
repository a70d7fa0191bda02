"""The marker of a directory that Ratel writes to: whose model it holds, and which of its files Ratel wrote.

It is the file `ratel.files`, JSON. A file of the model is Ratel's if the marker lists it and it still has the bytes
that Ratel wrote. A file in `run/` is Ratel's if the marker lists it: some of these files grow, so they are listed by
name. Everything else is the user's, and is neither replaced nor removed unless the user asks for it.

Invariants: the marker is replaced by a rename, so it is never half written. A file of the user's is never listed,
except while an export is being published that replaces it because the user insists.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Final

import xxhash

from ratel_cli.errors import BadInput, EnvironmentFailure, printable
from ratel_cli.hardware.host import free_bytes
from ratel_cli.io.files import nearest_existing, replace_file
from ratel_cli.json_fields import JsonFields, read_as

MARKER_NAME: Final = "ratel.files"
NEW_MARKER_NAME: Final = f"{MARKER_NAME}.new"
"""A marker that is being written. A process that is killed meanwhile leaves it, perhaps in a directory that it made."""
_FORMAT_VERSION: Final = 2
STAGING_NAME: Final = ".export-in-progress"
"""The folder in which an export is made, and from which it is published."""
_PART_BYTES: Final = 8 << 20
_ALWAYS_READ_BYTES: Final = 64 << 20
"""Larger files with the size and the time of the marker count as unchanged without being read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A file as Ratel wrote it."""

    name: str
    """Relative to the directory, with `/` between folders."""
    num_bytes: int
    modified_ns: int
    """When its content was written, in nanoseconds since 1970."""
    xxh3_128: str
    """The hash of its content; empty for a file of the user's, whose size and time count."""

    def __post_init__(self) -> None:
        parts = PurePosixPath(self.name).parts
        if self.name.startswith("/") or "\0" in self.name or ".." in parts or not parts:
            raise ValueError("name leads out of the directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedStore:
    """The store of a run that the user had deleted, while the rest of the run stays."""

    step: int | None
    """The step that it had; None: that could not be read."""
    when: str
    """When it was deleted: local time to the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """What the marker of one directory says."""

    run: str
    """The output directory of the run that the model comes from, absolute."""
    is_run: bool
    """Whether the directory is itself that output directory, so that Ratel has files in `run/`."""
    step: int | None = None
    """The step of the model; None: there is none yet."""
    files: tuple[WrittenFile, ...] = ()
    """The model's files."""
    run_files: tuple[str, ...] = ()
    """Names of the files in `run/` that Ratel wrote."""
    replaced: tuple[WrittenFile, ...] = ()
    """The files that `files` replace while an export is being published."""
    is_publishing: bool = False
    """Whether some of `files` may still be in the staging directory; see `publishing`."""
    deleted_store: DeletedStore | None = None
    """Written before the store's files go, so it counts only where the store is not there, or not all of it."""


def read_marker(directory: Path) -> Marker | None:
    """The marker of a directory; None if there is none, or it cannot be read."""
    try:
        content = json.loads((directory / MARKER_NAME).read_bytes())
        is_ours = JsonFields(content).integer("format_version") == _FORMAT_VERSION
        return read_as(Marker, content) if is_ours else None
    except (OSError, ValueError, RecursionError):
        return None


def write_marker(directory: Path, marker: Marker) -> None:
    """Replace the directory's marker, durably. Raises OSError."""
    text = json.dumps({"format_version": _FORMAT_VERSION, **asdict(marker)}, indent=1) + "\n"
    replace_file(directory / MARKER_NAME, text.encode())


def holds_nothing(directory: Path) -> bool:
    """Whether the directory is missing or empty, apart from a marker that was being written. Raises OSError."""
    return not directory.exists() or all(path.name == NEW_MARKER_NAME for path in directory.iterdir())


def check_output(output_dir: Path, *, overwrite: bool, option: str) -> None:
    """Raise BadInput if `output_dir` is a file, or if it has files in it and Ratel did not make it."""
    try:
        is_empty = holds_nothing(output_dir)
    except NotADirectoryError as error:
        raise BadInput(f"{option}: {output_dir} is not a directory") from error
    except OSError as error:
        raise EnvironmentFailure(f"{option}: {output_dir} cannot be read: {error.strerror}") from error
    if not is_empty and not overwrite and read_marker(output_dir) is None:
        raise BadInput(
            f"{option}: {output_dir} has files in it, and Ratel did not make it",
            "choose an empty directory, or use --overwrite to replace the model files in it",
        )


def space_for_export(output_dir: Path) -> int:
    """Bytes that are available to an export to `output_dir`, with those of one that was interrupted there."""
    marker, staging = read_marker(output_dir), output_dir / STAGING_NAME
    is_removed = marker is not None and not marker.is_publishing and not staging.is_symlink()
    left = [path.lstat() for path in staging.rglob("*")] if is_removed else []
    left_bytes = sum(each.st_size for each in left if stat.S_ISREG(each.st_mode))
    return free_bytes([nearest_existing(output_dir)]) + left_bytes


def written_file(directory: Path, name: str, *, digest: str | None = None) -> WrittenFile:
    """The entry for a file that was just written; `digest` is its hash if that is known. Raises OSError."""
    found = (directory / name).stat()
    return WrittenFile(
        name=name,
        num_bytes=found.st_size,
        modified_ns=found.st_mtime_ns,
        xxh3_128=digest or _digest_of(directory / name),
    )


def is_unchanged(directory: Path, file: WrittenFile) -> bool:
    """Whether the file is there as Ratel wrote it. A large one is read only if its time differs. Never raises."""
    path = directory / file.name
    try:
        if _leads_elsewhere(directory, file.name):
            return False
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_size != file.num_bytes:
            return False
        is_same_time = found.st_mtime_ns == file.modified_ns
        if not file.xxh3_128:
            return is_same_time
        is_same_time = is_same_time and file.num_bytes > _ALWAYS_READ_BYTES
        return is_same_time or _digest_of(path) == file.xxh3_128
    except (OSError, ValueError):
        return False


def has_written_content(directory: Path, file: WrittenFile) -> bool:
    """Whether the file is there with the content that Ratel wrote, whatever its time: also in a copy. Reads all of it.

    Never raises.
    """
    try:
        return not _leads_elsewhere(directory, file.name) and _digest_of(directory / file.name) == file.xxh3_128
    except (OSError, ValueError):
        return False


def files_of_others(directory: Path, names: Iterable[str]) -> list[str]:
    """Which of these names are taken in the directory by something that is not as Ratel wrote it."""
    marker = read_marker(directory)
    listed = (*marker.files, *marker.replaced) if marker is not None else ()
    return [
        name
        for name in names
        if _leads_elsewhere(directory, name)
        or (
            os.path.lexists(directory / name)
            and not any(each.name == name and is_unchanged(directory, each) for each in listed)
        )
    ]


def reject_files_of_others(
    directory: Path, names: Sequence[str], *, option: str, misleading: Sequence[str] = ()
) -> None:
    """Raise BadInput if one of these names is taken by a file of the user's; `option` is what named the directory.

    `misleading`: names of files that lead a loader to other weights, if the model itself has none of them.
    """
    found = files_of_others(directory, names)
    if found:
        others = f" ({len(found)} such files)" if len(found) > 1 else ""
        raise BadInput(
            f"{option}: {printable(str(directory / found[0]))} would be replaced, but Ratel did not write it, or it "
            f"was changed since{others}",
            f"choose another {option}, move the file away, or replace it with --overwrite",
        )
    found = [name for name in files_of_others(directory, misleading) if not (directory / name).is_dir()]
    if found:
        raise BadInput(
            f"{option}: {printable(str(directory / found[0]))} would lead to other weights than the model's, and Ratel "
            "did not write it, or it was changed since",
            f"choose another {option}, or move the file away; with --overwrite it is renamed to {found[0]}.old",
        )


def reject_folders(directory: Path, names: Iterable[str], *, option: str) -> None:
    """Raise BadInput if a folder has one of these names, which no export replaces."""
    for name in names:
        if os.path.isdir(directory / name):  # Path.is_dir raises for names that are too long
            raise BadInput(
                f"{option}: {directory / name} is a directory, but a file of the model has that name",
                f"choose another {option}, or move the directory away",
            )


def _leads_elsewhere(directory: Path, name: str) -> bool:
    """Whether a folder in the name is a link or no folder."""
    parents = [directory / folder for folder in PurePosixPath(name).parents if folder.name]
    return any(folder.is_symlink() or (folder.exists() and not folder.is_dir()) for folder in parents)


def _digest_of(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while part := file.read(_PART_BYTES):
            digest.update(part)
    return digest.hexdigest()
