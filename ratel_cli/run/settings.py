"""What a config asks of the store and the plan, in the terms of `planning`: the same for a run and for `ratel plan`.

Invariant: this file imports nothing heavy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ratel_cli.config.schema import RunConfig
from ratel_cli.io.files import nearest_existing
from ratel_cli.model.spec import ModelSpec
from ratel_cli.planning.placement import StateBytes, Workload
from ratel_cli.planning.problem import Decisions
from ratel_cli.planning.traffic import store_bytes
from ratel_cli.store.layout import record_layout
from ratel_cli.store.lock import DATA_FILE_NAME

SNAPSHOT_SLOTS: Final = 2
"""Slots of a snapshot's store: the generation that was copied last, and the one that is being copied."""


def state_bytes(config: RunConfig) -> StateBytes:
    """The bytes of one parameter's state."""
    layout = record_layout(config.dtype)
    return StateBytes(
        compute=layout.compute_field.bytes_per_element,
        record=layout.bytes_per_parameter,
        num_fields=len(layout.fields),
        gradient=record_layout(config.resolved_gradient_dtype).compute_field.bytes_per_element,
    )


def workload_of(config: RunConfig) -> Workload:
    """The tokens of a full step."""
    return Workload(
        micro_batch_size=config.micro_batch_size,
        num_micro_batches=config.gradient_accumulation_steps,
        sequence_len=config.sequence_len,
    )


def decisions_of(config: RunConfig, *, host_limit_bytes: int) -> Decisions:
    """What the config decides about the plan; the planner decides the rest."""
    slots = num_slots(config)
    return Decisions(
        holds_gradients=slots == 1 or config.max_grad_norm is not None,
        num_slots=slots,
        host_limit_bytes=host_limit_bytes,
        device_limit_bytes=config.limits.gpu_memory,
        activations=config.activations,
        overlap=config.optimizer_overlap,
    )


def num_slots(config: RunConfig) -> int:
    """Slots of the config's store: the number of generations that it has space for."""
    if config.storage.durability == "none":
        return 1
    # A generation that is being copied to the snapshot needs its slot until the copy is done.
    return 2 + config.num_saved_generations + (config.storage.snapshot is not None)


def place_of(config: RunConfig) -> str:
    """The store's directories, for messages."""
    return ", ".join(map(str, config.storage.paths))


def taken_bytes(config: RunConfig) -> int:
    """Bytes that an earlier store in the same directories takes: they are there already, or will be free."""
    files = [path / DATA_FILE_NAME for path in config.storage.paths]
    return sum(file.stat().st_size for file in files if os.path.isfile(file))  # is_file raises for long names


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSpace:
    """The space of a snapshot on the device of `storage.snapshot.path`."""

    path: Path
    need_bytes: int
    available_bytes: int


def snapshot_space(config: RunConfig, spec: ModelSpec, *, nvme_bytes: int) -> SnapshotSpace | None:
    """The space that the config's snapshot needs and has; None if the config asks for no snapshot.

    `nvme_bytes` is what the run needs in `storage.paths`, which may be on the same device.
    """
    if config.storage.snapshot is None:
        return None
    path = config.storage.snapshot.path
    existing, file = nearest_existing(path), path / DATA_FILE_NAME
    free = os.statvfs(existing)
    available_bytes = free.f_bavail * free.f_frsize + (file.stat().st_size if file.is_file() else 0)
    if existing.stat().st_dev in {nearest_existing(each).stat().st_dev for each in config.storage.paths}:
        available_bytes -= max(0, nvme_bytes - taken_bytes(config))
    return SnapshotSpace(
        path=path,
        need_bytes=store_bytes(spec, state_bytes(config), num_slots=SNAPSHOT_SLOTS),
        available_bytes=max(0, available_bytes),
    )
