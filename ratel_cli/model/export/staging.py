"""Replaces the model in a directory as close to atomically as a file system allows.

Files are written into a staging directory inside the output directory, hence on the same file system, and are
published by renames (`publishing`). Invariants: until `publish` the files of the output directory are unchanged. If
a process ends after that, the next command publishes the rest. A file of the user's is not touched (`marker` says which
these are), unless the user asks to overwrite what has the name of a file of the export; what only leads a loader to
other weights is renamed then.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ratel_cli.closing import Closing
from ratel_cli.errors import BadInput, NotEnoughSpace
from ratel_cli.io.files import sync_path
from ratel_cli.model.export.publishing import ENTRY_NAMES, finish_publishing
from ratel_cli.model.files.marker import (
    MARKER_NAME,
    STAGING_NAME,
    Marker,
    WrittenFile,
    check_output,
    is_unchanged,
    read_marker,
    reject_files_of_others,
    reject_folders,
    space_for_export,
    write_marker,
    written_file,
)
from ratel_cli.model.files.shards import write_failure
from ratel_cli.units import format_bytes


def require_space(output_dir: Path, num_bytes: int, *, option: str) -> None:
    """Raise EnvironmentFailure unless `num_bytes` bytes are free for `output_dir`, which `option` named."""
    available_bytes = space_for_export(output_dir)
    if available_bytes < num_bytes:
        needed, free = format_bytes(num_bytes), format_bytes(available_bytes)
        raise NotEnoughSpace(
            f"{output_dir}: the export needs {needed}, {free} available",
            f"free space there, or set another {option}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where an export goes."""

    directory: Path
    run: str
    """The output directory of the run that the weights come from; the marker of `directory` names it."""
    option: str = "output_dir"
    """What named `directory`, for messages."""
    overwrite: bool = False
    """A file that Ratel did not write may be replaced."""


class Staging(Closing):
    """A temporary directory whose files move to `output_dir` together.

    Every method but `close` raises EnvironmentFailure if something cannot be written, IntegrityFailure on an I/O error.
    """

    def __init__(self, destination: Destination) -> None:
        """Create the directory, and that of `destination` if it is missing.

        Raises BadInput if that is a file, or if it holds files, Ratel did not make it and `overwrite` is not set.
        """
        check_output(destination.directory, overwrite=destination.overwrite, option=destination.option)
        output_dir = self.output_dir = destination.directory
        self.path = output_dir / STAGING_NAME
        self._destination = destination
        self._digests: dict[str, str] = {}
        self._made = [folder for folder in (output_dir, *output_dir.parents) if not folder.exists()]
        """Folders that did not exist, the innermost first."""
        try:
            self.renamed = finish_publishing(output_dir)
            """The user's files that were in the way of an earlier export, each with its new name."""
        except OSError as error:
            raise write_failure(output_dir, error) from error
        marker = read_marker(output_dir)
        self._has_new_marker = marker is None
        self._marker = marker or Marker(run=destination.run, is_run=False)
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            if marker is None:
                if os.path.lexists(self.path):
                    raise BadInput(f"{self._destination.option}: {self.path} is in the way", "move it away")
                write_marker(output_dir, self._marker)
            self._remove()
            self.path.mkdir()
        except OSError as error:
            self.close()
            raise write_failure(output_dir, error) from error

    def close(self) -> None:
        """Remove everything that was not published and never will be. Idempotent."""
        marker = read_marker(self.output_dir)
        if marker is not None and marker.is_publishing:
            return
        with contextlib.suppress(OSError):
            self._remove()
        if self._has_new_marker:
            with contextlib.suppress(OSError):
                (self.output_dir / MARKER_NAME).unlink()
        for folder in self._made:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def reject_files_of_others(self, names: Sequence[str]) -> None:
        """Raise BadInput if publishing files with these names would replace a file of the user's."""
        if not self._destination.overwrite:
            reject_files_of_others(self.output_dir, names, option=self._destination.option, misleading=ENTRY_NAMES)
        reject_folders(self.output_dir, names, option=self._destination.option)

    def write_text(self, name: str, text: str) -> None:
        """Write a small file and sync it to the drive."""
        self.write_bytes(name, text.encode())

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write a small file and sync it to the drive."""
        try:
            with open(self.path / name, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise write_failure(self.output_dir / name, error) from error

    def copy(self, source: Path, name: str) -> None:
        """Copy a file of the base model, and sync it to the drive. `name` may contain folders."""
        destination = self.path / name
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, destination)
            sync_path(destination)
        except OSError as error:
            raise write_failure(self.output_dir / name, error) from error

    def add(self, name: str, *, xxh3_128: str) -> None:
        """Take a file that was written into the staging directory, and the hash of its content."""
        self._digests[name] = xxh3_128

    def publish(self, *, step: int) -> list[tuple[Path, Path]]:
        """Replace the earlier export by the files, as the model of `step`. In phases:

            1. check that no file of the user's has one of the names
            2. make the files durable in the staging directory, and list them in the marker as being published
            3. move them to their places; `publishing` does it, now or in a later command

        Returns the user's files that were renamed, each with its new name: only with `overwrite`. Raises BadInput in
        phase 1. After an error in phase 3 the next command goes on.
        """
        names = [str(path.relative_to(self.path)) for path in sorted(self.path.rglob("*")) if path.is_file()]
        self.reject_files_of_others(names)
        output = self.output_dir
        try:
            new = tuple(written_file(self.path, name, digest=self._digests.get(name)) for name in names)
            marker = read_marker(output) or self._marker  # another command may have changed it meanwhile
            earlier = [file for file in marker.files if is_unchanged(output, file)]
            insisted = [name for name in names if name not in {file.name for file in earlier}]
            users = [file for name in insisted if (file := _users_file(output, name)) is not None]
            for folder in {(self.path / name).parent for name in names}:
                sync_path(folder)
            self._made, self._has_new_marker = [], False
            replaced = (*earlier, *users)
            published = replace(
                marker, run=self._destination.run, step=step, files=new, replaced=replaced, is_publishing=True
            )
            write_marker(output, published)
            return finish_publishing(output)
        except OSError as error:
            raise write_failure(output, error) from error

    def _remove(self) -> None:
        if self.path.is_symlink():
            self.path.unlink()
        elif self.path.exists():
            shutil.rmtree(self.path)


def _users_file(directory: Path, name: str) -> WrittenFile | None:
    """The entry for a file of the user's that gives way to one of the model. It is not read: it may be large."""
    try:
        found = (directory / name).lstat()
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return WrittenFile(name=name, num_bytes=found.st_size, modified_ns=found.st_mtime_ns, xxh3_128="")
