"""Puts the parts of the engine together: the optimizer thread, what it works on, and the steps above them.

Called by `run.finetune`, and by tests and benchmarks in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ratel_cli.engine.device.device import Device
from ratel_cli.engine.optimizer.adamw import AdamWSettings, GroupAdamW
from ratel_cli.engine.optimizer.groups import GroupWork
from ratel_cli.engine.optimizer.pipeline import GroupOrder, UpdatePipeline
from ratel_cli.engine.optimizer.update import UpdateSettings
from ratel_cli.engine.step import StepEngine
from ratel_cli.engine.telemetry import Timeline
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.scratch import Scratch
from ratel_cli.model.blocks import DecoderModel
from ratel_cli.planning.placement import Placement
from ratel_cli.sizes import GROUP_ELEMENTS
from ratel_cli.store.store import Store


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
    """An engine for one run on an open store. `check_stop` is called between blocks, and may raise."""
    model.place(device.torch_device)
    order: GroupOrder = "naive" if updates.overlap == "naive" else "optimized"
    with GroupAdamW(adamw, store.layout.dtype, num_threads=placement.adamw_threads) as group_adamw:
        work = GroupWork(group_adamw, store, pool, timeline=timeline, resident_states=placement.resident_states)
        with (
            UpdatePipeline(work, order=order, group_elements=group_elements) as pipeline,
            StepEngine(
                model,
                store,
                pool,
                pipeline,
                updates,
                placement,
                seed=seed,
                device=device,
                timeline=timeline,
                scratch=scratch,
                activation_scratch=activation_scratch,
                chunk_tokens=chunk_tokens,
                check_stop=check_stop,
            ) as engine,
        ):
            yield engine
