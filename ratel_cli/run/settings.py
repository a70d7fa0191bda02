"""What a config says of a run, in the words of `planning`: for the run itself and for `ratel plan`, alike.

Called by `run.finetune`, `run.plan`, `run.store` and `run.plan_inputs`. Imports nothing heavy.
"""

from __future__ import annotations

import os

from ratel_cli.config.schema import RunConfig
from ratel_cli.planning.placement import StateBytes, Workload
from ratel_cli.planning.plan import Decisions
from ratel_cli.store.layout import record_layout
from ratel_cli.store.lock import DATA_FILE_NAME


def state_bytes(config: RunConfig) -> StateBytes:
    """Of a parameter."""
    layout = record_layout(config.dtype)
    return StateBytes(
        compute=layout.compute_field.bytes_per_element,
        record=layout.bytes_per_parameter,
        num_fields=len(layout.fields),
        gradient=record_layout(config.resolved_gradient_dtype).compute_field.bytes_per_element,
    )


def workload_of(config: RunConfig) -> Workload:
    """Of a full step."""
    return Workload(
        micro_batch_size=config.micro_batch_size,
        num_micro_batches=config.gradient_accumulation_steps,
        sequence_len=config.sequence_len,
    )


def decisions_of(config: RunConfig, *, host_limit_bytes: int) -> Decisions:
    """What is left to decide."""
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
    """Generations that a store for this config has room for."""
    if config.storage.durability == "none":
        return 1
    # What is being copied to the snapshot must not be written over meanwhile.
    return 2 + config.num_saved_generations + (config.storage.snapshot is not None)


def taken_bytes(config: RunConfig) -> int:
    """What an earlier store of this run holds already, or frees when it is replaced."""
    files = [path / DATA_FILE_NAME for path in config.storage.paths]
    return sum(file.stat().st_size for file in files if os.path.isfile(file))  # is_file raises for long names
