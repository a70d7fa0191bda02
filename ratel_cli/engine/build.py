"""Opens the device that computes, and puts the parts of the engine together: AdamW, the optimizer thread, the weight
reader and the steps above them.

Invariant: however the run ends, threads are joined and memory is given back, the parts opened last first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

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
from ratel_cli.io.queue import IoQueue
from ratel_cli.io.scratch import Scratch
from ratel_cli.model.blocks import DecoderModel
from ratel_cli.planning.placement import Placement
from ratel_cli.sizes import GROUP_ELEMENTS
from ratel_cli.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of an engine that do not change while it is open."""

    adamw: AdamWSettings
    updates: UpdateSettings
    placement: Placement
    seed: int
    gradient_scratch_bytes: int = 0
    """Space on the drives for gradients that are held until the step is decided."""
    activation_scratch_bytes: int = 0
    """Space on the drives for offloaded activations."""
    chunk_tokens: int | None = None
    """Tokens whose logits are computed at once; None: as many as fit in a fixed number of bytes."""
    group_elements: int = GROUP_ELEMENTS
    """Parameters that the optimizer reads, updates and writes at once."""


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
    settings: EngineSettings,
    *,
    queue: IoQueue,
    pool: BufferPool,
    device: Device,
    timeline: Timeline,
    paths: Sequence[Path],
    drive_weights: Sequence[int] | None = None,
    check_stop: Callable[[], None] = lambda: None,
) -> Iterator[StepEngine]:
    """Open an engine on an open store and an open device, with the scratch files that its settings ask for in `paths`.

    `drive_weights`: the paths' shares of these files; None: equal shares. `check_stop` is called between blocks; what
    it raises abandons the step. Raises EnvironmentFailure if there is no space for the files.
    """
    updates, placement = settings.updates, settings.placement
    with ExitStack() as resources:

        def scratch(num_bytes: int) -> Scratch | None:
            if not num_bytes:
                return None
            return resources.enter_context(Scratch(paths, num_bytes, queue, weights=drive_weights))

        gradients = scratch(settings.gradient_scratch_bytes)
        activations = scratch(settings.activation_scratch_bytes)
        model.place(device.torch_device)
        adamw = resources.enter_context(
            GroupAdamW(settings.adamw, store.layout.dtype, num_threads=placement.adamw_threads)
        )
        work = GroupWork(adamw, store, pool, timeline=timeline, resident_states=placement.resident_states)
        order: GroupOrder = "naive" if updates.overlap == "naive" else "optimized"
        pipeline = resources.enter_context(UpdatePipeline(work, order=order, group_elements=settings.group_elements))
        resident = ResidentWeights(placement.resident_weights)
        updating = Updates(
            updates, placement, model.spec.blocks, store, pipeline, resident, gradients, timeline=timeline
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
        yield resources.enter_context(
            StepEngine(
                model,
                pool,
                reader,
                updating,
                ActivationOffloader(pool, activations, placement, device=device, timeline=timeline),
                swapped=placement.swapped,
                gradient_dtype=updates.gradient_dtype,
                leaving_bytes=placement.gpu_leaving_bytes,
                holds_tied=device.is_host or placement.gpu_holds_tied,
                seed=settings.seed,
                device=device,
                chunk_tokens=settings.chunk_tokens,
                check_stop=check_stop,
            )
        )
