"""What a run is predicted to need and to take, under either cost model: the content of `ratel plan`. Pure.

Invariant: there is a forecast even of a run that does not fit. It is made for as much memory as the run takes, and
`shortfalls` names the tiers that have less.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, Protocol

from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.planning.model_profile import Source
from ratel_cli.planning.papers.prefix import Case, Equations
from ratel_cli.planning.placement import Workload
from ratel_cli.planning.plan import SwappedOperator
from ratel_cli.planning.step_time import StageTime

CostModel = Literal["ratel", "paper"]
TierName = Literal["GPU", "RAM", "NVMe", "snapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything that a forecast is for, except the model: what advice may change."""

    workload: Workload
    hardware: HardwareProfile
    host_limit_bytes: int | None = None
    """Host memory that the user allows; None takes it from the machine."""
    num_steps: int | None = None
    """Steps of the run; None if that depends on the data."""


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
    """A prediction of one step and of the run. Numbers are for one step unless they say otherwise."""

    cost_model: CostModel
    source: Source
    """Whether operators' costs were recorded, or estimated from shapes."""
    model_name: str
    num_parameters: int
    num_blocks: int
    flops_forward: int
    setting: Setting
    swappable_bytes: int
    """Layers' inputs and all outputs that could be swapped."""
    inter_block_bytes: int
    """Layers' inputs, which are always offloaded."""
    swapped_bytes: int
    """Everything that is offloaded, inputs included."""
    swapped_to_nvme_bytes: int
    gpu_activation_bytes: int
    """The part of `swapped_bytes` that stays on the GPU."""
    swap_set: tuple[SwappedOperator, ...]
    """The greatest benefit first."""
    recompute_flops: int
    case: Case
    forward: StageTime
    backward: StageTime
    """Includes a separate optimizer."""
    bottleneck: str
    nvme_read_bytes: int
    nvme_written_bytes: int
    gpu_bytes: int
    host_bytes: int
    nvme_bytes: int
    tiers: tuple[Tier, ...]
    """Tiers that have a limit."""
    curve: tuple[tuple[int, float], ...]
    """Bytes offloaded, and the step's seconds then."""

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.forward.total + self.backward.total

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a step per second."""
        return self.setting.workload.tokens / self.step_seconds

    @property
    def tflops_model(self) -> float:
        """10^12 FLOPs of the model per second, recomputation not counted."""
        return 3 * self.flops_forward / self.step_seconds / 1e12

    @property
    def tflops_hardware(self) -> float:
        """10^12 FLOPs per second, recomputation included."""
        return (3 * self.flops_forward + self.recompute_flops) / self.step_seconds / 1e12

    @property
    def shortfalls(self) -> tuple[Tier, ...]:
        """Tiers that are too small."""
        return tuple(tier for tier in self.tiers if tier.shortfall_bytes)

    @property
    def fits(self) -> bool:
        """Whether every tier is large enough."""
        return not self.shortfalls

    @property
    def run_seconds(self) -> float | None:
        """Seconds of the run; None if the number of steps is not known."""
        steps = self.setting.num_steps
        return None if steps is None else steps * self.step_seconds

    @property
    def run_tb_written(self) -> float | None:
        """10^12 bytes written to NVMe in the run; None if the number of steps is not known."""
        steps = self.setting.num_steps
        return None if steps is None else steps * self.nvme_written_bytes / 1e12

    @property
    def endurance_share(self) -> float | None:
        """The share of the drives' rated endurance that the run writes; None if either is not known."""
        rated, written = self.setting.hardware.nvme.endurance_tb_written, self.run_tb_written
        return None if rated is None or written is None else written / rated

    def to_json(self) -> dict[str, object]:
        """The content of `ratel plan --json`."""
        return {
            "model": {
                "name": self.model_name,
                "num_parameters": self.num_parameters,
                "num_blocks": self.num_blocks,
                "flops_forward": self.flops_forward,
            },
            "hardware": self.setting.hardware.to_json(),
            "activations": {
                "total_bytes": self.swappable_bytes,
                "inter_block_bytes": self.inter_block_bytes,
                "swapped_bytes": self.swapped_bytes,
                "swapped_to_nvme_bytes": self.swapped_to_nvme_bytes,
                "kept_on_gpu_bytes": self.gpu_activation_bytes,
                "swap_set": [asdict(operator) for operator in self.swap_set],
                "recompute_flops": self.recompute_flops,
                "source": self.source,
            },
            "time": {
                "forward": self.forward.to_json(),
                "backward": self.backward.to_json(),
                "forward_seconds": self.forward.total,
                "backward_seconds": self.backward.total,
                "step_seconds": self.step_seconds,
                "run_seconds": self.run_seconds,
                "bottleneck": self.bottleneck,
                "case": self.case,
            },
            "traffic": {"nvme_read_bytes": self.nvme_read_bytes, "nvme_written_bytes": self.nvme_written_bytes},
            "memory": {
                "gpu_bytes": self.gpu_bytes,
                "host_bytes": self.host_bytes,
                "nvme_bytes": self.nvme_bytes,
                "fits": self.fits,
                "shortfall_bytes": sum(tier.shortfall_bytes for tier in self.tiers),
                "tiers": [{**asdict(tier), "shortfall_bytes": tier.shortfall_bytes} for tier in self.tiers],
            },
            "throughput": {
                "tokens_per_second": self.tokens_per_second,
                "tflops_model": self.tflops_model,
                "tflops_hardware": self.tflops_hardware,
            },
            "wear": {
                "tb_written_per_step": self.nvme_written_bytes / 1e12,
                "tb_written_per_run": self.run_tb_written,
                "endurance_share": self.endurance_share,
            },
            "curve": [{"swapped_bytes": num_bytes, "step_seconds": seconds} for num_bytes, seconds in self.curve],
            "cost_model": self.cost_model,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """The number of layers of a model with another depth, and its parameters."""

    num_layers: int
    num_parameters: int


class Forecaster(Protocol):
    """One model under one cost model: makes a forecast for any setting."""

    def forecast(self, setting: Setting) -> Forecast:
        """The prediction for this setting. Raises BadInput if the cost model cannot handle it."""
        ...

    def deepest(self, setting: Setting) -> Depth | None:
        """The model of this width with the most layers that fit; None if not even one layer does."""
        ...

    def equations(self, setting: Setting) -> Equations:
        """The same cost model in the form that other systems' choices are compared by (planning/papers)."""
        ...
