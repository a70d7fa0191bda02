"""What `ratel plan` reads: the model from its shape or its config.json, the machine from a file or from the cache.

No weights are read, nothing is downloaded and nothing is measured.

Invariants: the plan names its machine; free memory and free space of this machine are current.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ratel_cli.config.schema import ModelShape, RunConfig
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput, EnvironmentFailure
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.planning.analytic import analytic_profile
from ratel_cli.planning.forecast.forecast import Forecaster, Setting, Tier
from ratel_cli.planning.forecast.paper_forecast import PaperForecaster
from ratel_cli.planning.forecast.ratel_forecast import RatelForecaster
from ratel_cli.planning.papers.largest import with_layers
from ratel_cli.planning.papers.paper import PaperShape
from ratel_cli.run.hardware_file import load_hardware
from ratel_cli.run.model_description import describe_model
from ratel_cli.run.profile_cache import cached_machine_profile, profile_target, refresh_free_space
from ratel_cli.run.run_directory import CachedProfile, run_directory
from ratel_cli.run.settings import decisions_of, snapshot_space, state_bytes, taken_bytes, workload_of
from ratel_cli.units import MIB

_PROCESS_BYTES = 460 * MIB
"""What a run takes before training: Python, torch, transformers, a skeleton (2-core Xeon, 2026-11)."""


def setting_of(config: RunConfig, hardware: HardwareProfile) -> Setting:
    """What to plan for: the config's step, on this machine."""
    return Setting(
        workload=workload_of(config),
        hardware=hardware,
        host_limit_bytes=config.limits.host_memory,
        num_steps=config.max_steps,
    )


def forecaster_of(config: RunConfig, hardware: HardwareProfile, *, name: str, log: RunLog) -> Forecaster:
    """The config's model under its cost model; `name` is for a `model_shape`, which has none. Raises BadInput."""
    if config.cost_model == "paper":
        return _paper_forecaster(config, name)
    model = describe_model(config, name=name, log=log)
    state = state_bytes(config)
    recorded = CachedProfile(config, model.spec, hardware).read()
    return RatelForecaster(
        spec=model.spec,
        profile=recorded or analytic_profile(model.spec, state, workload_of(config), traits=model.traits),
        state=state,
        decisions=decisions_of(config, host_limit_bytes=0),
        process_bytes=_PROCESS_BYTES,
    )


def snapshot_tiers(config: RunConfig, forecaster: Forecaster, *, nvme_bytes: int) -> tuple[Tier, ...]:
    """The tier of the snapshot's device on this machine; empty if the config asks for no snapshot."""
    if not isinstance(forecaster, RatelForecaster):
        return ()
    space = snapshot_space(config, forecaster.spec, nvme_bytes=nvme_bytes)
    if space is None:
        return ()
    remedy = "set storage.snapshot.path to a device with more space"
    return (Tier(name="snapshot", need_bytes=space.need_bytes, have_bytes=space.available_bytes, remedy=remedy),)


def paper_shape(shape: ModelShape, config: RunConfig) -> PaperShape:
    """A `model_shape` as the papers count it, with the config's micro-batch."""
    counted = PaperShape(
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        num_parameters=shape.num_parameters or 0,
        batch_size=config.micro_batch_size,
        sequence_len=config.sequence_len,
    )
    return counted if shape.num_parameters else with_layers(counted, shape.num_layers)


def find_hardware(config: RunConfig, file: Path | None, log: RunLog) -> HardwareProfile:
    """The machine of `--hardware`, of the config's last run, or of the last `ratel profile`, in this order.

    Raises EnvironmentFailure if there is none of these.
    """
    if file is not None:
        return load_hardware(file)
    target = profile_target(config)
    of_run = run_directory(config.output_dir) / "hardware.json"
    if of_run.is_file():
        log.say(f"planning for this machine, as the run in {config.output_dir} measured it")
        hardware = refresh_free_space(load_hardware(of_run), target)
    else:
        cached = cached_machine_profile(target, log)
        if cached is None:
            raise EnvironmentFailure(
                "this machine has not been measured yet, and no hardware file is given",
                "run `ratel profile` with this config first, or plan for another machine: --hardware FILE",
            )
        hardware = cached
    nvme = hardware.nvme
    return replace(hardware, nvme=replace(nvme, free_bytes=nvme.free_bytes + taken_bytes(config)))


def _paper_forecaster(config: RunConfig, name: str) -> PaperForecaster:
    if config.model_shape is None:
        raise BadInput(
            "`cost_model: paper` needs `model_shape`: the paper's equations are for GPT-type models",
            "see configs/models for the papers' models, or leave cost_model at `ratel`",
        )
    return PaperForecaster(
        name=name, shape=paper_shape(config.model_shape, config), gpu_limit_bytes=config.limits.gpu_memory
    )
