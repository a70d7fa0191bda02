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
from operator import attrgetter
from typing import NamedTuple

from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.schedule.lifetimes import weight_lifetimes
from ratel_cli.schedule.slices import GATHERED_AHEAD
from ratel_cli.schedule.uses import Stage, step_uses
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """What one of several ranks has of a model."""

    own: ModelSpec
    """What it stores and updates."""
    num_ranks: int = 1
    network: NetworkTraffic = NO_TRAFFIC
    """What it sends and receives in a step."""


def computed_by_rank(spec: ModelSpec, rank_slice: RankSlice) -> ModelSpec:
    """The model as a rank computes with it: all blocks, and, of several ranks, gradients that leave the device in
    fp32, since they are added up before they are rounded."""
    if rank_slice.size == 1:
        return spec
    blocks = (replace(block, gradient_dtype="float32") if block.is_trained else block for block in spec.blocks)
    return replace(spec, blocks=tuple(blocks))


def network_traffic(spec: ModelSpec, rank_slice: RankSlice) -> NetworkTraffic:
    """The traffic of a rank. `spec`: of the whole model."""
    if rank_slice.size == 1:
        return NO_TRAFFIC
    own, others = spec.sliced(rank_slice), rank_slice.size - 1
    uses = step_uses(spec.segments)
    moved: dict[Stage, Exchanged] = {"forward": NOTHING, "backward": NOTHING}
    first = gradients = last = NOTHING
    for weights in weight_lifetimes(uses, ahead=GATHERED_AHEAD):
        own_bytes = own.blocks[weights.of.index].compute_bytes
        gathered = Exchanged(others * own_bytes, weights.of.compute_bytes - own_bytes)
        stage = uses[weights.first].stage
        moved[stage] = moved[stage].and_also(gathered)
        if weights.first == 0:
            first = first.and_also(gathered)
    for block in filter(attrgetter("is_trained"), spec.blocks):
        own_elements, flags_bytes = own.blocks[block.index].num_elements, others * len(block.parameters)
        exchanged = Exchanged(
            4 * (block.num_elements - own_elements) + flags_bytes, 4 * others * own_elements + flags_bytes
        )
        gradients = gradients.and_also(exchanged)
        if block.segment == 0:
            last = last.and_also(exchanged)
    return NetworkTraffic(
        forward=moved["forward"],
        backward=moved["backward"].and_also(gradients),
        gradients=gradients,
        first=first,
        last=last,
    )
