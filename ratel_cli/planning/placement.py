"""Which bytes stay in host memory between their uses, and how far transfers run ahead of computing.

Part of the plan: chosen by `planning.choose` from limits and measured rates, carried out by `engine`. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Overlap = Literal["optimized", "naive", "separate"]
"""How the optimizer runs: beside computing, with reads and writes around each group; beside computing, one
transfer after another; or between backward and the next forward."""
Stage = Literal["forward", "backward", "update"]
"""From the embedding to the last layer; the head and everything down to the embedding; what comes between
them and the next forward: nothing, unless the optimizer is separate."""


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
    activation_bytes: int = 0
    """Room for activations that are kept from forward to backward instead of being recomputed: of blocks whose
    weights stay, since the graph that backward walks refers to them."""
    deferred: frozenset[int] = frozenset()
    """Blocks whose update waits for the next step's forward even when nothing has to be clipped."""

    def update_stage(self, index: int, *, holds_gradients: bool, overlap: Overlap) -> Stage:
        """When a block is updated. Unless that is in backward, its gradient is held until then."""
        if overlap == "separate":
            return "update"
        return "forward" if holds_gradients or index in self.deferred else "backward"
