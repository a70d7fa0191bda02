"""Opens the engine that runs steps: with a plan and a run's config, or with settings that name every detail.

Invariant: an engine and its scratch files end together; the store and the queue that they use stay open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ratel_cli.config.schema import RunConfig
from ratel_cli.engine.build import open_device, open_engine
from ratel_cli.engine.device.device import Device
from ratel_cli.engine.optimizer.adamw import AdamWSettings
from ratel_cli.engine.optimizer.update import UpdateSettings
from ratel_cli.engine.step import StepEngine
from ratel_cli.engine.telemetry import Timeline
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import IoQueue
from ratel_cli.io.scratch import Scratch
from ratel_cli.model.blocks import DecoderModel
from ratel_cli.model.skeleton import DTYPES
from ratel_cli.planning.placement import Placement
from ratel_cli.planning.plan import Plan
from ratel_cli.run.context import RunContext
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


def engine_settings(config: RunConfig, plan: Plan) -> EngineSettings:
    """What the config and the plan decide about a run's engine."""
    return EngineSettings(
        adamw=AdamWSettings(
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            epsilon=config.adam_epsilon,
            weight_decay=config.weight_decay,
        ),
        updates=UpdateSettings(
            gradient_dtype=DTYPES[config.resolved_gradient_dtype],
            max_grad_norm=config.max_grad_norm,
            hold=plan.decisions.in_place,
            held_in_memory_bytes=plan.held_in_memory_bytes,
            overlap=plan.decisions.overlap,
        ),
        placement=plan.placement,
        seed=config.seed,
        gradient_scratch_bytes=plan.spilled_bytes,
        activation_scratch_bytes=plan.offloaded.written_bytes,
    )


@contextmanager
def open_planned_engine(
    context: RunContext,
    model: DecoderModel,
    store: Store,
    plan: Plan,
    *,
    timeline: Timeline,
    drive_weights: Sequence[int],
) -> Iterator[StepEngine]:
    """The engine of a run under one plan. `drive_weights` are the storage directories' shares of the scratch files."""
    with (
        open_device(context.device, timeline, limit_bytes=plan.device_allocation_bytes) as device,
        open_engine_with_scratch(
            model,
            store,
            engine_settings(context.config, plan),
            queue=context.queue,
            pool=context.pool,
            device=device,
            timeline=timeline,
            paths=context.config.storage.paths,
            drive_weights=drive_weights,
            check_stop=context.stop.check,
        ) as engine,
    ):
        yield engine


@contextmanager
def open_engine_with_scratch(
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
    """An engine on an open store and an open device, with the scratch files that its settings ask for in `paths`.

    `check_stop` is called between blocks, and may raise. Raises EnvironmentFailure if there is no space for the files.
    """
    with ExitStack() as resources:

        def scratch(num_bytes: int) -> Scratch | None:
            if not num_bytes:
                return None
            return resources.enter_context(Scratch(paths, num_bytes, queue, weights=drive_weights))

        yield resources.enter_context(
            open_engine(
                model,
                store,
                pool,
                adamw=settings.adamw,
                updates=settings.updates,
                placement=settings.placement,
                seed=settings.seed,
                device=device,
                timeline=timeline,
                scratch=scratch(settings.gradient_scratch_bytes),
                activation_scratch=scratch(settings.activation_scratch_bytes),
                chunk_tokens=settings.chunk_tokens,
                group_elements=settings.group_elements,
                check_stop=check_stop,
            )
        )
