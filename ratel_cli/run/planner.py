"""A run's planner: makes one plan after another for the same model, machine and limits.

The first plan of a model that was never recorded follows from its shapes. Its first step offloads nothing and is
recorded; the steps after it follow a new plan (Ratel section IV-B).

Invariant: every plan stays within the limits of the first one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ratel_cli.console import RunLog
from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.engine.telemetry import Span, SpanLabel
from ratel_cli.errors import DoesNotFit
from ratel_cli.hardware.gpu import gpu_limit_bytes
from ratel_cli.hardware.host import resident_bytes
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.model.blocks import DecoderModel
from ratel_cli.model.spec import ModelSpec
from ratel_cli.planning.analytic import analytic_profile
from ratel_cli.planning.model_profile import ModelProfile
from ratel_cli.planning.placement import StateBytes, Workload
from ratel_cli.planning.plan import Plan, make_plan
from ratel_cli.planning.problem import Decisions, Problem
from ratel_cli.planning.recorded import BlockSeconds, recorded_profile
from ratel_cli.run.context import RunContext
from ratel_cli.run.settings import decisions_of, state_bytes, workload_of
from ratel_cli.store.copy import COPY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Makes plans. Its fields are what all plans of a run have in common."""

    spec: ModelSpec
    state: StateBytes
    workload: Workload
    decisions: Decisions
    hardware: HardwareProfile
    process_bytes: int

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

    def recorded(self, recording: StepRecording, spans: Sequence[Span]) -> ModelProfile:
        """The profile of the model from a recorded step and the spans of its work."""
        return recorded_profile(
            recording.units(),
            _block_seconds(spans, num_cores=self.hardware.host.num_cores if self.hardware.link is None else None),
            self.spec,
            self.state,
            self.workload,
        )

    def _plan(self, profile: ModelProfile, decisions: Decisions) -> Plan:
        return make_plan(
            Problem(
                spec=self.spec,
                state=self.state,
                workload=self.workload,
                profile=profile,
                hardware=self.hardware,
                decisions=decisions,
                process_bytes=self.process_bytes,
            )
        )


def make_planner(context: RunContext, spec: ModelSpec, hardware: HardwareProfile) -> Planner:
    """The planner of a run, with the memory that is free now."""
    config = context.config
    decisions = decisions_of(config, host_limit_bytes=context.host_limit_bytes)
    if context.device.type == "cuda":
        gpu_bytes = gpu_limit_bytes(context.device, config.limits.gpu_memory)
        decisions = replace(decisions, device_limit_bytes=gpu_bytes)
    return Planner(
        spec=spec,
        state=state_bytes(config),
        workload=workload_of(config),
        decisions=decisions,
        hardware=hardware,
        process_bytes=resident_bytes() + (COPY_BYTES if config.storage.snapshot is not None else 0),
    )


def estimated_profile(planner: Planner, model: DecoderModel) -> ModelProfile:
    """The model's profile from its shapes alone."""
    return analytic_profile(planner.spec, planner.state, planner.workload, traits=model.traits)


def _block_seconds(spans: Sequence[Span], *, num_cores: int | None) -> Mapping[int, BlockSeconds]:
    """Seconds that each block computed. `num_cores` is the number of cores if the CPU computes, else None.

    Micro-batches count with their median, because the first one of a run is slower: code and memory are cold. On the
    CPU, the optimizer's threads take cores from backward, so their share is subtracted.
    """
    alike: dict[SpanLabel, list[float]] = {}
    for span in spans:
        if span.resource == "compute":
            alike.setdefault(span.label, []).append(span.end - span.start)
    computing: dict[tuple[int, str], float] = defaultdict(float)
    for label, seconds in alike.items():
        computing[label.block, label.stage] += len(seconds) * median(seconds)
    shared = 0.0
    if num_cores is not None:
        backward_seconds = sum(seconds for (_, stage), seconds in computing.items() if stage == "backward")
        optimizing = sum(span.end - span.start for span in spans if span.resource == "optimizer")
        shared = min(0.5, optimizing / num_cores / max(backward_seconds, 1e-9))
    return {
        block: BlockSeconds(forward=computing[block, "forward"], backward=(1 - shared) * computing[block, "backward"])
        for block in {label.block for label in alike}
    }
