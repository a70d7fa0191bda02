"""What follows from a placement. Pure.

Invariant: an `Evaluation` fits into the limit of host memory, and all its parts belong to its placement. That it fits
into the GPU is for the caller to check (`Problem.fits_device`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ratel_cli.planning.memory.capacity import HostMemory
from ratel_cli.planning.profile.activations import (
    OffloadedActivations,
)
from ratel_cli.planning.profile.placement import (
    Placement,
)
from ratel_cli.planning.search.swap import SwapPrefix
from ratel_cli.planning.time.step_time import StepTime
from ratel_cli.planning.time.traffic import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A placement that fits, and everything that follows from it."""

    placement: Placement
    swap: SwapPrefix
    offloaded: OffloadedActivations
    memory: HostMemory
    spilled_segments: int
    """Held gradients of this many segments, the first in forward order, lie on NVMe."""
    traffic: Traffic
    time: StepTime


@dataclass(frozen=True, slots=True, kw_only=True)
class SpilledPrefix:
    """A swapped prefix in a given amount of host memory: which units go to NVMe, and what that takes."""

    spilled_units: int
    offloaded: OffloadedActivations
