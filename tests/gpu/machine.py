"""Ratel's engine on a GPU for tests: a tiny model, a real store, pinned memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PretrainedConfig

from ratel_cli.engine.device.device import Device
from ratel_cli.engine.measure.telemetry import Timeline
from ratel_cli.engine.steps.build import open_device
from ratel_cli.io.buffers import PinMemory
from ratel_cli.io.pinning import GpuPinning
from ratel_cli.planning.profile.placement import Placement
from ratel_cli.sizes import DtypeName
from tests.engine.architectures import larger_config, tiny_config
from tests.engine.machine import NOTHING_AHEAD, Machine, initial_weights, machine
from tests.reference import Recipe
from tests.simulated_gpu import gpu_of_this_process, has_gpu, is_simulated

GPU = gpu_of_this_process()
"""The device of all tests of a GPU."""
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="no GPU: set RATEL_SIMULATED_GPU=1")]


def gpu_config(architecture: str, **changes: object) -> PretrainedConfig:
    """A model of sizes that a GPU's kernels like. On the simulated GPU, which has none, it is a tiny one."""
    return (tiny_config if is_simulated() else larger_config)(architecture, **changes)


def on_gpu(timeline: Timeline, *, limit_bytes: int | None = None) -> AbstractContextManager[Device]:
    """Open the GPU as a run does."""
    return open_device(GPU, timeline, limit_bytes=limit_bytes)


@contextmanager
def gpu_machine(
    directory: Path,
    config: PretrainedConfig,
    recipe: Recipe,
    *,
    dtype: DtypeName = "bfloat16",
    weights: Mapping[str, torch.Tensor] | None = None,
    limit_bytes: int | None = None,
    pin: PinMemory | None = None,
    placement: Placement = NOTHING_AHEAD,
    gpu_embedding_rows: int | None = 1 << 20,
    **settings: object,
) -> Iterator[Machine]:
    """`machine` on the GPU. `weights`: None takes `initial_weights`. `gpu_embedding_rows` takes the place of the
    placement's: rows go up wherever a step has fewer tokens than the embedding has rows."""
    with machine(
        directory,
        config,
        recipe,
        dtype=dtype,
        weights=initial_weights(config) if weights is None else weights,
        devices=lambda timeline: on_gpu(timeline, limit_bytes=limit_bytes),
        pin=pin or GpuPinning(GPU, pytest.fail),
        placement=replace(placement, gpu_embedding_rows=gpu_embedding_rows),
        **settings,  # type: ignore[arg-type]
    ) as ratel:
        yield ratel
