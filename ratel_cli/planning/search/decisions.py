"""What the user's config and limits decide before the plan is made. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ratel_cli.planning.profile.placement import ActivationPolicy, Overlap
from ratel_cli.planning.time.wear import WearPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What a plan has to keep to."""

    holds_gradients: bool
    """No block is updated before the last gradient is there: the norm may have to be clipped, or the store is written
    in place."""
    num_slots: int
    """Generations that the store has space for."""
    host_limit_bytes: int
    """Host memory that the run may take, the process included."""
    activations: ActivationPolicy = "auto"
    overlap: Overlap = "optimized"
    wear: WearPolicy = "ignore"
    device_limit_bytes: int | None = None
    """Memory of the compute device that the plan may use; for a CPU, a budget for what computes. None is no limit."""
    device_reserve_bytes: int = 0
    """GPU memory that the run may take in addition: segments of torch's allocator are rarely full."""

    @property
    def overwrites(self) -> bool:
        """Whether the only generation is overwritten, so that nothing is written before the step is decided."""
        return self.num_slots == 1
