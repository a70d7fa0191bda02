"""Moves a new export from its staging directory to its place, and goes on with that where a process was killed.

Before the first move the new files are whole, on the drive, and listed in the marker as files that are being published.
From then on the earlier model is given up. Whatever happens, the next command finds in the marker what is left to do:

    1. what a loader would look at first, the index or the only file of weights, gives way
    2. the other files of the earlier model give way
    3. each new file moves to its place, the one that a loader looks at last
    4. the marker lists the new files alone

Each phase may be repeated. What gives way is removed if the marker lists it as replaced and it is unchanged. Everything
else is the user's, and is renamed.

Invariant: at every moment the earlier files are whole, or the new ones are, some of them in the staging directory. A
directory in between has no file by which a loader finds weights, so it never loads as a mix of two models.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Final

from ratel_cli.io.files import sync_path
from ratel_cli.model.files.directory import (
    ADAPTER_WEIGHTS_NAME,
    DENOISER_WEIGHTS_NAME,
    INDEX_NAME,
    WEIGHTS_NAME,
    index_name_of,
)
from ratel_cli.model.files.marker import STAGING_NAME, Marker, is_unchanged, read_marker, write_marker

ENTRY_NAMES: Final = (
    INDEX_NAME, WEIGHTS_NAME, index_name_of(DENOISER_WEIGHTS_NAME), DENOISER_WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME
)  # fmt: skip
"""What a loader looks at to find the weights. One that does not belong to the model leads to other weights."""


def finish_publishing(directory: Path) -> list[tuple[Path, Path]]:
    """Publish the rest of an export that was begun; nothing if none was. Raises OSError.

    Returns the user's files that were in the way, each with its new name.
    """
    marker = read_marker(directory)
    if marker is None or not marker.is_publishing:
        return []
    staging, names = directory / STAGING_NAME, [file.name for file in marker.files]
    waiting = [name for name in names if (staging / name).is_file()]
    placed = {file.name for file in marker.files if file.name not in waiting and is_unchanged(directory, file)}
    renamed: list[tuple[Path, Path]] = []
    for name in ENTRY_NAMES:
        if name not in placed and not (directory / name).is_dir():
            renamed += _make_way(directory, name, marker)
    for file in marker.replaced:
        if file.name not in placed and file.name not in waiting and is_unchanged(directory, file):
            (directory / file.name).unlink()
    for name in sorted(waiting, key=lambda name: name in ENTRY_NAMES):
        renamed += _move(staging, directory, name, marker)
    for folder in {directory, *((directory / name).parent for name in names)}:
        if folder.is_dir():
            sync_path(folder)
    remove_empty_folders(directory, [file.name for file in marker.replaced])
    if staging.is_dir():
        shutil.rmtree(staging)
    is_whole = len(placed) + len(waiting) == len(names)  # else someone removed or changed a file meanwhile
    step = marker.step if is_whole else None
    write_marker(directory, replace(marker, step=step, replaced=(), is_publishing=False))
    return renamed


def remove_empty_folders(directory: Path, names: Iterable[str]) -> None:
    """Remove the folders of these files in the directory, where nothing is left in them."""
    for name in names:
        for folder in PurePosixPath(name).parents:
            if folder.name:
                with contextlib.suppress(OSError):
                    (directory / folder).rmdir()


def renamed_notice(path: Path, spare: Path) -> str:
    """The message about a file of the user's that was renamed."""
    return f"{path} was in the way of the model, and is now {spare.name}"


def spare_name(path: Path) -> Path:
    """A name for a file of the user's that gives way: nothing has it."""
    number, spare = 1, path.with_name(f"{path.name}.old")
    while os.path.lexists(spare):
        number += 1
        spare = path.with_name(f"{path.name}.old{number}")
    return spare


def _move(staging: Path, directory: Path, name: str, marker: Marker) -> Iterator[tuple[Path, Path]]:
    """Move a file to its place. What has its name, or that of one of its folders, gives way."""
    for folder in reversed(PurePosixPath(name).parents[:-1]):
        if not (directory / folder).is_dir() or (directory / folder).is_symlink():
            yield from _make_way(directory, str(folder), marker)
    yield from _make_way(directory, name, marker)
    (directory / name).parent.mkdir(parents=True, exist_ok=True)
    os.replace(staging / name, directory / name)


def _make_way(directory: Path, name: str, marker: Marker) -> Iterator[tuple[Path, Path]]:
    """Remove or rename what has this name; what is renamed is returned with its new name."""
    path = directory / name
    if not os.path.lexists(path):
        return
    if any(file.name == name and is_unchanged(directory, file) for file in marker.replaced):
        path.unlink()
    else:
        spare = spare_name(path)
        path.rename(spare)
        yield path, spare
