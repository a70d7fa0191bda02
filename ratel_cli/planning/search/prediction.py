"""What one step is predicted to take, under either cost model: the part that a plan and a forecast share. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ratel_cli.planning.profile.activations import OffloadedActivations
from ratel_cli.planning.profile.model_profile import Source
from ratel_cli.planning.profile.placement import Workload
from ratel_cli.planning.time.network import NO_TRAFFIC, NetworkTraffic
from ratel_cli.planning.time.step_time import StepTime
from ratel_cli.planning.time.traffic import Traffic
from ratel_cli.planning.time.wear import WearTrade

Case = Literal[1, 2, 3]
"""Section IV-D. 1: swapping never helps. 2: everything that costs FLOPs is swapped. 3: the optimum lies between."""

CostModel = Literal["ratel", "paper"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedOperator:
    """One operator's output, swapped in one or more layers. A row of `swap_set` in plan.json."""

    operator: str
    blocks: int
    """Number of layers in which it is swapped."""
    bytes: int
    """Bytes of all of them and of all micro-batches."""
    flops: int
    """FLOPs that need not be recomputed."""
    seconds: float | None
    """Measured seconds of recomputation that are saved; None if not measured."""
    benefit: float
    """FLOPs per byte (Eq. 6)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A step of one model. Numbers are for all of its micro-batches.

    Memory and activations are those of a full step; times, rates, FLOPs and traffic those of a step of the data, as far
    as its lengths are known.
    """

    cost_model: CostModel
    source: Source
    """Whether operators' costs were recorded, or estimated from shapes."""
    model_name: str
    num_parameters: int
    num_blocks: int
    workload: Workload
    flops_forward: int
    flops_recomputed: int
    """FLOPs that backward runs again."""
    swappable_bytes: int
    """Layers' inputs and all outputs that could be swapped."""
    inter_block_bytes: int
    """Layers' inputs, which are always offloaded."""
    swapped: tuple[SwappedOperator, ...]
    """The greatest benefit first."""
    offloaded: OffloadedActivations
    case: Case
    traffic: Traffic
    time: StepTime
    bottleneck: str
    """The resource that is busy longest."""
    gpu_bytes: int
    """Memory of the compute device at its peak."""
    host_bytes: int
    """Host memory at its peak."""
    nvme_bytes: int
    """Everything on NVMe: model states and what is spilled."""
    curve: tuple[tuple[int, float], ...]
    """Bytes offloaded, and the step's seconds then."""
    num_trained: int | None = None
    """The part of `num_parameters` that are trained; None: all."""
    frozen_flops: int = 0
    """What backward leaves out of twice `flops_forward`: gradients of what is frozen."""
    gpu_activation_bytes: int = 0
    """The part of `gpu_bytes` that layers' activations take at their peak; 0 where the CPU computes."""
    unclipped_seconds: float | None = None
    """The seconds of a step that could have been clipped, but was not; `time` is that of a clipped one. None if no step
    is clipped, or if both take about the same time."""
    num_ranks: int = 1
    """Ranks that train together. Workload, FLOPs, bytes and memory are those of one of them; rates are those of all."""
    network: NetworkTraffic = NO_TRAFFIC
    """What it sends to the others, and receives."""
    wear: WearTrade | None = None
    """What `storage.wear` chose among; None if a step of any plan writes only the state, or if the cost model does not
    choose."""

    @property
    def flops_model(self) -> int:
        """Forward and backward, recomputation not counted."""
        return 3 * self.flops_forward - self.frozen_flops

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a step per second: those of the data's samples, where these are known."""
        return self.num_ranks * self.workload.data_tokens / self.time.total

    @property
    def unclipped_tokens_per_second(self) -> float | None:
        """Tokens per second of a step that is not clipped; None where `unclipped_seconds` is."""
        if self.unclipped_seconds is None:
            return None
        return self.num_ranks * self.workload.data_tokens / self.unclipped_seconds

    @property
    def unclipped_tflops_model(self) -> float | None:
        """`tflops_model` of a step that is not clipped; None where `unclipped_seconds` is."""
        if self.unclipped_seconds is None:
            return None
        return self.num_ranks * self.flops_model / self.unclipped_seconds / 1e12

    @property
    def tflops_model(self) -> float:
        """10^12 FLOPs of the model per second, recomputation not counted."""
        return self.num_ranks * self.flops_model / self.time.total / 1e12

    @property
    def tflops_hardware(self) -> float:
        """10^12 FLOPs per second, recomputation included."""
        return self.num_ranks * (self.flops_model + self.flops_recomputed) / self.time.total / 1e12
