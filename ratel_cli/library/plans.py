"""Plans for the steps of a loop whose batches are not known beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ratel_cli.data.samples.sample_batch import AnyModelBatch
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.model.cut.cut_model import AnyModel
from ratel_cli.planning.profile.placement import Workload
from ratel_cli.planning.search.plan import Plan
from ratel_cli.run.context import RunContext
from ratel_cli.run.train.planner import Planner, estimated_profile, make_planner
from ratel_cli.run.train.trial import tried_profile


def least_of(model: AnyModel) -> Workload:
    """The smallest step of a model."""
    return Workload(micro_batch_size=1, num_micro_batches=1, sequence_len=model.spec.sample_tokens or 2)


def workload_of(batches: Sequence[AnyModelBatch], known: Workload | None) -> Workload:
    """The shape of a full step with these micro-batches, and at least that of `known`."""
    found = Workload(
        micro_batch_size=max(each.shape[0] for each in batches),
        num_micro_batches=len(batches),
        sequence_len=max(each.width for each in batches),
    )
    if known is None:
        return found
    return Workload(
        micro_batch_size=max(found.micro_batch_size, known.micro_batch_size),
        num_micro_batches=max(found.num_micro_batches, known.num_micro_batches),
        sequence_len=max(found.sequence_len, known.sequence_len),
    )


def is_within(wanted: Workload, planned: Workload) -> bool:
    """Whether a step of the wanted shape follows a plan for the other one."""
    return (
        wanted.micro_batch_size <= planned.micro_batch_size
        and wanted.num_micro_batches <= planned.num_micro_batches
        and wanted.sequence_len <= planned.sequence_len
    )


def planner_for(context: RunContext, model: AnyModel, hardware: HardwareProfile, workload: Workload) -> Planner:
    """The planner of steps whose learning rate comes when all gradients are there."""
    split = {
        "micro_batch_size": workload.micro_batch_size,
        "gradient_accumulation_steps": workload.num_micro_batches,
        "sequence_len": workload.sequence_len,
    }
    context = replace(context, config=context.config.model_copy(update=split))
    planner = make_planner(context, model.spec, hardware)
    return replace(planner, decisions=replace(planner.decisions, holds_gradients=True))


def measured_plan(
    context: RunContext, model: AnyModel, hardware: HardwareProfile, workload: Workload, batch: AnyModelBatch
) -> Plan:
    """The plan from what one layer of each kind takes. `batch`: a micro-batch of the step. Raises DoesNotFit.

    Where nothing could be measured, only the inputs of layers are offloaded: what else to offload is not known.
    """
    planner = planner_for(context, model, hardware, workload)
    estimate = estimated_profile(planner, model)
    plan = planner.plan(estimate)
    measured = tried_profile(context, model, [batch], planner, plan, estimate, is_packed=False)
    return planner.plan_recording(estimate) if measured is None else planner.plan(measured)
