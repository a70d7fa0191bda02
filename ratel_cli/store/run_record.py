"""Which run a store belongs to: a small file next to each data file, for people and for the checks of `run`.

The store itself knows hashes of its settings (`StoreIdentity`). Two runs can have the same settings; the record tells
them apart, and gives messages a name and a date.

Invariant: a run never fails for its record. A record that is missing or damaged says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from ratel_cli.errors import printable
from ratel_cli.json_fields import read_file_as

RECORD_FILE_NAME: Final = "ratel.run"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The run that a store was made for."""

    run: str
    """Its output directory, absolute."""
    made: str
    """When the store was made: local time to the second."""

    @property
    def name(self) -> str:
        """The run's name."""
        return printable(Path(self.run).name)


def write_records(directories: Sequence[Path], run: str) -> None:
    """Record in each directory that its store is made now, for this run."""
    made = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    _write(directories, RunRecord(run=run, made=made))


def _write(directories: Sequence[Path], record: RunRecord) -> None:
    content = json.dumps({"format_version": 1, **asdict(record)})
    for directory in directories:
        with suppress(OSError):  # the drive may be full now that the store has its space
            (directory / RECORD_FILE_NAME).write_text(content + "\n", encoding="utf-8")


def hand_over(directories: Sequence[Path], run: str) -> None:
    """Record that the store is this run's from now on, if the record names another one."""
    record = read_record(directories[0])
    if record is not None and record.run != run:
        _write(directories, RunRecord(run=run, made=record.made))


def read_record(directory: Path) -> RunRecord | None:
    """The record in a directory; None if there is none."""
    record = read_file_as(RunRecord, directory / RECORD_FILE_NAME)
    return None if record is None else replace(record, made=printable(record.made))
