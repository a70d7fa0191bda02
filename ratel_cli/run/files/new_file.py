"""A file that a command writes for the user. Invariant: a file that exists stays, unless the user insists."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from tempfile import TemporaryFile

from ratel_cli.errors import BadInput, EnvironmentFailure


def reject_existing(path: Path, *, overwrite: bool) -> None:
    """Raise BadInput if there is such a file, or anything else of this name."""
    if os.path.lexists(path) and not overwrite:
        raise BadInput(f"{path}: the file exists", "choose another name, or replace it with --overwrite")


def check_new(path: Path, *, overwrite: bool) -> None:
    """Raise BadInput unless `-o` may name this file, and EnvironmentFailure if it cannot be written. For commands that
    work for a while before they write it."""
    check_place(path)
    reject_existing(path, overwrite=overwrite)
    try:
        if not os.path.exists(path):
            TemporaryFile(dir=path.parent).close()
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _cannot_write(path, error.strerror) from error


def check_place(path: Path) -> None:
    """Raise BadInput if `-o` names a directory, or a file in a directory that does not exist."""
    if os.path.isdir(path):
        raise BadInput(f"argument '-o {path}': this is a directory", "give the name of the file to write")
    if not os.path.isdir(path.parent):
        message = f"argument '-o {path}': there is no directory {path.parent}"
        raise BadInput(message, "name a file in a directory that exists")


def write_new(path: Path, text: str, *, overwrite: bool) -> None:
    """Write a text file. Raises BadInput if it exists, EnvironmentFailure if it cannot be written."""
    reject_existing(path, overwrite=overwrite)
    try:
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _cannot_write(path, error.strerror if isinstance(error, OSError) else error) from error


def _cannot_write(path: Path, reason: object) -> EnvironmentFailure:
    return EnvironmentFailure(f"{path}: cannot be written: {reason}")
