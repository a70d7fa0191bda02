"""What a run is predicted to need and to take, under either cost model: what `ratel plan` tells.

`ratel_forecast` and `paper_forecast` make them; `advice` asks for several, of settings that
differ in one thing. Pure.

Invariant: there is a forecast even of what does not fit; then it is the one for as much memory as it takes, and
`shortfalls` says in which tiers that is too much.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, Protocol

from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.planning.model_profile import Source
from ratel_cli.planning.papers.prefix import Case, Equations
from ratel_cli.planning.placement import Workload
from ratel_cli.planning.plan import SwappedOperator

CostModel = Literal["ratel", "paper"]
TierName = Literal["GPU", "RAM", "NVMe", "snapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a forecast is for, but for the model: all that advice may change."""

    workload: Workload
    hardware: HardwareProfile
    host_limit_bytes: int | None = None
    """Of main memory, where the user gave one; else it follows from the machine's."""
    num_steps: int | None = None
    """Of the run, where that is known without its data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One kind of memory: what is needed, what is there, and what to change."""

    name: TierName
    need_bytes: int
    have_bytes: int
    remedy: str

    @property
    def shortfall_bytes(self) -> int:
        return max(0, self.need_bytes - self.have_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Seconds for which each resource is busy in forward or backward, and what that stage takes."""

    compute: float
    up: float
    down: float
    nvme: float
    optimizer: float
    memory: float
    """Of main memory; 0 where the cost model leaves it out."""
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Of one step, and of the run."""

    cost_model: CostModel
    source: Source
    """Whether operators' costs were recorded, or estimated from shapes."""
    model_name: str
    num_parameters: int
    num_blocks: int
    flops_forward: int
    setting: Setting
    swappable_bytes: int
    inter_block_bytes: int
    swapped_bytes: int
    swapped_to_nvme_bytes: int
    kept_on_gpu_bytes: int
    swap_set: tuple[SwappedOperator, ...]
    recompute_flops: int
    case: Case
    forward: Stage
    backward: Stage
    bottleneck: str
    nvme_read_bytes: int
    nvme_written_bytes: int
    gpu_bytes: int
    host_bytes: int
    nvme_bytes: int
    tiers: tuple[Tier, ...]
    """Those that have a limit."""
    curve: tuple[tuple[int, float], ...]
    """Bytes swapped, and the step's seconds then."""

    @property
    def step_seconds(self) -> float:
        return self.forward.total + self.backward.total

    @property
    def tokens_per_second(self) -> float:
        return self.setting.workload.tokens / self.step_seconds

    @property
    def tflops_model(self) -> float:
        """Recomputation not counted."""
        return 3 * self.flops_forward / self.step_seconds / 1e12

    @property
    def tflops_hardware(self) -> float:
        return (3 * self.flops_forward + self.recompute_flops) / self.step_seconds / 1e12

    @property
    def shortfalls(self) -> tuple[Tier, ...]:
        """Tiers that are too small."""
        return tuple(tier for tier in self.tiers if tier.shortfall_bytes)

    @property
    def fits(self) -> bool:
        return not self.shortfalls

    @property
    def run_seconds(self) -> float | None:
        """None where the number of steps is not known."""
        steps = self.setting.num_steps
        return None if steps is None else steps * self.step_seconds

    @property
    def run_tb_written(self) -> float | None:
        """10^12 bytes; None where the number of steps is not known."""
        steps = self.setting.num_steps
        return None if steps is None else steps * self.nvme_written_bytes / 1e12

    @property
    def endurance_share(self) -> float | None:
        """Of what the drives are rated for, what the run writes; None where either is not known."""
        rated, written = self.setting.hardware.nvme.endurance_tb_written, self.run_tb_written
        return None if rated is None or written is None else written / rated

    def to_json(self) -> dict[str, object]:
        """The keys of `ratel plan --json`."""
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
                "kept_on_gpu_bytes": self.kept_on_gpu_bytes,
                "swap_set": [asdict(operator) for operator in self.swap_set],
                "recompute_flops": self.recompute_flops,
                "source": self.source,
            },
            "time": {
                "forward": _stage_json(self.forward),
                "backward": _stage_json(self.backward),
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
    """A model of another depth."""

    num_layers: int
    num_parameters: int


class Forecaster(Protocol):
    """A model under a cost model: forecasts for any setting."""

    def forecast(self, setting: Setting) -> Forecast: ...

    def deepest(self, setting: Setting) -> Depth | None:
        """Of its width, with as many layers as fit; None if not even one does."""
        ...

    def equations(self, setting: Setting) -> Equations:
        """The same cost model, for `planning.papers.strategies`."""
        ...


def _stage_json(stage: Stage) -> dict[str, float]:
    return {name: seconds for name, seconds in asdict(stage).items() if name != "total"}
