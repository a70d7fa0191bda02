"""What `ratel plan` reads: the model from its shape or its config.json, the machine from a file or from the cache.

No weights are read and nothing is downloaded. A machine that nothing is known about is measured, in about a second.

Invariants: the plan names its machine; free memory and free space of this machine are current.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ratel_cli.config.keys.schema import ModelShape, RunConfig
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput
from ratel_cli.hardware.shares import ONE_RANK, RankLayout
from ratel_cli.hardware.spec import HardwareProfile, Network
from ratel_cli.io.files import device_of
from ratel_cli.papers.paper_forecast import PaperForecaster
from ratel_cli.papers.ratel import PaperShape, with_layers
from ratel_cli.planning.forecast.forecast import Forecast, Forecaster, Setting, Tier
from ratel_cli.planning.forecast.ratel_forecast import RatelForecaster, rank_slice_of
from ratel_cli.planning.profile.analytic import analytic_profile
from ratel_cli.planning.profile.placement import Workload
from ratel_cli.planning.search.split import best_split
from ratel_cli.run.files.hardware_file import load_hardware
from ratel_cli.run.files.profile_cache import (
    REFRESHES,
    ProfileTarget,
    cached_machine_profile,
    profile_target,
    refresh_free_space,
)
from ratel_cli.run.files.run_directory import HARDWARE_NAME, CachedProfile, run_directory
from ratel_cli.run.inputs.length import known_steps
from ratel_cli.run.inputs.model_description import describe_model
from ratel_cli.run.inputs.settings import decisions_of, wear_limit, workload_of
from ratel_cli.run.train.first_checks import notice_slow_dtype
from ratel_cli.run.train.space import spaces_of, taken_bytes
from ratel_cli.sizes import SPLIT_KEYS, Filling
from ratel_cli.units import MIB, parse_rate

_PROCESS_BYTES = 460 * MIB
"""What a run takes before training: Python, torch, transformers, a skeleton (2-core Xeon, 2026-11)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The ranks to plan for, and machines like the one that is planned for."""

    num_ranks: int = 1
    num_machines: int = 1
    network: str | None = None
    """The rate of a machine, as `--network` has it; None: as the hardware file says."""

    @property
    def on_machine(self) -> int:
        """The number of ranks on each machine; on the last one there may be fewer."""
        return -(-self.num_ranks // self.num_machines)

    def layout(self, *, on_drives: int) -> RankLayout:
        """Where the ranks are. `on_drives`: how many of a machine share its drives."""
        return RankLayout(num_ranks=self.num_ranks, on_machine=self.on_machine, on_drives=on_drives)

    def of_machines(self, hardware: HardwareProfile) -> HardwareProfile:
        """One of these machines. Raises BadInput if ranks cannot be on them, or their network is not known."""
        if self.num_machines > self.num_ranks:
            message = f"argument '--nodes': {self.num_ranks} ranks cannot be on {self.num_machines} machines"
            raise BadInput(message, "lower --nodes, or raise --ranks")
        if self.network is not None:
            try:
                rate = parse_rate(self.network)
                if rate <= 0:
                    raise ValueError(self.network)
            except (ValueError, OverflowError) as error:
                message = f"argument '--network': must be a rate like 25GB/s, not {self.network!r}"
                raise BadInput(message) from error
            return replace(hardware, network=Network(bytes_per_second=rate))
        if self.num_machines > 1 and hardware.network is None:
            raise BadInput("the network between the machines is not known", "add --network RATE, such as 25GB/s")
        return hardware


def setting_of(
    config: RunConfig,
    hardware: HardwareProfile,
    *,
    step_keys: tuple[str, ...] = SPLIT_KEYS,
    layout: RankLayout = ONE_RANK,
    filling: Filling | None = None,
) -> Setting:
    """What to plan for: the config's step, on this machine, with drives of the endurance that the config gives.
    `step_keys`: those of the config as it was written. `layout`: the ranks that train. `filling`: of the data's steps;
    None: they are full."""
    endurance_tb = config.storage.endurance_tb or hardware.nvme.endurance_tb_written
    return Setting(
        workload=replace(workload_of(config), filling=filling),
        hardware=replace(hardware, nvme=replace(hardware.nvme, endurance_tb_written=endurance_tb)),
        host_limit_bytes=config.limits.host_memory,
        wear=config.resolved_wear,
        has_reference=config.has_reference,
        chunk_bytes=None if config.head_chunk == "auto" else config.head_chunk,
        num_steps=known_steps(config if layout.num_ranks == 1 else config.of_ranks(layout.num_ranks)),
        layout=layout,
        step_keys=step_keys,
    )


def forecaster_of(
    config: RunConfig, hardware: HardwareProfile, *, name: str, log: RunLog, is_recorded: bool = True
) -> Forecaster:
    """The config's model under its cost model; `name` is for a `model_shape`, which has none. Raises BadInput.

    `is_recorded`: costs that an earlier run recorded are used, if there are any.
    """
    if config.cost_model == "paper":
        shape = config.model_shape
        if shape is None:
            raise BadInput(
                "`cost_model: paper` needs `model_shape`: the paper's equations are for GPT-type models",
                "see configs/models for the papers' models, or leave cost_model at `ratel`",
            )
        limit_bytes = config.limits.gpu_memory
        return PaperForecaster(name=name, shape=paper_shape(shape, config), gpu_limit_bytes=limit_bytes)
    model = describe_model(config, name=name, log=log)
    recorded = CachedProfile(config, model.spec, hardware).read() if is_recorded else None
    estimate = analytic_profile(model.spec, workload_of(config), traits=model.traits)
    return RatelForecaster(
        spec=model.spec,
        profile=recorded or estimate,
        decisions=decisions_of(config, host_limit_bytes=0),
        process_bytes=_PROCESS_BYTES,
        estimate=estimate,
    )


def with_planned_split(
    config: RunConfig, hardware: HardwareProfile, *, name: str, log: RunLog, layout: RankLayout = ONE_RANK
) -> RunConfig:
    """The config with the split that a new run's plan chooses, from shapes alone; as it is if it names a split.
    `config`: of each of the ranks that `layout` has."""
    if config.split is not None:
        return config
    unsplit = config.split_by(1)
    forecaster = forecaster_of(unsplit, hardware, name=name, log=log, is_recorded=False)
    setting = setting_of(unsplit, hardware, layout=layout)

    return config.split_by(best_workload(forecaster, setting).micro_batch_size)


def best_workload(forecaster: Forecaster, setting: Setting) -> Workload:
    """A step of the setting in the split that is the fastest."""
    return best_split(setting.workload, lambda workload: forecaster.rate(replace(setting, workload=workload))).workload


def with_planned_chunk(config: RunConfig, hardware: HardwareProfile, *, name: str, log: RunLog) -> RunConfig:
    """The config with the chunks of the head that a new run's plan chooses; as it is if it names their size."""
    if not config.is_chunk_planned:
        return config
    forecaster = forecaster_of(config, hardware, name=name, log=log, is_recorded=False)
    if not isinstance(forecaster, RatelForecaster):
        return config
    return config.chunked_by(forecaster.chunk_bytes(setting_of(config, hardware)))


def with_space_tiers(forecast: Forecast, config: RunConfig, forecaster: Forecaster) -> Forecast:
    """The forecast with the tiers of the snapshot's device, if the config asks for a snapshot, and of the export's, on
    this machine.

    Only a run knows the export to the byte: here it is its weights alone.
    """
    if not isinstance(forecaster, RatelForecaster):
        return forecast
    setting = forecast.setting
    spaces = spaces_of(
        config,
        forecaster.spec,
        nvme_bytes=forecast.prediction.nvme_bytes,
        own=forecaster.spec.sliced(rank_slice_of(setting, forecaster.spec)),
        layout=setting.layout,
    )
    tiers = (
        Tier(
            name=space.name,
            need_bytes=space.need_bytes,
            have_bytes=space.available_bytes,
            remedy=f"set {space.option} to a device with more space",
        )
        for space in spaces
    )
    return replace(forecast, tiers=(*forecast.tiers, *tiers))


def wear_warning(config: RunConfig, forecaster: Forecaster, setting: Setting) -> str | None:
    """What `storage.max_tb_written` does to a new run of `max_steps`; None if it allows all of them."""
    if not isinstance(forecaster, RatelForecaster) or config.max_steps is None:
        return None
    shares = (1,) * len(config.storage.paths)
    own = forecaster.spec.sliced(rank_slice_of(setting, forecaster.spec))
    number = setting.layout.on_drives
    limit = wear_limit(config, own.stored_blocks, shares=shares, first_step=0, num_sharing=number)
    return None if limit is None else limit.warning(config.max_steps)


def paper_shape(shape: ModelShape, config: RunConfig) -> PaperShape:
    """A `model_shape` as the papers count it, with the config's micro-batch."""
    counted = PaperShape(
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        num_parameters=shape.num_parameters or 0,
        batch_size=config.known_split[0],
        sequence_len=config.sequence_len,
    )
    return counted if shape.num_parameters else with_layers(counted, shape.num_layers)


def on_same_drives(stores: Sequence[Sequence[Path]]) -> list[Sequence[Path]]:
    """Choose the stores, each given by its directories, that are on the drives of the first."""
    return [paths for paths in stores if set(map(device_of, paths)) == set(map(device_of, stores[0]))]


def find_hardware(
    config: RunConfig, file: Path | None, log: RunLog, *, stores: Sequence[Sequence[Path]] = ()
) -> HardwareProfile:
    """The machine of `--hardware`, of the config's last run, of the last `ratel profile`, or measured briefly, in this
    order. `stores`: the directories of the stores of all ranks on its drives, whose space is theirs already; by default
    of the config's.

    Raises EnvironmentFailure if this machine cannot be measured.
    """
    if file is not None:
        return load_hardware(file)
    notice_slow_dtype(config, log.notice)
    target = profile_target(config)
    of_run = run_directory(config.output_dir) / HARDWARE_NAME
    if of_run.is_file():
        log.say(f"planning for this machine, as the run in {config.output_dir} measured it")
        hardware = refresh_free_space(load_hardware(of_run), target)
    else:
        hardware = cached_machine_profile(target, log, refreshed_by=REFRESHES) or _measured(target, log)
    nvme = hardware.nvme
    taken = sum(map(taken_bytes, stores or [config.storage.paths]))
    return replace(hardware, nvme=replace(nvme, free_bytes=nvme.free_bytes + taken))


def _measured(target: ProfileTarget, log: RunLog) -> HardwareProfile:
    from ratel_cli.run.train.profile_machine import measure_briefly

    return measure_briefly(target, log)
