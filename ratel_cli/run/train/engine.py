"""Opens the engines that run steps under one plan after another, with a run's config.

Invariant: engines and their scratch files end together; the store and the queue that they use stay open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ratel_cli.config.keys.optimizers import resolved_options
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.engine.device.device import Device
from ratel_cli.engine.measure.telemetry import Timeline
from ratel_cli.engine.optimizer.settings import OptimizerSettings
from ratel_cli.engine.optimizer.update import UpdateSettings
from ratel_cli.engine.steps.build import EngineParts, open_device
from ratel_cli.engine.steps.following import EngineSettings
from ratel_cli.engine.steps.pinned import block_buffers, other_bytes, unit_buffers
from ratel_cli.engine.steps.step import StepEngine
from ratel_cli.hardware.gpu import is_limited
from ratel_cli.model.cut.cut_model import AnyModel
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.duties.activations import RUNTIME_BYTES
from ratel_cli.planning.duties.placed import PlacedStep
from ratel_cli.planning.duties.step import PlannedStep
from ratel_cli.planning.search.plan import Plan
from ratel_cli.run.context import RunContext
from ratel_cli.store.store import Store
from ratel_cli.units import GIB, format_bytes


def optimizer_settings(config: RunConfig) -> OptimizerSettings:
    """What the update rules of a run compute with."""
    options = {
        "beta1": config.adam_beta1,
        "beta2": config.adam_beta2,
        "epsilon": config.adam_epsilon,
        **resolved_options(config.optimizer, config.optim_args),
    }
    return OptimizerSettings(weight_decay=config.weight_decay, options=options)


def engine_settings(config: RunConfig, plan: Plan) -> EngineSettings:
    """What the config and the plan decide about a run's engine."""
    return EngineSettings(
        optimizer=optimizer_settings(config),
        updates=UpdateSettings(
            max_grad_norm=config.max_grad_norm,
            speculation=plan.speculation,
            holds_all=plan.decisions.overwrites,
            held_in_memory_bytes=plan.held_in_memory_bytes,
            overlap=plan.decisions.overlap,
        ),
        placement=plan.placement,
        seed=config.seed,
        gradient_scratch_bytes=plan.spilled_bytes,
        activation_scratch_bytes=plan.offloaded.written_bytes,
        chunk_tokens=plan.workload.chunk_tokens,
        micro_batch_tokens=plan.workload.micro_batch_tokens,
        spare_bytes=max(0, plan.decisions.host_limit_bytes - plan.memory.total),
    )


def pin_ahead(context: RunContext, spec: ModelSpec, plan: Plan, *, units_only: bool = False) -> None:
    """Pin the host memory that crosses the link in the steps of a plan, where a GPU computes and it is not there yet.

    `units_only`: an engine of another plan has the rest. Raises Interrupted where a signal asked the run to stop.
    """
    if context.device.type == "cpu":
        return
    placement, num_micro_batches = plan.placement, plan.workload.num_micro_batches
    buffers = list(unit_buffers(placement, plan.offloaded.unit_bytes, num_micro_batches))
    most_bytes = _pool_bytes(context, plan)
    if not units_only:
        most_bytes -= other_bytes(spec, placement)
        step = PlannedStep(
            spec=spec,
            own=spec,
            workload=plan.workload,
            on_gpu=True,
            holds_gradients=plan.decisions.holds_gradients,
            overlap=plan.decisions.overlap,
        )
        buffers += block_buffers(PlacedStep(step, placement), spilled_segments=plan.spilled_segments)
    total_bytes = sum(each.num_bytes * each.number for each in buffers)
    if total_bytes >= GIB:  # else it is done in a moment
        context.log.remark(f"pinning {format_bytes(total_bytes)} of host memory for the GPU")
    with context.bar("pinning host memory", total_bytes) as advance:
        context.pool.pin_ahead(buffers, most_bytes, progress=advance)


def _pool_bytes(context: RunContext, plan: Plan) -> int:
    """What the pool may hold of host memory: not where torch or the process will be."""
    return max(0, context.host_limit_bytes - plan.memory.process - RUNTIME_BYTES)


def open_planned_device(context: RunContext, plan: Plan, timeline: Timeline) -> AbstractContextManager[Device]:
    """The device of a run, held to what the plan takes of it if the user's limit is below what it has."""
    is_held_to_limit = is_limited(context.device, context.config.limits.gpu_memory)
    limit_bytes = plan.device_allocation_bytes if is_held_to_limit else None
    return open_device(context.device, timeline, limit_bytes=limit_bytes)


@contextmanager
def open_planned_engines(
    context: RunContext,
    model: AnyModel,
    store: Store,
    plan: Plan,
    *,
    timeline: Timeline,
    drive_shares: Sequence[int],
) -> Iterator[Callable[[Plan], StepEngine[Any]]]:
    """Makes the engine for a plan, and then for another one, which takes over from the engine before it.

    All plans are made with the decisions of `plan`. `drive_shares` are the storage directories' shares of the scratch
    files.
    """
    with (
        open_planned_device(context, plan, timeline) as device,
        EngineParts(
            model,
            store,
            queue=context.queue,
            pool=context.pool,
            device=device,
            timeline=timeline,
            paths=context.config.storage.paths,
            drive_shares=drive_shares,
            ranks=context.ranks,
            # The others would wait for a rank that leaves a step, so several end between two steps alone.
            check_stop=context.stop.check if context.ranks.size == 1 else lambda: None,
        ) as parts,
    ):

        def engine_for(followed: Plan) -> StepEngine[Any]:
            if context.device.type == "cpu":
                # Idle buffers of the plan before would take what the new plan counts on for torch: a limit of 4 GiB
                # peaked at 4.16 GiB.
                context.pool.trim()
            else:
                context.pool.idle_limit_bytes = _pool_bytes(context, followed)  # they take long to make, so they stay
            return parts.engine(engine_settings(context.config, followed))

        yield engine_for
    context.pool.trim()  # what comes next, such as the export, has buffers of its own
