"""A run's planner: makes one plan after another for the same model, machine and limits.

The first plan of a model that was never recorded follows from its shapes. One layer of each kind is run within it
(run/train/trial.py), and the next plan follows from what they take. Where none could be measured, the first step
offloads nothing and is recorded; the steps after it follow a new plan (Ratel section IV-B).

Invariant: every plan stays within the limits of the first one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ratel_cli.console import RunLog
from ratel_cli.engine.measure.telemetry import Span, SpanLabel
from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.engine.steps.footprint import measured_traits
from ratel_cli.errors import DoesNotFit
from ratel_cli.hardware.gpu import gpu_limit
from ratel_cli.hardware.host import kept_bytes
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.model.cut.cut_model import AnyModel
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.profile.analytic import analytic_profile
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.planning.profile.placement import Workload
from ratel_cli.planning.profile.recorded import BlockSeconds, recorded_profile
from ratel_cli.planning.search.decisions import Decisions
from ratel_cli.planning.search.plan import Plan, make_plan
from ratel_cli.planning.search.problem import Problem
from ratel_cli.planning.time.refined import SeenStep, refined_hardware, refined_profile
from ratel_cli.planning.time.step_time import Resource
from ratel_cli.run.context import RunContext
from ratel_cli.run.inputs.settings import chunked_workload_of, decisions_of
from ratel_cli.schedule.uses import Stage
from ratel_cli.sizes import Filling
from ratel_cli.store.fill import COPY_BYTES
from ratel_cli.store.layout import WHOLE, RankSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Makes plans. Its fields are what all plans of a run have in common."""

    spec: ModelSpec
    workload: Workload
    decisions: Decisions
    hardware: HardwareProfile
    process_bytes: int
    rank_slice: RankSlice = WHOLE
    """What this rank has of the model. `hardware` is its share of the machine."""

    def plan(self, profile: ModelProfile) -> Plan:
        """The best plan for a profile. Raises DoesNotFit."""
        return self._plan(profile, self.decisions)

    def plan_recording(self, profile: ModelProfile) -> Plan:
        """The plan of the step that is recorded: everything except the layers' inputs is recomputed."""
        return self._plan(profile, replace(self.decisions, activations="recompute"))

    def plan_again(self, profile: ModelProfile, log: RunLog) -> Plan:
        """The plan for a recorded profile. If the user's `activations` do not fit, warns and plans with `auto`."""
        try:
            return self.plan(profile)
        except DoesNotFit as failure:
            log.warn(
                f"activations: {self.decisions.activations} does not fit with the recorded costs "
                f"({failure.message}); using auto"
            )
            return self._plan(profile, replace(self.decisions, activations="auto"))

    def recorded(self, recording: StepRecording, spans: Sequence[Span], *, estimate: ModelProfile) -> ModelProfile:
        """The profile of the model from a recorded step, the spans of its work, and the profile before it.

        The micro-batches of the step count as the mean ones of the data.
        """
        step = self.workload.mean
        profile = recorded_profile(
            recording.units(),
            self._block_seconds(spans, estimate),
            self.spec,
            step,
            num_micro_batches=recording.num_micro_batches,
            estimate=estimate.of_tokens(step.micro_batch_tokens),
        )
        return replace(profile.of_tokens(self.workload.micro_batch_tokens), sequence_len=self.workload.sequence_len)

    def seen(self, seconds: float, spans: Sequence[Span], profile: ModelProfile) -> SeenStep:
        """What a step that took `seconds` shows by the spans of its work. `profile`: the one of its plan."""
        return SeenStep(
            seconds=seconds,
            blocks=self._block_seconds(spans, profile),
            nvme_seconds=_busy_seconds(spans, "nvme read", "nvme write"),
            up_seconds=_busy_seconds(spans, "up"),
            down_seconds=_busy_seconds(spans, "down"),
        )

    def refined(self, profile: ModelProfile, plan: Plan, steps: Sequence[SeenStep]) -> tuple[Planner, ModelProfile]:
        """A planner and a profile with the rates and the times that the steps under `plan` show."""
        refined = refined_profile(
            profile, steps, swapped=plan.placement.swapped, num_micro_batches=self.workload.full_micro_batches
        )
        return replace(self, hardware=refined_hardware(self.hardware, plan.time, steps)), refined

    def problem(self, profile: ModelProfile, decisions: Decisions) -> Problem:
        """What a plan for a profile follows from, with other decisions than the planner's own."""
        return Problem(
            spec=self.spec,
            workload=self.workload,
            profile=profile,
            hardware=self.hardware,
            decisions=decisions,
            process_bytes=self.process_bytes,
            rank_slice=self.rank_slice,
        )

    def _block_seconds(self, spans: Sequence[Span], profile: ModelProfile) -> Mapping[int, BlockSeconds]:
        """What blocks compute alone: where the CPU computes, what the plan adds for AdamW next to them is left out."""
        host, lost_seconds = self.hardware.host, 0.0
        if self.hardware.link is None:
            share = 1 / host.num_cores if profile.adamw_share is None else profile.adamw_share
            updated = self.spec.sliced(self.rank_slice).update_work
            lost_seconds = share * updated / host.adam_parameters_per_second
        return _block_seconds(spans, lost_seconds=lost_seconds)

    def _plan(self, profile: ModelProfile, decisions: Decisions) -> Plan:
        return make_plan(self.problem(profile, decisions))


def make_planner(
    context: RunContext, spec: ModelSpec, hardware: HardwareProfile, *, filling: Filling | None = None
) -> Planner:
    """The planner of a run, with the memory that is free now. `filling`: of the data's steps; None: they are full."""
    config = context.config
    decisions = decisions_of(config, host_limit_bytes=context.host_limit_bytes)
    if context.device.type != "cpu":
        limit = gpu_limit(context.device, config.limits.gpu_memory)
        decisions = replace(
            decisions, device_limit_bytes=limit.plannable_bytes, device_reserve_bytes=limit.reserve_bytes
        )
    return Planner(
        spec=spec,
        workload=replace(chunked_workload_of(config, spec), filling=filling),
        decisions=decisions,
        hardware=hardware,
        process_bytes=kept_bytes() + (COPY_BYTES if config.storage.snapshot is not None else 0),
        rank_slice=context.ranks.slice,
    )


def estimated_profile(planner: Planner, model: AnyModel) -> ModelProfile:
    """The model's profile from its shapes alone. No block may be bound."""
    return analytic_profile(planner.spec, planner.workload, traits=measured_traits(model))


def _block_seconds(spans: Sequence[Span], *, lost_seconds: float) -> Mapping[int, BlockSeconds]:
    """Seconds that each block computed. `lost_seconds` is what a step's updates take of computing, if all of them are
    next to it.

    Micro-batches count with their median, because the first one of a run is slower: code and memory are cold. Each
    stage loses as much as the part of the updates that is next to it would cost.
    """
    alike: dict[SpanLabel, list[float]] = {}
    for span in spans:
        if span.resource == "compute":
            alike.setdefault(span.label, []).append(span.end - span.start)
    computing: dict[tuple[int, Stage], float] = defaultdict(float)
    for label, seconds in alike.items():
        computing[label.block, label.stage] += len(seconds) * median(seconds)
    optimizer_seconds = sum(span.end - span.start for span in spans if span.resource == "optimizer")

    def left(stage: Stage) -> float:
        """The share of the stage's computing that it would take without the optimizer next to it."""
        stage_seconds = sum(seconds for (_, each), seconds in computing.items() if each == stage)
        if not optimizer_seconds or not stage_seconds:
            return 1.0
        lost = lost_seconds * _optimizing_next_to(stage, spans) / optimizer_seconds
        return 1.0 - min(0.5, lost / stage_seconds)

    forward, backward = left("forward"), left("backward")
    return {
        block: BlockSeconds(
            forward=forward * computing[block, "forward"], backward=backward * computing[block, "backward"]
        )
        for block in {label.block for label in alike}
    }


def _optimizing_next_to(stage: Stage, spans: Sequence[Span]) -> float:
    """Seconds of the optimizer between the begin and the end of a stage's computing."""
    computing = [span for span in spans if span.resource == "compute" and span.label.stage == stage]
    begin, end = min(span.start for span in computing), max(span.end for span in computing)
    return sum(max(0.0, min(span.end, end) - max(span.start, begin)) for span in spans if span.resource == "optimizer")


def _busy_seconds(spans: Sequence[Span], *resources: Resource) -> float:
    """Seconds in which at least one of the resources has work."""
    seconds, until = 0.0, -math.inf
    for start, end in sorted((span.start, span.end) for span in spans if span.resource in resources):
        seconds += max(0.0, end - max(start, until))
        until = max(until, end)
    return seconds
