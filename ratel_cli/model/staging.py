"""Replaces the model in a directory as close to atomically as a file system allows.

Files are written into a staging directory inside the output directory, hence on the same file system, and are
published by renames. Invariants: until `publish` the files of the output directory are unchanged. Afterwards the
staging directory is gone, whatever happened. A crash between the renames leaves a directory that does not load, never
a mix of two models: the file by which a loader finds the weights (the index, or the only file of weights) is removed
first and comes back last. A file of the user's is not touched (`marker` says which these are), unless the user asks
to overwrite what has the name of a file of the export.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path, PurePosixPath

from ratel_cli.closing import Closing
from ratel_cli.errors import BadInput, EnvironmentFailure
from ratel_cli.io.files import nearest_existing, sync_path
from ratel_cli.model.directory import INDEX_NAME, WEIGHTS_NAME
from ratel_cli.model.marker import (
    MARKER_NAME,
    Marker,
    check_output,
    is_unchanged,
    read_marker,
    reject_files_of_others,
    write_marker,
    written_file,
)
from ratel_cli.model.shards import write_failure
from ratel_cli.units import format_bytes

_STAGING_NAME = ".export-in-progress"
_ENTRY_NAMES = (INDEX_NAME, WEIGHTS_NAME)


def require_space(output_dir: Path, num_bytes: int, *, option: str) -> None:
    """Raise EnvironmentFailure unless `num_bytes` bytes are free for `output_dir`, which `option` named."""
    free_bytes = shutil.disk_usage(nearest_existing(output_dir)).free
    if free_bytes < num_bytes:
        needed, free = format_bytes(num_bytes), format_bytes(free_bytes)
        raise EnvironmentFailure(
            f"{output_dir}: the export needs {needed}, {free} available",
            f"free space there, or set another {option}",
        )


class Staging(Closing):
    """A temporary directory whose files move to `output_dir` together.

    Every method but `close` raises EnvironmentFailure if something cannot be written, IntegrityFailure on an I/O error.
    """

    def __init__(self, output_dir: Path, *, run: str, overwrite: bool = False, option: str = "output_dir") -> None:
        """Create the directory, and `output_dir` if it is missing.

        `run` is the output directory of the model's run, `option` what named `output_dir`. Raises BadInput if
        `output_dir` is a file, or if it holds files, Ratel did not make it and `overwrite` is not set.
        """
        check_output(output_dir, overwrite=overwrite, option=option)
        self.output_dir = output_dir
        self.path = output_dir / _STAGING_NAME
        self._overwrite = overwrite
        self._option = option
        self._digests: dict[str, str] = {}
        self._made = [folder for folder in (output_dir, *output_dir.parents) if not folder.exists()]
        """Folders that did not exist, the innermost first."""
        marker = read_marker(output_dir)
        self._has_new_marker = marker is None
        self._marker = marker or Marker(run=run, is_run=False)
        self._run = run
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            if marker is None:
                self._reject_leftover()
                write_marker(output_dir, self._marker)
            self._remove()
            self.path.mkdir()
        except OSError as error:
            self.close()
            raise write_failure(output_dir, error) from error

    def close(self) -> None:
        """Remove everything that was not published. Idempotent."""
        with contextlib.suppress(OSError):
            self._remove()
        if self._has_new_marker:
            with contextlib.suppress(OSError):
                (self.output_dir / MARKER_NAME).unlink()
        for folder in self._made:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def reject_files_of_others(self, names: Iterable[str]) -> None:
        """Raise BadInput if publishing files with these names would replace a file of the user's."""
        if not self._overwrite:
            reject_files_of_others(self.output_dir, [*names, *_ENTRY_NAMES], option=self._option)
        for name in names:
            if (self.output_dir / name).is_dir():
                raise BadInput(
                    f"{self._option}: {self.output_dir / name} is a directory, but a file of the model has that name",
                    f"choose another {self._option}, or move the directory away",
                )

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

    def publish(self, *, step: int) -> None:
        """Move every file to its place and remove the earlier export. In phases:

            1. check that no file of the user's has one of the names
            2. list the new files in the marker, next to the earlier ones
            3. remove the earlier export, the file by which a loader finds the weights first
            4. move the new files to their places, the file by which a loader finds the weights last
            5. list only the new files in the marker, as the model of `step`; by then all of them are on the drive

        Raises BadInput in phase 1.
        """
        names = [str(path.relative_to(self.path)) for path in sorted(self.path.rglob("*")) if path.is_file()]
        self.reject_files_of_others(names)
        try:
            new = tuple(written_file(self.path, name, digest=self._digests.get(name)) for name in names)
            earlier = [file for file in self._marker.files if is_unchanged(self.output_dir, file)]
            self._made, self._has_new_marker = [], False
            write_marker(self.output_dir, replace(self._marker, files=(*earlier, *new)))
            for name in _ENTRY_NAMES:
                (self.output_dir / name).unlink(missing_ok=True)
            for file in earlier:
                (self.output_dir / file.name).unlink(missing_ok=True)
            for name in sorted(names, key=lambda name: name in _ENTRY_NAMES):
                destination = self.output_dir / name
                destination.parent.mkdir(parents=True, exist_ok=True)
                os.replace(self.path / name, destination)
            for folder in {(self.output_dir / name).parent for name in names}:
                sync_path(folder)
            remove_empty_folders(self.output_dir, [file.name for file in earlier])
            write_marker(self.output_dir, replace(self._marker, run=self._run, step=step, files=new))
        except OSError as error:
            raise write_failure(self.output_dir, error) from error

    def _reject_leftover(self) -> None:
        """Raise BadInput if there is something with the staging directory's name in a directory without a marker."""
        if os.path.lexists(self.path):
            raise BadInput(f"{self._option}: {self.path} is in the way", "move it away")

    def _remove(self) -> None:
        if self.path.is_symlink():
            self.path.unlink()
        elif self.path.exists():
            shutil.rmtree(self.path)


def remove_empty_folders(directory: Path, names: Iterable[str]) -> None:
    """Remove the folders of these files in the directory, where nothing is left in them."""
    for name in names:
        for folder in PurePosixPath(name).parents:
            if folder.name:
                with contextlib.suppress(OSError):
                    (directory / folder).rmdir()
