"""Opens the engine that runs steps under a plan, with a run's config.

Invariant: an engine and its scratch files end together; the store and the queue that they use stay open.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ratel_cli.config.schema import RunConfig
from ratel_cli.engine.build import EngineSettings, open_device, open_engine
from ratel_cli.engine.optimizer.adamw import AdamWSettings
from ratel_cli.engine.optimizer.update import UpdateSettings
from ratel_cli.engine.step import StepEngine
from ratel_cli.engine.telemetry import Timeline
from ratel_cli.model.blocks import DecoderModel
from ratel_cli.model.skeleton import DTYPES
from ratel_cli.planning.plan import Plan
from ratel_cli.run.context import RunContext
from ratel_cli.store.store import Store


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
            speculates=plan.unclipped_seconds is not None,
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
        open_engine(
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
