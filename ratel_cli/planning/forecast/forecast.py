"""What a run is predicted to need and to take, under either cost model: the content of `ratel plan`. Pure.

Invariant: there is a forecast even of a run that does not fit. It is made for as much memory as the run takes, and
`shortfalls` names the tiers that have less.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Literal, Protocol

from ratel_cli.hardware.shares import ONE_RANK, RankLayout, share_of
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.planning.profile.placement import Workload
from ratel_cli.planning.search.prediction import Prediction
from ratel_cli.planning.search.recorded_plan import PredictedFigures, sections_of
from ratel_cli.planning.search.split import SplitRate
from ratel_cli.planning.time.wear import WearPolicy
from ratel_cli.sizes import SPLIT_KEYS

TierName = Literal["GPU", "RAM", "NVMe", "snapshot", "export"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Everything that a forecast is for, except the model: what advice may change."""

    workload: Workload
    hardware: HardwareProfile
    host_limit_bytes: int | None = None
    """Host memory that the user allows; None takes it from the machine."""
    wear: WearPolicy = "ignore"
    num_steps: int | None = None
    """Steps of the run; None if that depends on the data."""
    clips: bool = True
    """False: gradients are not clipped, whatever the config says."""
    has_reference: bool = False
    """Whether the answers that are compared go through the model once before step 1."""
    chunk_bytes: int | None = None
    """Logits that the head computes at once, in fp32; None leaves it to the plan."""
    layout: RankLayout = ONE_RANK
    """The ranks that train. The workload is that of one of them."""
    step_keys: tuple[str, ...] = SPLIT_KEYS
    """The keys of the config that decide how many tokens a step has: those of the split into micro-batches, or that of
    the number of tokens, if the plan chose the split."""

    @cached_property
    def share(self) -> HardwareProfile:
        """What one rank has of the machine. A CPU that computes is shared, too: `hardware` is what all of it can do."""
        share = share_of(self.hardware, self.layout)
        if share.link is not None:
            return share
        flops_per_second = share.gpu.flops_per_second / self.layout.on_machine
        return replace(share, gpu=replace(share.gpu, flops_per_second=flops_per_second))

    @property
    def of_full_rows(self) -> Setting:
        """This setting for steps that are full, whatever is known of the data."""
        return replace(self, workload=replace(self.workload, filling=None))

    @property
    def has_own_split(self) -> bool:
        """Whether the user, not the plan, chose how the step is split into micro-batches."""
        return self.step_keys == SPLIT_KEYS


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One kind of memory: what is needed, what is available, and what to change if that is too little."""

    name: TierName
    need_bytes: int
    have_bytes: int
    remedy: str

    @property
    def shortfall_bytes(self) -> int:
        """Bytes by which the tier is short; 0 if it is large enough."""
        return max(0, self.need_bytes - self.have_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A prediction of one step, of the run, and of whether it fits."""

    prediction: Prediction
    """Its backward includes a separate optimizer."""
    setting: Setting
    tiers: tuple[Tier, ...]
    """Tiers that have a limit."""

    @property
    def shortfalls(self) -> tuple[Tier, ...]:
        """Tiers that are too small."""
        return tuple(tier for tier in self.tiers if tier.shortfall_bytes)

    @property
    def fits(self) -> bool:
        """Whether every tier is large enough."""
        return not self.shortfalls

    @property
    def split_rate(self) -> SplitRate:
        """What this split of the step gives, for the search among all splits."""
        return SplitRate(
            workload=self.setting.workload,
            tokens_per_second=self.prediction.tokens_per_second,
            shortfall_bytes=sum(tier.shortfall_bytes for tier in self.tiers),
            unclipped_tokens_per_second=self.prediction.unclipped_tokens_per_second,
        )

    @property
    def run_seconds(self) -> float | None:
        """Seconds of the run; None if the number of steps is not known."""
        steps = self.setting.num_steps
        return None if steps is None else steps * self.prediction.time.total

    @property
    def reference_seconds(self) -> float | None:
        """Seconds before step 1, at most, for what the reference model gives; None if there is none, or if the number
        of steps is not known."""
        steps = self.setting.num_steps if self.setting.has_reference else None
        return None if steps is None else steps * self.prediction.time.forward.total

    @property
    def run_tb_written(self) -> float | None:
        """10^12 bytes that one rank writes to NVMe in the run; None if the number of steps is not known."""
        steps = self.setting.num_steps
        return None if steps is None else steps * self.prediction.traffic.written_bytes / 1e12

    @property
    def endurance_share(self) -> float | None:
        """The share of the drives' rated endurance that the run writes; None if either is not known."""
        rated, written = self.setting.share.nvme.endurance_tb_written, self.run_tb_written
        return None if rated is None or written is None else written / rated

    @property
    def drive_seconds(self) -> float | None:
        """How long such steps can go on until the drives' rated endurance is used up; None if that is not known."""
        rated = self.setting.share.nvme.endurance_tb_written
        if rated is None:
            return None
        return rated * 1e12 * self.prediction.time.total / self.prediction.traffic.written_bytes

    def to_json(self) -> dict[str, object]:
        """The content of `ratel plan --json`."""
        figures, shortfall_bytes = (
            PredictedFigures.of(self.prediction),
            sum(tier.shortfall_bytes for tier in self.tiers),
        )
        sections = sections_of(figures, self.prediction, shortfall_bytes=shortfall_bytes)
        return {
            **sections,
            "workload": {**sections["workload"], "is_split_planned": not self.setting.has_own_split},
            "hardware": self.setting.hardware.to_json(),
            "ranks": asdict(self.setting.layout),
            "time": {
                **sections["time"],
                "run_seconds": self.run_seconds,
                "reference_seconds": self.reference_seconds,
            },
            "memory": {
                **sections["memory"],
                "tiers": [{**asdict(tier), "shortfall_bytes": tier.shortfall_bytes} for tier in self.tiers],
            },
            "wear": {
                **sections["wear"],
                "tb_written_per_run": self.run_tb_written,
                "endurance_share": self.endurance_share,
                "drive_seconds": self.drive_seconds,
            },
            "curve": [asdict(point) for point in figures.curve],
            "cost_model": self.prediction.cost_model,
        }


class Forecaster(Protocol):
    """One model under one cost model: makes a forecast for any setting."""

    def forecast(self, setting: Setting) -> Forecast:
        """The prediction for this setting. Raises BadInput if the cost model cannot handle it."""

    def rate(self, setting: Setting) -> SplitRate:
        """Return the part of the forecast that decides between settings."""

    def chunk_bytes(self, setting: Setting) -> int | None:
        """The logits that a run with this setting would compute at once; None if this cost model knows none."""
