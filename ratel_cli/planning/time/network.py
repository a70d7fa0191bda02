"""What several ranks send each other in a step, to the byte. Pure.

    weights     of each block, whenever it comes into host memory: its slice, to every other rank
    gradients   of each trained block, once: to every other rank what that one updates, in fp32; and for each parameter
                a byte that says whether it has a gradient

A rank receives what the others send it. The few numbers on which ranks agree, such as losses and norms, are not
counted.

Invariant: a step of the engine moves exactly these bytes, whatever its plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.duties import exchange, weights
from ratel_cli.planning.duties.step import PlannedStep
from ratel_cli.schedule.ledger import Amounts
from ratel_cli.schedule.uses import Stage
from ratel_cli.store.layout import RankSlice


class Exchanged(NamedTuple):
    """Bytes of one rank."""

    sent_bytes: int = 0
    received_bytes: int = 0

    def and_also(self, other: Exchanged) -> Exchanged:
        """The sum of both."""
        return Exchanged(self.sent_bytes + other.sent_bytes, self.received_bytes + other.received_bytes)


NOTHING = Exchanged()


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkTraffic:
    """What one rank moves in a step."""

    forward: Exchanged = NOTHING
    """Weights."""
    backward: Exchanged = NOTHING
    """Weights, and all gradients."""
    gradients: Exchanged = NOTHING
    """The part of `backward` that is not weights."""
    first: Exchanged = NOTHING
    """The part of `forward` that is weights of the first segment."""
    last: Exchanged = NOTHING
    """The part of `gradients` that belongs to the first segment, which ends backward."""

    @property
    def total(self) -> Exchanged:
        """What the rank moves in the whole step."""
        return self.forward.and_also(self.backward)


NO_TRAFFIC = NetworkTraffic()
"""Traffic of one rank alone."""


def computed_by_rank(spec: ModelSpec, rank_slice: RankSlice) -> ModelSpec:
    """The model as a rank computes with it: all blocks, and, of several ranks, gradients that leave the device in
    fp32, since they are added up before they are rounded."""
    if rank_slice.size == 1:
        return spec
    blocks = (replace(block, gradient_dtype="float32") if block.is_trained else block for block in spec.blocks)
    return replace(spec, blocks=tuple(blocks))


def network_of(step: PlannedStep) -> NetworkTraffic:
    """What the rows of a step have for the network; the same whatever its placement is."""
    gathered, exchanged = step.folded(weights.gathered), step.folded(exchange.exchanged, None)

    def moved(amounts: Amounts, stage: Stage) -> Exchanged:
        return Exchanged(amounts["sent", stage], amounts["received", stage])

    gradients = moved(exchanged.amounts, "backward")
    return NetworkTraffic(
        forward=moved(gathered.amounts, "forward"),
        backward=moved(gathered.amounts, "backward").and_also(gradients),
        gradients=gradients,
        first=moved(gathered.exposed, "forward"),
        last=moved(exchanged.exposed, "backward"),
    )
