"""The space that a run takes in the file systems that it writes to, and what is available there.

They are those of the store, of the snapshot and of the export, which may be the same. Scratch files are gone when the
export is written.

Invariant: this file imports nothing heavy, and writes nothing.
"""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.errors import ConfigKey, NotEnoughSpace
from ratel_cli.hardware.host import free_bytes
from ratel_cli.hardware.shares import ONE_RANK, RankLayout
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.io.files import device_of, nearest_existing
from ratel_cli.model.files.marker import space_for_export
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.forecast.ratel_forecast import more_space
from ratel_cli.planning.time.traffic import store_bytes
from ratel_cli.run.files.run_directory import store_at
from ratel_cli.run.inputs.settings import num_slots
from ratel_cli.store.lock import DATA_FILE_NAME
from ratel_cli.units import format_bytes

SNAPSHOT_SLOTS: Final = 2
"""Slots of a snapshot's store: the generation that was copied last, and the one that is being copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The space that the snapshot or the export needs in its file system, and what the rest of the run leaves there."""

    name: Literal["snapshot", "export"]
    option: Literal["storage.snapshot.path", "output_dir"]
    path: Path
    need_bytes: int
    available_bytes: int
    is_shared: bool
    """Whether other new files of the run will be there, too."""

    @property
    def key(self) -> ConfigKey:
        """The key of the config that names its place."""
        return tuple(self.option.split("."))

    @property
    def words(self) -> str:
        """What is needed, where, and what is available."""
        need, available = format_bytes(self.need_bytes), format_bytes(self.available_bytes)
        return f"needs {need} in {self.path}, {available} available{' beside the store' if self.is_shared else ''}"

    @property
    def remedy(self) -> str | None:
        """What to do; None if it fits."""
        fits = self.need_bytes <= self.available_bytes
        return None if fits else f"free some space there, or set {self.option} to another device"

    def check(self) -> None:
        """Raise NotEnoughSpace if it does not fit."""
        if self.remedy is not None:
            raise NotEnoughSpace(f"not enough space for the {self.name}: it {self.words}", self.remedy)


def spaces_of(
    config: RunConfig,
    spec: ModelSpec,
    *,
    nvme_bytes: int,
    shares: Sequence[int] | None = None,
    export_bytes: int | None = None,
    own: ModelSpec | None = None,
    layout: RankLayout = ONE_RANK,
) -> tuple[Space, ...]:
    """The space of the snapshot, if the config asks for one, and of the export.

    `nvme_bytes` is what the run needs in `storage.paths`, with scratch files; `shares` are those of the paths in it,
    equal ones if None. `export_bytes` is the size of the export; its weights alone if None. `own`: what a rank's store
    has of the model, all of it if None; `layout`: the ranks that have stores on these drives.
    """
    shares = shares or (1,) * len(config.storage.paths)
    export = config.output_dir
    own_bytes = store_bytes(own or spec, num_slots=num_slots(config))
    taken = _to_come(config, own_bytes, shares, num_sharing=layout.on_drives)
    spaces: list[Space] = []
    if config.storage.snapshot is not None:
        path = config.storage.snapshot.path
        beside = _to_come(config, nvme_bytes, shares, num_sharing=layout.on_drives)[device_of(path)]
        free = max(0, free_bytes([nearest_existing(path)]) - beside) // layout.on_machine
        snapshot = Space(
            name="snapshot",
            option="storage.snapshot.path",
            path=path,
            need_bytes=store_bytes(own or spec, num_slots=SNAPSHOT_SLOTS),
            available_bytes=free + _file_bytes(path),
            is_shared=beside > 0,
        )
        spaces.append(snapshot)
        taken[device_of(path)] += layout.on_machine * max(0, snapshot.need_bytes - _file_bytes(path))
    beside = taken[device_of(export)]
    available_bytes = max(0, space_for_export(export) - beside)
    spaces.append(
        Space(
            name="export",
            option="output_dir",
            path=export,
            need_bytes=_exported_bytes(config, spec) if export_bytes is None else export_bytes,
            available_bytes=available_bytes,
            is_shared=beside > 0,
        )
    )
    return tuple(spaces)


def _exported_bytes(config: RunConfig, spec: ModelSpec) -> int:
    """The weights of an export: of an adapter, what is trained alone."""
    exported = [block for block in spec.blocks if block.is_trained or config.adapter is None]
    return sum(block.num_stored * block.dtype_bytes for block in exported)


def check_store_space(
    config: RunConfig, spec: ModelSpec, need_bytes: int, hardware: HardwareProfile, *, layout: RankLayout = ONE_RANK
) -> None:
    """Raise NotEnoughSpace unless store and scratch files of a new run fit together, of this rank and of those that
    share its drives."""
    available_bytes = hardware.nvme.free_bytes // layout.on_drives + taken_bytes(config.storage.paths)
    hint = f"free some space; or {more_space(spec, num_ranks=layout.num_ranks, has_files=not config.random_init)}"
    if need_bytes > available_bytes:
        raise NotEnoughSpace(
            f"not enough space for the store: it needs {format_bytes(need_bytes)} in {store_at(config)}, "
            f"{format_bytes(available_bytes)} available",
            hint,
        )
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    for device, new_bytes in _to_come(config, need_bytes, hardware.nvme.shares).items():
        here = [path for path in config.storage.paths if device_of(path) == device]
        free = free_bytes([nearest_existing(here[0])]) // layout.on_drives
        if new_bytes > free:
            raise NotEnoughSpace(
                f"not enough space for the store: its share in {', '.join(map(str, here))} is "
                f"{format_bytes(new_bytes)}, {format_bytes(free)} available",
                hint,
            )
        if limit_bytes != resource.RLIM_INFINITY and new_bytes > limit_bytes * len(here):
            raise NotEnoughSpace(
                f"{', '.join(map(str, here))}: the store needs a file of {format_bytes(new_bytes // len(here))}, but "
                f"the limit of this process on the size of files is {format_bytes(limit_bytes)}",
                "raise it with `ulimit -f unlimited`",
            )


def taken_bytes(paths: Iterable[Path]) -> int:
    """Bytes that a store takes in these directories: a run that has it needs no others, or will free them."""
    return sum(map(_file_bytes, paths))


def _to_come(config: RunConfig, num_bytes: int, shares: Sequence[int], *, num_sharing: int = 1) -> Counter[int]:
    """What `num_bytes` in `storage.paths` will still take of each file system, by its device; for each rank that shares
    them."""
    num_bytes, whole = max(0, num_bytes - taken_bytes(config.storage.paths)), sum(shares)
    found = Counter[int]()
    for path, share in zip(config.storage.paths, shares, strict=True):
        found[device_of(path)] += num_sharing * -(-num_bytes * share // whole)
    return found


def _file_bytes(directory: Path) -> int:
    """Bytes of the store in a directory; 0 if there is none."""
    file = directory / DATA_FILE_NAME
    return file.stat().st_size if os.path.isfile(file) else 0  # is_file raises for long names
