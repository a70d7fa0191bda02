"""The record of a change to another number of ranks, in `run/`: which new stores are made, and whether they count.

Invariant: it is durable when it is written, in place of the one before; while it is there, the change has not ended.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.errors import BadInput, EnvironmentFailure
from ratel_cli.io.files import replace_file, sync_path
from ratel_cli.json_fields import JsonFields, read_as
from ratel_cli.run.files.run_directory import run_directory
from ratel_cli.run.files.run_files import list_run_files

RESHARDING_NAME: Final = "resharding.json"
NEW_RESHARDING_NAME: Final = f"{RESHARDING_NAME}.new"
"""While it is written."""
NEW_STORE: Final = "resharded.store"
"""The directory of a new store, in that of the store which it becomes."""
_FORMAT_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardingRecord:
    """What was begun, or decided."""

    made: tuple[Path, ...]
    """Directories of the new stores, absolute; each is made in a directory of its own there."""
    deleted: tuple[Path, ...]
    """Directories whose stores will go."""
    store_ids: tuple[str | None, ...]
    """Ids of the new stores, in each directory of `made`; none until they count."""

    @property
    def is_decided(self) -> bool:
        """Whether the new stores count."""
        return bool(self.store_ids)


def is_moving(config: RunConfig) -> bool:
    """Whether a change to another number of ranks has still to be ended: the stores of all ranks are not in their
    places. Raises as `read_resharding`."""
    record = read_resharding(config)
    return record is not None and record.is_decided


def new_directories(config: RunConfig) -> list[Path]:
    """The directories in which new stores are being made, if any are."""
    record = read_resharding(config)
    return [] if record is None else [each / NEW_STORE for each in record.made]


def _path(config: RunConfig) -> Path:
    return run_directory(config.output_dir) / RESHARDING_NAME


def write_resharding(config: RunConfig, record: ReshardingRecord) -> None:
    """Durable when it returns, in place of what was there. Raises EnvironmentFailure."""
    path = _path(config)
    try:
        content = {"format_version": _FORMAT_VERSION, **asdict(record)}
        list_run_files(config.output_dir, [RESHARDING_NAME, NEW_RESHARDING_NAME])
        replace_file(path, (json.dumps(content, indent=2, default=str) + "\n").encode())
    except OSError as error:
        raise EnvironmentFailure(f"{path}: cannot be written: {error.strerror}") from error


def forget_resharding(config: RunConfig) -> None:
    """The change has ended. Raises OSError."""
    _path(config).unlink()
    sync_path(run_directory(config.output_dir))


def read_resharding(config: RunConfig) -> ReshardingRecord | None:
    """What was begun or decided; None if nothing was. Raises BadInput for a record that cannot be read: without it,
    nobody knows which stores count."""
    path = _path(config)
    try:
        content = json.loads(path.read_bytes())
        if JsonFields(content).integer("format_version") != _FORMAT_VERSION:
            raise ValueError("made by another version")
        return read_as(ReshardingRecord, content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(
            f"{path}: cannot be read: it says which stores of this run count",
            "if none of the run's directories has a store named resharded.store, delete the file",
        ) from error
