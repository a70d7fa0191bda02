"""Records what a config's model costs on this machine, operator by operator, for `ratel profile CONFIG`.

One micro-batch of any tokens and weights of any values are enough: no base weights are read and no data is needed, only
the model's config. The profile is cached where a run of the same config looks for it.

Invariant: the cached profile is the one that a recorded step of the run would give, except for noise in its times.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.engine.measure.telemetry import Timeline
from ratel_cli.engine.steps.build import open_device
from ratel_cli.engine.steps.footprint import measured_traits
from ratel_cli.errors import EnvironmentFailure
from ratel_cli.hardware.gpu import compute_device, determinism
from ratel_cli.hardware.host import default_limit_bytes, kept_bytes
from ratel_cli.hardware.load import LoadMeter
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.io.buffers import BufferPool
from ratel_cli.model.cut.cut_model import AnyModel
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.duties.step import PlannedStep
from ratel_cli.planning.memory.capacity import StepMemory
from ratel_cli.planning.memory.gpu_memory import GpuMemory
from ratel_cli.planning.profile.activations import NOTHING_OFFLOADED
from ratel_cli.planning.profile.analytic import analytic_profile
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.planning.profile.placement import Placement
from ratel_cli.planning.profile.recorded import recorded_profile
from ratel_cli.run.files.output import check_run_output, claim_output
from ratel_cli.run.files.profile_cache import REFRESHES
from ratel_cli.run.files.run_directory import MODEL_NAME, CachedProfile
from ratel_cli.run.files.run_files import list_run_files, write_run_file
from ratel_cli.run.inputs.base_kinds import build_model
from ratel_cli.run.inputs.process import prepare_process
from ratel_cli.run.inputs.settings import chunked_workload_of, decisions_of
from ratel_cli.run.train.profile_machine import report_other_load
from ratel_cli.run.train.trial import adamw_beside, block_profiler


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """What a model costs on this machine."""

    profile: ModelProfile
    activation_available_bytes: int
    """Host memory that a run has left for activations, at the peak of a step (the paper's MEM_avail)."""


def record_model(config: RunConfig, hardware: HardwareProfile, log: RunLog, *, refresh: bool) -> ModelCosts:
    """The model's costs: cached ones, or measured ones if there are none or with `refresh`. Raises RatelError."""
    prepare_process()
    model = build_model(config)
    cache = CachedProfile(config, model.spec, hardware)
    profile = None if refresh else cache.read()
    if profile is not None:
        log.say(f"the model's costs come from {cache.path}; {REFRESHES} measures again")
        return _costs(config, model.spec, hardware, profile)
    check_run_output(config, [MODEL_NAME], overwrite=False)
    log.say("measuring the model, block by block")
    meter = LoadMeter()
    profile = measure_model(config, model, hardware, log)
    report_other_load(meter, log)
    claim_output(config)
    try:
        list_run_files(config.output_dir, [MODEL_NAME])
        cache.path.parent.mkdir(parents=True, exist_ok=True)
        write_run_file(cache.path, json.dumps(cache.content(model.spec, profile), indent=2) + "\n")
    except OSError as error:
        raise EnvironmentFailure(f"{cache.path}: cannot be written: {error.strerror}") from error
    log.say(f"wrote {cache.path}; `ratel plan` and `ratel finetune` use it")
    return _costs(config, model.spec, hardware, profile)


def _costs(config: RunConfig, spec: ModelSpec, hardware: HardwareProfile, profile: ModelProfile) -> ModelCosts:
    """The profile, and the bytes that the limit leaves next to a step that runs ahead and offloads nothing."""
    limit_bytes = config.limits.host_memory or default_limit_bytes()
    decisions = decisions_of(config, host_limit_bytes=limit_bytes)
    workload = chunked_workload_of(config, spec)
    step = PlannedStep(
        spec=spec,
        own=spec,
        workload=workload,
        on_gpu=hardware.link is not None,
        holds_gradients=decisions.holds_gradients,
        overlap=decisions.overlap,
    )
    gpu = GpuMemory(spec, workload, profile) if step.on_gpu else None
    memory, _ = StepMemory(step, process_bytes=kept_bytes(), gpu=gpu).fit(
        Placement(prefetch_blocks=2, pending_updates=2), NOTHING_OFFLOADED, limit_bytes=sys.maxsize
    )
    return ModelCosts(profile=profile, activation_available_bytes=max(0, limit_bytes - memory.total))


def measure_model(
    config: RunConfig, model: AnyModel, hardware: HardwareProfile, log: RunLog, *, num_samples: int = 1
) -> ModelProfile:
    """The model's costs on one micro-batch, whose rows have this many samples each. Nothing is cached."""
    spec = model.spec
    workload = chunked_workload_of(config, spec)
    estimate = analytic_profile(spec, workload, traits=measured_traits(model))
    device = compute_device(config.device)
    with (
        determinism(config.deterministic, device, notice=log.notice),  # it decides how attention computes
        open_device(device, Timeline()) as opened,
        BufferPool(None) as pool,
    ):
        placement = Placement(gpu_holds_head=False)
        profiler = block_profiler(model, pool, opened, dtype=config.dtype, placement=placement, workload=workload)
        batch = model.any_batch(workload.micro_batch_size, workload.sequence_len, num_samples=num_samples)
        units, seconds = profiler.record(batch, beside=adamw_beside(pool, hardware.host, opened))
    profile = recorded_profile(units, seconds, spec, workload, num_micro_batches=1, estimate=estimate)
    return replace(profile, adamw_share=profiler.sharing)
