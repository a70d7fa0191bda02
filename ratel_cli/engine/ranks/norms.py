"""The norms of the slices of all ranks, of which the global norm is made.

A parameter that is cut has a norm for each part. They are stacked in the order of parameters and, within each, of
ranks, as torch stacks the norms of tensors. So the bits depend on the number of ranks and on nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ratel_cli.engine.optimizer.block_gradient import Norms
from ratel_cli.engine.optimizer.gradients import NormParts
from ratel_cli.engine.ranks.ranks import Ranks
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.schedule.slices import slice_of
from ratel_cli.store.layout import RankSlice

_ABSENT = -1.0
"""Stands for the norm of a part that has no gradient."""


def norms_of_all(ranks: Ranks, blocks: Sequence[BlockSpec], norms: Norms) -> NormParts:
    """By parameter: the norms of its parts, in the order of ranks. `blocks`: all that are trained, whole. `norms`: of
    this rank's slices, by parameter."""
    names = [
        [parameter.name for block in blocks for parameter in slice_of(block, RankSlice(rank, ranks.size)).parameters]
        for rank in range(ranks.size)
    ]
    own = [float(norms.get(name, _ABSENT)) for name in names[ranks.rank]]
    found = defaultdict[str, list[float]](list)
    for of_rank, values in zip(names, ranks.gathered(own, lengths=list(map(len, names))), strict=True):
        for name, value in zip(of_rank, values, strict=True):
            if value != _ABSENT:
                found[name].append(value)
    return found
