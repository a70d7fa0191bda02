"""What an engine follows, and the parts that follow it.

Invariant: both are of one placement. Those of another are not used any more when it is replaced.
"""

from __future__ import annotations

from dataclasses import dataclass

from ratel_cli.engine.optimizer.gradient_sums import GradientSums
from ratel_cli.engine.optimizer.settings import OptimizerSettings
from ratel_cli.engine.optimizer.update import Updates, UpdateSettings
from ratel_cli.engine.ranks.exchange import GradientExchange
from ratel_cli.engine.reading.host_weights import ResidentWeights
from ratel_cli.engine.reading.weights import WeightReader
from ratel_cli.planning.profile.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an engine follows: settings of the run, and what its plan decides."""

    optimizer: OptimizerSettings
    updates: UpdateSettings
    placement: Placement
    seed: int
    gradient_scratch_bytes: int = 0
    """Space on the drives for gradients that are held until the step is decided."""
    activation_scratch_bytes: int = 0
    """Space on the drives for offloaded activations."""
    chunk_tokens: int | None = None
    """Tokens whose logits are computed at once; None: as many as have 64 MiB of logits."""
    micro_batch_tokens: int | None = None
    """The most tokens of a micro-batch, for which the plan has memory; None if it is not known."""
    spare_bytes: int = 0
    """Host memory that the plan leaves: where the CPU computes, idle buffers may stay in it until the next step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """What follows one placement."""

    updates: Updates
    exchange: GradientExchange
    """Between the sums of gradients and the updates."""
    reader: WeightReader
    gradient_sums: GradientSums
    resident: ResidentWeights
