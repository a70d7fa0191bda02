"""Which bytes stay in host memory between their uses, and how far transfers run ahead of computing.

Part of the plan: chosen by `planning.choose` from limits and measured rates, carried out by `engine`. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Overlap = Literal["optimized", "naive", "separate"]
"""How the optimizer runs: beside computing, with reads and writes around each group; beside computing, one
transfer after another; or between backward and the next forward."""
Activations = Literal["auto", "keep", "recompute", "swap_all", "static"] | float
"""What becomes of operator outputs between forward and backward: as the plan finds best; all kept in memory; none,
twice (layers' inputs are always offloaded); all swapped; or so great a share of their bytes."""
Stage = Literal["forward", "backward", "update"]
"""From the embedding to the last layer; the head and everything down to the embedding; what comes between
them and the next forward: nothing, unless the optimizer is separate."""
SPILL_WINDOW_UNITS = 3
"""Buffers for spilled units: one is used, one is on its way, one waits so that the drive never does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The default is the least memory: nothing stays, nothing runs ahead, everything waits for its turn."""

    prefetch_blocks: int = 0
    """So many blocks' compute weights are read ahead of the one that computes."""
    pending_updates: int = 0
    """So many blocks may have been handed to the optimizer and not be written yet while the next one computes."""
    resident_weights: frozenset[int] = frozenset()
    """Blocks whose compute weights stay: never read but in the first step."""
    resident_states: frozenset[int] = frozenset()
    """Blocks whose optimizer states stay: never read but in the first step."""
    swapped: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """By block: the operators whose outputs are offloaded in forward and fetched in backward, by their keys
    (engine/replay/tape.py). Everything else but block inputs is recomputed."""
    spilled_units: int = 0
    """What so many units, one for each layer and micro-batch, offloaded goes to NVMe: the first in forward
    order, whose turn in backward comes last. The others' stays in host memory, or on a GPU."""
    kept_from: int | None = None
    """Units from this one on, counted as above, stay in a GPU's memory: backward begins with them."""
    kept_weights: frozenset[int] = frozenset()
    """Layers whose compute weights stay in a GPU's memory from forward to backward: the last ones."""
    adamw_threads: int = 1
    """Each updates a part of a group: as many as the drives can keep busy."""
    deferred: frozenset[int] = frozenset()
    """Blocks whose update waits for the next step's forward even when nothing has to be clipped."""

    def update_stage(self, index: int, *, holds_gradients: bool, overlap: Overlap) -> Stage:
        """When a block is updated. Unless that is in backward, its gradient is held until then."""
        if overlap == "separate":
            return "update"
        return "forward" if holds_gradients or index in self.deferred else "backward"
