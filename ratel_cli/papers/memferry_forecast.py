"""What reading weights in place would give one model on one machine: the content of `ratel plan --direct`. Pure.

The step is MemFerry's: all weights come from host memory once, and what is uploaded stays on the GPU until backward has
used it, whether the GPU has the memory or not. Ratel's own step reads them from NVMe, and uploads them twice.

Invariant: parameters of equal name, size and times are one group, whatever layers they are in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.papers.memferry import (
    DirectLayer,
    DirectTime,
    GradientFront,
    KeptGradients,
    printed_plan,
    timeline,
)
from ratel_cli.papers.memferry_costs import WeightUse, kept_weight_bytes, weight_uses
from ratel_cli.papers.memferry_search import DirectPlan, plan_direct
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.planning.profile.placement import ACCESS_MODES, AccessMode, Workload

RESERVE_FACTORS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class UseGroup:
    """Parameters that are alike."""

    weight_bytes: int
    """Bytes of the weights of one of them."""
    layer: DirectLayer
    """What one of them takes in each mode; its name is the parameter's."""
    modes: Mapping[AccessMode, int]
    """How many have each mode; modes that none has are left out."""

    @property
    def count(self) -> int:
        """How many they are."""
        return sum(self.modes.values())

    def to_json(self) -> dict[str, object]:
        """A part of `ratel plan --direct --json`."""
        seconds = {f"{name}_seconds": value for name, value in asdict(self.layer).items() if name != "name"}
        return {
            "parameter": self.layer.name,
            "count": self.count,
            "weight_bytes": self.weight_bytes,
            **seconds,
            "modes": dict(self.modes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectForecast:
    """The plan, what it is made from, and what it is compared with."""

    groups: tuple[UseGroup, ...]
    """In the order of forward."""
    plan: DirectPlan
    printed: DirectTime
    """Times with the modes that the paper's own planner gives."""
    kept_bytes: int
    """Weights that the plan keeps on the GPU from their upload to backward."""
    uploaded_bytes: int
    """Weights that would stay on the GPU from their upload to backward if everything were uploaded."""
    gpu_bytes: int
    """The GPU's memory."""
    num_tokens: int
    """Tokens of a micro-batch."""
    gradients: tuple[KeptGradients, ...]
    is_paper: bool

    def to_json(self) -> dict[str, object]:
        """A part of `ratel plan --direct --json`."""
        return {
            "is_exact": self.plan.is_exact,
            "gain": self.plan.gain,
            "times": {
                "uploaded": _time_json(self.plan.uploaded),
                "planned": _time_json(self.plan.time),
                "printed": _time_json(self.printed),
            },
            "kept_weight_bytes": self.kept_bytes,
            "uploaded_weight_bytes": self.uploaded_bytes,
            "parameters": [group.to_json() for group in self.groups],
            "gradients": [asdict(each) for each in self.gradients],
        }


def direct_forecast(
    spec: ModelSpec, profile: ModelProfile, workload: Workload, hardware: HardwareProfile, *, is_paper: bool
) -> DirectForecast | None:
    """The forecast; None where the CPU computes. `profile` is that of a micro-batch; `is_paper` as in `weight_uses`."""
    uses = weight_uses(spec, profile, workload, hardware, is_paper=is_paper)
    if not uses:
        return None
    layers = [use.layer for use in uses]
    plan, front = plan_direct(layers), GradientFront([use.gradient for use in uses])
    return DirectForecast(
        groups=_groups(uses, plan.modes),
        plan=plan,
        printed=timeline(layers, printed_plan(layers)),
        kept_bytes=kept_weight_bytes(uses, plan.modes),
        uploaded_bytes=sum(use.weight_bytes for use in uses),
        gpu_bytes=hardware.gpu.memory_bytes,
        num_tokens=workload.micro_batch_tokens,
        gradients=tuple(front.kept(reserve) for reserve in RESERVE_FACTORS),
        is_paper=is_paper,
    )


def _groups(uses: Sequence[WeightUse], modes: Sequence[AccessMode]) -> tuple[UseGroup, ...]:
    found: dict[tuple[int, DirectLayer], Counter[AccessMode]] = {}
    for use, mode in zip(uses, modes, strict=True):
        alone = replace(use.layer, then_forward=0.0, then_backward=0.0)
        found.setdefault((use.weight_bytes, alone), Counter())[mode] += 1
    return tuple(
        UseGroup(
            weight_bytes=weight_bytes,
            layer=layer,
            modes={mode: counts[mode] for mode in ACCESS_MODES if counts[mode]},
        )
        for (weight_bytes, layer), counts in found.items()
    )


def _time_json(time: DirectTime) -> dict[str, float]:
    return {
        "forward_seconds": time.forward,
        "backward_seconds": time.backward,
        "step_seconds": time.total,
        "window_seconds": time.window,
        "uploaded_for_backward_seconds": time.moved,
    }
