"""The recompute-offload-keep curve of a run: memory of activations against speed (SSDTrain, section IV-C). Pure.

Each point is the whole plan that the config's `activations` would force: layers' inputs are always offloaded, and of
what layers hold besides them a share is swapped and the rest recomputed. Nothing is predicted here that a plan does not
predict.

Invariant: the points come by their share; those of no share and of all of it are the plans of `activations: recompute`
and `activations: swap_all`, and one point is the plan itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from ratel_cli.planning.forecast.forecast import Forecast, Forecaster
from ratel_cli.planning.profile.placement import ActivationPolicy

RokStrategy = Literal["recompute", "mix", "planned", "offload", "keep"]
_ORDER: Final[tuple[RokStrategy, ...]] = ("recompute", "mix", "planned", "offload", "keep")
_MIXES = 8
"""Between the ends there is a point at each eighth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RokPoint:
    """One plan. All bytes are of activations, for one step."""

    strategy: RokStrategy
    """`keep`: everything stays in the memory of GPU and host. `planned`: what the plan chose."""
    swap_coefficient: float
    """The share, by bytes, of what layers hold besides their inputs that is not recomputed: 0 to 1."""
    gpu_bytes: int
    """At their peak in a GPU's memory: those of one layer, those on their way, and those that stay; 0 without a GPU."""
    host_bytes: int
    """In host memory, buffers for what goes to NVMe included."""
    nvme_bytes: int
    """Written to NVMe."""
    recomputed_flops: int
    seconds: float
    """Seconds that a step takes."""
    tokens_per_second: float
    shortfall_bytes: int
    """Bytes by which GPU, host memory and drives together are short of the whole step; 0 if it fits."""

    @property
    def memory_bytes(self) -> int:
        """In the memory of GPU and host."""
        return self.gpu_bytes + self.host_bytes


def rok_curve(forced: Callable[[ActivationPolicy], Forecaster], forecast: Forecast) -> tuple[RokPoint, ...]:
    """The points for the setting of `forecast`, which is the plan. `forced`: the model's forecaster with this choice in
    place of the config's. Raises BadInput as `Forecaster.forecast`."""

    def point(strategy: RokStrategy, activations: ActivationPolicy) -> RokPoint:
        return _point(strategy, forced(activations).forecast(forecast.setting))

    ends = (point("recompute", "recompute"), point("offload", "swap_all"), point("keep", "keep"))
    points = {each.swap_coefficient: each for each in (_point("planned", forecast), ends[0], ends[1])}
    for eighth in range(1, _MIXES):
        mix = point("mix", eighth / _MIXES)
        points.setdefault(mix.swap_coefficient, mix)  # with few layers, several shares swap the same
    mixes = [each for each in points.values() if each.strategy == "mix"]
    found = (*ends, *mixes, _point("planned", forecast))
    return tuple(sorted(found, key=lambda each: (each.swap_coefficient, _ORDER.index(each.strategy))))


def _point(strategy: RokStrategy, forecast: Forecast) -> RokPoint:
    prediction = forecast.prediction
    offloaded = prediction.offloaded
    held_bytes = prediction.swappable_bytes - prediction.inter_block_bytes
    swapped_bytes = offloaded.total_bytes - prediction.inter_block_bytes
    return RokPoint(
        strategy=strategy,
        swap_coefficient=swapped_bytes / held_bytes if held_bytes else 0.0,
        gpu_bytes=prediction.gpu_activation_bytes,
        host_bytes=offloaded.memory_bytes,
        nvme_bytes=offloaded.written_bytes,
        recomputed_flops=prediction.flops_recomputed,
        seconds=prediction.time.total,
        tokens_per_second=prediction.tokens_per_second,
        shortfall_bytes=sum(tier.shortfall_bytes for tier in forecast.tiers),
    )
