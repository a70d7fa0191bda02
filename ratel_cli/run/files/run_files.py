"""The files in `run/` of an output directory: which of them are Ratel's, and how they are written.

The directory's marker lists their names, each before its file is made; rejects after that. Listing is by name, because
most of them grow or are written again.

Invariants: a file that is not listed is neither replaced nor removed unless the user insists; a link is never written
through, even then. What is listed but was never made is forgotten when the command ends. Nothing heavy is imported.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.load import to_yaml
from ratel_cli.console import RunLog
from ratel_cli.data.files.file_names import REJECTS_NAME, TEST_REJECTS_NAME
from ratel_cli.errors import BadInput, printable
from ratel_cli.model.files.marker import read_marker, write_marker
from ratel_cli.run.files.run_directory import (
    CONFIG_NAME,
    EVENTS_NAME,
    HARDWARE_NAME,
    METRICS_NAME,
    MODEL_NAME,
    NEW_REFERENCE_NAME,
    ORIGIN_NAME,
    PLAN_NAME,
    REFERENCE_NAME,
    TOKENS_NAME,
    TRACE_NAME,
    as_recorded_by_run,
    log_name,
    record_name,
    run_directory,
)
from ratel_cli.training.facts import FACTS_NAME

_OF_EVERY_RUN: Final = (CONFIG_NAME, FACTS_NAME, HARDWARE_NAME, MODEL_NAME, PLAN_NAME, METRICS_NAME)
_HEAD_BYTES: Final = 400
"""A report says within these bytes that it is one."""


def is_run_output(directory: Path) -> bool:
    """Whether the directory is the output directory of a run, so that Ratel has files in `run/`."""
    marker = read_marker(directory)
    return marker is not None and marker.is_run


def own_run_files(output_dir: Path) -> frozenset[str]:
    """The names in `run/` that are Ratel's. Others are the user's."""
    marker = read_marker(output_dir)
    return frozenset(marker.run_files if marker is not None and marker.is_run else ())


def is_users(output_dir: Path, name: str) -> bool:
    """Whether a file in `run/` is the user's. Without a marker nothing says so."""
    return read_marker(output_dir) is not None and name not in own_run_files(output_dir)


def files_of_run(config: RunConfig, *, has_origin: bool) -> list[str]:
    """The names of all files that a run may write. `has_origin`: it starts from another run."""
    optional = ([ORIGIN_NAME] if has_origin else []) + ([TEST_REJECTS_NAME] if config.test_datasets else [])
    optional += [REFERENCE_NAME, NEW_REFERENCE_NAME] if config.has_reference else []
    return [*_OF_EVERY_RUN, REJECTS_NAME, *optional, *files_of_training(config)]


def files_of_training(config: RunConfig) -> list[str]:
    """The names of the files that grow while a run trains."""
    trackers = [name for tracker in config.report_to for name in (record_name(tracker), log_name(tracker))]
    return [METRICS_NAME, *([TRACE_NAME] if config.trace else []), *trackers]


def reject_run_files_of_others(config: RunConfig, names: Iterable[str], *, overwrite: bool) -> None:
    """Raise BadInput if one of these names in `run/` is taken by the user, or if what is written there goes elsewhere.

    With `overwrite` a file may be replaced, but what is neither a file nor a folder may not: a link leads to something
    else, and a pipe waits for a reader. A folder is not replaced by anything that writes a file.
    """
    run, own = run_directory(config.output_dir), own_run_files(config.output_dir)
    events = [EVENTS_NAME] if "tensorboard" in config.report_to else []
    for folder in (run, run / TOKENS_NAME, *(run / name for name in events)):
        mode = _mode(folder)
        if mode is not None and not stat.S_ISDIR(mode):
            what = "a link" if stat.S_ISLNK(mode) else "not a directory"
            raise BadInput(
                f"output_dir: {printable(str(folder))} is {what}, but a run would write its files there",
                "move it away, or choose another output_dir",
            )
    for name in names:
        mode, shown = _mode(run / name), printable(str(run / name))
        if mode is None or stat.S_ISDIR(mode):
            continue
        if not stat.S_ISREG(mode):
            what = "a link" if stat.S_ISLNK(mode) else "not a regular file"
            raise BadInput(
                f"output_dir: {shown} is {what}, but a run would write a file of that name",
                "move it away, or choose another output_dir",
            )
        if name not in own and not overwrite:
            raise BadInput(
                f"output_dir: {shown} would be replaced, but Ratel did not write it",
                "move the file away, choose another output_dir, or replace it with --overwrite",
            )


def list_run_files(output_dir: Path, names: Iterable[str]) -> None:
    """List files in `run/` as Ratel's; they are written next. Raises OSError."""
    marker, own, names = read_marker(output_dir), own_run_files(output_dir), frozenset(names)
    if marker is not None and marker.is_run and not names <= own:
        write_marker(output_dir, replace(marker, run_files=tuple(sorted(names | own))))


def forget_missing(output_dir: Path, names: Iterable[str]) -> None:
    """List those of these names no longer that have no file: the user may use them. Never raises."""
    marker, run = read_marker(output_dir), run_directory(output_dir)
    missing = {name for name in names if not os.path.lexists(run / name)}
    if marker is not None and not missing.isdisjoint(marker.run_files):
        left = tuple(name for name in marker.run_files if name not in missing)
        with suppress(OSError):
            write_marker(output_dir, replace(marker, run_files=left))


def remove_run_file(output_dir: Path, name: str) -> None:
    """Remove a file in `run/` if it is Ratel's. Raises OSError."""
    if not is_users(output_dir, name):
        (run_directory(output_dir) / name).unlink(missing_ok=True)
        forget_missing(output_dir, [name])


def names_of_rejects(config: RunConfig) -> list[str]:
    """The files that the rows which cannot be used may go to; empty if the user has a file of such a name.

    Then `ratel data --bad` shows the rows.
    """
    output_dir, names = config.output_dir, [REJECTS_NAME, *([TEST_REJECTS_NAME] if config.test_datasets else [])]
    taken = any(is_users(output_dir, name) and _mode(run_directory(output_dir) / name) is not None for name in names)
    return [] if taken else names


def note_rejects(output_dir: Path, names: Iterable[str]) -> None:
    """List those of these files that were written, and only those. Never raises.

    They are listed after they were made, since a command that rejects the data before that must change nothing. One
    that is killed in between leaves a file that counts as the user's.
    """
    names = list(names)
    with suppress(OSError):
        list_run_files(output_dir, [name for name in names if _mode(run_directory(output_dir) / name) is not None])
    forget_missing(output_dir, names)


def write_run_files(config: RunConfig, contents: Mapping[str, object], *, log: RunLog) -> None:
    """Write the config, and each of `contents` as JSON under its file name. Warns if that is not possible."""
    directory = run_directory(config.output_dir)
    try:
        list_run_files(config.output_dir, [CONFIG_NAME, *contents])
        directory.mkdir(parents=True, exist_ok=True)
        write_run_file(directory / CONFIG_NAME, to_yaml(as_recorded_by_run(config)))
        for name, content in contents.items():
            write_run_file(directory / name, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        log.warn(f"{directory}: cannot be written ({error.strerror}); training continues without it")


def write_run_file(path: Path, text: str) -> None:
    """Write a listed file. Raises OSError, also if it is a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o666), "w", encoding="utf-8") as file:
        file.write(text)


def is_report(path: Path) -> bool:
    """Whether the file is a report that Ratel made."""
    from ratel_cli.report.page.page import GENERATOR

    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return False
        with open(path, "rb") as file:
            return f'<meta name="generator" content="{GENERATOR}">'.encode() in file.read(_HEAD_BYTES)
    except OSError:
        return False


def _mode(path: Path) -> int | None:
    """The kind of what is at the path, links not followed; None if there is nothing."""
    try:
        return path.lstat().st_mode
    except OSError:
        return None
