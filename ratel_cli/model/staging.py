"""Replaces the model in a directory as close to atomically as a file system allows.

Files are written into a staging directory inside the output directory, hence on the same file system, and are
published by renames. Invariants: until `publish` the output directory is unchanged. Afterwards the staging directory is
gone, whatever happened. A crash between the renames leaves a directory that does not load, never a mix of two models:
the file by which a loader finds the weights (the index, or the only file of weights) is removed first and comes back
last.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from ratel_cli.closing import Closing
from ratel_cli.errors import BadInput, EnvironmentFailure
from ratel_cli.io.files import sync_path
from ratel_cli.model.directory import INDEX_NAME, WEIGHTS_NAME
from ratel_cli.model.shards import write_failure
from ratel_cli.units import format_bytes

_STAGING_NAME = ".export-in-progress"
_ENTRY_NAMES = (INDEX_NAME, WEIGHTS_NAME)
_SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


class Staging(Closing):
    """A temporary directory whose files move to `output_dir` together.

    Every method but `close` raises EnvironmentFailure if something cannot be written, IntegrityFailure on an I/O error.
    """

    def __init__(self, output_dir: Path) -> None:
        """Create the directory, and `output_dir` if it is missing. Raises BadInput if `output_dir` is a file."""
        self.output_dir = output_dir
        self.path = output_dir / _STAGING_NAME
        if output_dir.exists() and not output_dir.is_dir():
            raise BadInput(f"output_dir: {output_dir} is not a directory")
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            self._remove()
            self.path.mkdir()
        except OSError as error:
            raise write_failure(output_dir, error) from error

    def close(self) -> None:
        """Remove everything that was not published. Idempotent."""
        with contextlib.suppress(OSError):
            self._remove()

    def require_space(self, num_bytes: int) -> None:
        """Raise EnvironmentFailure unless `num_bytes` bytes are free."""
        free_bytes = shutil.disk_usage(self.output_dir).free
        if free_bytes < num_bytes:
            needed, free = format_bytes(num_bytes), format_bytes(free_bytes)
            raise EnvironmentFailure(
                f"{self.output_dir}: the export needs {needed}, {free} available",
                "free space there, or set another output_dir",
            )

    def write_text(self, name: str, text: str) -> None:
        """Write a small file and sync it to the drive."""
        try:
            with open(self.path / name, "x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise write_failure(self.output_dir / name, error) from error

    def copy(self, source: Path, name: str) -> None:
        """Copy a file of the base model. `name` may contain folders."""
        destination = self.path / name
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, destination)
        except OSError as error:
            raise write_failure(self.output_dir / name, error) from error

    def publish(self) -> None:
        """Move every file to its place and remove the weights of an earlier export."""
        names = [str(path.relative_to(self.path)) for path in sorted(self.path.rglob("*")) if path.is_file()]
        try:
            for name in _ENTRY_NAMES:
                (self.output_dir / name).unlink(missing_ok=True)
            for path in list(self.output_dir.iterdir()):
                if _SHARD_NAME.fullmatch(path.name) is not None:
                    path.unlink()
            for name in sorted(names, key=lambda name: name in _ENTRY_NAMES):
                destination = self.output_dir / name
                destination.parent.mkdir(parents=True, exist_ok=True)
                os.replace(self.path / name, destination)
            sync_path(self.output_dir)
        except OSError as error:
            raise write_failure(self.output_dir, error) from error

    def _remove(self) -> None:
        if self.path.is_symlink():
            self.path.unlink()
        elif self.path.exists():
            shutil.rmtree(self.path)
