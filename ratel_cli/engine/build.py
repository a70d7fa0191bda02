"""Opens the device that computes, and puts the parts of the engine together: AdamW, the optimizer thread, the weight
reader and the steps above them.

Invariant: however the run ends, threads are joined and memory is given back, the parts opened last first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ratel_cli.engine.activations import ActivationOffloader
from ratel_cli.engine.device.cuda import CudaDevice
from ratel_cli.engine.device.device import Device, HostDevice
from ratel_cli.engine.host_weights import ResidentWeights
from ratel_cli.engine.optimizer.adamw import AdamWSettings, GroupAdamW
from ratel_cli.engine.optimizer.groups import GroupWork
from ratel_cli.engine.optimizer.pipeline import GroupOrder, UpdatePipeline
from ratel_cli.engine.optimizer.update import Updates, UpdateSettings
from ratel_cli.engine.step import StepEngine
from ratel_cli.engine.telemetry import Timeline
from ratel_cli.engine.weights import WeightReader
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.scratch import Scratch
from ratel_cli.model.blocks import DecoderModel
from ratel_cli.planning.placement import Placement
from ratel_cli.sizes import GROUP_ELEMENTS
from ratel_cli.store.store import Store


@contextmanager
def open_device(device: torch.device, timeline: Timeline, *, limit_bytes: int | None = None) -> Iterator[Device]:
    """Open the device for an engine. `limit_bytes`: the most that torch may allocate on a GPU; None sets no limit."""
    if device.type == "cpu":
        yield HostDevice(timeline)
        return
    with CudaDevice(device, timeline, limit_bytes=limit_bytes) as opened:
        yield opened


@contextmanager
def open_engine(
    model: DecoderModel,
    store: Store,
    pool: BufferPool,
    *,
    adamw: AdamWSettings,
    updates: UpdateSettings,
    placement: Placement,
    seed: int,
    device: Device,
    timeline: Timeline,
    scratch: Scratch | None = None,
    activation_scratch: Scratch | None = None,
    chunk_tokens: int | None = None,
    group_elements: int = GROUP_ELEMENTS,
    check_stop: Callable[[], None] = lambda: None,
) -> Iterator[StepEngine]:
    """Open an engine for one run on an open store.

    `scratch` is needed if held gradients may exceed `updates.held_in_memory_bytes`, `activation_scratch` if the
    placement spills units. `chunk_tokens`: tokens for which logits are computed at once; None chooses. `check_stop` is
    called between blocks; what it raises abandons the step.
    """
    model.place(device.torch_device)
    order: GroupOrder = "naive" if updates.overlap == "naive" else "optimized"
    with GroupAdamW(adamw, store.layout.dtype, num_threads=placement.adamw_threads) as group_adamw:
        work = GroupWork(group_adamw, store, pool, timeline=timeline, resident_states=placement.resident_states)
        with UpdatePipeline(work, order=order, group_elements=group_elements) as pipeline:
            resident = ResidentWeights(placement.resident_weights)
            updating = Updates(
                updates, placement, model.spec.blocks, store, pipeline, resident, scratch, timeline=timeline
            )
            reader = WeightReader(
                model,
                store,
                pool,
                updating,
                resident,
                prefetch_blocks=placement.prefetch_blocks,
                gpu_weights=placement.gpu_weights,
                device=device,
                timeline=timeline,
            )
            with StepEngine(
                model,
                pool,
                reader,
                updating,
                ActivationOffloader(pool, activation_scratch, placement, device=device, timeline=timeline),
                swapped=placement.swapped,
                gradient_dtype=updates.gradient_dtype,
                seed=seed,
                device=device,
                chunk_tokens=chunk_tokens,
                check_stop=check_stop,
            ) as engine:
                yield engine
