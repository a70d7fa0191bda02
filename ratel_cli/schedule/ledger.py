"""The ledger of a step: what it holds and moves, as rows, and the sums and overlaps over them. Pure.

A row says for how long something takes memory, or how much of a resource is used in which stage. Planner, engine and
meters read the same rows; `planning/duties/` makes them, a duty in each file. The rows are of a step in the middle of a
run, and a step is a cycle: what lives into the next one has moments from its end on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final, Literal, NamedTuple

from ratel_cli.schedule.uses import Stage

OPEN, RUN, REPLAY, BACKWARD, LEAVE = range(5)
"""Phases of a use, in the order of the device's stream: weights are there; forward; recomputing; gradients are made;
gradients leave, and everything up to the next use."""
_PHASES: Final = 5
_PARTS: Final = 16

Tier = Literal["host", "gpu"]
Purpose = Literal[
    "weights", "gradients", "held", "states", "sums", "partial sums", "rows", "exchange", "activations", "runtime",
    "hidden states", "units", "resident", "batch", "expanded", "logits", "leaving",
]  # fmt: skip
"""What memory is taken for. `held`: gradients that wait for their update and have not been asked for again. `states`:
buffers of groups. `sums`: of gradients. `partial sums`: of shared blocks. `rows`: of a matrix that tokens are looked up
in. `exchange`: gradients that several ranks exchange. `runtime`: torch's own. `resident`: what stays from step to step.
`expanded`: what is made of weights while they are used. `leaving`: gradients until their downloads have ended."""
WorkKind = Literal[
    "read", "in files", "first read", "write", "up", "down", "waited", "sent", "received", "added", "add bytes"
]
"""What is counted. Of drives, bytes that are read, those of them in the base model's files, those read once in a run,
and bytes that are written. Of the link, bytes to a GPU, bytes back, and what of both computing waits for. Of the
network, bytes to other ranks and from them. Of the CPU, elements that are added to sums, and the bytes of main memory
that this moves."""


def at(use: int, phase: int = OPEN, part: int = 0) -> int:
    """A moment of the use at position `use`. Parts order what happens within a phase; there are 16."""
    return (use * _PHASES + phase) * _PARTS + part


def end_of(use: int, phase: int = LEAVE) -> int:
    """The last moment of a phase."""
    return at(use, phase, _PARTS - 1)


def place_of(moment: int) -> tuple[int, int]:
    """The position and the phase of a moment."""
    return divmod(moment // _PARTS, _PHASES)


class Holding(NamedTuple):
    """Memory that is taken from one moment to another, both included."""

    tier: Tier
    purpose: Purpose
    owner: int
    """The index of a segment; -1 if it is the whole step's."""
    num_bytes: int
    begins: int
    ends: int
    at_most: bool = False
    """Whether it is a bound for which the engine waits, taken and given back many times within its span, and not one
    buffer."""


class Work(NamedTuple):
    """Use of a resource: bytes, or elements that are added."""

    resource: WorkKind
    purpose: Purpose
    owner: int
    amount: int
    stage: Stage
    """When it falls. A stage cannot be derived from the owner: a deferred update reads and writes in the next
    forward."""
    times: int = 1
    is_exposed: bool = False
    """Whether nothing computes meanwhile."""


Row = Holding | Work


def held(
    purpose: Purpose, owner: int, num_bytes: int, first: int, last: int, *, at_most: bool = False
) -> Iterator[Holding]:
    """Host memory while the uses from one position to another are open, both included; no row if that is nothing."""
    if num_bytes and first <= last:
        yield Holding("host", purpose, owner, num_bytes, at(first), end_of(last), at_most)


def by_position(rows: Iterable[Holding], cycle: int) -> dict[Purpose, list[int]]:
    """The bytes at each of the `cycle` positions of a step, by purpose."""
    changes: dict[Purpose, list[int]] = defaultdict(lambda: [0] * (cycle + 1))
    for row in rows:
        change, num_bytes = changes[row.purpose], row.num_bytes
        first, last = place_of(row.begins)[0] % cycle, place_of(row.ends)[0] % cycle
        change[first] += num_bytes
        change[last + 1] -= num_bytes
        if last < first:  # into the next step
            change[0] += num_bytes
    return {purpose: list(accumulate(change[:cycle])) for purpose, change in changes.items()}


def overlap_of(rows: Iterable[Holding], moments: Sequence[int]) -> list[int]:
    """The bytes at each of these moments, which rise."""
    changes = [0] * (len(moments) + 1)
    for row in rows:
        changes[bisect_left(moments, row.begins)] += row.num_bytes
        changes[bisect_left(moments, row.ends + 1)] -= row.num_bytes
    return list(accumulate(changes[:-1]))


Amounts = dict[tuple[WorkKind, Stage], int]
"""What is used of a resource in a stage."""


def amounts(rows: Iterable[Work], *, is_exposed: bool = False) -> Amounts:
    """The sums of what is used. `is_exposed`: only while nothing computes."""
    found: Amounts = defaultdict(int)
    for row in rows:
        if row.is_exposed or not is_exposed:
            found[row.resource, row.stage] += row.times * row.amount
    return found
