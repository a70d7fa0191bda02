"""What a run knows of its machine and model, and the plans that follow.

Second phase of `run.finetune`. A model whose operators no step has recorded is planned from its shapes;
its first step swaps nothing and is recorded, and the steps after it follow a new plan (Ratel section IV-B).
What was recorded is kept (run/cached_profile.py) for the next time the same layers run on the same machine.

Invariant: every plan fits into what the first one was allowed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ratel_cli.console import RunLog
from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.engine.telemetry import Span
from ratel_cli.errors import DoesNotFit, EnvironmentFailure
from ratel_cli.hardware.gpu import gpu_limit_bytes
from ratel_cli.hardware.host import resident_bytes
from ratel_cli.hardware.measure import measure
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.io.files import nearest_existing
from ratel_cli.model.blocks import DecoderModel
from ratel_cli.model.skeleton import DTYPES
from ratel_cli.model.spec import ModelSpec
from ratel_cli.planning.activations import input_bytes
from ratel_cli.planning.analytic import analytic_profile, head_flops
from ratel_cli.planning.model_profile import ModelProfile
from ratel_cli.planning.placement import StateBytes, Workload
from ratel_cli.planning.plan import Decisions, Plan, make_plan
from ratel_cli.planning.recorded import BlockSeconds, recorded_profile
from ratel_cli.run.context import RunContext
from ratel_cli.run.settings import decisions_of, state_bytes, workload_of
from ratel_cli.store.copy import COPY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Everything that a run's plans have in common."""

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
        """The plan of the step that is recorded: everything but layers' inputs is recomputed."""
        return self._plan(profile, replace(self.decisions, activations="recompute"))

    def plan_again(self, profile: ModelProfile, log: RunLog) -> Plan:
        """The plan for what was recorded. If that is more than the user's wish has room for, the best that there is."""
        try:
            return self.plan(profile)
        except DoesNotFit as refusal:
            log.warn(
                f"activations: {self.decisions.activations} does not fit after all ({refusal.message}); using auto"
            )
            return self._plan(profile, replace(self.decisions, activations="auto"))

    def recorded(self, recording: StepRecording, spans: Sequence[Span]) -> ModelProfile:
        """The profile that a recorded step gives; `spans` is what happened in it."""
        tokens = self.workload.micro_batch_tokens
        return recorded_profile(
            recording.units(),
            _block_seconds(spans, num_cores=self.hardware.host.num_cores if self.hardware.link is None else None),
            num_blocks=len(self.spec.blocks),
            input_bytes=input_bytes(self.spec, self.state, tokens=tokens),
            flops_head=head_flops(self.spec, tokens=tokens),
            micro_batch_tokens=tokens,
            sequence_len=self.workload.sequence_len,
        )

    def _plan(self, profile: ModelProfile, decisions: Decisions) -> Plan:
        return make_plan(
            self.spec,
            profile,
            self.state,
            self.workload,
            decisions,
            self.hardware,
            process_bytes=self.process_bytes,
        )


def make_planner(context: RunContext, spec: ModelSpec, hardware: HardwareProfile) -> Planner:
    """For a run on this machine, now."""
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


def measure_hardware(context: RunContext, *, has_store: bool) -> HardwareProfile:
    """This machine, with the directories of the run. Raises EnvironmentFailure."""
    config, queue, pool = context.config, context.queue, context.pool
    paths, dtype = [nearest_existing(path) for path in config.storage.paths], DTYPES[config.dtype]
    try:
        return measure(paths, queue, pool, dtype=dtype, device=context.device)
    except EnvironmentFailure as failure:
        # A store that exists needs no more space, so a full disk is no reason not to go on. If memory is too small to
        # measure with, the plan says what is missing in all.
        if not has_store and not isinstance(failure, DoesNotFit):
            raise
        context.log.warn(f"the drives could not be measured: {failure.message}; the prediction assumes 1 GB/s")
        return measure(paths, queue, pool, dtype=dtype, device=context.device, nvme_rates=(1e9, 1e9))


def estimated_profile(planner: Planner, model: DecoderModel) -> ModelProfile:
    """From shapes alone."""
    return analytic_profile(
        planner.spec,
        planner.state,
        traits=model.traits,
        micro_batch_tokens=planner.workload.micro_batch_tokens,
        sequence_len=planner.workload.sequence_len,
    )


def _block_seconds(spans: Sequence[Span], *, num_cores: int | None) -> Mapping[int, BlockSeconds]:
    """What each block computed. Where the CPU does, the optimizer's thread had a core of it meanwhile.

    Micro-batches count by their median: the first one of a run meets code and memory that no step after it finds cold.
    """
    alike: dict[tuple[int, str, str], list[float]] = {}
    for span in spans:
        if span.resource == "compute":
            alike.setdefault((span.block, span.stage, span.label), []).append(span.end - span.start)
    computing: dict[tuple[int, str], float] = defaultdict(float)
    for (block, stage, _), seconds in alike.items():
        computing[block, stage] += len(seconds) * median(seconds)
    shared = 0.0
    if num_cores is not None:
        backward_seconds = sum(seconds for (_, stage), seconds in computing.items() if stage == "backward")
        optimizing = sum(span.end - span.start for span in spans if span.resource == "optimizer")
        shared = min(0.5, optimizing / num_cores / max(backward_seconds, 1e-9))
    return {
        block: BlockSeconds(
            forward=computing[block, "forward"],
            backward=(1 - shared) * computing[block, "backward"],
        )
        for block in {block for block, _ in computing}
    }
