"""What a run's snapshot takes on its device, and what there is: for the run itself and for `ratel plan`, alike.

Called by `run.finetune` and `cli.plan`. Imports nothing heavy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ratel_cli.config.schema import RunConfig
from ratel_cli.io.files import nearest_existing
from ratel_cli.model.spec import ModelSpec
from ratel_cli.planning.traffic import store_bytes
from ratel_cli.run.settings import state_bytes, taken_bytes
from ratel_cli.store.lock import DATA_FILE_NAME

NUM_SLOTS: Final = 2
"""Of the snapshot's store: the last generation that was copied, and the one that is being copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSpace:
    """On the device of `storage.snapshot.path`."""

    path: Path
    need_bytes: int
    have_bytes: int


def snapshot_space(config: RunConfig, spec: ModelSpec, *, nvme_bytes: int) -> SnapshotSpace | None:
    """None if no snapshot is asked for. `nvme_bytes` is what goes to `storage.paths`, which may share the device."""
    if config.storage.snapshot is None:
        return None
    path = config.storage.snapshot.path
    there, file = nearest_existing(path), path / DATA_FILE_NAME
    free = os.statvfs(there)
    have_bytes = free.f_bavail * free.f_frsize + (file.stat().st_size if file.is_file() else 0)
    if there.stat().st_dev in {nearest_existing(each).stat().st_dev for each in config.storage.paths}:
        have_bytes -= max(0, nvme_bytes - taken_bytes(config))
    return SnapshotSpace(
        path=path,
        need_bytes=store_bytes(spec, state_bytes(config), num_slots=NUM_SLOTS),
        have_bytes=max(0, have_bytes),
    )
